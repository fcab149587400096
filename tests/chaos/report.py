"""What was done to a service, what its clients saw of it, and the table of it."""

from __future__ import annotations

import dataclasses
import time
from collections import Counter

from tests.chaos.clients import WHOLE, Seen


@dataclasses.dataclass(slots=True)
class Act:
    """One thing that was done to the service, and what came of it. Times in seconds since it was done."""

    name: str
    struck_at: float = 0.0
    healed_s: float = 0.0
    seen: list[Seen] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)

    def strikes(self) -> None:
        """It is done now."""
        self.struck_at = time.monotonic()

    def healed(self) -> None:
        """All is there again."""
        self.healed_s = time.monotonic() - self.struck_at

    def after(self, one: Seen) -> bool:
        """Whether a request began when all was there again."""
        return self.healed_s > 0 and one.began > self.struck_at + self.healed_s

    @property
    def hurt(self) -> list[Seen]:
        """The requests that did not get their answer."""
        return [one for one in self.seen if one.outcome != WHOLE]

    @property
    def last_hurt_s(self) -> float:
        """When the last request began that did not get its answer; 0 if all did."""
        return max((one.began - self.struck_at for one in self.hurt), default=0.0)

    def slowest_s(self) -> float:
        """The longest that a whole answer took to a client."""
        return max((one.ended - one.began for one in self.seen if one.outcome == WHOLE), default=0.0)

    def row(self) -> str:
        """As a line of the report."""
        outcomes = Counter(f"{one.outcome} {one.phase}".strip() for one in self.hurt)
        seen = ", ".join(f"{outcome} × {count}" for outcome, count in outcomes.most_common()) or "nothing"
        last = f"{max(0.0, self.last_hurt_s):.1f} s" if self.hurt else "—"
        return (
            f"| {self.name} | {len(self.seen)} | {seen} | {last} | {self.healed_s:.1f} s | {self.slowest_s():.1f} s"
            f" | {'; '.join(self.notes)} |"
        )


HEAD = (
    "| done | requests | not answered | the last of these began after | all there again after | slowest answer"
    " | nothing lost |\n|---|---|---|---|---|---|---|"
)
