"""Our metrics in Ray's: they come out of each node's metrics agent, where Prometheus looks for Ray's own."""

from __future__ import annotations

from collections.abc import Iterable

from ray.util.metrics import Counter, Gauge, Histogram

from serve_app.telemetry.meters import Labels
from serve_app.telemetry.metric_table import Metric


class RaySink:
    """Makes the metrics, and hands numbers on to them.."""

    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._made = {metric.name: _made(metric) for metric in metrics}

    def add(self, metric: Metric, labels: Labels, number: float) -> None:
        """See `Sink`."""
        self._made[metric.name].inc(number, tags=dict(zip(metric.labels, labels, strict=True)))

    def observe(self, metric: Metric, labels: Labels, value: float) -> None:
        """See `Sink`."""
        self._made[metric.name].observe(value, tags=dict(zip(metric.labels, labels, strict=True)))

    def set(self, metric: Metric, labels: Labels, value: float) -> None:
        """See `Sink`."""
        self._made[metric.name].set(value, tags=dict(zip(metric.labels, labels, strict=True)))


def _made(metric: Metric) -> Counter | Gauge | Histogram:
    match metric.kind:
        case "counter":
            return Counter(metric.name, metric.meaning, metric.labels)
        case "gauge":
            return Gauge(metric.name, metric.meaning, metric.labels)
        case "histogram":
            return Histogram(metric.name, metric.meaning, list(metric.bounds), metric.labels)
