"""PURE. Rates of one key over a sliding minute, exact: each request counts until 60 s after it came. No I/O."""

from __future__ import annotations

import dataclasses
from collections import deque

WINDOW_S = 60.0


@dataclasses.dataclass(frozen=True, slots=True)
class Room:
    """What a limit leaves. `reset_s`: until all is free again; `retry_after_s`: until what was asked for would fit."""

    limit: int
    remaining: int
    reset_s: float
    retry_after_s: float = 0.0

    @property
    def fits(self) -> bool:
        """Whether what was asked for was let in."""
        return self.retry_after_s == 0


class Sliding:
    """How much was used in the last minute, against one limit."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._used: deque[list[float]] = deque()
        self._sum = 0.0

    def look(self, amount: int, now: float) -> Room:
        """Whether so much would fit, and when if not; uses nothing.

        What is larger than the limit itself fits where nothing else was used, or it never could.
        """
        room = self.room(now)
        if self._sum + amount <= self.limit or not self._sum:
            return room
        over, at = self._sum + min(amount, self.limit) - self.limit, now
        for came, used in self._used:
            over, at = over - used, came + WINDOW_S
            if over <= 0:
                break
        return dataclasses.replace(room, retry_after_s=max(at - now, 0.001))

    def take(self, amount: int, now: float) -> Room:
        """Use so much, if it fits; else nothing is used."""
        room = self.look(amount, now)
        if not room.fits:
            return room
        self._used.append([now, amount])
        self._sum += amount
        return self.room(now)

    def settle(self, taken_at: float, guessed: int, actual: int) -> None:
        """Replace what was guessed at `taken_at` by what it was."""
        for entry in reversed(self._used):
            if entry[0] == taken_at and entry[1] == guessed:
                entry[1] = actual
                self._sum += actual - guessed
                return

    def room(self, now: float) -> Room:
        """What is left now."""
        self._forget(now)
        reset_s = self._used[-1][0] + WINDOW_S - now if self._used else 0.0
        return Room(self.limit, max(0, int(self.limit - self._sum)), reset_s)

    def _forget(self, now: float) -> None:
        while self._used and self._used[0][0] <= now - WINDOW_S:
            self._sum -= self._used.popleft()[1]
        if not self._used:
            self._sum = 0.0
