"""What went wrong in other people's model swappers, each once, with `serve_app.residency.policy`."""

from collections.abc import Callable

import pytest
from world import LIMITS, TICK_S, World, asleep, awake, model, sleeper, world

from serve_app.residency.events import (
    Activity,
    Grant,
    Load,
    Loaded,
    Order,
    Refuse,
    Sleep,
    Stage,
    StillBusy,
    Tick,
    Unload,
    Wake,
    Wanted,
)
from serve_app.residency.policy import MAX_BACKOFF_FACTOR, Residency
from serve_app.residency.victims import LEASE_S, RESIDENCY_PER_SWAP

# Evicted while it streams


@pytest.mark.case(7)
def test_model_that_streams_is_not_evicted_and_the_newcomer_gets_its_room_after_it() -> None:
    w = awake(world(), "a")
    w.begin("a")
    w.run(30)
    w.want("b")
    w.run(20)
    assert w.stage("a") is Stage.AWAKE
    w.finish("a")
    w.run(10)
    assert (w.stage("a"), w.stage("b")) == (Stage.STOPPED, Stage.AWAKE)


def test_model_that_streams_is_not_put_to_sleep_either() -> None:
    w = awake(world(sleeper("a", idle_sleep_s=5), host_bytes=10), "a")
    w.begin("a")
    w.run(500)
    assert w.stage("a") is Stage.AWAKE
    w.finish("a")
    w.run(6)
    assert w.stage("a") is Stage.ASLEEP


# Evicted before its waiter is served


@pytest.mark.case(8)
def test_loaded_model_is_not_evicted_before_its_waiter_is_served() -> None:
    w = world(min_residency_s=0)
    w.want("a")
    w.run(0.1)
    w.want("b")
    w.run(w.times.load_s)
    assert w.actions(Grant, "a")
    assert w.stage("a") is Stage.AWAKE
    w.run(LEASE_S - 1)
    assert w.begin("a")
    w.run(5)
    w.finish("a")
    w.run(10)
    assert w.actions(Grant, "b")


@pytest.mark.case(8)
def test_old_request_that_ends_does_not_end_the_lease_of_a_new_grant() -> None:
    w = awake(world(), "a")
    w.begin("a")
    w.run(30)
    w.want("b")
    w.want("a")
    w.finish("a")
    assert w.stage("a") is Stage.AWAKE
    assert w.begin("a")
    w.finish("a")
    w.run(5)
    assert w.actions(Grant, "b")


def test_request_that_made_an_unload_stop_does_not_end_the_lease_of_a_new_grant() -> None:
    policy = Residency([model("a"), model("b")], world(min_residency_s=0).limits)
    policy.handle(Wanted("a"), 0)
    policy.handle(Loaded("a"), 1)
    policy.handle(Activity("a", 0, 50), 50)
    assert policy.handle(Wanted("b"), 100) == [Unload("a")]
    policy.handle(Wanted("a"), 100)
    policy.handle(Activity("a", 1, 51), 100.1)
    assert policy.handle(StillBusy("a"), 100.2) == [Grant("a")]
    policy.handle(Activity("a", 1, 51), 100.2)
    assert policy.handle(Activity("a", 0, 51), 100.3) == []


# A burst


@pytest.mark.case(11)
def test_burst_on_a_cold_model_starts_one_load_and_grants_all_at_once() -> None:
    w = world()
    for _ in range(20):
        w.want("a")
        w.run(0.1)
    w.run(5)
    assert (len(w.actions(Load)), len(w.actions(Grant)), w.waiting["a"]) == (1, 1, 0)


# Ping-pong


@pytest.mark.case(35)
def test_thrash_between_two_models_is_bounded_by_the_residency_time() -> None:
    w = world()
    for _ in range(600):
        for name in ("a", "b"):
            if not w.waiting[name] and not w.begin(name):
                w.want(name)
        w.run(0.5)
        for name in ("a", "b"):
            w.finish(name)
        w.run(0.5)
    stays_s = min(LIMITS.min_residency_s, RESIDENCY_PER_SWAP * w.times.load_s)
    assert 2 < len(w.actions(Load)) <= 600 / stays_s + 1


# It can never fit


def test_model_that_can_never_fit_is_refused_at_once_and_evicts_nothing() -> None:
    w = awake(world(model("a"), model("huge", memory=11)), "a")
    w.want("huge")
    (_, refusal) = w.log[-1]
    assert isinstance(refusal, Refuse)
    assert refusal.code == "never_fits"
    w.run(500)
    assert (w.actions(Load, "huge"), w.actions(Unload)) == ([], [])


