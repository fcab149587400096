"""`serve_app.residency.policy`: the tier asleep, and what operators order."""

from world import TICK_S, World, asleep, awake, model, sleeper, world

from serve_app.residency.events import (
    Abandon,
    Died,
    Grant,
    Load,
    Loaded,
    LoadFailed,
    Order,
    Refuse,
    Sleep,
    Stage,
    Unload,
    Unwanted,
    Wake,
    Wanted,
)
from serve_app.residency.policy import EARLY_DEATH_S, Residency


def stages(w: World, *names: str) -> list[Stage]:
    return [w.stage(name) for name in names]


# Falling asleep


def test_evicted_model_sleeps_where_the_host_has_room_and_is_stopped_where_it_has_none() -> None:
    for host_bytes, then in ((10, Stage.ASLEEP), (5, Stage.ASLEEP), (4, Stage.STOPPED), (0, Stage.STOPPED)):
        w = awake(world(sleeper("a", host=4, process_bytes=1), model("b", 9), host_bytes=host_bytes), "a")
        w.run(30)
        w.want("b")
        w.run(5)
        assert stages(w, "a", "b") == [then, Stage.AWAKE]


def test_idle_model_falls_asleep_first_and_is_stopped_later() -> None:
    w = awake(world(sleeper("a", idle_sleep_s=30, idle_unload_s=100), host_bytes=10), "a")
    w.run(31)
    assert w.stage("a") is Stage.ASLEEP
    assert (w.policy.used_bytes(), w.policy.used_host_bytes()) == (1, 5)
    w.run(70)
    assert w.stage("a") is Stage.STOPPED


def test_sleeper_that_is_worth_less_makes_host_room_for_one_that_is_worth_more() -> None:
    w = asleep(world(sleeper("seldom", 4), sleeper("often", 8), model("new", 8), host_bytes=9), "seldom")
    awake(w, "often")
    for _ in range(20):
        w.want("often")
        w.run(1)
    w.run(10)
    w.want("new")
    w.run(10)
    assert stages(w, "seldom", "often", "new") == [Stage.STOPPED, Stage.ASLEEP, Stage.AWAKE]


def test_host_memory_of_a_sleeper_that_is_ended_is_not_used_before_it_is_gone() -> None:
    w = asleep(world(sleeper("a", 4), sleeper("b", 4), host_bytes=9), "a")
    w.hangs.add(("a", Stage.UNLOADING))
    w.order("a", Order.UNLOAD)
    awake(w, "b")
    w.order("b", Order.SLEEP)
    w.run(30)
    assert w.policy.used_host_bytes() <= 9
    assert w.actions(Sleep, "b") == []


def test_sleeper_that_is_ended_counts_as_what_it_holds() -> None:
    w = asleep(world(sleeper("a", 9), model("b", 9), host_bytes=10), "a")
    awake(w, "b")
    w.order("a", Order.UNLOAD)
    assert (w.stage("a"), w.policy.used_bytes()) == (Stage.UNLOADING, 10)


def test_model_does_not_fall_asleep_into_the_host_memory_that_the_newcomer_needs() -> None:
    w = awake(world(sleeper("a", 8), sleeper("b", 8, process_bytes=3), host_bytes=5), "a")
    w.run(30)
    w.want("b")
    w.run(5)
    assert (w.actions(Sleep), stages(w, "a", "b")) == ([], [Stage.STOPPED, Stage.AWAKE])


def test_model_whose_sleep_would_not_leave_enough_is_stopped() -> None:
    w = awake(world(sleeper("a", 10), model("b", 10), host_bytes=20), "a")
    w.run(30)
    w.want("b")
    w.run(5)
    assert (w.actions(Sleep), stages(w, "a", "b")) == ([], [Stage.STOPPED, Stage.AWAKE])


def test_what_sleepers_keep_is_taken_from_them_where_it_is_missing() -> None:
    w = asleep(world(sleeper("a", 5), sleeper("b", 5), model("all", 10), host_bytes=20), "a", "b")
    w.want("all")
    w.run(10)
    assert stages(w, "a", "b", "all") == [Stage.STOPPED, Stage.STOPPED, Stage.AWAKE]


# Failures


