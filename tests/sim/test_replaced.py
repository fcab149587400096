"""`serve_app.residency.policy`: what changes below a model that is there: its engine's arguments, its size."""

import pytest
from world import awake, model, sleeper, world

from serve_app.residency.events import (
    Abandon,
    Action,
    Activity,
    Died,
    Grant,
    Limits,
    Load,
    Loaded,
    LoadFailed,
    Order,
    Ordered,
    Refuse,
    Replaced,
    Slept,
    Stage,
    StillBusy,
    Tick,
    Unload,
    Unloaded,
    Wanted,
    Woken,
)
from serve_app.residency.policy import Residency

LIMITS = Limits(memory_bytes=10, min_residency_s=0, ageing_s=60, backoff_s=10, host_bytes=10)


def policy_with(*events: object) -> Residency:
    """A policy of a and c, of which one sleeps beside the other awake, after these events of one second each."""
    policy = Residency([sleeper("a"), model("c", 9)], LIMITS)
    for second, event in enumerate(events):
        policy.handle(event, second)  # type: ignore[arg-type]
    return policy


def then(policy: Residency, *events: object) -> list[Action]:
    return [action for event in events for action in policy.handle(event, 100)]  # type: ignore[arg-type]


def test_load_with_arguments_of_before_is_given_up_and_who_waits_gets_the_next_one() -> None:
    policy = policy_with(Wanted("a"))
    assert then(policy, Replaced("a")) == [Abandon("a")]
    assert then(policy, Loaded("a")) == []
    assert then(policy, Unloaded("a")) == [Load("a")]
    assert then(policy, Loaded("a")) == [Grant("a")]


def test_awake_model_is_drained_and_loaded_anew_when_it_is_wanted() -> None:
    policy = policy_with(Wanted("a"), Loaded("a"))
    assert then(policy, Replaced("a")) == [Unload("a", drain=True)]
    assert then(policy, Wanted("a"), Unloaded("a")) == [Load("a")]


def test_model_that_wakes_or_falls_asleep_goes_when_it_is_done() -> None:
    policy = policy_with(Wanted("a"), Loaded("a"), Ordered("a", Order.SLEEP), Slept("a"), Wanted("a"))
    assert then(policy, Replaced("a")) == []
    assert then(policy, Woken("a")) == [Unload("a", drain=True)]
    assert then(policy, Unloaded("a")) == [Load("a")]

    policy = policy_with(Wanted("a"), Loaded("a"), Ordered("a", Order.SLEEP))
    assert then(policy, Replaced("a"), Wanted("a")) == []
    assert then(policy, Slept("a")) == [Unload("a")]
    assert then(policy, Unloaded("a")) == [Load("a")]


def test_model_that_was_found_in_use_when_it_was_to_go_goes_all_the_same() -> None:
    policy = policy_with(Wanted("a"), Loaded("a"))
    assert policy.handle(Tick(), 1000) != []  # idle: it is put away
    assert then(policy, Replaced("a")) == []
    assert then(policy, StillBusy("a", 1)) == [Unload("a", drain=True)]


def test_sleeping_model_that_waits_for_room_is_loaded_and_not_woken() -> None:
    policy = policy_with(
        *(Wanted("a"), Loaded("a"), Ordered("a", Order.SLEEP), Slept("a")),
        *(Wanted("c"), Loaded("c"), Activity("c", 1, 1), Wanted("a")),
    )
    assert then(policy, Replaced("a")) == [Unload("a")]
    assert then(policy, Unloaded("a")) == [Unload("c", drain=True)]
    assert then(policy, Unloaded("c")) == [Load("a")]


def test_model_that_failed_is_loaded_at_once_with_what_may_have_mended_it() -> None:
    policy = policy_with(Wanted("a"), LoadFailed("a", "no such file"))
    (refusal,) = policy.handle(Wanted("a"), 2)
    assert isinstance(refusal, Refuse)
    assert policy.handle(Replaced("a"), 2) == []
    assert policy.failure("a") == ""
    assert policy.handle(Wanted("a"), 2) == [Load("a")]


def test_pinned_model_stays_pinned_and_is_to_be_had_again() -> None:
    policy = policy_with(Ordered("a", Order.PIN), Loaded("a"))
    assert then(policy, Replaced("a")) == [Unload("a", drain=True)]
    assert (then(policy, Unloaded("a")), policy.pinned("a"), policy.lost_pins(100)) == ([], True, ["a"])


def test_pinned_model_that_died_is_to_be_had_again_unless_it_does_so_early_and_often() -> None:
    policy = policy_with(Ordered("a", Order.PIN), Loaded("a"))
    for early in (10.0, 20.0):
        assert policy.lost_pins(early) == []
        policy.handle(Died("a", "killed"), early)
        if early == 10.0:
            assert policy.lost_pins(early) == ["a"]
            assert policy.handle(Ordered("a", Order.LOAD), early) == [Load("a")]
            policy.handle(Loaded("a"), early)
    assert policy.lost_pins(21) == []
    assert policy.lost_pins(60) == ["a"]


def test_model_that_is_no_longer_pinned_is_not_to_be_had_again() -> None:
    for order in (Order.UNPIN, Order.UNLOAD):
        policy = policy_with(Ordered("a", Order.PIN), Loaded("a"), Ordered("a", order), Died("a", "killed"))
        then(policy, Unloaded("a"))
        assert (policy.stage("a"), policy.lost_pins(100)) == (Stage.STOPPED, [])


def test_pool_sheds_what_no_longer_fits_when_a_model_is_said_to_be_larger() -> None:
    w = awake(world(model("a", 5), model("b", 5)), "a", "b")
    w.policy.configure(model("a", 9))
    w.run(10)
    assert w.policy.used_bytes() <= 10


def test_load_that_failed_because_another_one_gave_its_memory_back_is_tried_again() -> None:
    policy = Residency(
        [model("a", 5), model("b", 5)],
        Limits(memory_bytes=10, min_residency_s=0, ageing_s=60, backoff_s=10, measured=True),
    )
    policy.handle(Wanted("a"), 0)
    policy.handle(Wanted("b"), 0)
    policy.handle(LoadFailed("a", "no such file"), 1)
    assert policy.handle(LoadFailed("b", "free memory grew"), 2) == [Load("b")]


@pytest.mark.parametrize("in_flight", [0, 1])
def test_replica_whose_model_is_drained_counts_as_in_use_until_its_requests_are_done(in_flight: int) -> None:
    policy = policy_with(Wanted("a"), Loaded("a"), Activity("a", 1, 1), Ordered("a", Order.UNLOAD))
    then(policy, Activity("a", in_flight, 1))
    assert policy.stage("a") is Stage.UNLOADING
    assert policy.demand({}).awake == (frozenset("a") if in_flight else frozenset())
