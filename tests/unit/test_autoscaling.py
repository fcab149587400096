"""serve_app.models.autoscaling: how many replicas, decided from what they publish and from nothing else."""

import dataclasses
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.models.autoscaling import (
    Bounds,
    Decision,
    Delays,
    PoolPolicy,
    ReplicaDemand,
    ReplicaLoad,
    ResidentPolicy,
    Timers,
    decide_pool,
    decide_resident,
    load_stats,
    read_demand,
    read_load,
)
from serve_app.residency.demand import PoolDemand

ROOM = 10.0
NOW = 1000.0
AT_ONCE = Delays(0.0, 0.0)
FRESH = Timers()


def replica(
    awake: str = "",
    coming: str = "",
    unmet: dict[str, float] | None = None,
    free: float = 0.0,
    held: int = 0,
) -> ReplicaDemand:
    return ReplicaDemand(float(held), free, frozenset(awake), frozenset(coming), unmet or {})


IDLE = replica(free=ROOM)


def pool(
    *running: ReplicaDemand | None,
    target: int | None = None,
    queued: float = 0.0,
    least: int = 0,
    most: int = 4,
    delays: Delays = AT_ONCE,
    timers: Timers = FRESH,
    now: float = NOW,
) -> Decision:
    bounds = Bounds(least, most, len(running) if target is None else target)
    return decide_pool(running, queued, bounds, ROOM, delays, timers, now)


@pytest.mark.parametrize(
    ("running", "queued", "target", "replicas"),
    [
        pytest.param([], 0, 0, 0, id="nobody asks"),
        pytest.param([], 1, 0, 1, id="the first request"),
        pytest.param([], 0.1, 0, 1, id="the first request, in one report of many"),
        pytest.param([], 1, 1, 1, id="its replica is on its way"),
        pytest.param([], 0, 1, 0, id="its client has left"),
        pytest.param([None], 0, 1, 1, id="has not reported yet"),
        pytest.param([IDLE], 0, 1, 0, id="idle"),
        pytest.param([replica("a")], 0, 1, 1, id="awake"),
        pytest.param([replica(coming="a")], 0, 1, 1, id="loading"),
        pytest.param([replica(held=1)], 0, 1, 1, id="somebody waits there"),
        pytest.param([IDLE], 1, 1, 1, id="somebody waits for any replica"),
        pytest.param([replica("a", unmet={"b": 6})], 0, 1, 2, id="one model does not fit"),
        pytest.param([replica("a", unmet={"b": 6, "c": 6})], 0, 1, 3, id="two do not fit"),
        pytest.param([replica("a", unmet={"b": 4, "c": 6})], 0, 1, 2, id="two that fit on one new replica"),
        pytest.param([replica("a", unmet={"b": 6}), replica("c", unmet={"b": 6})], 0, 2, 3, id="the same on both"),
        pytest.param([replica("a", unmet={"b": 6}), IDLE], 0, 2, 2, id="there is room on another"),
        pytest.param([replica("a", unmet={"b": 6}), None], 0, 2, 2, id="another has just come"),
        pytest.param([replica("a", unmet={"b": 6})], 0, 2, 2, id="another is on its way"),
        pytest.param([replica("a", unmet={"b": 6}), replica("b")], 0, 2, 2, id="awake on another"),
        pytest.param([replica("a", unmet={"b": 6}), replica(coming="b")], 0, 2, 2, id="loading on another"),
        pytest.param([replica("a", unmet={"b": 11})], 0, 1, 1, id="never fits"),
        pytest.param([replica("a", unmet=dict.fromkeys("bcdef", 6.0))], 0, 1, 4, id="more than there may be"),
        pytest.param([IDLE, IDLE, IDLE], 0, 3, 0, id="all idle"),
        pytest.param([replica("a"), IDLE, IDLE], 0, 3, 3, id="one in use: Serve might stop that one"),
        pytest.param([replica("a"), replica("a"), IDLE], 0, 3, 2, id="two copies: any one may go"),
        pytest.param([replica("a"), replica("a"), replica("a")], 0, 3, 1, id="three copies: any two may go"),
        pytest.param([replica("ab"), replica("a"), replica("b")], 0, 3, 2, id="two copies of each"),
        pytest.param([replica("a"), replica("a"), replica(coming="b")], 0, 3, 3, id="copies, but one loads"),
        pytest.param([replica("a")], 0, 3, 3, id="those on their way are not dropped either"),
        pytest.param([IDLE], 0, 3, 2, id="all that runs may go, so any one may"),
    ],
)
def test_the_pool_has_so_many_replicas(
    running: list[ReplicaDemand | None], queued: float, target: int, replicas: int
) -> None:
    assert pool(*running, target=target, queued=queued).replicas == replicas


