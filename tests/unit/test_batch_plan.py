"""The lines of a batch: what is refused and how it is said, the order, the lane, and what is tried again."""

import io
import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.batches.plan import (
    ENDPOINTS,
    MAX_PROBLEMS,
    Bounds,
    Line,
    Load,
    Plan,
    again,
    body_of,
    groups,
    lane,
    read_plan,
)
from serve_app.batches.state import FINAL, Batch, Status, ended, moved, seen, window_s
from serve_app.service_schema import Batches

CHAT = ENDPOINTS[0]
BOUNDS = Bounds(max_lines=10, max_line_bytes=1000, endpoint=CHAT)


def line(custom_id: object = "a", **fields: Any) -> bytes:
    body = {"model": "m", "messages": []}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": CHAT, "body": body, **fields}).encode()


def plan_of(*lines: bytes, bounds: Bounds = BOUNDS) -> Plan:
    return read_plan(io.BytesIO(b"\n".join(lines)), bounds)


def test_good_lines_are_found_where_they_stand() -> None:
    raw = b"\xef\xbb\xbf" + line("a") + b"\r\n\n  " + line("b", body={"model": "n", "x": "é"}) + b"\n"
    plan = read_plan(io.BytesIO(raw), BOUNDS)
    assert not plan.problems
    assert [(one.custom_id, one.model, one.number) for one in plan.lines] == [("a", "m", 1), ("b", "n", 3)]
    bodies = [json.loads(body_of(raw[one.start : one.start + one.size])) for one in plan.lines]
    assert bodies == [{"model": "m", "messages": []}, {"model": "n", "x": "é"}]


@pytest.mark.parametrize(
    ("raw", "code", "param"),
    [
        (b"{", "invalid_json_line", None),
        (b"[1]", "invalid_json_line", None),
        (b"\xff", "invalid_json_line", None),
        (line(None), "invalid_custom_id", "custom_id"),
        (line(""), "invalid_custom_id", "custom_id"),
        (line("x" * 600), "invalid_custom_id", "custom_id"),
        (line(7), "invalid_custom_id", "custom_id"),
        (line(method="GET"), "invalid_method", "method"),
        (line(url="/v1/models"), "invalid_url", "url"),
        (line(url=["/v1/models"]), "invalid_url", "url"),
        (line(url="/v1/embeddings"), "mismatched_url", "url"),
        (line(body="text"), "invalid_body", "body"),
        (line(body={"stream": True}), "invalid_body", "body.stream"),
        (line(body={"model": 3}), "invalid_body", "body.model"),
        (line(body={"x": "y" * 1000}), "line_too_large", None),
    ],
)
def test_a_wrong_line_is_named_with_its_number(raw: bytes, code: str, param: str | None) -> None:
    plan = plan_of(line("good"), raw)
    assert [(found.code, found.line, found.param) for found in plan.problems] == [(code, 2, param)]


def test_a_custom_id_may_come_once() -> None:
    (problem,) = plan_of(line("a"), line("b"), line("a")).problems
    assert (problem.code, problem.line) == ("duplicate_custom_id", 3)
    assert "line 1" in problem.message


@pytest.mark.parametrize("raw", [b"", b"\n\n", b"\xef\xbb\xbf"])
def test_a_file_without_requests_is_refused(raw: bytes) -> None:
    assert [found.code for found in read_plan(io.BytesIO(raw), BOUNDS).problems] == ["empty_file"]


def test_exactly_so_many_lines_are_allowed() -> None:
    ten = [line(str(number)) for number in range(10)]
    assert not plan_of(*ten).problems
    assert [found.code for found in plan_of(*ten, line("10")).problems] == ["too_many_lines"]


def test_only_the_first_problems_are_told() -> None:
    assert len(plan_of(*[b"{"] * 500).problems) == MAX_PROBLEMS


def test_a_batch_may_mix_endpoints_where_none_is_given() -> None:
    lines = [line(str(number), url=url) for number, url in enumerate(ENDPOINTS)]
    assert not plan_of(*lines, bounds=Bounds(10, 1000)).problems


@given(
    st.lists(st.one_of(st.binary(max_size=40), st.sampled_from([line("a"), line("b"), line("c"), b""])), max_size=12)
)
def test_whatever_the_file_holds_each_line_is_a_request_a_problem_or_empty(pieces: list[bytes]) -> None:
    raw = b"\n".join(pieces)
    plan = read_plan(io.BytesIO(raw), Bounds(100, 1000))
    assert plan.lines or plan.problems
    assert len({one.custom_id for one in plan.lines}) == len(plan.lines)
    for one in plan.lines:
        assert isinstance(json.loads(body_of(raw[one.start : one.start + one.size])), dict)


def _lines(models: list[str]) -> list[Line]:
    return [Line(number, str(number), CHAT, model, 0, 0) for number, model in enumerate(models)]


def _engine(model: str) -> str | None:
    return None if model in ("", "auto") else model.removeprefix("lora-")


@given(st.lists(st.sampled_from(["a", "b", "c", "lora-a", "auto", ""]), max_size=30), st.sets(st.sampled_from("abc")))
def test_every_line_is_in_one_group_and_every_engine_has_one(models: list[str], awake: set[str]) -> None:
    lines = _lines(models)
    found = groups(lines, _engine, awake.__contains__)
    assert sorted(one.number for group in found for one in group.lines) == list(range(len(lines)))
    engines = [group.engine for group in found]
    assert len(set(engines)) == len(engines)
    assert all(_engine(one.model) == group.engine for group in found for one in group.lines)
    known = [engine for engine in engines if engine is not None]
    assert None not in engines[:-1]
    assert known == sorted(known, key=lambda engine: engine not in awake)


