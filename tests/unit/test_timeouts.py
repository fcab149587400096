"""Engines that are late, and what their clients and the other replicas see of it."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import orjson
import pytest
from asgi_call import Call
from front import Places, body, event, front, until
from scripted_upstream import DONE, Upstream, answer, forever, silent, stream
from starlette.types import Message

from serve_app.router.app import RouterApp

ANSWER = {"id": "ok", "choices": [{"finish_reason": "stop"}]}


def chunked(*, then: asyncio.Event | None = None, pause_s: float = 0.0) -> Any:
    """One event; then, after `then`, another and the end; or events for ever, `pause_s` apart."""

    async def script(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        try:
            await _say(writer, event("word"))
            while not then:
                await asyncio.sleep(pause_s)
                await _say(writer, event("word"))
            await then.wait()
            await _say(writer, event("last") + DONE + b"\r\n0\r\n", size=len(event("last") + DONE))
        except ConnectionError:
            await forever()  # `Seen.closed` says so

    return script


async def _say(writer: asyncio.StreamWriter, data: bytes, size: int = 0) -> None:
    writer.write(b"%x\r\n%s\r\n" % (size or len(data), data))
    await writer.drain()


@pytest.fixture(autouse=True, params=["asgi", "door"])
def through(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Call, "through", request.param)


class SlowReader(Call):
    """A client that takes nothing of the body until it `reads`; `test_wire.py` has one over a socket."""

    through = "asgi"

    def __init__(self, app: RouterApp, body: object) -> None:
        self.reads = asyncio.Event()
        super().__init__(app, body)

    async def _send(self, message: Message) -> None:
        await super()._send(message)
        if message["type"] == "http.response.body":
            await self.reads.wait()


async def closed_at_once(app: RouterApp, upstream: Upstream) -> None:
    await asyncio.wait_for(upstream.seen[0].closed.wait(), 1)
    assert app._relay.in_flight.total() == 0


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("limit", ["ttft_timeout_s", "total_timeout_s"])
async def test_engine_that_does_not_begin_in_time_is_a_504(streaming: bool, limit: str) -> None:
    async with front(silent, model={limit: 0.05}) as (app, (upstream,)):
        call = await Call(app, body(stream=streaming)).done()
        assert (call.status, call.error["code"]) == (504, "timeout")
        assert "0.05 s" in call.error["message"]
        await closed_at_once(app, upstream)


async def test_plain_answer_whose_headers_came_but_not_its_body_is_a_504() -> None:
    async def headers_only(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 50\r\n\r\n{")
        await asyncio.Event().wait()

    async with front(headers_only, model={"ttft_timeout_s": 0.05}) as (app, (upstream,)):
        assert (await Call(app, body()).done()).status == 504
        await closed_at_once(app, upstream)


async def test_stream_whose_headers_came_but_no_event_is_a_504() -> None:
    async with front(stream(end="stall"), model={"ttft_timeout_s": 0.05}) as (app, (upstream,)):
        assert (await Call(app, body(stream=True)).done()).status == 504
        await closed_at_once(app, upstream)


async def test_stream_that_falls_silent_ends_in_an_error_event_and_done() -> None:
    model = {"idle_timeout_s": 0.05, "ttft_timeout_s": 30}
    async with front(stream(event("a"), event("b"), end="stall"), model=model) as (app, (upstream,)):
        call = await Call(app, body(stream=True)).done()
        *words, failure, done = call.events
        assert [orjson.loads(word)["choices"][0]["delta"]["content"] for word in words] == ["a", "b"]
        assert orjson.loads(failure)["error"]["code"] == "timeout"
        assert done == b"[DONE]"
        await closed_at_once(app, upstream)


async def test_silence_in_the_middle_of_an_event_ends_in_an_error_event_too() -> None:
    async with front(stream(event("a"), event("b")[:9], end="stall"), model={"idle_timeout_s": 0.05}) as (app, _):
        call = await Call(app, body(stream=True)).done()
        assert [orjson.loads(data).get("error", {}).get("code") for data in call.events[:-1]] == [None, "timeout"]


async def test_stream_that_goes_on_for_too_long_ends_in_an_error_event_and_done() -> None:
    async with front(chunked(pause_s=0.01), model={"total_timeout_s": 0.2}) as (app, (upstream,)):
        call = await Call(app, body(stream=True)).done()
        assert len(call.events) > 4
        assert orjson.loads(call.events[-2])["error"]["code"] == "timeout"
        assert call.events[-1] == b"[DONE]"
        await closed_at_once(app, upstream)


async def test_stream_whose_events_keep_coming_is_not_idle() -> None:
    async with front(chunked(pause_s=0.01), model={"idle_timeout_s": 0.1}) as (app, _):
        call = Call(app, body(stream=True))
        await call.until(lambda call: call.body.count(b"word") >= 30)
        call.disconnect()
        await call.done()
        assert b"error" not in call.body


async def test_silent_stream_hears_comments_and_then_its_answer_whole() -> None:
    goes_on = asyncio.Event()
    async with front(chunked(then=goes_on), router={"comment_s": 0.02}) as (app, _):
        call = Call(app, body(stream=True))
        await call.until(lambda call: call.body.count(b": the engine works on it\n\n") >= 3)
        goes_on.set()
        await call.done()
        assert [b"word" in call.events[0], b"last" in call.events[1], call.events[2]] == [True, True, b"[DONE]"]


def prefill(until_then: asyncio.Event, end: bytes) -> Any:
    """Headers at once, as vLLM does, and nothing more until then."""

    async def script(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        await until_then.wait()
        await _say(writer, end + b"\r\n0\r\n", size=len(end))

    return script


async def test_stream_that_waits_long_for_its_first_token_hears_comments_and_then_its_answer() -> None:
    done = asyncio.Event()
    sections = {"router": {"comment_s": 0.02}, "model": {"idle_timeout_s": 0.03}}
    async with front(prefill(done, event("word") + DONE), **sections) as (app, _):
        call = Call(app, body(stream=True))
        await call.until(lambda call: call.body.count(b": the engine works on it\n\n") >= 3)
        done.set()
        await call.done()
        assert (b"word" in call.events[0], call.events[1]) == (True, b"[DONE]")


@pytest.mark.parametrize("end", [b'data: {"error":{"message":"no","code":400}}\n\n' + DONE, DONE])
async def test_failure_after_such_comments_is_an_error_event_and_done(end: bytes) -> None:
    done = asyncio.Event()
    async with front(prefill(done, end), router={"comment_s": 0.02}) as (app, _):
        call = Call(app, body(stream=True))
        await call.until(lambda call: b": the engine" in call.body)
        done.set()
        await call.done()
        assert "error" in orjson.loads(call.events[0])
        assert call.events[1:] == [b"[DONE]"]


async def test_first_token_that_does_not_come_ends_a_stream_with_comments_in_an_error_event() -> None:
    sections = {"router": {"comment_s": 0.02}, "model": {"ttft_timeout_s": 0.15}}
    async with front(prefill(asyncio.Event(), b""), **sections) as (app, (upstream,)):
        call = await Call(app, body(stream=True)).done()
        assert call.body.count(b": the engine") >= 2
        assert orjson.loads(call.events[-2])["error"]["code"] == "timeout"
        await closed_at_once(app, upstream)


async def test_comments_do_not_make_a_silent_engine_look_alive() -> None:
    sections = {"model": {"idle_timeout_s": 0.15}, "router": {"comment_s": 0.02}}
    async with front(stream(event("a"), end="stall"), **sections) as (app, _):
        call = await Call(app, body(stream=True)).done()
        assert call.body.count(b": the engine") >= 2
        assert orjson.loads(call.events[-2])["error"]["code"] == "timeout"


@pytest.mark.parametrize("script", [stream(event("a"), event("b"), DONE), stream(event("a") + DONE)])
async def test_client_that_reads_slowly_is_not_taken_for_a_silent_engine(script: Any) -> None:
    sections = {"model": {"idle_timeout_s": 0.05}, "router": {"comment_s": 0.02}}
    async with front(script, **sections) as (app, _):
        call = SlowReader(app, body(stream=True))
        await call.until(lambda call: len(call.messages) > 1)
        began = time.monotonic()
        await until(lambda: time.monotonic() - began > 0.2)
        call.reads.set()
        await call.done()
        assert call.events[-1] == b"[DONE]"
        assert b"error" not in call.body
        assert call.body.count(b": the engine") == 0  # it has enough to read


async def test_nothing_is_said_after_the_end_of_a_stream() -> None:
    async with front(stream(event("a") + DONE), router={"comment_s": 0.01}) as (app, _):
        call = await Call(app, body(stream=True)).done()
        said, began = len(call.messages), time.monotonic()
        await until(lambda: time.monotonic() - began > 0.05)
        assert len(call.messages) == said
        assert call.messages[-1]["more_body"] is False


# Which replicas get requests then


async def test_hanging_replica_is_left_alone_after_a_few_requests() -> None:
    async with front(silent, answer(200, ANSWER), model={"ttft_timeout_s": 0.3}) as (app, (hanging, _)):
        first = [(await Call(app, body()).done()).status for _ in range(12)]
        assert first.count(504) == 3
        then = [(await Call(app, body()).done()).status for _ in range(12)]
        assert then == [200] * 12
        assert len(hanging.seen) == 3


async def test_only_one_of_many_requests_tries_a_replica_whose_pause_is_over() -> None:
    async with front(silent, answer(200, ANSWER), model={"ttft_timeout_s": 0.5}) as (app, (hanging, _)):
        for _ in range(3):
            app._relay.breaker.failed("hot-0", time.monotonic() - 11)  # 11 s ago
        calls = [Call(app, body()) for _ in range(20)]
        statuses = [(await call.done()).status for call in calls]
        assert (statuses.count(200), len(hanging.seen)) == (19, 1)


async def test_last_replica_gets_requests_even_if_it_hangs() -> None:
    async with front(silent, model={"ttft_timeout_s": 0.02}) as (app, (upstream,)):
        assert [(await Call(app, body()).done()).status for _ in range(5)] == [504] * 5
        upstream.script = answer(200, ANSWER)
        assert (await Call(app, body()).done()).status == 200


async def test_replica_is_not_blamed_for_the_time_that_a_request_waited_in_the_queue() -> None:
    engine = Places(1)
    async with front(engine, model={"ttft_timeout_s": 0.2, "queue": {"size": 9}}) as (app, _):
        engine.taken = 1  # by another Router
        calls = [Call(app, body()) for _ in range(5)]
        began = time.monotonic()
        await until(lambda: time.monotonic() - began > 0.25)
        engine.taken = 0
        assert [(await call.done()).status for call in calls] == [504] * 5
        assert app._relay.breaker.shunned(time.monotonic()) == frozenset()


async def test_replica_is_not_blamed_for_answers_that_are_long() -> None:
    async with front(chunked(pause_s=0.01), model={"total_timeout_s": 0.05}) as (app, _):
        for _ in range(4):
            await Call(app, body(stream=True)).done()
        assert app._relay.breaker.shunned(time.monotonic()) == frozenset()


@pytest.mark.case(61)
@pytest.mark.parametrize("status", [400, 404, 422, 429])
async def test_replica_is_not_blamed_for_requests_that_are_wrong(status: int) -> None:
    async with front(answer(status, {"error": {"message": "no"}})) as (app, (upstream,)):
        for _ in range(100):
            await Call(app, body()).done()
        upstream.script = answer(200, ANSWER)
        assert (await Call(app, body()).done()).status == 200
        assert app._relay.breaker.shunned(time.monotonic()) == frozenset()