def test_from_zero_the_pool_does_not_wait() -> None:
    assert pool(queued=1, delays=Delays(60, 60)).replicas == 1


def test_with_replicas_the_pool_waits_for_room_to_be_made_first() -> None:
    full = replica("a", unmet={"b": 6})
    first = pool(full, delays=Delays(2, 60))
    assert first == Decision(1, Timers(up_since=NOW))
    assert pool(full, delays=Delays(2, 60), timers=first.timers, now=NOW + 1.9).replicas == 1
    assert pool(full, delays=Delays(2, 60), timers=first.timers, now=NOW + 2).replicas == 2
    assert pool(replica("b"), delays=Delays(2, 60), timers=first.timers, now=NOW + 1).timers == Timers()


def test_the_pool_shrinks_once_it_was_idle_for_the_delay_without_a_break() -> None:
    delays = Delays(1, 60)
    idle = pool(IDLE, delays=delays)
    assert idle == Decision(1, Timers(down_since=NOW))
    assert pool(IDLE, delays=delays, timers=idle.timers, now=NOW + 59).replicas == 1
    assert pool(IDLE, delays=delays, timers=idle.timers, now=NOW + 60).replicas == 0
    used = pool(replica("a"), delays=delays, timers=idle.timers, now=NOW + 59)
    again = pool(IDLE, delays=delays, timers=used.timers, now=NOW + 60)
    assert again == Decision(1, Timers(down_since=NOW + 60))


def test_the_way_to_zero_by_one_waits_only_once() -> None:
    """Serve goes from three replicas to one first, whatever a policy says."""
    timers = Timers(down_since=NOW - 60)
    down = pool(IDLE, IDLE, IDLE, delays=Delays(1, 60), timers=timers)
    assert down.replicas == 0
    assert pool(IDLE, target=1, delays=Delays(1, 60), timers=down.timers, now=NOW + 0.1).replicas == 0


MODELS = st.frozensets(st.sampled_from("abcd"))
DEMANDS = st.builds(
    ReplicaDemand,
    held=st.sampled_from([0.0, 0.0, 0.0, 1.0]),
    free_bytes=st.floats(0, ROOM),
    awake=MODELS,
    coming=st.one_of(st.just(frozenset[str]()), MODELS),
    unmet=st.dictionaries(st.sampled_from("efgh"), st.floats(0.1, 2 * ROOM), max_size=2),
)
RUNNING = st.lists(st.one_of(DEMANDS, st.just(IDLE), st.just(replica("a")), st.none()), max_size=5)
TIMERS = st.builds(
    Timers,
    up_since=st.one_of(st.none(), st.floats(0, NOW)),
    down_since=st.one_of(st.none(), st.floats(0, NOW)),
    peak=st.integers(0, 8),
)
DELAYS = st.builds(Delays, st.floats(0, 100), st.floats(0, 100))


@st.composite
def bounds(draw: st.DrawFn, least: int = 0) -> Bounds:
    low = draw(st.integers(least, 4))
    return Bounds(low, draw(st.integers(max(low, 1), 8)), draw(st.integers(0, 8)))


@given(RUNNING, st.floats(0, 5), bounds(), DELAYS, TIMERS)
def test_the_pool_stays_within_its_bounds(
    running: list[ReplicaDemand | None], queued: float, limits: Bounds, delays: Delays, timers: Timers
) -> None:
    decision = decide_pool(running, queued, limits, ROOM, delays, timers, NOW)
    assert limits.min_replicas <= decision.replicas <= limits.max_replicas


@given(RUNNING, st.floats(0, 5), DELAYS, TIMERS)
def test_whichever_replicas_serve_stops_no_protected_model_loses_its_last(
    running: list[ReplicaDemand | None], queued: float, delays: Delays, timers: Timers
) -> None:
    limits = Bounds(0, 8, len(running))
    gone = len(running) - decide_pool(running, queued, limits, ROOM, delays, timers, NOW).replicas
    if gone > 0:
        assert queued == 0
        known = [replica for replica in running if replica]
        assert len(known) == len(running)
        assert not any(replica.held or replica.coming or replica.unmet for replica in known)
        copies = Counter(model for replica in known for model in replica.awake)
        assert all(count > gone for count in copies.values())