# A failed load


def test_failed_load_takes_nothing_with_it() -> None:
    w = awake(world(model("a", 5), model("b", 5)), "a")
    w.begin("a")
    w.fails.add(("b", Stage.LOADING))
    w.want("b")
    w.run(10)
    assert (w.stage("a"), w.stage("b"), w.policy.used_bytes()) == (Stage.AWAKE, Stage.STOPPED, 5)
    assert w.actions(Unload) == []
    assert w.policy.failure("b") == "no weights"


def test_load_that_hangs_is_a_failed_load() -> None:
    w = world()
    w.hangs.add(("a", Stage.LOADING))
    w.want("a")
    w.want("b")
    w.run(w.times.hang_s + 5)
    assert w.actions(Refuse, "a")
    assert (w.stage("a"), w.stage("b")) == (Stage.STOPPED, Stage.AWAKE)


def test_failed_model_is_refused_until_its_backoff_is_over_then_loads_again() -> None:
    w = world()
    w.fails.add(("a", Stage.LOADING))
    w.want("a")
    w.run(w.times.load_s + TICK_S)
    w.want("a")
    (_, refusal) = w.log[-1]
    assert isinstance(refusal, Refuse)
    assert (refusal.code, refusal.reason) == ("load_failed", "no weights")
    assert 0 < refusal.retry_after_s <= LIMITS.backoff_s
    w.run(refusal.retry_after_s)
    w.heal()
    w.want("a")
    w.run(5)
    assert (w.stage("a"), w.policy.failure("a")) == (Stage.AWAKE, "")


def test_backoff_doubles_up_to_its_limit() -> None:
    w = world()
    w.fails.add(("a", Stage.LOADING))
    waits = []
    for _ in range(9):
        w.want("a")
        w.run(w.times.load_s + TICK_S)
        (refusal,) = [action for _, action in w.log[-1:] if isinstance(action, Refuse)]
        waits.append(refusal.retry_after_s / LIMITS.backoff_s)
        w.run(refusal.retry_after_s + 1)
    assert waits == [1, 2, 4, 8, 16, 32, 32, 32, MAX_BACKOFF_FACTOR]


# A client that leaves


def test_client_that_leaves_does_not_leave_a_model_loading_for_ever() -> None:
    w = world(model("a", idle_unload_s=60), model("b"))
    w.want("a")
    w.leave("a")
    assert w.stage("a") is Stage.LOADING
    w.run(10)
    assert w.stage("a") is Stage.AWAKE
    w.run(70)
    assert w.stage("a") is Stage.STOPPED


def test_client_that_leaves_the_queue_is_not_loaded_for() -> None:
    w = awake(world(), "a")
    w.begin("a")
    w.want("b")
    w.leave("b")
    w.finish("a")
    w.run(100)
    assert (w.stage("a"), w.actions(Load, "b")) == (Stage.AWAKE, [])


def test_nobody_is_drained_for_a_waiter_who_has_left() -> None:
    w = awake(world(), "a")
    w.begin("a")
    w.want("b")
    w.run(1)
    w.leave("b")
    w.run(200)
    assert w.stage("a") is Stage.AWAKE
    assert w.actions(Load, "b") == []


# The idle timer


@pytest.mark.case(23)
def test_idle_timer_does_not_run_during_the_load() -> None:
    w = World([model("a", idle_unload_s=30)], LIMITS)
    w.hangs.add(("a", Stage.LOADING))
    w.want("a")
    w.run(10)
    w.heal()
    w.run(1)
    assert (w.stage("a"), len(w.actions(Grant))) == (Stage.AWAKE, 1)
    w.run(29)
    assert w.begin("a")


def test_idle_model_is_unloaded_after_its_time_and_a_long_request_is_no_idleness() -> None:
    w = awake(world(model("a", idle_unload_s=30)), "a")
    w.begin("a")
    w.run(500)
    assert w.stage("a") is Stage.AWAKE
    w.finish("a")
    w.run(29)
    assert w.stage("a") is Stage.AWAKE
    w.run(2)
    assert w.stage("a") is Stage.STOPPED


# An unload and a request at the same time


def test_request_that_races_the_unload_stops_it_and_nothing_is_lost() -> None:
    w = awake(world(model("a", idle_unload_s=30)), "a")
    w.run(20)
    w.begin("a", seen=False)
    w.run(60)
    assert (w.stage("a"), w.engines["a"].in_flight) == (Stage.AWAKE, 1)
    w.finish("a")
    w.run(40)
    assert w.stage("a") is Stage.STOPPED


