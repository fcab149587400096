"""What the feed of a running service (`/v1/router/events`) has told so far. Pure."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

_RECENT_STEPS = 3
_REQUESTS = 50
_POINTS = 180


@dataclasses.dataclass(frozen=True, slots=True)
class Rates:
    """Means over the last steps that are over."""

    requests_per_s: float
    tokens_per_s: float


@dataclasses.dataclass(slots=True)
class Watched:
    """Fields are the newest data of the events of that name; see docs/ui.md."""

    hello: dict[str, Any] = dataclasses.field(default_factory=dict)
    models: dict[str, Any] = dataclasses.field(default_factory=dict)
    step_s: int = 1
    points: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    requests: list[dict[str, Any]] = dataclasses.field(default_factory=list)

    def take(self, name: str, data: dict[str, Any]) -> None:
        """One event. What a newer service may say besides is passed over."""
        match name:
            case "hello":
                # Of another Router, or the same one again: it tells everything anew.
                self.hello, self.points, self.requests = data, [], []
            case "models":
                self.models = data
            case "traffic":
                self.step_s = data["step_s"]
                by_time = {point["t"]: point for point in (*self.points, *data["points"])}
                self.points = [by_time[t] for t in sorted(by_time)][-_POINTS:]
            case "requests":
                self.requests = [*self.requests, *data["requests"]][-_REQUESTS:]

    @property
    def over(self) -> list[dict[str, Any]]:
        """The points of the steps that are over: all but the newest."""
        return self.points[:-1]

    @property
    def since_models_s(self) -> float:
        """How old the newest `models` is, by the clock of the service."""
        return max(0.0, self.points[-1]["t"] - self.models["at"]) if self.points else 0.0

    def rates(self) -> Rates:
        """How much there is to do just now."""
        recent = self.over[-_RECENT_STEPS:] or self.points
        seconds = max(1, len(recent)) * self.step_s
        return Rates(
            sum(point["requests"] for point in recent) / seconds, sum(point["tokens"] for point in recent) / seconds
        )

    def total(self, field: str) -> Counter[str]:
        """The sums of a field that counts by name, over all points."""
        total: Counter[str] = Counter()
        for point in self.points:
            total.update(point[field])
        return total

    def count(self, field: str) -> int:
        """The sum of a field that is a count, over all points."""
        return sum(point[field] for point in self.points)

    def newest(self, field: str) -> dict[str, float] | None:
        """The percentiles of the newest point that has some."""
        return next((point[field] for point in reversed(self.points) if point[field]), None)
