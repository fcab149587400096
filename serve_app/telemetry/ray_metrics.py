"""Counters in Ray's metrics: they come out of each node's metrics agent, where Prometheus looks for Ray's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ray.util.metrics import Counter

from serve_app.telemetry.decisions import LABELS, Meter


def decision_meter() -> Meter:
    """Counts `switchyard_decisions_total`."""
    counter = Counter(
        "switchyard_decisions",
        description="Requests by the model that answered, whether it thought, and where both choices came from.",
        tag_keys=LABELS,
    )

    def count(labels: Mapping[str, str], number: int) -> None:
        counter.inc(number, tags=dict(labels))

    return count


def audit_meter() -> Callable[[], None]:
    """Counts `switchyard_audit_dropped_total`, one at a time."""
    return Counter("switchyard_audit_dropped", description="Audit records that could not be written.").inc  # type: ignore[no-any-return]