def test_model_wanted_while_it_is_unloaded_is_loaded_again() -> None:
    w = awake(world(model("a", idle_unload_s=30)), "a")
    while w.stage("a") is not Stage.UNLOADING:
        w.run(TICK_S)
    w.want("a")
    w.run(10)
    assert (w.stage("a"), len(w.actions(Load)), w.waiting["a"]) == (Stage.AWAKE, 2, 0)


def test_waiter_of_an_unload_that_found_a_request_is_granted_at_once() -> None:
    policy = Residency([model("a", idle_unload_s=1)], LIMITS)
    policy.handle(Wanted("a"), 0)
    policy.handle(Loaded("a"), 1)
    assert policy.handle(Tick(), 100) == [Unload("a")]
    assert policy.handle(Wanted("a"), 100) == []
    assert policy.handle(StillBusy("a"), 100.1) == [Grant("a")]


# An unload that does not end


def test_stuck_unload_holds_its_memory_and_nothing_else() -> None:
    w = awake(world(model("a", 6, idle_unload_s=10), model("b", 4), model("c", 6)), "a")
    w.hangs.add(("a", Stage.UNLOADING))
    w.run(20)
    assert w.stage("a") is Stage.UNLOADING
    w.want("c")
    w.want("a")
    w.want("b")
    w.run(30)
    # Its memory is not given to another, nothing goes in its stead, and what fits beside it is served.
    assert (w.stage("b"), w.stage("c"), w.policy.used_bytes()) == (Stage.AWAKE, Stage.STOPPED, 10)
    assert len(w.actions(Unload)) == 1
    w.heal()
    w.run(30)
    assert w.actions(Grant, "c")


# Starvation


def traffic_of_requests(w: World) -> None:
    """Requests that always overlap, so that the model is never idle."""
    w.begin("a")
    w.run(0.5)
    if w.engines.get("a") and w.engines["a"].in_flight > 1:
        w.finish("a")


def traffic_of_acquires(w: World) -> None:
    """Short requests that each ask for the model first."""
    if not w.waiting["a"]:
        w.want("a")
    w.begin("a")
    w.run(0.1)
    w.finish("a")
    w.run(0.4)


def traffic_of_grants(w: World) -> None:
    """Somebody asks for the model again and again, and no request of theirs arrives."""
    if not w.waiting["a"]:
        w.want("a")
    w.run(0.5)


def traffic_unseen(w: World) -> None:
    """Requests so short that the policy never hears of them, but one is there whenever it looks."""
    if w.engines.get("a") and not w.engines["a"].in_flight:
        w.begin("a", seen=False)
    w.run(0.5)


TRAFFIC = [traffic_of_requests, traffic_of_acquires, traffic_of_grants, traffic_unseen]


def waits_s(w: World, traffic: Callable[[World], None]) -> float:
    """How long a waiter for b waits while a has traffic."""
    awake(w, "a")
    w.want("b")
    asked = w.now
    while not w.actions(Grant, "b") and w.now < asked + 1000:
        traffic(w)
        if w.stage("a") in (Stage.UNLOADING, Stage.FALLING_ASLEEP):
            w.engines["a"].in_flight = 0  # what was running when it closed comes to its end
    return w.now - asked


BOUND_S = LIMITS.ageing_s + LIMITS.min_residency_s + LEASE_S + 3 + 5


@pytest.mark.case(89)
@pytest.mark.parametrize("traffic", TRAFFIC)
@pytest.mark.parametrize("start", [0.0, 1000.0])
def test_queued_model_is_not_starved_by_traffic_on_a_loaded_one(traffic: Callable[[World], None], start: float) -> None:
    assert waits_s(world(at=start), traffic) <= BOUND_S


@pytest.mark.case(89)
@pytest.mark.parametrize("first", ["a", "b"])
def test_ten_requests_for_one_model_and_one_for_another_take_three_loads_at_most(first: str) -> None:
    w = world()
    for name in [first, "a", "b", *["a"] * 9]:
        w.want(name)
    answered = {"a": 0, "b": 0}
    for _ in range(600):
        for name, asked in (("a", 10), ("b", 1)):
            # Whoever was granted comes in, one after the other, a second each.
            if answered[name] < asked and w.begin(name):
                w.run(1)
                w.finish(name)
                answered[name] += 1
            elif answered[name] < asked and not w.waiting[name]:
                w.want(name)
        w.run(0.5)
        if answered == {"a": 10, "b": 1}:
            break
    assert answered == {"a": 10, "b": 1}
    assert len(w.actions(Load)) <= 3
    assert max(w.actions(Grant, "a") + w.actions(Grant, "b")) < BOUND_S


