"""Counts decisions by what was decided and why; a task hands the counts on once a second."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping

from serve_app.routing.decision import Decision

FLUSH_EVERY_S = 1.0
LABELS = ("model", "model_source", "thinking", "thinking_source", "rule", "scorer")

Meter = Callable[[Mapping[str, str], int], None]


class DecisionCounts:
    """Counts in memory. `meter` takes labels and a number; it is not called while a request waits."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._counts: Counter[tuple[str, ...]] = Counter()
        self._flushing: asyncio.Task[None] | None = None

    def count(self, decision: Decision) -> None:
        """One more."""
        labels = (
            decision.model_id,
            decision.model_source,
            "on" if decision.thinking else "off",
            decision.thinking_source,
            decision.rule or "",
            decision.score.kind if decision.score else "",
        )
        self._counts[labels] += 1
        if self._flushing is None or self._flushing.done():
            self._flushing = asyncio.create_task(self._flush_later())

    async def _flush_later(self) -> None:
        await asyncio.sleep(FLUSH_EVERY_S)
        self.flush()

    def flush(self) -> None:
        """Hand on what was counted since the last time."""
        counts, self._counts = self._counts, Counter()
        for values, number in counts.items():
            self._meter(dict(zip(LABELS, values, strict=True)), number)


def no_meter(labels: Mapping[str, str], number: int) -> None:
    """Drops the counts."""