def test_failed_sleep_ends_the_engine_and_who_waits_gets_a_new_one() -> None:
    w = awake(world(sleeper("a", idle_sleep_s=10), host_bytes=10), "a")
    w.fails.add(("a", Stage.FALLING_ASLEEP))
    while w.stage("a") is not Stage.FALLING_ASLEEP:
        w.run(TICK_S)
    w.want("a")
    w.run(10)
    assert (w.stage("a"), w.waiting["a"]) == (Stage.AWAKE, 0)
    assert (len(w.actions(Unload)), len(w.actions(Load)), w.actions(Refuse)) == (1, 2, [])
    w.run(100)
    assert len(w.actions(Sleep)) == 1  # it does not try again


def test_failed_wake_becomes_a_load_and_its_waiters_stay() -> None:
    w = asleep(world(sleeper("a"), host_bytes=10), "a")
    w.fails.add(("a", Stage.WAKING))
    w.want("a")
    w.run(10)
    assert (w.stage("a"), w.waiting["a"], w.actions(Refuse)) == (Stage.AWAKE, 0, [])
    assert (len(w.actions(Wake)), len(w.actions(Load))) == (1, 2)


def test_wake_that_hangs_becomes_a_load() -> None:
    w = asleep(world(sleeper("a"), host_bytes=10), "a")
    w.hangs.add(("a", Stage.WAKING))
    w.want("a")
    w.run(w.times.hang_s + w.times.load_s + 1)
    assert (w.stage("a"), w.waiting["a"]) == (Stage.AWAKE, 0)


def test_sleeper_that_dies_is_stopped_and_loaded_for_the_next() -> None:
    w = asleep(world(sleeper("a"), host_bytes=10), "a")
    w.die("a")
    w.run(TICK_S)
    assert (w.stage("a"), w.policy.used_bytes(), w.policy.used_host_bytes()) == (Stage.STOPPED, 0, 0)
    w.want("a")
    w.run(5)
    assert w.actions(Refuse) == []
    assert w.stage("a") is Stage.AWAKE


def test_death_in_any_stage_leaves_nothing_behind_and_who_waits_is_answered() -> None:
    for stage in (Stage.LOADING, Stage.FALLING_ASLEEP, Stage.WAKING, Stage.UNLOADING):
        w = world(sleeper("a"), host_bytes=10)
        if stage is not Stage.LOADING:
            awake(w, "a")
            w.order("a", Order.UNLOAD if stage is Stage.UNLOADING else Order.SLEEP)
        if stage is Stage.WAKING:
            w.run(2)
        w.want("a")
        assert w.stage("a") is stage
        w.die("a")
        w.run(15)
        w.check_books()
        assert w.waiting["a"] == 0, stage
        assert w.stage("a") is (Stage.STOPPED if stage is Stage.LOADING else Stage.AWAKE)


def test_one_early_death_is_forgiven_and_the_second_backs_off() -> None:
    w = awake(world(), "a")
    w.die("a")
    w.run(TICK_S)
    awake(w, "a")
    w.die("a")
    w.run(TICK_S)
    w.want("a")
    (_, refusal) = w.log[-1]
    assert isinstance(refusal, Refuse)
    assert (refusal.code, refusal.reason) == ("load_failed", "killed")


def test_deaths_far_from_their_loads_are_no_failures() -> None:
    w = world()
    for _ in range(3):
        awake(w, "a")
        w.run(EARLY_DEATH_S)
        w.die("a")
        w.run(TICK_S)
    assert w.actions(Refuse) == []


# Loads that are given up


def test_load_that_nobody_wants_is_given_up_for_another_after_the_grace() -> None:
    w = world(grace_s=2)
    w.hangs.add(("a", Stage.LOADING))
    w.want("a")
    w.want("b")
    w.leave("a")
    w.run(1.5)
    assert w.actions(Abandon) == []
    w.run(1)
    assert len(w.actions(Abandon, "a")) == 1
    w.run(5)
    assert stages(w, "a", "b") == [Stage.STOPPED, Stage.AWAKE]


def test_load_that_nobody_wants_goes_on_where_nobody_waits_for_its_room() -> None:
    w = world(model("a", 5), model("b", 5), grace_s=0)
    w.want("a")
    w.leave("a")
    w.want("b")
    w.run(5)
    assert (w.actions(Abandon), stages(w, "a", "b")) == ([], [Stage.AWAKE, Stage.AWAKE])