@pytest.mark.parametrize("traffic", TRAFFIC)
def test_model_that_lacks_only_host_memory_is_not_starved_by_traffic_either(traffic: Callable[[World], None]) -> None:
    w = world(sleeper("a", 4, process_bytes=4), sleeper("b", 4, process_bytes=4), host_bytes=6)
    assert waits_s(w, traffic) <= BOUND_S


@pytest.mark.parametrize("traffic", TRAFFIC)
def test_model_that_needs_what_a_sleeper_would_keep_is_not_starved(traffic: Callable[[World], None]) -> None:
    assert waits_s(world(sleeper("a", 10), model("b", 10), host_bytes=20), traffic) <= BOUND_S


def test_priority_starves_nobody_where_ageing_takes_no_time() -> None:
    w = world(model("low"), model("a", priority=1), model("b", priority=1), ageing_s=0)
    for _ in range(200):
        for name in ("a", "b", "low"):
            if not w.waiting[name] and not w.actions(Grant, "low"):
                w.want(name)
        w.run(1)
    assert w.actions(Grant, "low")


def test_small_model_does_not_overtake_one_that_waits_for_much_room_for_ever() -> None:
    w = awake(world(model("a", 5), model("big", 10), model("s1", 5), model("s2", 5)), "a")
    w.begin("a")
    w.want("big")
    w.run(1)
    w.want("s1")
    w.run(30)
    # In the meantime it may use what is free.
    assert (w.stage("big"), w.stage("s1")) == (Stage.STOPPED, Stage.AWAKE)
    w.finish("a")
    w.run(5)
    assert w.stage("big") is Stage.AWAKE


def test_first_in_the_queue_keeps_the_room_that_is_on_its_way_for_it() -> None:
    w = awake(world(model("a", 5), model("big", 10), model("small", 5)), "a")
    w.run(30)
    w.want("big")
    w.want("small")
    assert (w.stage("a"), w.stage("small")) == (Stage.UNLOADING, Stage.STOPPED)
    w.run(5)
    assert w.stage("big") is Stage.AWAKE


def test_sleeper_that_waits_its_turn_does_not_keep_the_one_before_it_out() -> None:
    busy, sleeping = sleeper("a", 2, host=2, asleep_bytes=0), sleeper("b", 9, host=2, process_bytes=3)
    w = asleep(world(busy, sleeping, sleeper("c", 5, process_bytes=2), host_bytes=6), "b")
    awake(w, "a")
    w.want("c")
    w.want("b")
    for _ in range(200):
        traffic_of_requests(w)
    assert w.actions(Grant, "c")
    w.finish("a")
    w.run(60)
    assert w.actions(Grant, "b")[1:]  # the first was before it slept


def test_waiter_that_asks_again_at_once_keeps_its_place_and_its_age() -> None:
    w = awake(world(model("a"), model("b"), model("c")), "a")
    w.begin("a")
    w.want("b")
    for _ in range(40):
        w.run(2)
        w.leave("b")
        w.want("b")
        if not w.waiting["c"]:
            w.want("c")
    assert w.stage("a") is Stage.UNLOADING
    w.finish("a")
    w.run(5)
    assert w.stage("b") is Stage.AWAKE


# A sleeping engine


@pytest.mark.case(127)
def test_request_to_a_sleeping_engine_wakes_it_and_is_granted_then() -> None:
    w = asleep(world(sleeper("a"), host_bytes=10), "a")
    assert not w.begin("a")
    w.want("a")
    w.want("a")
    assert (w.stage("a"), len(w.actions(Wake)), w.waiting["a"]) == (Stage.WAKING, 1, 2)
    w.run(w.times.wake_s + TICK_S)
    assert (w.stage("a"), w.waiting["a"], len(w.actions(Load))) == (Stage.AWAKE, 0, 1)
    assert w.begin("a")


