"""What of a request goes on to the engine, and what never reaches one."""

import asyncio
import re
from typing import Any

import orjson
import pytest
from asgi_call import Call
from relayed import (
    COLD,
    HOT,
    PROMPT,
    asked,
    behind,
    body,
    config,
    empty_tables,
    pool,
    routed,
    through,
)
from scripted_pool import SECRET, Pool
from scripted_upstream import (
    answer,
    silent,
)

from serve_app.config import Config

__all__ = ["empty_tables", "pool", "through"]


# What goes on to the engine


@pytest.mark.case(118)
async def test_engine_sees_the_clients_fields_and_none_of_its_credentials() -> None:
    private = {
        "authorization": "Bearer key",
        "cookie": "session=1",
        "x-forwarded-for": "1.2.3.4",
        "x-switchyard-secret": "guess",
        "x-api-key": "key",
        "user-agent": "client",
    }
    kept = {"traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01", "tracestate": "a=b"}
    async with behind(answer(200, {})) as (app, (upstream,)):
        await Call(app, body(vendor=[1, None]), headers={**private, **kept}).done()
    (seen,) = upstream.seen
    assert (seen.path, seen.body["vendor"], seen.body["model"]) == ("/v1/chat/completions", [1, None], HOT)
    assert seen.headers["x-switchyard-secret"] == SECRET
    assert {name: seen.headers[name] for name in kept} == kept
    assert not {"authorization", "cookie", "x-forwarded-for", "x-api-key"} & set(seen.headers)
    assert "client" not in seen.headers.get("user-agent", "")


def judge() -> Config:
    """A hot model that scores, with sampling values of its own."""
    plain = {"plain": {"temperature": 0.7}}
    hot = {"id": HOT, "tier": "resident", "source": "org/hot", "context": 64, "abilities": ["score"], "sampling": plain}
    return Config.model_validate({"models": [hot]})


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/tokenize", {"messages": [{"role": "user", "content": PROMPT}], "add_generation_prompt": False}),
        ("/tokenize", {"prompt": PROMPT, "return_token_strs": None}),
        ("/detokenize", {"tokens": [1, 2]}),
        ("/v1/score", {"text_1": PROMPT, "text_2": [PROMPT], "vendor": [None]}),
        ("/v1/rerank", {"query": PROMPT, "documents": [PROMPT], "top_n": 1}),
    ],
)
@pytest.mark.parametrize("streaming", [{}, {"stream": True}, {"stream": False}], ids=str)
async def test_tokens_and_scores_pass_both_ways_as_they_are(
    path: str, fields: dict[str, Any], streaming: dict[str, Any]
) -> None:
    said = {"count": 2, "tokens": [1, 2]}
    async with behind(answer(200, said, pieces=2), settings=judge()) as (app, (upstream,)):
        call = await Call(app, fields | streaming, path=path).done()
    (seen,) = upstream.seen
    assert (seen.path, seen.body) == (path, fields | streaming | {"model": HOT})
    assert (call.status, call.body) == (200, orjson.dumps(said))
    assert call.headers["content-type"] == "application/json"
    assert (call.headers["x-router-model"], call.headers["x-router-model-source"]) == (HOT, "default")


@pytest.mark.parametrize("model", [{}, {"model": "embedder"}, {"model": COLD}], ids=str)
@pytest.mark.parametrize("path", ["/v1/score", "/v1/rerank"])
async def test_scores_that_no_model_has_wake_none(pool: Pool, path: str, model: dict[str, Any]) -> None:
    call = await refused(pool, {"query": PROMPT, "documents": [PROMPT], **model}, path=path)
    assert (call.status, call.error["code"], call.error["param"]) == (400, "unsupported_model", "model")


