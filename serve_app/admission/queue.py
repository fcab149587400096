"""PURE. The queue in front of one model: who goes in next, and who has to go when it is full. No clock, no I/O.

Times are seconds of any clock that never goes back.

- Higher priority first; within one priority the key with the least in flight, and among those the one whose last
  request ended longest ago; within one key first come first served.
  So one key with a thousand requests delays the others by one request, not by a thousand, however few places there are.
- When it is full, the newest request of the lowest priority goes, and among those one of the key that has most of
  the queue; the newcomer itself, if that is the one.
- A request waits at most `wait_s`.
"""

from __future__ import annotations

import dataclasses
from collections import Counter


@dataclasses.dataclass(frozen=True, slots=True)
class Ticket:
    """One request that waits. `number` is given in order of arrival."""

    number: int
    key: str
    priority: int
    until: float


class FairQueue:
    """The waiting requests of one model."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._waiting: dict[int, Ticket] = {}
        self._in_flight: Counter[str] = Counter()
        # By key, the count of ends at its last one. There are as many as configured keys: none is ever dropped.
        self._last_end: Counter[str] = Counter()
        self._ends = 0
        self._numbers = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def resize(self, size: int) -> None:
        """How many may wait from now on; who waits already stays."""
        self._size = size

    def in_flight(self, key: str) -> int:
        """How many requests of the key have been let in and are not over."""
        return self._in_flight[key]

    def started(self, key: str) -> None:
        """A request of this key was let in."""
        self._in_flight[key] += 1

    def ended(self, key: str) -> None:
        """A request of this key that was let in is over."""
        self._ends += 1
        self._last_end[key] = self._ends
        self.withdrew(key)

    def withdrew(self, key: str) -> None:
        """A request of this key that was let in found no place after all."""
        self._in_flight[key] -= 1
        if self._in_flight[key] <= 0:
            del self._in_flight[key]

    def join(self, key: str, priority: int, until: float) -> tuple[Ticket, Ticket | None]:
        """Queue up. Returns the new ticket, and the one that has to go for it: the same, if it finds no place."""
        self._numbers += 1
        ticket = Ticket(self._numbers, key, priority, until)
        self._waiting[ticket.number] = ticket
        if len(self._waiting) <= self._size:
            return ticket, None
        held = Counter(waiting.key for waiting in self._waiting.values())
        loser = min(self._waiting.values(), key=lambda one: (one.priority, -held[one.key], -one.number))
        del self._waiting[loser.number]
        return ticket, loser

    def rejoin(self, ticket: Ticket) -> None:
        """Back to the old place: it was let in, and found every place taken again."""
        self._waiting[ticket.number] = ticket

    def leave(self, ticket: Ticket) -> None:
        """The request does not wait any more; no harm if it had gone already."""
        self._waiting.pop(ticket.number, None)

    def next(self) -> Ticket | None:
        """The request that goes in now; it is out of the queue then."""
        if not self._waiting:
            return None
        first = min(self._waiting.values(), key=self._rank)
        del self._waiting[first.number]
        return first

    def place(self, ticket: Ticket) -> int:
        """How many go in no later than this request, itself counted, as things are now. One that tries is the first."""
        if ticket.number not in self._waiting:
            return 1
        return sum(self._rank(one) <= self._rank(ticket) for one in self._waiting.values())

    def _rank(self, ticket: Ticket) -> tuple[int, int, int, int]:
        return -ticket.priority, self._in_flight[ticket.key], self._last_end[ticket.key], ticket.number

    def overdue(self, now: float) -> list[Ticket]:
        """Those that waited too long; they are out of the queue then."""
        late = [ticket for ticket in self._waiting.values() if ticket.until <= now]
        for ticket in late:
            del self._waiting[ticket.number]
        return late
