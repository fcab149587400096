"""serve_app.telemetry.traffic: what is said of the last 15 minutes is what happened in them."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.telemetry.traffic import ERROR, STEP_S, STEPS, Sketch, Sums, Traffic

BEGAN = 1_000_000_000.0
MINUTES_15 = STEPS * STEP_S


def record(at: float = BEGAN, **fields: Any) -> dict[str, Any]:
    """An audit record, as far as it is looked at."""
    return {
        "at": at,
        "request": "r",
        "key": "a",
        "stream": True,
        "status": 200,
        "error": None,
        "model": "hot",
        "completion_tokens": 11,
        "ttft_ms": 20.0,
        "engine_ms": 100.0,
        "total_ms": 120.0,
        "model_source": "default",
        "thinking": False,
        **fields,
    }


RECORDS = st.builds(
    record,
    key=st.sampled_from("abc"),
    stream=st.booleans(),
    status=st.sampled_from([200, 400, 429, 499, 500, 503, 504]),
    error=st.sampled_from([None, "client_left", "engine_died", "overloaded", "Not a word!"]),
    model=st.sampled_from([None, "hot", "cold"]),
    model_source=st.sampled_from(["default", "rule", "explicit"]),
    completion_tokens=st.integers(0, 1000),
    ttft_ms=st.none() | st.floats(0, 1e6),
    thinking=st.booleans(),
)
VALUES = st.lists(st.floats(1e-3, 1e8), min_size=1, max_size=200)


def exact(values: list[float], part: float) -> float:
    return sorted(values)[max(1, math.ceil(part * len(values))) - 1]


@given(VALUES, st.sampled_from([0.01, 0.5, 0.9, 0.99, 1.0]))
def test_a_percentile_is_within_its_error(values: list[float], part: float) -> None:
    sketch = Sketch()
    for value in values:
        sketch.add(value)
    assert sketch.quantile(part) == pytest.approx(exact(values, part), rel=ERROR * 1.000001)


@given(st.lists(st.floats(0, 1e300), min_size=1))
def test_a_sketch_stays_small_whatever_it_is_given(values: list[float]) -> None:
    sketch = Sketch()
    for value in (*values, 0, 1e300):
        sketch.add(value)
    assert max(sketch.buckets) - min(sketch.buckets) < 650
    assert sketch.quantile(1) == pytest.approx(1e8, rel=ERROR)


def summed(records: list[dict[str, Any]]) -> dict[str, Any]:
    sums = Sums()
    for each in records:
        sums.add(each)
    return sums.as_point(0)


@given(st.lists(RECORDS), st.lists(RECORDS))
def test_sums_of_two_are_those_of_both_together(some: list[dict[str, Any]], others: list[dict[str, Any]]) -> None:
    both, more = Sums(), Sums()
    for each in some:
        both.add(each)
    for each in others:
        more.add(each)
    both.merge(more)
    assert both.as_point(0) == summed(some + others)


@given(st.lists(RECORDS))
def test_every_request_is_counted_once(records: list[dict[str, Any]]) -> None:
    point = summed(records)
    assert point["requests"] == len(records)
    assert point["tokens"] == sum(each["completion_tokens"] for each in records)
    assert sum(point["sources"].values()) == sum(each["model"] is not None for each in records)
    assert sum(point["refused"].values()) + point["failed"] <= len(records)


@pytest.mark.parametrize(
    ("status", "error", "refused", "failed"),
    [
        (200, None, {}, 0),
        (429, "rate_limit_exceeded", {"rate_limit_exceeded": 1}, 0),
        (503, "overloaded", {"overloaded": 1}, 0),
        (400, None, {"other": 1}, 0),
        (400, "<b>no word</b>", {"other": 1}, 0),
        (503, "engine_died", {}, 1),
        (504, "timeout", {}, 1),
        (500, "internal_error", {}, 1),
        (200, "engine_died", {}, 1),
        (200, "client_left", {}, 0),
        (499, "client_left", {}, 0),
    ],
)
def test_what_was_refused_is_told_from_what_failed_and_from_clients_that_left(
    status: int, error: str | None, refused: dict[str, int], failed: int
) -> None:
    point = summed([record(status=status, error=error)])
    assert (point["refused"], point["failed"]) == (refused, failed)


def test_time_between_tokens_is_of_streams_that_went_well() -> None:
    assert summed([record()])["tpot_ms"]["p50"] == pytest.approx(10, rel=ERROR)
    for other in (record(stream=False), record(error="engine_died"), record(completion_tokens=1), record(ttft_ms=None)):
        assert summed([other])["tpot_ms"] is None


@given(st.lists(st.tuples(st.sampled_from("abc"), st.floats(0, 2 * MINUTES_15)), max_size=60))
def test_points_are_those_of_each_step_of_the_last_15_minutes(requests: list[tuple[str, float]]) -> None:
    traffic = Traffic(BEGAN)
    requests.sort(key=lambda each: each[1])
    for key, after_s in requests:
        traffic.take(record(BEGAN + after_s, key=key))
    now = BEGAN + 2 * MINUTES_15
    for whose in ("a", None):
        points = traffic.points(now, whose)
        assert [point["t"] for point in points] == [now - (STEPS - 1 - i) * STEP_S for i in range(STEPS)]
        wanted = Counter(
            (BEGAN + after_s) // STEP_S * STEP_S
            for key, after_s in requests
            if whose in (None, key) and BEGAN + after_s >= points[0]["t"]
        )
        assert {point["t"]: point["requests"] for point in points if point["requests"]} == wanted


def test_a_young_router_speaks_of_its_own_time_only_and_a_clock_set_back_breaks_nothing() -> None:
    traffic = Traffic(BEGAN)
    assert [point["t"] for point in traffic.points(BEGAN + 12)] == [BEGAN, BEGAN + 5, BEGAN + 10]
    assert [point["t"] for point in traffic.points(BEGAN - 100)] == [BEGAN]
    assert [point["t"] for point in traffic.points(BEGAN + 3, since=int(BEGAN) + 10)] == [BEGAN]
    traffic.take(record(BEGAN + 60))
    traffic.take(record(BEGAN))
    assert traffic.points(BEGAN)[-1]["requests"] == 2


def test_thousands_of_keys_are_kept_as_their_sum() -> None:
    traffic = Traffic(BEGAN)
    for step in range(100):
        for key in range(100):
            traffic.take(record(BEGAN + step * STEP_S, key=f"key-{key}"))
    now = BEGAN + 99 * STEP_S
    assert [point["requests"] for point in traffic.points(now)] == [100] * 100
    mine = [point["requests"] for point in traffic.points(now, "key-1")]
    assert mine == sorted(mine)  # the oldest steps are forgotten first
    assert 20 <= sum(mine) <= 41


def ids(found: list[Any]) -> list[int]:
    return [each["request"] for each in found]


def test_latest_requests_are_the_newest_of_whom_they_are_asked_for() -> None:
    traffic = Traffic(BEGAN)
    for number in range(1, 11):
        traffic.take(record(request=number, key="ab"[number % 2]))
    assert ids(traffic.latest(3)) == [8, 9, 10]
    assert ids(traffic.latest(3, "b")) == [5, 7, 9]
    assert ids(traffic.latest(9, after=7)) == [8, 9, 10]
    assert ids(traffic.latest(2, until=4)) == [3, 4]
    assert ids(traffic.latest(9, after=10)) == []


def test_whole_records_are_bounded() -> None:
    traffic = Traffic(BEGAN)
    for number in range(5000):
        traffic.take(record(request=number))
    assert 1000 <= len(traffic.latest(5000)) <= 4000
    assert ids(traffic.latest(1)) == [4999]


def test_steps_begin_with_the_arrival_and_end_with_the_engine() -> None:
    traffic = Traffic(BEGAN)
    traffic.take(record(), [("admit", 50.0, 50.001), ("decide", 50.001, 50.0035)])
    traffic.take(record(engine_ms=None))
    (whole, refused) = traffic.latest(2)
    assert whole["steps"] == [
        {"name": "admit", "from_ms": 0.0, "to_ms": 1.0},
        {"name": "decide", "from_ms": 1.0, "to_ms": 3.5},
        {"name": "relay", "from_ms": 20.0, "to_ms": 120.0},
    ]
    assert refused["steps"] == []


def test_last_use_is_kept_by_model() -> None:
    traffic = Traffic(BEGAN)
    for at, model in ((1, "hot"), (2, "cold"), (3, "hot"), (4, None)):
        traffic.take(record(BEGAN + at, model=model))
    assert traffic.last_used == {"hot": BEGAN + 3, "cold": BEGAN + 2}
