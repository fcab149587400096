"""The record that every request leaves, however it ends."""

from __future__ import annotations

import asyncio
import contextlib
import time
from pathlib import Path
from typing import Any

import pytest
from asgi_call import Call
from front import Places, audited, body, by, event, front, key, until, usage_event
from scripted_upstream import DONE, answer, hang_up, silent, stream

from serve_app.telemetry.audit import read_records

PROMPT = "my-private-words"
OK = answer(
    200,
    {
        "choices": [{"finish_reason": "stop"}],
        "usage": {
            "prompt_tokens": 7,
            "completion_tokens": 5,
            "completion_tokens_details": {"reasoning_tokens": 2},
            "prompt_tokens_details": {"cached_tokens": 4},
        },
    },
)
LAST = b'data: {"choices":[{"delta":{},"finish_reason":"length"}]}\n\n'
STREAM = stream(event("a"), LAST, usage_event(prompt_tokens=7, completion_tokens=5), DONE)


def only_record(directory: Path) -> dict[str, Any]:
    """What the closed audit of one request wrote: one record, without the prompt and the key."""
    text = "".join(path.read_text() for path in directory.iterdir())
    assert PROMPT not in text
    assert "k-key" not in text
    (record,) = read_records(directory)
    return record


@pytest.mark.parametrize("streaming", [False, True])
async def test_answer_is_recorded_with_what_it_cost(tmp_path: Path, streaming: bool) -> None:
    keys = {"security": {"keys": [key("k", max_priority=3)]}}
    async with front(STREAM if streaming else OK, **keys, **audited(tmp_path)) as (app, _):
        call = await Call(app, body(PROMPT, stream=streaming, priority=2), headers=by("k")).done()
    record = only_record(tmp_path)
    expected = {
        "key": "k",
        "path": "/v1/chat/completions",
        "stream": streaming,
        "priority": 2,
        "status": 200,
        "error": None,
        "model": "hot",
        "model_source": "default",
        "prompt_tokens": 7,
        "completion_tokens": 5,
        "finish": "length" if streaming else "stop",
        "replica": "hot-0",
        "request": call.headers["x-request-id"],
    }
    assert {name: record[name] for name in expected} == expected
    assert 0 < record["ttft_ms"] <= record["total_ms"] < 5000
    assert 0 < record["engine_ms"] <= record["total_ms"]
    assert abs(record["at"] - time.time()) < 60
    if not streaming:
        assert (record["reasoning_tokens"], record["cached_tokens"]) == (2, 4)


@pytest.mark.parametrize(
    ("call", "status", "error"),
    [
        ({"body": b"{not " + PROMPT.encode()}, 400, "invalid_json"),
        ({"body": body(PROMPT), "headers": {"content-type": "text/plain"}}, 415, "unsupported_media_type"),
        ({"body": body(PROMPT, model="nope")}, 404, "model_not_found"),
        ({"body": body(PROMPT, priority="x")}, 400, None),
        ({"body": body(PROMPT), "headers": {"authorization": "Bearer stolen-k-key"}}, 401, "invalid_api_key"),
        ({"body": body(PROMPT), "headers": {"authorization": ""}}, 401, "missing_api_key"),
        ({"body": b"{not " + PROMPT.encode(), "path": "/v1/responses"}, 400, None),
        ({"body": {"input": PROMPT, "previous_response_id": 1}, "path": "/v1/responses"}, 400, None),
    ],
)
async def test_refused_request_is_recorded_once(tmp_path: Path, call: dict[str, Any], status: int, error: str) -> None:
    async with front(OK, security={"keys": [key("k")]}, **audited(tmp_path)) as (app, _):
        refused = await Call(app, **{**call, "headers": by("k") | call.get("headers", {})}).done()
    record = only_record(tmp_path)
    assert (refused.status, record["status"], record["path"]) == (status, status, call.get("path", record["path"]))
    assert record["key"] == ("" if status == 401 else "k")
    assert record["request"] == refused.headers.get("x-request-id", "")
    assert error is None or record["error"] == error
    assert (record["engine_ms"], record["prompt_tokens"]) == (None, 0)


