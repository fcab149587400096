"""PURE, but for the two adapters at its end. How many replicas the pool and each resident model should have.

**Pool.** One more replica for every bin of distinct models that wait and find no room, after room on the other
replicas and on those that are on their way was counted. From zero, one for the first request. Fewer only while it
is safe *whichever* replicas go, for Serve (2.60) chooses them by itself: those not running yet, then those on the
nodes with the fewest replicas, then the newest; no public way tells it another. Safe means: nothing waits or loads
anywhere, and what is awake on any replica is awake on enough others. So one model in use keeps every replica of
the pool; how long an unused one does is its `idle_unload_s`.

**Resident.** Load over target, where load is tokens in flight, requests in flight or used KV cache, whichever asks
for most. Fewer replicas
only when the load would fill less than `_FILL` of those that stay, and never fewer than the busiest moment of the
delay asked for.

Both wait `upscale_delay_s` and `downscale_delay_s` themselves: Serve's delays of the same names are set to zero, so
that all that decides is here and can be tested. Serve pickles this module by value and runs it in its controller
ten times a second: it may import the standard library only, must be quick, and must never raise.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray.serve.config import AutoscalingContext

# How often replicas publish for it and callers report their queues. A policy decides every 0.1 s.
METRICS_EVERY_S = 0.25
# A replica that has said nothing for so long is not known any more. Clocks of nodes may differ by less than this.
_STALE_S = 10.0
# Resident replicas that stay after a scale-down are filled to this part of their target at most.
_FILL = 0.8
# A KV cache that is used to this part is full: what comes then waits, or has another request pre-empted.
_FULL_CACHE = 0.95


@dataclasses.dataclass(frozen=True, slots=True)
class Bounds:
    """The limits of one deployment, and what was decided last."""

    min_replicas: int
    max_replicas: int
    target: int

    def clip(self, replicas: int) -> int:
        """The nearest number of replicas that is allowed."""
        return max(self.min_replicas, min(self.max_replicas, replicas))


@dataclasses.dataclass(frozen=True, slots=True)
class Delays:
    """How long more, or fewer, replicas must be wanted without a break before it is done."""

    upscale_s: float
    downscale_s: float


@dataclasses.dataclass(frozen=True, slots=True)
class Timers:
    """All that is remembered between two decisions: since when more, or fewer, replicas are wanted.

    `peak`: the most that were wanted since `down_since`.
    """

    up_since: float | None = None
    down_since: float | None = None
    peak: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Decision:
    """How many replicas from now on."""

    replicas: int
    timers: Timers


@dataclasses.dataclass(frozen=True, slots=True)
class ReplicaDemand:
    """What one pool replica published; see `residency.demand.PoolDemand`."""

    held: float
    free_bytes: float
    awake: frozenset[str]
    coming: frozenset[str]
    unmet: Mapping[str, float]


@dataclasses.dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """What one resident replica published: requests in flight, an estimate of their tokens, and its KV cache's use."""

    ongoing: float
    tokens: float
    kv_cache: float = 0.0


def decide_pool(
    running: Sequence[ReplicaDemand | None],
    queued: float,
    bounds: Bounds,
    replica_bytes: float,
    delays: Delays,
    timers: Timers,
    now: float,
) -> Decision:
    """Decide for the pool. `running`: one entry a running replica, None for one that is not known.

    `queued`: calls that wait for any replica at all. `replica_bytes`: what an empty replica has room for.
    """
    fresh = _new_bins(running, replica_bytes)
    wanted = len(running) + fresh if fresh else int(queued > 0)
    # Of those that are on their way none is dropped either: one may run by the time that Serve chooses.
    lowest = max(len(running), bounds.target) - _spare(running, queued) if running else 0
    # From zero at once: somebody waits, and nothing is there that could still make room.
    delays = delays if running else dataclasses.replace(delays, upscale_s=0.0)
    return _timed(wanted, lowest, bounds, delays, timers, now)


def _new_bins(running: Sequence[ReplicaDemand | None], replica_bytes: float) -> int:
    """So many empty replicas hold the distinct models that find no room (first fit, largest first)."""
    known = [replica for replica in running if replica]
    elsewhere = frozenset[str]().union(*(replica.awake | replica.coming for replica in known))
    unmet: dict[str, float] = {}
    for replica in known:
        for model, wanted in replica.unmet.items():
            if model not in elsewhere and wanted <= replica_bytes:
                unmet[model] = max(wanted, unmet.get(model, 0.0))
    # A running replica that has not reported yet is taken for empty: it has just come.
    room = [replica.free_bytes if replica else replica_bytes for replica in running]
    new = 0
    for wanted in sorted(unmet.values(), reverse=True):
        place = next((index for index, free in enumerate(room) if wanted <= free), None)
        if place is None:
            new += 1
            room.append(replica_bytes - wanted)
        else:
            room[place] -= wanted
    return new


def _spare(running: Sequence[ReplicaDemand | None], queued: float) -> int:
    """So many of the running replicas may go, whichever they are."""
    if queued > 0 or any(replica is None or replica.held or replica.coming or replica.unmet for replica in running):
        return 0
    copies = Counter(model for replica in running if replica for model in replica.awake)
    return min(copies.values()) - 1 if copies else len(running)


