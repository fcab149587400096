"""PURE. What is given up when a model has too much to do, in this order: thinking, size, the least important requests.

`load` is 1 where every place of every replica is taken; beyond that requests wait. KV cache counts the same way, and
a replica whose cache is full while requests wait for it has no place left, however many the configuration gives it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from serve_app.admission.kv_cache import is_full
from serve_app.engines.base import EngineLoad
from serve_app.service_schema import Degrade


@dataclasses.dataclass(frozen=True, slots=True)
class Usage:
    """What one replica publishes, and the limits of its model."""

    in_flight: int
    places: int
    engine: EngineLoad = dataclasses.field(default_factory=EngineLoad)
    kv_cache_limit: float | None = None

    @property
    def places_now(self) -> int:
        """Those that its KV cache has room for: where it is full, no more than are taken."""
        return min(self.places, self.in_flight) if is_full(self.engine, self.kv_cache_limit) else self.places


def load_of(replicas: Iterable[Usage], queued: int = 0) -> float:
    """How loaded a model is over all its replicas, the requests that wait before them included; 0 without a replica."""
    found = list(replicas)
    if not found:
        return 0.0
    taken = (sum(usage.in_flight for usage in found) + queued) / max(1, sum(usage.places_now for usage in found))
    return max(taken, min(usage.engine.kv_cache for usage in found))


def shrunk_budget(load: float, budget: int | None, settings: Degrade) -> int | None:
    """The thinking budget under this load: as it was, or at most what is left for thinking."""
    if load < settings.shrink_thinking_at:
        return budget
    return settings.thinking_budget if budget is None else min(budget, settings.thinking_budget)


def wants_lighter(load: float, settings: Degrade) -> bool:
    """Whether `auto` should be answered by a lighter model that is awake."""
    return load >= settings.lighter_model_at