def test_load_that_ended_when_it_was_given_up_is_neither_granted_nor_a_failure() -> None:
    for late in (Loaded("a"), LoadFailed("a", "no weights")):
        policy = Residency([model("a"), model("b")], world(grace_s=0).limits)
        policy.handle(Wanted("a"), 0)
        policy.handle(Unwanted("a"), 1)
        assert policy.handle(Wanted("b"), 2) == [Abandon("a")]
        policy.handle(Wanted("a"), 2)
        assert policy.handle(late, 2) == []
        assert (policy.stage("a"), policy.failure("a")) == (Stage.UNLOADING, "")


# Orders


def test_ordered_load_comes_up_without_a_request_and_makes_room() -> None:
    w = awake(world(), "a")
    w.run(30)
    w.order("b", Order.LOAD)
    w.run(5)
    assert (stages(w, "a", "b"), w.actions(Grant, "b")) == ([Stage.STOPPED, Stage.AWAKE], [])


def test_ordered_load_waits_for_a_busy_model_until_it_has_aged() -> None:
    w = awake(world(), "a")
    w.begin("a")
    w.run(100)
    w.order("b", Order.LOAD)
    w.run(50)
    assert w.stage("a") is Stage.AWAKE
    w.run(15)
    assert w.stage("a") is Stage.UNLOADING


def test_ordered_load_does_not_find_the_age_of_a_request_that_left_long_ago() -> None:
    w = awake(world(), "a")
    w.begin("a")
    w.want("b")
    w.leave("b")
    w.run(500)
    w.order("b", Order.LOAD)
    w.run(5)
    assert w.stage("a") is Stage.AWAKE


def test_clients_that_come_and_go_do_not_cost_an_ordered_load_its_place() -> None:
    w = awake(world(), "a")
    w.begin("a")
    w.order("b", Order.LOAD)
    for _ in range(20):
        w.run(4)
        w.want("b")
        w.leave("b")
    assert w.stage("a") is Stage.UNLOADING


def test_ordered_sleep_drains_and_refuses_nobody_who_waits() -> None:
    w = awake(world(sleeper("a"), host_bytes=10), "a")
    w.begin("a")
    w.order("a", Order.SLEEP)
    w.run(5)
    assert (w.stage("a"), w.begin("a")) == (Stage.FALLING_ASLEEP, False)
    w.finish("a")
    w.run(1)
    assert w.stage("a") is Stage.ASLEEP


def test_model_told_to_go_while_it_falls_asleep_is_stopped_when_it_sleeps() -> None:
    w = awake(world(sleeper("a"), host_bytes=10), "a")
    w.begin("a")
    w.order("a", Order.SLEEP)
    w.order("a", Order.UNLOAD)
    w.finish("a")
    w.run(5)
    assert w.stage("a") is Stage.STOPPED
    awake(w, "a")
    w.order("a", Order.SLEEP)
    w.run(5)
    assert w.stage("a") is Stage.ASLEEP


def test_model_told_to_sleep_while_it_loads_sleeps_when_it_is_up_unless_it_is_wanted_by_then() -> None:
    w = world(sleeper("a"), host_bytes=10)
    w.order("a", Order.LOAD)
    w.order("a", Order.SLEEP)
    w.run(5)
    assert w.stage("a") is Stage.ASLEEP
    w.order("a", Order.LOAD)
    w.order("a", Order.UNLOAD)
    w.want("a")
    w.run(5)
    assert (w.stage("a"), w.waiting["a"]) == (Stage.AWAKE, 0)
    w.order("a", Order.SLEEP)
    w.run(1)
    w.order("a", Order.LOAD)
    w.order("a", Order.UNLOAD)
    w.run(5)
    assert w.stage("a") is Stage.STOPPED


def test_ordered_sleep_of_a_model_that_cannot_sleep_is_an_unload() -> None:
    w = awake(world(), "a")
    w.order("a", Order.SLEEP)
    assert w.stage("a") is Stage.UNLOADING