def decide_resident(
    running: Sequence[ReplicaLoad | None],
    bounds: Bounds,
    target: ReplicaLoad,
    delays: Delays,
    timers: Timers,
    now: float,
) -> Decision:
    """Decide for one resident model. `target`: requests and tokens that one replica should have at most."""
    known = [replica for replica in running if replica]
    load = max(
        sum(replica.ongoing for replica in known) / target.ongoing,
        sum(replica.tokens for replica in known) / target.tokens,
        sum(replica.kv_cache for replica in known) / _FULL_CACHE,
    )
    # A replica that has not reported may have any load, and so may those that have died and come again.
    blind = not known or len(known) < len(running)
    lowest = bounds.target if blind else math.ceil(load / _FILL)
    return _timed(math.ceil(load), lowest, bounds, delays, timers, now)


def _timed(wanted: int, lowest: int, bounds: Bounds, delays: Delays, timers: Timers, now: float) -> Decision:
    """Up to `wanted` or down to `lowest` (with what `wanted` asks for), each once it was so for its delay."""
    wanted = bounds.clip(wanted)
    lowest = bounds.clip(max(lowest, wanted))
    target = bounds.clip(bounds.target)
    if wanted > target:
        since = now if timers.up_since is None else timers.up_since
        if now - since >= delays.upscale_s:
            return Decision(wanted, Timers())
        return Decision(target, Timers(up_since=since))
    if lowest < target:
        since, peak = now, lowest
        if timers.down_since is not None and timers.peak < target:
            since, peak = timers.down_since, max(lowest, timers.peak)
        if now - since < delays.downscale_s:
            return Decision(target, Timers(down_since=since, peak=peak))
        # Serve goes to zero by way of one: the timer goes on, so that it does not wait there again.
        return Decision(peak, Timers(down_since=since) if peak == 0 else Timers())
    return Decision(target, Timers())


# What Serve calls. Everything above is plain data.


class PoolPolicy:
    """Serve's custom autoscaling policy for the pool."""

    def __init__(self, replica_bytes: float, upscale_delay_s: float, downscale_delay_s: float) -> None:
        self._replica_bytes = replica_bytes
        self._delays = Delays(upscale_delay_s, downscale_delay_s)

    def __call__(self, ctx: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        decision = decide_pool(
            [read_demand(stats) for stats in latest_stats(ctx)],
            ctx.total_queued_requests or 0.0,
            _bounds(ctx),
            self._replica_bytes,
            self._delays,
            Timers(**ctx.policy_state.get("timers", {})),
            ctx.current_time,
        )
        return decision.replicas, {"timers": dataclasses.asdict(decision.timers)}


class ResidentPolicy:
    """Serve's custom autoscaling policy for one resident model."""

    def __init__(
        self, target_ongoing: float, target_tokens: float, upscale_delay_s: float, downscale_delay_s: float
    ) -> None:
        self._target = ReplicaLoad(target_ongoing, target_tokens)
        self._delays = Delays(upscale_delay_s, downscale_delay_s)

    def __call__(self, ctx: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        decision = decide_resident(
            [read_load(stats) for stats in latest_stats(ctx)],
            _bounds(ctx),
            self._target,
            self._delays,
            Timers(**ctx.policy_state.get("timers", {})),
            ctx.current_time,
        )
        return decision.replicas, {"timers": dataclasses.asdict(decision.timers)}


def latest_stats(ctx: AutoscalingContext) -> list[dict[str, float] | None]:
    """What each running replica published last, None where that is nothing or too old.

    Serve keeps a series for every key that was ever published, for as long as the look-back period: a key whose
    newest point is older than the replica's newest is not published any more.
    """
    points: dict[Any, list[tuple[str, float, float]]] = {replica: [] for replica in ctx.running_replicas}
    for name, by_replica in (ctx.raw_metrics or {}).items():
        for replica, series in by_replica.items():
            if series and replica in points:
                points[replica].append((name, series[-1].timestamp, series[-1].value))
    return [_newest(found, ctx.current_time) for found in points.values()]


def _newest(points: Iterable[tuple[str, float, float]], now: float) -> dict[str, float] | None:
    points = list(points)
    newest = max((at for _, at, _ in points), default=-math.inf)
    if now - newest > _STALE_S:
        return None
    return {name: value for name, at, value in points if at == newest}


def read_demand(stats: Mapping[str, float] | None) -> ReplicaDemand | None:
    """The typed form of `PoolDemand.stats()`."""
    if stats is None or "free" not in stats:
        return None
    return ReplicaDemand(
        held=stats.get("held", 0.0),
        free_bytes=stats["free"],
        awake=frozenset(_under("awake:", stats)),
        coming=frozenset(_under("coming:", stats)),
        unmet=_under("unmet:", stats),
    )


def _under(prefix: str, stats: Mapping[str, float]) -> dict[str, float]:
    return {name.removeprefix(prefix): value for name, value in stats.items() if name.startswith(prefix) and value}


def load_stats(ongoing: int, tokens: int, kv_cache: float) -> dict[str, float]:
    """What a resident replica publishes; `read_load` reads it."""
    return {"ongoing": float(ongoing), "tokens": float(tokens), "kv_cache": kv_cache}


def read_load(stats: Mapping[str, float] | None) -> ReplicaLoad | None:
    """The typed form of `load_stats`."""
    if stats is None or "ongoing" not in stats:
        return None
    return ReplicaLoad(stats["ongoing"], stats.get("tokens", 0.0), stats.get("kv_cache", 0.0))


def _bounds(ctx: AutoscalingContext) -> Bounds:
    return Bounds(ctx.capacity_adjusted_min_replicas, ctx.capacity_adjusted_max_replicas, ctx.target_num_replicas)
