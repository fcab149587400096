"""`/v1/messages` at the front door, as Anthropic's own client sees it: keys, limits, errors, streams, records."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anthropic
import httpx2
import orjson
import pytest
from anthropic import AsyncAnthropic
from asgi_call import Call
from front import HOT, Places, audited, front, key, until
from scripted_pool import SECRET, Pool
from scripted_upstream import Upstream, answer, stream

from serve_app.config import Config
from serve_app.models.replicas import PublishedModel, Replica, set_replicas
from serve_app.router.app import RouterApp

PATH = "/v1/messages"
THINKS = {"thinking": {"supported": True}, "engine": {"reasoning_parser": "qwen3"}}
HI: list[Any] = [{"role": "user", "content": "hi"}]


def body(**fields: Any) -> dict[str, Any]:
    return {"messages": HI, "max_tokens": 2000, **fields}


def event(kind: str, **fields: Any) -> bytes:
    return f"event: {kind}\ndata: ".encode() + orjson.dumps({"type": kind, **fields}) + b"\n\n"


def usage(read: int, wrote: int, **more: int) -> dict[str, int]:
    return {"input_tokens": read, "output_tokens": wrote, **more}


MESSAGE: dict[str, Any] = {
    "id": "msg_1",
    "type": "message",
    "role": "assistant",
    "content": [],
    "model": HOT,
    "stop_reason": None,
    "stop_sequence": None,
}
START = event("message_start", message={**MESSAGE, "usage": usage(9, 0)})
SAYS_OK = [
    event("content_block_start", index=0, content_block={"type": "text", "text": ""}),
    event("content_block_delta", index=0, delta={"type": "text_delta", "text": "ok"}),
    event("content_block_stop", index=0),
]
ENDED = {"stop_reason": "end_turn", "stop_sequence": None}
LAST = event("message_delta", delta=ENDED, usage=usage(9, 2, cache_read_input_tokens=4))
STOP = event("message_stop")
WHOLE = {**MESSAGE, **ENDED, "content": [{"type": "text", "text": "ok"}], "usage": usage(9, 2)}


def client(app: RouterApp, **given: Any) -> AsyncAnthropic:
    transport = httpx2.ASGITransport(app=app)
    http = httpx2.AsyncClient(transport=transport)
    return AsyncAnthropic(base_url="http://router", http_client=http, max_retries=0, **{"api_key": "none", **given})


async def test_answer_reaches_the_client_and_the_request_the_engine() -> None:
    asked = {"thinking": {"type": "enabled", "budget_tokens": 300}, "system": "be kind", "model": HOT}
    async with front(answer(200, WHOLE), model=THINKS) as (app, (upstream,)):
        got = await client(app).messages.create(**body(**asked))
    assert got.content[0].text == "ok"
    (seen,) = upstream.seen
    assert seen.path == PATH
    assert seen.body == {
        "messages": HI,
        "max_tokens": 2000,
        "model": HOT,
        "system": "be kind",
        "chat_template_kwargs": {"enable_thinking": True},
        "thinking_token_budget": 300,
    }


async def test_why_is_said_and_the_id_stands_where_the_client_looks_for_it() -> None:
    async with front(answer(200, WHOLE), model=THINKS) as (app, _):
        raw = await client(app).messages.with_raw_response.create(**body(model="auto"))
    said = raw.headers
    assert said["x-router-model"] == HOT
    assert {"x-router-thinking", "x-router-model-source", "x-router-policy"} <= set(said)
    assert (await raw.parse())._request_id == said["x-request-id"]


async def test_path_of_the_clients_beta_is_the_same_path() -> None:
    async with front(answer(200, WHOLE)) as (app, (upstream,)):
        got = await client(app).beta.messages.create(**body(model=HOT), betas=["some-feature"])
    assert got.stop_reason == "end_turn"
    assert upstream.seen[0].path == PATH


@pytest.mark.parametrize("cut", [1, 3, 50, 10_000])
async def test_stream_is_whole_events_however_the_bytes_come(cut: int) -> None:
    raw = b"".join([START, *SAYS_OK, LAST, STOP])
    pieces = [raw[at : at + cut] for at in range(0, len(raw), cut)]
    async with (
        front(stream(*pieces)) as (app, _),
        client(app).messages.stream(**body(model=HOT)) as events,
    ):
        assert (await events.get_final_message()).content[0].text == "ok"


# Keys


@pytest.mark.parametrize("given", [{"api_key": "one-key"}, {"api_key": None, "auth_token": "one-key"}], ids=str)
async def test_key_may_stand_in_either_header(given: dict[str, Any]) -> None:
    async with front(answer(200, WHOLE), security={"keys": [key("one")]}) as (app, _):
        assert (await client(app, **given).messages.create(**body(model=HOT))).stop_reason == "end_turn"


@pytest.mark.parametrize("path", [PATH, PATH + "/count_tokens", PATH + "/batches"])
async def test_wrong_key_is_refused_in_the_form_of_the_api(path: str) -> None:
    async with front(answer(200, WHOLE), security={"keys": [key("one")]}) as (app, (upstream,)):
        call = await Call(app, body(), path=path, headers={"x-api-key": "wrong"}).done()
    assert (call.status, call.anthropic_error["type"]) == (401, "authentication_error")
    assert not upstream.seen


async def test_key_that_may_not_use_the_model_is_told_that_there_is_none() -> None:
    async with front(answer(200, WHOLE), security={"keys": [key("one", models=[])]}) as (app, _):
        with pytest.raises((anthropic.PermissionDeniedError, anthropic.NotFoundError)):
            await client(app, api_key="one-key").messages.create(**body(model=HOT))


async def test_rate_of_a_key_is_held_and_says_when_to_come_back() -> None:
    keys = {"keys": [key("one", requests_per_minute=1)]}
    async with front(answer(200, WHOLE), security=keys) as (app, _):
        asking = client(app, api_key="one-key")
        await asking.messages.create(**body(model=HOT))
        with pytest.raises(anthropic.RateLimitError) as refused:
            await asking.messages.create(**body(model=HOT))
    said: Any = refused.value
    assert said.body["error"]["type"] == "rate_limit_error"
    assert int(said.response.headers["retry-after"]) >= 1


# Errors


@pytest.mark.parametrize(
    ("method", "path", "status", "kind"),
    [
        ("GET", PATH, 405, "invalid_request_error"),
        ("POST", PATH + "/batches", 404, "not_found_error"),
    ],
)
async def test_what_there_is_not_is_said_in_the_form_of_the_api(method: str, path: str, status: int, kind: str) -> None:
    async with front(answer(200, WHOLE)) as (app, _):
        call = await Call(app, body(), path=path, method=method).done()
    assert (call.status, call.anthropic_error["type"]) == (status, kind)


@pytest.mark.parametrize(
    ("fields", "raised"),
    [({"model": "none"}, anthropic.NotFoundError), ({"thinking": {"type": "wild"}}, anthropic.BadRequestError)],
    ids=str,
)
async def test_refusal_of_the_router_is_the_clients_own_error(
    fields: dict[str, Any], raised: type[anthropic.APIStatusError]
) -> None:
    async with front(answer(200, WHOLE)) as (app, (upstream,)):
        for streams in (False, True):
            with pytest.raises(raised):
                await client(app).messages.create(**body(**{"model": HOT, **fields}), stream=streams)
    assert not upstream.seen


@pytest.mark.parametrize(
    ("status", "raised"),
    [(400, anthropic.BadRequestError), (422, anthropic.BadRequestError), (500, anthropic.APIStatusError)],
)
async def test_refusal_of_the_engine_is_too_and_quotes_nothing(
    status: int, raised: type[anthropic.APIStatusError]
) -> None:
    said = {"type": "error", "error": {"type": "BadRequestError", "message": "wrong, input_value='zebra'"}}
    async with front(answer(status, said)) as (app, _):
        with pytest.raises(raised) as refused:
            await client(app).messages.create(**body(model=HOT))
    assert "zebra" not in str(refused.value.body)
    assert refused.value.status_code == {422: 400, 500: 503}.get(status, status)


async def test_full_model_is_overloaded() -> None:
    engine = Places(1)
    async with front(engine, model={"queue": {"size": 0}}) as (app, _):
        first = Call(app, body(), path=PATH)
        await until(lambda: engine.taken == 1)
        call = await Call(app, body(), path=PATH).done()
        engine.end()
        await first.done()
    assert (call.status, call.anthropic_error["type"]) in ((429, "rate_limit_error"), (503, "overloaded_error"))
    assert int(call.headers["retry-after"]) >= 1


FAULT = event("error", error={"type": "internal_error", "message": "zebra"})


async def test_engine_that_fails_at_once_is_a_status() -> None:
    async with front(stream(FAULT)) as (app, _):
        call = await Call(app, body(stream=True), path=PATH).done()
    assert (call.status, call.anthropic_error["type"]) == (503, "overloaded_error")


@pytest.mark.parametrize(
    "script",
    [stream(START, *SAYS_OK[:2], FAULT), stream(START, *SAYS_OK[:2], end="cut"), stream(START, *SAYS_OK[:2])],
    ids=["says so", "dies", "just ends"],
)
async def test_engine_that_fails_later_is_an_event_that_the_client_raises(script: Any, tmp_path: Path) -> None:
    async with front(script, **audited(tmp_path)) as (app, _):
        call = await Call(app, body(stream=True), path=PATH).done()
        last = call.named_events[-1]
        assert (call.status, last["type"], set(last["error"])) == (200, "error", {"type", "message"})
        assert "zebra" not in str(call.named_events)
        with pytest.raises(anthropic.APIStatusError):
            async with client(app).messages.stream(**body(model=HOT)) as events:
                await events.get_final_message()


# Cold models


@pytest.fixture
def pool() -> Pool:
    return Pool()


@pytest.fixture
async def cold(pool: Pool) -> AsyncIterator[RouterApp]:
    """A lazy model that is not awake, and is when `pool.woken` is set."""
    models = [
        {"id": HOT, "tier": "resident", "source": "org/hot", "context": 4096},
        {"id": "cold", "tier": "lazy", "source": "org/cold", "context": 4096},
    ]
    config = Config.model_validate(
        {"models": models, "audit": {"sink": "none"}, "router": {"loading_comment_s": 0.1, "hold_s": 30}}
    )
    async with Upstream(stream(START, *SAYS_OK, LAST, STOP)) as upstream:
        pool.will_be_at(upstream.url)
        states = {"cold": PublishedModel("loading", progress=0.4)}
        set_replicas("Pool", [Replica("pool-0", {"cold": upstream.url}, SECRET, states, True)])
        app = RouterApp(config, {HOT: "Hot", "cold": "Pool"}, pool, "test")
        yield app
        await app._relay.close()
        set_replicas("Pool", [])


async def test_stream_hears_comments_while_its_model_loads_and_the_client_reads_past_them(
    cold: RouterApp, pool: Pool
) -> None:
    call = Call(cold, body(model="cold", stream=True), path=PATH)
    await call.until(lambda call: call.body.count(b"\n\n") >= 2)
    assert call.body.startswith(b": loading cold 40%\n\n")

    async def read() -> str:
        async with client(cold).messages.stream(**body(model="cold")) as events:
            return "".join([text async for text in events.text_stream])

    reading = asyncio.create_task(read())
    await until(lambda: cold.fleet.cold.waiting("cold") == 2)
    pool.woken.set()
    assert await reading == "ok"
    await call.done()
    assert call.named_events[-1]["type"] == "message_stop"


async def test_load_that_fails_after_a_comment_is_an_event_that_the_client_raises(cold: RouterApp, pool: Pool) -> None:
    pool.answers = [{"refused": {"code": "load_failed", "reason": "no weights", "retry_after_s": 9.0}}]
    call = Call(cold, body(model="cold", stream=True), path=PATH)
    await call.until(lambda call: call.body.count(b"\n\n") >= 1)
    pool.woken.set()
    await call.done()
    (said,) = call.named_events
    assert (call.status, said["error"]["type"]) == (200, "overloaded_error")


# Records


def records(directory: Path) -> list[dict[str, Any]]:
    (file,) = directory.glob("*.jsonl")
    return [orjson.loads(line) for line in file.read_bytes().splitlines()]


async def test_record_has_the_tokens_and_how_it_ended(tmp_path: Path) -> None:
    async with front(stream(START, *SAYS_OK, LAST, STOP), model=THINKS, **audited(tmp_path)) as (app, _):
        await Call(app, body(stream=True, model=HOT), path=PATH).done()
        await Call(app, body(model="none"), path=PATH).done()
    good, refused = records(tmp_path)
    assert (good["path"], good["model"], good["stream"], good["finish"]) == (PATH, HOT, True, "end_turn")
    # Anthropic counts what the cache had apart.
    assert (good["prompt_tokens"], good["completion_tokens"], good["cached_tokens"]) == (13, 2, 4)
    assert (refused["path"], refused["status"], refused["error"]) == (PATH, 404, "model_not_found")


async def test_tokens_are_counted_by_the_engine() -> None:
    async with front(answer(200, {"input_tokens": 9})) as (app, (upstream,)):
        counted = await client(app).messages.count_tokens(model=HOT, messages=HI)
    assert counted.input_tokens == 9
    assert (upstream.seen[0].path, upstream.seen[0].body) == (PATH + "/count_tokens", {"messages": HI, "model": HOT})