@pytest.mark.case(82)
async def test_requests_with_the_same_id_get_ids_of_their_own_at_the_engine() -> None:
    async with behind(answer(200, {})) as (app, (upstream,)):
        calls = [await Call(app, body(), headers={"x-request-id": "same"}).done() for _ in range(2)]
    assert [call.headers["x-request-id"] for call in calls] == ["same", "same"]
    ids = {seen.headers["x-request-id"] for seen in upstream.seen}
    assert len(ids | {"same"}) == 3


@pytest.mark.case(82)
@pytest.mark.parametrize("wild", ["a b\té", "", " ", "x" * 129, "x" * 300, "x" * 60_000])
async def test_wild_request_id_is_replaced(wild: str) -> None:
    async with behind(answer(200, {})) as (app, _):
        call = await Call(app, body(), headers={"x-request-id": wild}).done()
    assert re.fullmatch("[0-9a-f]{32}", call.headers["x-request-id"])


@pytest.mark.case(82)
@pytest.mark.parametrize("wild", ["a\r\nset-cookie: b", "a\0b"])
async def test_request_id_that_is_more_than_a_value_is_not_said_back(wild: str) -> None:
    """A connection takes the first for two headers, and refuses the other."""
    async with behind(answer(200, {})) as (app, _):
        call = await Call(app, body(), headers={"x-request-id": wild}).done()
    assert "set-cookie" not in call.headers
    assert wild not in call.headers.values()


@pytest.mark.case(82)
@pytest.mark.parametrize("own", ["job/42", "a%0d%0ab", "x" * 128, "{}<>"])
async def test_any_id_in_signs_that_print_is_kept(own: str) -> None:
    async with behind(answer(200, {})) as (app, (upstream,)):
        call = await Call(app, body(), headers={"x-request-id": own}).done()
    assert call.headers["x-request-id"] == own
    # What an engine repeats in every chunk is short, and nobody else's.
    assert re.fullmatch("[0-9a-f]{32}", upstream.seen[0].headers["x-request-id"])


async def test_answer_says_how_it_was_decided() -> None:
    call = await asked(answer(200, {}), model="nick", mode="thinking")
    assert call.headers["x-router-model"] == HOT
    assert call.headers["x-router-model-source"] == "alias"
    assert call.headers["x-router-thinking"] == "off"
    assert "cannot think" in call.headers["x-router-warning"]


# What never reaches an engine


async def refused(pool: Pool, *args: Any, settings: Config | None = None, **kwargs: Any) -> Call:
    async with routed(pool, settings) as app:
        call = await Call(app, *args, **kwargs).done()
    assert PROMPT not in call.error["message"]
    assert pool.asked == []
    return call


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{not json",
        b'{"messages": "' + PROMPT.encode() + b'" oops}',
        b'{"a": NaN}',
        b'{"a": Infinity}',
        b'{"messages": "\xff\xfe"}',
        b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
        b"[" * 100_000,
    ],
)
async def test_bad_json_is_a_400(pool: Pool, raw: bytes) -> None:
    call = await refused(pool, raw)
    assert (call.status, call.error["code"]) == (400, "invalid_json")


@pytest.mark.parametrize("depth", [200, 260, 900])
async def test_deeply_nested_body_is_answered_or_a_400(depth: int) -> None:
    raw = b'{"messages":[{"role":"user","content":"hi"}],"vendor":' + b"[" * depth + b"]" * depth + b"}"
    async with behind(answer(200, {})) as (app, _):
        call = await Call(app, raw).done()
    assert call.status in (200, 400)
    assert call.status == 200 or call.error


@pytest.mark.parametrize("number", [b"1e400", b"123456789012345678901234567890", b"-0", b"1e-400"])
async def test_odd_numbers_are_answered_or_a_400(number: bytes) -> None:
    raw = b'{"messages":[{"role":"user","content":"hi"}],"seed":' + number + b',"vendor":' + number + b"}"
    async with behind(answer(200, {})) as (app, _):
        call = await Call(app, raw).done()
    assert call.status in (200, 400)


