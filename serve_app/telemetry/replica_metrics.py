"""Metrics of a replica that holds engines: how its models are, what they went through, and where its memory goes."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Mapping

from serve_app.models.replicas import PublishedModel
from serve_app.residency.events import Transition
from serve_app.telemetry import metric_table as table
from serve_app.telemetry.meters import Meters

_MOST_TRANSITIONS = 10_000


@dataclasses.dataclass(frozen=True, slots=True)
class Memory:
    """A pool's budgets, and what is taken of them."""

    used_bytes: int
    limit_bytes: int
    host_used_bytes: int
    host_limit_bytes: int


class ReplicaMetrics:
    """Told by the replica's event loop, read by the thread that flushes."""

    def __init__(self, replica: str) -> None:
        self._replica = replica
        self._transitions: deque[Transition] = deque(maxlen=_MOST_TRANSITIONS)
        self._now: tuple[Mapping[str, PublishedModel], bool, Memory | None] = ({}, True, None)

    def went(self, transition: Transition) -> None:
        """One transition."""
        self._transitions.append(transition)

    def publish(self, models: Mapping[str, PublishedModel], *, moving: bool, memory: Memory | None = None) -> None:
        """How the models are now."""
        self._now = models, moving, memory

    def collect(self, meters: Meters) -> None:
        """Everything since the last time, and how things are."""
        for _ in range(len(self._transitions)):
            count_transition(self._transitions.popleft(), meters)
        models, moving, memory = self._now
        for model, published in models.items():
            meters.gauge(table.STATE, (model, self._replica, published.state), 1)
            here = (model, self._replica)
            meters.gauge(table.IN_FLIGHT, here, published.in_flight)
            meters.gauge(table.WAITING, here, published.waiting)
            meters.gauge(table.KV_CACHE, here, published.kv_cache)
            meters.gauge(table.MODEL_MEMORY, here, published.memory_bytes)
        meters.gauge(table.MOVING, (self._replica,), int(moving))
        if memory:
            meters.gauge(table.POOL_USED, (self._replica,), memory.used_bytes)
            meters.gauge(table.POOL_LIMIT, (self._replica,), memory.limit_bytes)
            meters.gauge(table.HOST_USED, (self._replica,), memory.host_used_bytes)
            meters.gauge(table.HOST_LIMIT, (self._replica,), memory.host_limit_bytes)


def count_transition(transition: Transition, meters: Meters) -> None:
    """One transition, and how long a load or wake took where it was one. Pure but for `meters`."""
    meters.add(table.TRANSITIONS, (transition.model, transition.was, transition.now))
    if transition.now == "awake" and transition.was == "loading":
        meters.observe(table.LOAD, (transition.model,), transition.after_s)
    elif transition.now == "awake" and transition.was == "waking":
        meters.observe(table.WAKE, (transition.model,), transition.after_s)