@given(st.lists(DEMANDS, min_size=1, max_size=4), st.integers(1, 4))
def test_one_more_model_without_room_never_means_fewer_replicas(running: list[ReplicaDemand], more: int) -> None:
    crowded = dataclasses.replace(running[0], unmet={**running[0].unmet, **{f"m{n}": ROOM for n in range(more)}})
    before = pool(*running, most=50).replicas
    after = pool(crowded, *running[1:], most=50).replicas
    assert after >= before
    full = [dataclasses.replace(replica, free_bytes=0.0) for replica in (crowded, *running[1:])]
    assert pool(*full, most=50).replicas >= len(running) + more


@given(RUNNING, bounds(), DELAYS, st.integers(1, 30))
def test_what_does_not_change_is_decided_once(
    running: list[ReplicaDemand | None], limits: Bounds, delays: Delays, steps: int
) -> None:
    """No flapping: with the same reports the target moves one way only."""
    seen, timers = [limits.clip(limits.target)], Timers()
    for step in range(steps):
        limits = dataclasses.replace(limits, target=seen[-1])
        decision = decide_pool(running, 0.0, limits, ROOM, delays, timers, NOW + 10 * step)
        seen.append(decision.replicas)
        timers = decision.timers
    assert seen in (sorted(seen), sorted(seen, reverse=True))


def resident(
    *loads: ReplicaLoad | None,
    target: int | None = None,
    least: int = 1,
    delays: Delays = AT_ONCE,
    timers: Timers = FRESH,
    now: float = NOW,
) -> Decision:
    limits = Bounds(least, 8, len(loads) if target is None else target)
    return decide_resident(loads, limits, ReplicaLoad(10, 1000), delays, timers, now)


def load(ongoing: float, tokens: float = 0, kv_cache: float = 0) -> ReplicaLoad:
    return ReplicaLoad(ongoing, tokens, kv_cache)


@pytest.mark.parametrize(
    ("loads", "target", "replicas"),
    [
        pytest.param([load(0)], 1, 1, id="idle: one stays"),
        pytest.param([load(10)], 1, 1, id="at its target"),
        pytest.param([load(11)], 1, 2, id="one request more"),
        pytest.param([load(2, 2500)], 1, 3, id="few requests, many tokens"),
        pytest.param([load(35, 100)], 1, 4, id="many requests, few tokens"),
        pytest.param([load(2, 100, 0.9)], 1, 1, id="a cache that is well used"),
        pytest.param([load(2, 100, 0.97)], 1, 2, id="few requests and tokens, and a full cache"),
        pytest.param([load(2, 100, 0.5), load(2, 100, 0.4)], 2, 2, id="one cache would be too full"),
        pytest.param([load(2, 100, 0.3), load(2, 100, 0.4)], 2, 1, id="one cache has room for all"),
        pytest.param([load(200)], 1, 8, id="more than there may be"),
        pytest.param([load(15), None], 2, 2, id="the second has just come"),
        pytest.param([load(0), None], 2, 2, id="what it does is not known"),
        pytest.param([], 2, 2, id="all have died"),
        pytest.param([load(5), load(4)], 2, 2, id="one would be too full"),
        pytest.param([load(4), load(4)], 2, 1, id="one has room for all"),
        pytest.param([load(1), load(1), load(1)], 3, 1, id="two too many"),
        pytest.param([load(3)], 3, 1, id="those on their way are not needed any more"),
    ],
)
def test_a_resident_model_has_so_many_replicas(loads: list[ReplicaLoad | None], target: int, replicas: int) -> None:
    assert resident(*loads, target=target).replicas == replicas


def test_a_resident_model_keeps_what_the_busiest_moment_of_the_delay_needed() -> None:
    delays, timers = Delays(5, 300), Timers()
    for second, ongoing in [(0, 1), (100, 14), (200, 1)]:
        decision = resident(load(ongoing), load(0), load(0), load(0), delays=delays, timers=timers, now=NOW + second)
        assert decision.replicas == 4
        timers = decision.timers
    idle = [load(0)] * 4
    assert resident(*idle, delays=delays, timers=timers, now=NOW + 300) == Decision(2, Timers())


def test_a_short_burst_starts_no_replica() -> None:
    delays = Delays(5, 300)
    burst = resident(load(50), delays=delays)
    assert burst == Decision(1, Timers(up_since=NOW))
    assert resident(load(5), delays=delays, timers=burst.timers, now=NOW + 4) == Decision(1, Timers())
    assert resident(load(50), delays=delays, timers=burst.timers, now=NOW + 5).replicas == 5


LOADS = st.lists(st.one_of(st.builds(ReplicaLoad, st.floats(0, 300), st.floats(0, 1e6)), st.none()), max_size=8)