@pytest.mark.case(127)
def test_request_to_an_engine_that_falls_asleep_waits_and_wakes_it_again() -> None:
    w = awake(world(sleeper("a", idle_sleep_s=10), host_bytes=10), "a")
    while w.stage("a") is not Stage.FALLING_ASLEEP:
        w.run(TICK_S)
    w.want("a")
    assert w.actions(Wake) == []
    w.run(w.times.sleep_s + w.times.wake_s + 1)
    assert (len(w.actions(Sleep)), len(w.actions(Wake)), w.waiting["a"]) == (1, 1, 0)


# Deaths


def test_model_that_dies_is_loaded_again_by_the_next_request() -> None:
    w = awake(world(), "a")
    w.begin("a")
    w.die("a")
    w.run(TICK_S)
    assert (w.stage("a"), w.policy.used_bytes()) == (Stage.STOPPED, 0)
    w.want("a")
    w.run(5)
    assert w.stage("a") is Stage.AWAKE


def test_death_of_a_model_makes_room_for_who_waits() -> None:
    w = awake(world(), "a")
    w.begin("a")
    w.want("b")
    w.die("a")
    w.run(TICK_S)
    assert w.stage("b") is Stage.LOADING


# Who goes


def test_model_that_fits_is_not_hindered_by_what_is_loaded() -> None:
    w = awake(world(model("a", 4), model("b", 6)), "a")
    w.want("b")
    w.run(5)
    assert (w.stage("a"), w.stage("b")) == (Stage.AWAKE, Stage.AWAKE)


def test_only_what_must_go_is_evicted() -> None:
    w = awake(world(model("a-old", 2), model("large", 8), model("new", 8)), "a-old", "large")
    w.run(30)
    w.want("new")
    w.run(10)
    assert w.actions(Unload, "large")
    assert w.stage("a-old") is Stage.AWAKE


def test_important_and_recently_used_models_stay_longest() -> None:
    w = world(model("vip", 4, priority=1), model("old", 3), model("fresh", 3), model("new", 3))
    awake(w, "vip", "old", "fresh")
    w.run(30)
    for name in ("vip", "old", "fresh"):
        w.begin(name)
        w.finish(name)
        w.run(1)
    w.want("new")
    w.run(10)
    assert [action.model for _, action in w.log if isinstance(action, Unload)] == ["old"]


# Engines that measure the accelerator while they load


def test_load_that_fails_because_another_gave_memory_back_is_tried_again_and_its_waiter_is_not_told() -> None:
    w = awake(world(model("a", 3), model("b", 3), model("c", 3), measured=True), "a")
    w.want("b")
    w.run(1)
    w.fails.add(("b", Stage.LOADING))
    w.order("a", Order.UNLOAD)
    w.run(w.times.load_s - 1 + TICK_S)
    w.heal()
    assert (w.actions(Refuse), w.stage("b"), len(w.actions(Load, "b"))) == ([], Stage.LOADING, 2)
    w.run(w.times.load_s + TICK_S)
    assert w.actions(Grant, "b")
    assert w.policy.failure("b") == ""


@pytest.mark.parametrize("moves", [False, True])
def test_load_that_fails_by_itself_is_refused_with_a_back_off(moves: bool) -> None:
    """Undisturbed at once; else after one more try, however much moves."""
    w = awake(world(model("a", 3), model("b", 3), measured=True), "a")
    w.fails.add(("b", Stage.LOADING))
    w.want("b")
    if moves:
        w.order("a", Order.UNLOAD)
    w.run(w.times.load_s + TICK_S)
    if moves:
        assert w.actions(Refuse) == []
        w.order("a", Order.LOAD)
        w.order("a", Order.UNLOAD)
        w.run(w.times.load_s + TICK_S)
    assert len(w.actions(Refuse, "b")) == 1
    assert w.policy.refusal("b", w.now)


def test_a_model_that_wakes_disturbs_a_load_likewise() -> None:
    w = asleep(world(sleeper("a", 4), model("b", 3), host_bytes=20, measured=True), "a")
    w.want("b")
    w.fails.add(("b", Stage.LOADING))
    w.want("a")
    w.run(w.times.load_s + TICK_S)
    assert (w.actions(Refuse), w.stage("b")) == ([], Stage.LOADING)


def test_idle_models_are_put_away_after_a_load_and_not_in_it() -> None:
    w = awake(world(model("a", 3, idle_unload_s=5), model("b", 3), measured=True), "a")
    w.hangs.add(("b", Stage.LOADING))
    w.want("b")
    w.run(10)
    assert w.stage("a") is Stage.AWAKE
    w.run(w.times.hang_s)
    assert w.stage("a") is Stage.STOPPED
