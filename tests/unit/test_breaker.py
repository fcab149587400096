"""Which replicas are left alone, for how long, and how one of them gets back; in simulated time."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from serve_app.admission.breaker import Breaker


def broken(at: float = 0.0) -> Breaker:
    """A breaker that shuns `r` since then, for 10 s."""
    breaker = Breaker(failures=3, pause_s=10)
    for _ in range(3):
        breaker.failed("r", at)
    return breaker


def test_replica_is_left_alone_after_failures_in_a_row_and_only_it() -> None:
    breaker = Breaker(failures=3, pause_s=10)
    for now in (0.0, 1.0):
        breaker.failed("r", now)
        assert breaker.shunned(now) == frozenset()
    breaker.failed("other", 1.5)
    breaker.failed("r", 2.0)
    assert breaker.shunned(2.0) == {"r"}


def test_success_in_between_begins_the_count_anew() -> None:
    breaker = Breaker(failures=2)
    for now in range(10):
        breaker.failed("r", now)
        breaker.worked("r")
    assert breaker.shunned(10) == frozenset()


def test_replica_is_tried_again_after_the_pause() -> None:
    breaker = broken()
    assert breaker.shunned(9.99) == {"r"}
    assert breaker.shunned(10.0) == frozenset()


def test_only_one_request_tries_it_while_nobody_knows_whether_it_is_well() -> None:
    breaker = broken()
    breaker.sent("r", 10.0)
    assert breaker.shunned(10.1) == {"r"}
    breaker.worked("r")
    assert breaker.shunned(10.2) == frozenset()


def test_trial_that_fails_costs_another_pause() -> None:
    breaker = broken()
    breaker.sent("r", 10.0)
    breaker.failed("r", 15.0)
    assert breaker.shunned(24.9) == {"r"}
    assert breaker.shunned(25.0) == frozenset()


def test_trial_whose_client_left_is_followed_by_another_one() -> None:
    breaker = broken()
    breaker.sent("r", 10.0)
    assert breaker.shunned(20.0) == frozenset()


def test_requests_to_a_healthy_replica_or_in_its_pause_change_nothing() -> None:
    breaker = broken()
    breaker.sent("r", 5.0)  # there was no other
    assert breaker.shunned(10.0) == frozenset()
    breaker.failed("well", 11.0)
    breaker.sent("well", 11.0)
    assert "well" not in breaker.shunned(11.0)


@given(st.lists(st.tuples(st.sampled_from(["failed", "worked", "sent", "wait"]), st.integers(0, 15)), max_size=60))
def test_a_replica_is_never_shunned_for_longer_than_a_pause_after_its_last_failure_or_trial(
    steps: list[tuple[str, int]],
) -> None:
    breaker, now, last, row = Breaker(failures=3, pause_s=10), 0.0, -100.0, 0
    for what, seconds in steps:
        if what == "wait":
            now += seconds
        elif what == "worked":
            breaker.worked("r")
            row = 0
        elif what == "failed":
            breaker.failed("r", now)
            last, row = now, row + 1
        elif breaker.shunned(now) == frozenset():
            breaker.sent("r", now)
            last = now if row >= 3 else last
        assert (breaker.shunned(now) == {"r"}) == (row >= 3 and now < last + 10)
