"""serve_app.engines.stall: an engine hangs if it has requests and takes no step, and only then."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from serve_app.engines.stall import StallWatch, Verdict

LIMIT_S = 10.0


def looked(*seen: tuple[float, int, int | None], limit_s: float | None = LIMIT_S) -> list[Verdict]:
    """The verdicts on what was seen: when, how many requests, and how many steps."""
    watch = StallWatch(limit_s, 0)
    return [watch.look(in_flight, steps, at) for at, in_flight, steps in seen]


def test_engine_that_takes_no_step_is_asked_for_a_token_once_and_then_hangs() -> None:
    seen = [(at, 2, 7) for at in range(12)]
    assert looked(*seen) == [*[Verdict.FINE] * 5, Verdict.ASK, *[Verdict.FINE] * 4, Verdict.HUNG, Verdict.HUNG]


def test_engine_that_takes_the_step_that_it_was_asked_for_lives() -> None:
    seen = [(at, 1, 7 + at // 6) for at in range(60)]
    assert Verdict.HUNG not in looked(*seen)


def test_engine_without_requests_or_without_a_count_never_hangs() -> None:
    assert set(looked(*[(at, 0, 7) for at in range(60)])) == {Verdict.FINE}
    assert set(looked(*[(at, 3, None) for at in range(60)])) == {Verdict.FINE}
    assert set(looked(*[(at, 3, 7) for at in range(60)], limit_s=None)) == {Verdict.FINE}


def test_time_without_requests_does_not_count() -> None:
    assert looked((0, 1, 7), (4, 1, 7), (9, 0, 7), (13, 1, 7)) == [Verdict.FINE] * 4


@given(st.lists(st.tuples(st.floats(0.1, 4), st.integers(0, 2), st.integers(0, 1)), max_size=60))
def test_hung_is_only_who_had_requests_and_no_step_for_the_whole_limit(seen: list[tuple[float, int, int]]) -> None:
    watch, at, steps, since = StallWatch(LIMIT_S, 0), 0.0, 0, 0.0
    watch.look(1, steps, at)
    for pause_s, in_flight, step in seen:
        at, steps = at + pause_s, steps + step
        if step or not in_flight:
            since = at
        assert (watch.look(in_flight, steps, at) is Verdict.HUNG) == (at - since >= LIMIT_S)