async def test_what_is_no_request_to_a_model_is_not_recorded(tmp_path: Path) -> None:
    async with front(OK, **audited(tmp_path)) as (app, _):
        for path in ("/health", "/v1/models", "/nowhere"):
            await Call(app, path=path, method="GET").done()
    assert list(read_records(tmp_path)) == []


async def test_429_is_recorded(tmp_path: Path) -> None:
    limits = {"security": {"keys": [key("k", requests_per_minute=1)]}}
    async with front(OK, **limits, **audited(tmp_path)) as (app, _):
        for _ in range(2):
            await Call(app, body(PROMPT), headers=by("k")).done()
    records = list(read_records(tmp_path))
    assert [(record["status"], record["error"]) for record in records] == [(200, None), (429, "rate_limit_exceeded")]


async def test_full_queue_and_full_router_are_recorded_and_cost_no_engine_time(tmp_path: Path) -> None:
    engine = Places(1)
    limits = {"model": {"queue": {"size": 1, "wait_s": 0.2}}, "router": {"max_in_flight": 2}}
    async with front(engine, **limits, **audited(tmp_path)) as (app, _):
        first = Call(app, body(PROMPT))
        await until(lambda: engine.taken == 1)
        late = Call(app, body(PROMPT))
        await until(lambda: len(app._lines["hot"]) == 1)
        assert (await Call(app, body(PROMPT)).done()).status == 503
        assert (await late.done()).status == 503
        engine.end()
        await first.done()
    full, late_record, served = read_records(tmp_path)
    assert [record["status"] for record in (full, late_record, served)] == [503, 503, 200]
    assert [record["error"] for record in (full, late_record)] == ["overloaded", "overloaded"]
    assert (late_record["engine_ms"], late_record["queue_ms"] > 150) == (None, True)
    assert served["engine_ms"] > 150


@pytest.mark.parametrize(
    ("script", "streaming", "status", "error"),
    [
        (hang_up, False, 503, "engine_died"),
        (stream(event("a"), end="cut"), True, 200, "engine_died"),
        (answer(500, {}), False, 503, "engine_error"),
        (answer(400, {"error": {"message": PROMPT}}), False, 400, "invalid_value"),
    ],
)
async def test_engine_that_fails_is_recorded(
    tmp_path: Path, script: Any, streaming: bool, status: int, error: str
) -> None:
    async with front(script, **audited(tmp_path)) as (app, _):
        await Call(app, body(PROMPT, stream=streaming)).done()
    record = only_record(tmp_path)
    assert (record["status"], record["error"], record["replica"]) == (status, error, "hot-0")


@pytest.mark.parametrize(("script", "status"), [(silent, 499), (stream(event("a"), end="stall"), 200)])
async def test_client_that_leaves_is_recorded(tmp_path: Path, script: Any, status: int) -> None:
    async with front(script, **audited(tmp_path)) as (app, (upstream,)):
        call = Call(app, body(PROMPT, stream=True))
        await asyncio.wait_for(upstream.arrived.wait(), 5)
        if status == 200:
            await call.until(lambda call: len(call.messages) > 1)
        call.disconnect()
        await call.done()
    record = only_record(tmp_path)
    assert (record["status"], record["error"]) == (status, "client_left")


async def test_request_that_a_shutdown_ends_is_recorded(tmp_path: Path) -> None:
    async with front(stream(event("a"), end="stall"), **audited(tmp_path)) as (app, _):
        call = Call(app, body(PROMPT, stream=True))
        await call.until(lambda call: len(call.messages) > 1)
        call._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await call.done()
    record = only_record(tmp_path)
    assert (record["status"], record["error"]) == (200, "shutting_down")
