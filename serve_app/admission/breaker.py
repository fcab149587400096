"""PURE. Keeps requests away from a replica that fails or hangs, and tries it again after a while. No clock, no I/O."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(slots=True)
class _Record:
    failures: int = 0
    open_until: float = 0.0


class Breaker:
    """Failures in a row by replica: after `failures` of them it is left alone for `pause_s`, then one more tries it."""

    def __init__(self, failures: int = 3, pause_s: float = 10.0) -> None:
        self._failures = failures
        self._pause_s = pause_s
        self._records: dict[str, _Record] = {}

    def sent(self, replica: str, now: float) -> None:
        """A request goes to the replica. Where its pause is over this one tries it, and the others keep away so long.

        Without this the emptiest replica, which it is, got every request until the first of them had timed out.
        """
        record = self._records.get(replica)
        if record and record.failures >= self._failures and record.open_until <= now:
            record.open_until = now + self._pause_s

    def failed(self, replica: str, now: float) -> None:
        """A request found the replica hanging or broken."""
        record = self._records.setdefault(replica, _Record())
        record.failures += 1
        if record.failures >= self._failures:
            record.open_until = now + self._pause_s

    def told(self, replica: str, until: float) -> None:
        """The replica itself has said until when it takes nothing."""
        self._records[replica] = _Record(self._failures, until)

    def worked(self, replica: str) -> None:
        """A request was answered by the replica."""
        self._records.pop(replica, None)

    def shunned(self, now: float) -> frozenset[str]:
        """The replicas to be left alone."""
        if not self._records:
            return frozenset()
        return frozenset(name for name, record in self._records.items() if record.open_until > now)
