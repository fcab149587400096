"""Whether an engine that has requests still works on them. Pure.

An engine core can hang (a collective that waits for a lost peer, a lock, a grammar that never compiles) while its
server goes on to answer health checks. What tells is its scheduler's steps. None for a while may also mean that all it
had to do is done and a client reads slowly; so it is given a token to generate before it is taken for hung.
"""

from __future__ import annotations

import enum


class Verdict(enum.Enum):
    """What is to be done about an engine."""

    FINE = enum.auto()
    ASK = enum.auto()
    HUNG = enum.auto()


class StallWatch:
    """Looks at one engine again and again. `limit_s`: without a step for so long it hangs; None: never."""

    def __init__(self, limit_s: float | None, now: float) -> None:
        self._limit_s = limit_s
        self._steps: int | None = None
        self._since = now
        self._asked = False

    def look(self, in_flight: int, steps: int | None, now: float) -> Verdict:
        """`steps`: how many the engine has taken; None where it keeps no count."""
        if self._limit_s is None or steps is None or steps != self._steps or not in_flight:
            self._steps, self._since, self._asked = steps, now, False
            return Verdict.FINE
        idle_s = now - self._since
        if idle_s >= self._limit_s:
            return Verdict.HUNG
        if idle_s >= self._limit_s / 2 and not self._asked:
            self._asked = True
            return Verdict.ASK
        return Verdict.FINE