@given(LOADS, bounds(least=1), DELAYS, TIMERS)
def test_a_resident_model_stays_within_its_bounds(
    loads: list[ReplicaLoad | None], limits: Bounds, delays: Delays, timers: Timers
) -> None:
    decision = decide_resident(loads, limits, ReplicaLoad(10, 1000), delays, timers, NOW)
    assert 1 <= limits.min_replicas <= decision.replicas <= limits.max_replicas


@given(st.floats(0, 79), st.integers(1, 8))
def test_a_steady_load_ends_at_a_number_that_it_keeps(ongoing: float, start: int) -> None:
    """No flapping: the load spreads over the replicas, and what was decided stands from then on."""
    target, seen = start, []
    for step in range(6):
        target = resident(*[load(ongoing / target)] * target, now=NOW + step).replicas
        seen.append(target)
    assert len(set(seen[1:])) == 1


# The adapters: what Serve hands them, and that its stats come back as they were sent.


def test_a_pool_replicas_demand_is_read_as_it_was_published() -> None:
    demand = PoolDemand(
        held=2,
        awake=frozenset({"org/a:1"}),
        coming=frozenset({"b"}),
        unmet={"org/c": 7},
        free_bytes=3,
    )
    assert demand.stats()["protected"] == 1.0
    assert read_demand(demand.stats()) == ReplicaDemand(2, 3, demand.awake, demand.coming, {"org/c": 7})
    assert PoolDemand().stats()["protected"] == 0.0
    assert read_demand(PoolDemand().stats()) == ReplicaDemand(0, 0, frozenset(), frozenset(), {})


def test_a_resident_replicas_load_is_read_as_it_was_published() -> None:
    assert read_load(load_stats(3, 400, 0.5)) == ReplicaLoad(3, 400, 0.5)


def context(
    published: dict[str, list[tuple[float, dict[str, float]]]], *, target: int, queued: float = 0.0, **state: Any
) -> Any:
    """As Serve makes it: a series for every key that a replica published within the look-back period."""
    raw: dict[str, dict[str, list[SimpleNamespace]]] = {}
    for name, reports in published.items():
        for at, stats in reports:
            for key, value in stats.items():
                point = SimpleNamespace(timestamp=at, value=value)
                raw.setdefault(key, {}).setdefault(name, []).append(point)
    return SimpleNamespace(
        running_replicas=list(published),
        raw_metrics=raw,
        total_queued_requests=queued,
        target_num_replicas=target,
        capacity_adjusted_min_replicas=state.pop("least", 0),
        capacity_adjusted_max_replicas=3,
        policy_state=state,
        current_time=NOW,
    )


def test_the_pools_policy_reads_the_newest_report_only() -> None:
    """A key that is not published any more stays in Serve's series for a while."""
    policy = PoolPolicy(replica_bytes=10, upscale_delay_s=0, downscale_delay_s=0)
    full = PoolDemand(held=1, awake=frozenset({"a"}), unmet={"b": 6})
    now_free = PoolDemand(awake=frozenset({"a"}), free_bytes=4)
    assert policy(context({"r": [(NOW - 1, full.stats())]}, target=1))[0] == 2
    assert policy(context({"r": [(NOW - 1, full.stats()), (NOW - 0.5, now_free.stats())]}, target=1))[0] == 1


def test_a_pool_replica_that_fell_silent_keeps_what_it_may_hold() -> None:
    policy = PoolPolicy(replica_bytes=10, upscale_delay_s=0, downscale_delay_s=0)
    idle = PoolDemand(free_bytes=10).stats()
    assert policy(context({"r": [(NOW - 1, idle)]}, target=1))[0] == 0
    assert policy(context({"r": [(NOW - 11, idle)]}, target=1))[0] == 1
    assert policy(context({"r": []}, target=1))[0] == 1


def test_the_policys_memory_goes_through_serve() -> None:
    policy = PoolPolicy(replica_bytes=10, upscale_delay_s=0, downscale_delay_s=1)
    idle = {"r": [(NOW, PoolDemand(free_bytes=10).stats())]}
    first = policy(context(idle, target=1))
    assert first == (1, {"timers": {"up_since": None, "down_since": NOW, "peak": 0}})
    later = context(idle, target=1, **first[1])
    later.current_time = NOW + 1
    assert policy(later)[0] == 0


def test_the_residents_policy_counts_tokens_of_all_replicas() -> None:
    policy = ResidentPolicy(target_ongoing=10, target_tokens=1000, upscale_delay_s=0, downscale_delay_s=0)
    reports = {name: [(NOW, load_stats(1, 1200, 0.2))] for name in ("r", "s")}
    assert policy(context(reports, target=2, least=1))[0] == 3
