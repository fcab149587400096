"""PURE. Whether an engine's KV cache has room for one more request.

Full is: at least the limit is in use *and* a request waits for it. Then another one could not begin; it would stand in
the engine's own queue, where neither priorities nor fair shares hold. One request does wait there, always, so that the
engine never runs out of work while the next is sent for; and a cache that is nearly full but keeps nobody waiting is
just well used.
"""

from __future__ import annotations

from serve_app.engines.base import EngineLoad

# What counts as a full cache where the configuration sets no limit.
NEARLY_FULL = 0.95


def is_full(load: EngineLoad, limit: float | None) -> bool:
    """By what the engine said."""
    return load.kv_cache >= (NEARLY_FULL if limit is None else limit) and load.waiting > 0


def refuses(load: EngineLoad, in_flight: int, limit: float | None) -> bool:
    """Whether one more is refused. `in_flight`: requests that were let in; those that do not run yet count as waiting.

    So a burst that comes between two steps of the engine is not let in as a whole.
    """
    if limit is None or not in_flight:
        return False
    return load.kv_cache >= limit and (load.waiting > 0 or in_flight > load.running)
