"""PURE. What is given up when a model has too much to do, in this order: thinking, size, the least important requests.

`load` is 1 where every place of every replica is taken; beyond that requests wait. KV cache counts the same way: a
replica whose cache is full pre-empts requests, which is worse than a full list of places.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from serve_app.service_schema import Degrade


@dataclasses.dataclass(frozen=True, slots=True)
class Usage:
    """What one replica publishes. `kv_cache` from 0 to 1; `waiting`: requests that its engine has not begun."""

    in_flight: int
    places: int
    kv_cache: float = 0.0
    waiting: int = 0


def load_of(replicas: Iterable[Usage], queued: int = 0) -> float:
    """How loaded a model is over all its replicas, the requests that wait before them included; 0 without a replica."""
    found = list(replicas)
    places = sum(usage.places for usage in found)
    if not places:
        return 0.0
    taken = (sum(usage.in_flight for usage in found) + queued) / places
    return max(taken, min(usage.kv_cache for usage in found))


def shrunk_budget(load: float, budget: int | None, settings: Degrade) -> int | None:
    """The thinking budget under this load: as it was, or at most what is left for thinking."""
    if load < settings.shrink_thinking_at:
        return budget
    return settings.thinking_budget if budget is None else min(budget, settings.thinking_budget)


def wants_lighter(load: float, settings: Degrade) -> bool:
    """Whether `auto` should be answered by a lighter model that is awake."""
    return load >= settings.lighter_model_at