def test_groups_of_cold_models_keep_the_order_of_the_file() -> None:
    found = groups(_lines(["c", "auto", "a", "b", "c"]), _engine, {"b"}.__contains__)
    assert [group.engine for group in found] == ["b", "c", "a", None]


@pytest.mark.parametrize(
    ("interactive", "places", "may_run"),
    [
        (0, 100, 8),
        (44, 100, 6),
        (49, 100, 1),
        (50, 100, 0),
        (100, 100, 0),
        (500, 100, 0),
        (0, 1, 1),
        (1, 1, 0),
        (0, 0, 1),
    ],
)
def test_lines_take_what_interactive_requests_leave_below_the_mark(interactive: int, places: int, may_run: int) -> None:
    assert lane(Load(interactive, places), Batches(concurrency=8, run_below_load=0.5)) == may_run


@given(st.integers(0, 300), st.integers(0, 300), st.integers(1, 50), st.floats(0.01, 1))
def test_lane_never_passes_its_bounds(interactive: int, places: int, concurrency: int, mark: float) -> None:
    settings = Batches(concurrency=concurrency, run_below_load=mark)
    found = lane(Load(interactive, places), settings)
    assert 0 <= found <= concurrency
    assert interactive == 0 or found == 0 or found + interactive <= places * mark
    assert lane(Load(interactive + 1, places), settings) <= found


def test_what_the_client_did_wrong_is_not_tried_again() -> None:
    assert all(again(status, None, 5, 1) is None for status in (200, 400, 401, 403, 404, 409, 413, 422))


def test_busy_is_tried_again_when_it_says_and_the_others_wait_too() -> None:
    found = again(503, "overloaded", 20, 1)
    assert found is not None
    assert (found.wait_s, found.pause) == (20, True)
    assert found == again(429, "rate_limit_exceeded", 20, 1)


def test_a_line_that_kills_engines_gets_two() -> None:
    assert again(503, "engine_died", 2, 1)
    assert again(503, "engine_died", 2, 2) is None


@pytest.mark.parametrize("status", [429, 500, 502, 503, 504])
@pytest.mark.parametrize("code", [None, "overloaded", "load_failed", "engine_error"])
@pytest.mark.parametrize("retry_after_s", [None, 0.0, 1.0, 1e9])
def test_tries_and_waits_are_bounded(status: int, code: str | None, retry_after_s: float | None) -> None:
    waits = [found.wait_s for tries in range(1, 100) if (found := again(status, code, retry_after_s, tries))]
    assert len(waits) < 30
    assert all(0.5 <= wait <= 60 for wait in waits)
    assert waits == sorted(waits)


# States


STATUSES: tuple[Status, ...] = (
    "validating",
    "in_progress",
    "finalizing",
    "completed",
    "failed",
    "cancelling",
    "cancelled",
    "expired",
)


def batch(status: Status = "validating", **fields: Any) -> Batch:
    base = {"id": "batch_1", "key": "k", "endpoint": CHAT, "input_file_id": "file-1", "completion_window": "24h"}
    return Batch(**base, created_at=100, expires_at=200, status=status, **fields)


def test_a_batch_that_is_over_stays_as_it_is() -> None:
    for status, following in itertools.product(FINAL, STATUSES):
        with pytest.raises(ValueError, match="does not follow"):
            moved(batch(status), following, 150)


def test_every_state_is_reached_and_every_way_ends() -> None:
    reached, ends = {"validating"}, set()
    todo: list[Batch] = [batch()]
    while todo:
        one = todo.pop()
        following = []
        for status in STATUSES:
            try:
                following.append(moved(one, status, 150))
            except ValueError:
                continue
        assert bool(following) != (one.status in FINAL)
        reached |= {after.status for after in following}
        ends |= {one.status} if not following else set()
        todo += following
    assert reached == set(STATUSES)
    assert ends == FINAL


@pytest.mark.parametrize("status", STATUSES)
def test_an_end_that_was_asked_for_shows_at_once_unless_it_comes_too_late(status: Status) -> None:
    shown = seen(batch(status), 150.0)
    assert shown.status == ("cancelling" if status in ("validating", "in_progress") else status)
    assert seen(batch(status), None) == batch(status)


def test_what_a_batch_becomes() -> None:
    assert ended(batch("cancelling")) == "cancelled"
    assert ended(batch("finalizing")) == "completed"
    assert ended(batch("finalizing", late=True)) == "expired"


def test_the_card_is_openais() -> None:
    from openai.types import Batch as Theirs

    card = moved(batch(total=3), "in_progress", 120, completed=2).card()
    theirs = Theirs.model_validate(card, strict=True)
    assert (theirs.status, theirs.in_progress_at, theirs.completed_at) == ("in_progress", 120, None)
    assert theirs.request_counts
    assert (theirs.request_counts.total, theirs.request_counts.completed) == (3, 2)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        *(("24h", 86_400), ("1h", 3600), ("7d", 604_800), ("30d", 2_592_000)),
        *((wrong, None) for wrong in ("31d", "0h", "", "24", "-1h", "24h ", "1.5h", "1m")),
    ],
)
def test_completion_windows(text: str, seconds: int | None) -> None:
    assert window_s(text) == seconds
