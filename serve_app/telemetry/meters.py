"""Numbers between those who count and Ray's metrics: plain Python to add to, handed on once a second by a thread.

A call of Ray's costs microseconds and takes its tags apart each time: none is made while a request waits.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Protocol

from serve_app.telemetry.metric_table import Metric

logger = logging.getLogger(__name__)

FLUSH_EVERY_S = 1.0
# Between so many calls of the sink the interpreter lock is let go, or streams would wait for it.
_BURST = 50
_PAUSE_S = 0.001

Labels = tuple[str, ...]


class Sink(Protocol):
    """Where numbers go. `labels` are values in the order of the metric's names."""

    def add(self, metric: Metric, labels: Labels, number: float) -> None:
        """Raise a counter."""

    def observe(self, metric: Metric, labels: Labels, value: float) -> None:
        """Put a value into a histogram."""

    def set(self, metric: Metric, labels: Labels, value: float) -> None:
        """Set a gauge."""


class Meters:
    """What was counted since the last flush. For one thread: the one that flushes."""

    def __init__(self) -> None:
        self.counts: Counter[tuple[Metric, Labels]] = Counter()
        self.values: defaultdict[tuple[Metric, Labels], list[float]] = defaultdict(list)
        self.gauges: Counter[tuple[Metric, Labels]] = Counter()
        self._shown: set[tuple[Metric, Labels]] = set()

    def add(self, metric: Metric, labels: Labels = (), number: float = 1) -> None:
        """Raise a counter."""
        if number > 0:
            self.counts[metric, labels] += number  # type: ignore[assignment] # a Counter counts anything

    def observe(self, metric: Metric, labels: Labels, value: float) -> None:
        """One value of a histogram."""
        self.values[metric, labels].append(value)

    def gauge(self, metric: Metric, labels: Labels, value: float) -> None:
        """How something is now; several who say so add up."""
        self.gauges[metric, labels] += value  # type: ignore[assignment]

    def flush(self, sink: Sink, pause: Callable[[], object] = lambda: None) -> None:
        """Hand everything on. A gauge of which nobody speaks any more becomes 0: Ray would show its last value on."""
        counts, self.counts = self.counts, Counter()
        values, self.values = self.values, defaultdict(list)
        gauges, self.gauges = self.gauges, Counter()
        calls = 0

        def called() -> None:
            nonlocal calls
            calls += 1
            if calls % _BURST == 0:
                pause()

        for (metric, labels), number in counts.items():
            sink.add(metric, labels, number)
            called()
        for (metric, labels), observed in values.items():
            for value in observed:
                sink.observe(metric, labels, value)
                called()
        for gone in self._shown - gauges.keys():
            gauges[gone] = 0
        for (metric, labels), value in gauges.items():
            sink.set(metric, labels, value)
            called()
        self._shown = {gauge for gauge, value in gauges.items() if value}


class Flusher:
    """Once a second has everybody say what they have, and hands it on. A thread from `start` to `close`."""

    def __init__(self, collect: Sequence[Callable[[Meters], None]], sink: Sink) -> None:
        self._collect = collect
        self._sink = sink
        self._meters = Meters()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def close(self) -> None:
        """Hand on what there is, and end."""
        self._over.set()
        self._thread.join(2 * FLUSH_EVERY_S)

    def _run(self) -> None:
        while not self._over.wait(FLUSH_EVERY_S):
            self.flush()
        self.flush()

    def flush(self) -> None:
        """Once. What fails is logged: metrics must end nothing."""
        try:
            for collect in self._collect:
                collect(self._meters)
            self._meters.flush(self._sink, lambda: self._over.wait(_PAUSE_S))
        except Exception:
            logger.exception("metrics could not be handed on")