@pytest.mark.parametrize("headers", [{"content-length": "2000"}, {}], ids=["announced", "counted"])
async def test_too_large_body_is_a_413(pool: Pool, headers: dict[str, str]) -> None:
    chunks = [b'{"messages": "' + PROMPT.encode(), b"x" * 900, b'"}']
    chunks.insert(2, b"y" * (2000 - sum(map(len, chunks))))
    call = await refused(pool, chunks=chunks, headers=headers, settings=config(max_body_bytes=1024))
    assert (call.status, call.error["code"]) == (413, "request_too_large")


async def test_body_of_exactly_the_limit_is_taken() -> None:
    raw = orjson.dumps(body(pad=""))
    raw = orjson.dumps(body(pad="x" * (1024 - len(raw))))
    async with behind(answer(200, {}), settings=config(max_body_bytes=1024)) as (app, _):
        call = await Call(app, raw, headers={"content-length": "1024"}).done()
    assert (len(raw), call.status) == (1024, 200)


async def test_body_that_does_not_arrive_is_a_408(pool: Pool) -> None:
    call = await refused(pool, chunks=[b'{"mess'], unfinished=True, settings=config(body_timeout_s=0.02))
    assert (call.status, call.error["code"]) == (408, "body_timeout")


@pytest.mark.case(118)
@pytest.mark.parametrize(
    "headers",
    [
        {"content-type": "text/plain"},
        {"content-type": "multipart/form-data; boundary=x"},
        {"content-type": "application/x-www-form-urlencoded"},
        {"content-encoding": "gzip"},
    ],
)
async def test_other_content_types_are_a_415(pool: Pool, headers: dict[str, str]) -> None:
    assert (await refused(pool, body(), headers=headers)).status == 415


@pytest.mark.parametrize(
    "content_type", ["", "application/json; charset=utf-8", "APPLICATION/JSON", "application/vnd.api+json"]
)
async def test_every_way_to_say_json_is_taken(content_type: str) -> None:
    async with behind(answer(200, {})) as (app, _):
        assert (await Call(app, body(), headers={"content-type": content_type}).done()).status == 200


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"model": "nope"}, 404, "model"),
        ({"model": "embedder"}, 400, "model"),
        ({"model": COLD, "temperature": "hot"}, 400, "temperature"),
        ({"model": COLD, "max_tokens": 5000}, 400, "max_tokens"),
        ({"model": COLD, "messages": []}, 400, "messages"),
    ],
)
async def test_wrong_request_wakes_no_model(pool: Pool, fields: dict[str, Any], status: int, param: str) -> None:
    call = await refused(pool, body() | fields)
    assert (call.status, call.error["param"]) == (status, param)
    assert call.headers["x-request-id"]


@pytest.mark.case(116)
@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/chat/completions", 405),
        ("PUT", "/v1/completions", 405),
        ("POST", "/v1/models", 405),
        ("DELETE", "/v1/models/" + HOT, 405),
        ("POST", "/nope", 404),
        ("GET", "/", 404),
        ("POST", "/v1/v1/chat/completions", 404),
        ("POST", "/V1/chat/completions", 404),
        ("GET", "/v1/models/nope", 404),
    ],
)
async def test_wrong_path_or_method_is_refused_in_openais_shape(
    pool: Pool, method: str, path: str, status: int
) -> None:
    call = await refused(pool, path=path, method=method)
    assert (call.status, call.error["type"]) == (status, "invalid_request_error")
    assert status != 405 or call.headers["allow"]


async def test_router_takes_no_more_than_its_limit_and_recovers() -> None:
    async with behind(silent, settings=config(max_in_flight=1)) as (app, (upstream,)):
        first = Call(app, body())
        await asyncio.wait_for(upstream.arrived.wait(), 5)
        second = await Call(app, body()).done()
        assert (second.status, second.error["code"]) == (503, "overloaded")
        first.disconnect()
        await first.done()
        upstream.script = answer(200, {})
        assert (await Call(app, body()).done()).status == 200