def test_ordered_unload_gives_up_a_load_but_not_one_that_a_request_waits_for() -> None:
    w = world()
    w.order("a", Order.LOAD)
    w.order("a", Order.UNLOAD)
    assert len(w.actions(Abandon, "a")) == 1
    w.want("a")
    w.run(1)
    w.order("a", Order.UNLOAD)
    w.run(5)
    assert (w.stage("a"), w.waiting["a"]) == (Stage.AWAKE, 0)


def test_model_ordered_while_its_unload_is_tried_can_go_later() -> None:
    w = awake(world(model("a", idle_unload_s=10)), "a")
    w.begin("a", seen=False)
    while w.stage("a") is not Stage.UNLOADING:
        w.run(TICK_S)
    w.order("a", Order.LOAD)
    w.run(1)
    w.finish("a")
    w.run(20)
    assert w.stage("a") is Stage.STOPPED


# Pins


def test_pinned_model_comes_up_and_stays_whatever_waits() -> None:
    w = world(model("a", idle_unload_s=10), model("b"))
    w.order("a", Order.PIN)
    w.run(100)
    assert w.stage("a") is Stage.AWAKE
    w.want("b")
    (_, refusal) = w.log[-1]
    assert isinstance(refusal, Refuse)
    assert refusal.code == "no_room"
    w.order("a", Order.UNPIN)
    w.run(1)
    assert w.stage("a") is not Stage.AWAKE


def test_who_waits_already_is_refused_when_a_pin_takes_the_room_for_good() -> None:
    w = awake(world(), "a")
    w.begin("a")
    w.want("b")
    w.order("a", Order.PIN)
    assert (w.waiting["b"], len(w.actions(Refuse, "b"))) == (0, 1)
    w.order("a", Order.UNPIN)
    w.finish("a")
    w.run(50)
    assert w.actions(Load, "b") == []  # nobody waits for it any more


# Measured sizes


def test_measured_size_counts_from_then_on() -> None:
    w = world(model("a", 4), model("b", 5))
    w.sizes["a"] = 6
    awake(w, "a")
    assert (w.policy.memory_bytes("a"), w.policy.used_bytes()) == (6, 6)
    w.want("b")
    assert w.stage("b") is Stage.STOPPED


def test_what_was_measured_to_be_too_much_is_shed_once_idle() -> None:
    w = world(model("a", 5), model("b", 5))
    w.sizes["b"] = 7
    awake(w, "a")
    w.begin("a")
    awake(w, "b")
    assert w.policy.used_bytes() == 12
    w.run(10)
    assert (w.stage("a"), w.policy.used_bytes()) == (Stage.AWAKE, 5)


def test_model_measured_to_be_larger_than_the_pool_runs_alone() -> None:
    w = world(model("a", 8), model("b", 1))
    w.sizes["a"] = 11
    awake(w, "a")
    w.run(100)
    assert (w.stage("a"), w.policy.used_bytes()) == (Stage.AWAKE, 10)
    w.want("b")
    w.run(10)
    assert (w.stage("a"), w.stage("b")) == (Stage.STOPPED, Stage.AWAKE)


# A pool that does not evict


def test_pool_that_does_not_evict_refuses_what_finds_no_room() -> None:
    w = awake(world(model("a", 6), model("b", 6), model("c", 4), evicts=False), "a")
    w.run(100)
    w.want("b")
    w.want("c")
    w.run(5)
    assert (len(w.actions(Refuse, "b")), w.actions(Unload)) == (1, [])
    assert w.stage("c") is Stage.AWAKE


def test_pool_that_does_not_evict_lets_one_wait_for_room_that_is_on_its_way() -> None:
    w = awake(world(model("a", idle_unload_s=10), model("b"), evicts=False), "a")
    while w.stage("a") is not Stage.UNLOADING:
        w.run(TICK_S)
    w.want("b")
    w.run(5)
    assert (w.actions(Refuse), w.stage("b")) == ([], Stage.AWAKE)


def test_death_that_is_told_late_does_not_touch_a_model_on_its_way() -> None:
    policy = Residency([model("a")], world().limits)
    policy.handle(Wanted("a"), 0)
    assert policy.handle(Died("a", "killed"), 1) == []
    assert policy.stage("a") is Stage.LOADING
