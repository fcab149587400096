"""Metrics of a Router: of each request, from its audit record, which is only put into a queue, and of how it is."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from serve_app.telemetry import metric_table as table
from serve_app.telemetry.meters import Meters
from serve_app.telemetry.traffic import CODE, tpot_ms

# More than that between two flushes is not counted.
_MOST_RECORDS = 100_000

Look = Callable[[Meters], None]


class RouterMetrics:
    """What the Router's apps, in their threads, tell of requests, and how the Router is now."""

    def __init__(self) -> None:
        self._records: deque[Mapping[str, Any]] = deque(maxlen=_MOST_RECORDS)
        self._lost: deque[None] = deque(maxlen=_MOST_RECORDS)
        self._looks: list[Look] = []

    def take(self, record: Mapping[str, Any]) -> None:
        """One request, from any thread; costs an append."""
        self._records.append(record)

    def lost(self) -> None:
        """An audit record was not written, says any thread."""
        self._lost.append(None)

    def watch(self, look: Look) -> None:
        """Have `look` say how things are at each flush, in the thread that flushes."""
        self._looks.append(look)

    def leave(self, look: Look) -> None:
        """Have it say nothing more."""
        self._looks.remove(look)

    def collect(self, meters: Meters) -> None:
        """Everything since the last time."""
        for _ in range(len(self._records)):
            count_request(self._records.popleft(), meters)
        if lost := len(self._lost):
            meters.add(table.AUDIT_DROPPED, (), lost)
            for _ in range(lost):
                self._lost.popleft()
        for look in tuple(self._looks):
            look(meters)


def count_request(record: Mapping[str, Any], meters: Meters) -> None:
    """One request, by its audit record (`router.record.audit_record`). Pure but for `meters`."""
    model = record["model"] or ""
    status = record["status"]
    meters.add(table.REQUESTS, (record["path"], model, str(status)))
    error = record["error"]
    if error or status >= 400:
        meters.add(table.REFUSALS, (model, error if error and CODE.fullmatch(error) else "other"))
    for kind in ("prompt", "completion", "reasoning", "cached"):
        meters.add(table.TOKENS, (record["key"], model, kind), record[f"{kind}_tokens"])
    if record["batch"]:
        meters.add(table.BATCH_LINES, (model, "failed" if error or status >= 400 else "completed"))
    if record["model"] is None:
        return
    meters.add(
        table.DECISIONS,
        (
            model,
            record["model_source"],
            "on" if record["thinking"] else "off",
            record["thinking_source"],
            record["rule"] or "",
            record["scorer"] or "",
        ),
    )
    meters.observe(table.DECISION, (record["model_source"],), record["decision_ms"] / 1000)
    if record["degraded"]:
        meters.add(table.DEGRADED, (model,))
    _observe_times(record, (model,), meters)


def _observe_times(record: Mapping[str, Any], model: tuple[str], meters: Meters) -> None:
    if record["queue_ms"]:
        meters.observe(table.QUEUE, model, record["queue_ms"] / 1000)
    if record["load_ms"]:
        meters.observe(table.HOLD, model, record["load_ms"] / 1000)
    first = record["ttft_ms"]
    if first is None:
        return
    meters.observe(table.TTFT, model, first / 1000)
    if record["error"]:
        return  # it ended sooner than it would have
    meters.observe(table.REQUEST, model, record["total_ms"] / 1000)
    if (between := tpot_ms(record)) is not None:
        meters.observe(table.TPOT, model, between / 1000)
