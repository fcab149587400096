"""A server that is not ours behind the router: what it is sent, what its answers become, and how it is watched."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import subprocess
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import orjson
import pytest
from asgi_call import Call
from front import body, until
from pydantic import ValidationError
from scripted_pool import Pool
from scripted_upstream import DONE, Script, Seen, Upstream, answer, error, event, hang_up, stream

from serve_app.config import Config, parse_config
from serve_app.models.replicas import set_replicas
from serve_app.router.app import RouterApp

NAME, THERE, KEY = "theirs", "org/Their-Model", "sk-their-secret-4711"
ANSWER = {"id": "1", "choices": [{"message": {"content": "hello"}}]}
TABLE = "External"


def config(*urls: str, entry: dict[str, Any] | None = None, **external: Any) -> Config:
    settings = {"urls": list(urls), "health_every_s": 0.02, **external}
    theirs = {"id": NAME, "tier": "resident", "context": 4096, "queue": {"size": 0}, **(entry or {})}
    return Config.model_validate({"models": [{**theirs, "external": settings}], "audit": {"sink": "none"}})


def url(upstream: Upstream) -> str:
    return upstream.url + "/v1"


def asked(upstream: Upstream) -> list[Seen]:
    """What clients asked of it, without the router's own looks at its health."""
    return [seen for seen in upstream.seen if seen.body is not None]


@contextlib.asynccontextmanager
async def routed(settings: Config) -> AsyncIterator[RouterApp]:
    """The router, with its watch over the servers, once it has looked at each of them."""
    app = RouterApp(settings, {NAME: TABLE}, Pool(), "test")
    watch = asyncio.create_task(app._externals.run())
    try:
        yield app
    finally:
        watch.cancel()
        await asyncio.wait([watch])
        await app._relay.close()
        set_replicas(TABLE, [])


async def state(app: RouterApp) -> dict[str, Any]:
    call = await Call(app, path=f"/v1/models/{NAME}", method="GET").done()
    return dict(call.json)


async def in_state(app: RouterApp, wanted: str) -> dict[str, Any]:
    return await card(app, lambda found: found["state"] == wanted)


async def card(app: RouterApp, fulfils: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    """What /v1/models says of it, once that is so."""
    async with asyncio.timeout(5):
        while not fulfils(found := await state(app)):  # noqa: ASYNC110 # nobody announces it
            await asyncio.sleep(0.005)
    return found


async def ready(app: RouterApp) -> tuple[int, str]:
    call = await Call(app, path="/ready", method="GET").done()
    return call.status, call.json["models"][NAME]


async def test_it_gets_its_own_name_for_the_model_its_key_and_nothing_of_the_clients_key(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("THEIR_KEY", KEY)
    async with Upstream(answer(200, ANSWER)) as theirs:
        settings = config(url(theirs), entry={"aliases": ["nick"]}, model=THERE, api_key_env="THEIR_KEY")
        async with routed(settings) as app:
            await in_state(app, "awake")
            headers = {"authorization": "Bearer the-clients-own"}
            call = await Call(app, body(model="nick", top_k=3), headers=headers).done()
    assert call.status == 200
    assert call.json == ANSWER
    assert call.headers["x-router-model"] == NAME
    (seen,) = asked(theirs)
    assert seen.path == "/v1/chat/completions"
    assert seen.headers["authorization"] == f"Bearer {KEY}"
    assert "x-switchyard-secret" not in seen.headers
    assert seen.body["model"] == THERE
    assert seen.body["top_k"] == 3


@pytest.mark.parametrize(
    ("base", "path", "asked_path"),
    [
        ("", "/v1/chat/completions", "/v1/chat/completions"),
        ("/v1/", "/v1/chat/completions", "/v1/chat/completions"),
        ("/openai/v1", "/v1/chat/completions", "/openai/v1/chat/completions"),
        ("/openai/v1", "/tokenize", "/openai/tokenize"),
        ("/api/paas/v4", "/v1/chat/completions", "/api/paas/v4/chat/completions"),
    ],
)
async def test_a_base_url_is_what_openais_clients_take(base: str, path: str, asked_path: str) -> None:
    async with Upstream(answer(200, ANSWER)) as theirs, routed(config(theirs.url + base)) as app:
        await in_state(app, "awake")
        fields = {"prompt": "hi"} if path == "/tokenize" else body()
        call = await Call(app, {**fields, "model": NAME}, path=path).done()
    assert call.status == 200
    assert asked(theirs)[0].path == asked_path


async def test_a_server_that_thinks_gets_what_the_client_says_of_it_unless_the_router_is_told_how() -> None:
    said = {"reasoning_effort": "low", "model": NAME}
    async with Upstream(answer(200, ANSWER)) as theirs:
        async with routed(config(url(theirs))) as app:
            await in_state(app, "awake")
            await Call(app, body(**said)).done()
        async with routed(config(url(theirs), entry={"thinking": {"supported": True}})) as app:
            await in_state(app, "awake")
            await Call(app, body(**said)).done()
    untouched, switched = asked(theirs)
    assert untouched.body["reasoning_effort"] == "low"
    assert "chat_template_kwargs" not in untouched.body
    assert "reasoning_effort" not in switched.body
    assert switched.body["chat_template_kwargs"] == {"enable_thinking": True}
    assert switched.body["thinking_token_budget"] == 1024


CALLS = [{"index": 0, "id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}]


async def test_tool_calls_and_reasoning_of_a_stream_pass_byte_for_byte() -> None:
    pieces = [
        b'data: {"choices": [{"index": 0, "delta": {"role": "assistant", "reasoning_content": "hm"}}]}\n\n',
        b"data: " + orjson.dumps({"choices": [{"index": 0, "delta": {"content": "x"}}]}) + b"\n\n",
        DONE,
    ]
    async with Upstream(stream(*pieces)) as theirs, routed(config(url(theirs))) as app:
        await in_state(app, "awake")
        call = await Call(app, body(model=NAME, stream=True)).done()
    assert call.status == 200
    assert call.body == b"".join(pieces)


@pytest.mark.parametrize("streams", [False, True])
async def test_a_thought_that_a_server_gives_as_text_is_its_clients_to_find(streams: bool) -> None:
    text = "<think>\nhm\n</think>\n\nhello"
    said = stream(event(text), DONE) if streams else answer(200, {"choices": [{"message": {"content": text}}]})
    thinker = {"thinking": {"supported": True}}
    async with Upstream(said) as theirs, routed(config(url(theirs), entry=thinker)) as app:
        await in_state(app, "awake")
        fields = {"stream": streams, "reasoning_effort": "high", "include_reasoning": False}
        call = await Call(app, body(**fields)).done()
    assert orjson.dumps(text) in call.body


async def test_a_tool_call_reaches_the_client() -> None:
    choice = {"index": 0, "delta": {"tool_calls": CALLS}, "finish_reason": None}
    end = {"index": 0, "delta": {}, "finish_reason": "tool_calls"}
    pieces = [b"data: " + orjson.dumps({"choices": [one]}) + b"\n\n" for one in (choice, end)]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    entry = {"abilities": ["chat", "tools"]}
    async with Upstream(stream(*pieces, DONE)) as theirs, routed(config(url(theirs), entry=entry)) as app:
        await in_state(app, "awake")
        call = await Call(app, body(model=NAME, stream=True, tools=tools)).done()
    *events, done = call.events
    first, last = map(orjson.loads, events)
    assert first["choices"][0]["delta"]["tool_calls"] == CALLS
    assert last["choices"][0]["finish_reason"] == "tool_calls"
    assert done == b"[DONE]"
    assert asked(theirs)[0].body["tools"] == tools


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
async def test_a_stream_whose_lines_end_in_another_way_is_read_all_the_same(size: int) -> None:
    raw = (event("one") + event("two") + DONE).replace(b"\n", b"\r\n")
    pieces = [raw[at : at + size] for at in range(0, len(raw), size)]
    async with Upstream(stream(*pieces)) as theirs, routed(config(url(theirs))) as app:
        await in_state(app, "awake")
        call = await Call(app, body(model=NAME, stream=True)).done()
    assert call.body == event("one") + event("two") + DONE


async def test_a_response_stream_that_ends_as_openais_do_is_whole_and_a_cut_one_is_not() -> None:
    def said(kind: str) -> bytes:
        return f"event: {kind}\n".encode() + b"data: " + orjson.dumps({"type": kind, "response": {}}) + b"\n\n"

    begun, over = said("response.created"), said("response.completed")
    asking = {"model": NAME, "input": "hi", "stream": True, "store": False}
    for pieces, whole in [((begun, over), True), ((begun,), False)]:
        async with Upstream(stream(*pieces)) as theirs, routed(config(url(theirs))) as app:
            await in_state(app, "awake")
            call = await Call(app, asking, path="/v1/responses").done()
        assert call.status == 200
        assert (b"response.completed" in call.body) is whole
        assert (b"engine_died" in call.body) is not whole


@pytest.mark.parametrize(
    ("script", "status", "code", "retry_after"),
    [
        (answer(401, error(401, f"Incorrect API key provided: {KEY}")), 502, "upstream_unauthorized", None),
        (answer(403, error(403, f"{KEY} may not")), 502, "upstream_unauthorized", None),
        (answer(429, error(429, "slow down")), 503, "overloaded", "5"),
        (answer(503, error(503, "loading")), 503, "overloaded", "5"),
        (answer(500, error(500, f"oops {KEY}")), 503, "engine_error", "2"),
        (answer(302, {}), 503, "engine_error", "2"),
        (answer(400, error(400, f"bad value {KEY}", "temperature")), 400, "invalid_value", None),
        (answer(404, error(404, "no such model")), 404, "not_found", None),
        (
            answer(400, error(400, "the request exceeds the available context size")),
            400,
            "context_length_exceeded",
            None,
        ),
        (hang_up, 503, "engine_died", "2"),
    ],
)
async def test_its_refusals_become_ours_and_its_key_is_never_told(
    script: Script, status: int, code: str, retry_after: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("THEIR_KEY", KEY)
    async with Upstream(script) as theirs, routed(config(url(theirs), api_key_env="THEIR_KEY")) as app:
        await until(lambda: theirs.seen, "it was looked at")
        call = await Call(app, body(model=NAME)).done()
    assert (call.status, call.error["code"]) == (status, code)
    assert call.headers.get("retry-after") == retry_after
    assert KEY.encode() not in call.body


def limited(retry_after: str) -> Script:
    async def script(writer: asyncio.StreamWriter) -> None:
        writer.write(f"HTTP/1.1 429 X\r\nretry-after: {retry_after}\r\ncontent-length: 2\r\n\r\n{{}}".encode())

    return script


@pytest.mark.parametrize(
    ("said", "told"),
    [("17", "17"), ("0", "1"), ("1e9", "3600"), ("nan", "5"), ("soon", "5"), ("Wed, 21 Oct 2015 07:28:00 GMT", "1")],
)
async def test_its_retry_after_is_passed_on_within_bounds(said: str, told: str) -> None:
    async with Upstream(limited(said)) as theirs, routed(config(url(theirs))) as app:
        call = await Call(app, body(model=NAME)).done()
    assert (call.status, call.headers["retry-after"]) == (503, told)


async def test_one_that_is_limited_is_left_alone_while_another_answers() -> None:
    async with (
        Upstream(limited("60")) as full,
        Upstream(answer(200, ANSWER)) as other,
        routed(config(url(full), url(other))) as app,
    ):
        await until(lambda: full.seen and other.seen, "both were looked at")
        calls = [await Call(app, body(model=NAME)).done() for _ in range(6)]
    assert {call.status for call in calls} == {200}
    assert len(asked(full)) <= 1
    assert len(asked(other)) == 6


async def test_several_urls_share_the_load_and_one_that_is_gone_is_passed_over() -> None:
    gate = asyncio.Event()

    async def slow(writer: asyncio.StreamWriter) -> None:
        await gate.wait()
        await answer(200, ANSWER)(writer)

    gone = "http://127.0.0.1:1/v1"
    async with Upstream(slow) as one, Upstream(slow) as two, routed(config(gone, url(one), url(two))) as app:
        calls = [Call(app, body(model=NAME)) for _ in range(4)]
        await until(lambda: len(asked(one)) + len(asked(two)) == 4, "all four are there")
        assert len(asked(one)) == len(asked(two)) == 2
        assert (await state(app))["in_flight"] == 4
        gate.set()
        assert {(await call.done()).status for call in calls} == {200}


async def test_the_places_of_one_router_are_exact() -> None:
    gate = asyncio.Event()

    async def slow(writer: asyncio.StreamWriter) -> None:
        await gate.wait()
        await answer(200, ANSWER)(writer)

    async with Upstream(slow) as theirs, routed(config(url(theirs), entry={"max_ongoing_requests": 2})) as app:
        calls = [Call(app, body(model=NAME)) for _ in range(2)]
        await until(lambda: len(asked(theirs)) == 2, "both are there")
        third = await Call(app, body(model=NAME)).done()
        gate.set()
        assert [(await call.done()).status for call in calls] == [200, 200]
    assert (third.status, third.error["code"]) == (503, "overloaded")
    assert len(asked(theirs)) == 2


async def test_ready_says_how_it_is_and_a_dead_one_is_a_503() -> None:
    async with Upstream(answer(200, ANSWER)) as theirs, routed(config(url(theirs))) as app:
        await in_state(app, "awake")
        assert await ready(app) == (200, "awake")
        theirs.script = answer(500, {})
        assert (await in_state(app, "failed"))["failure"] == "it answers 500 to /v1/models"
        assert await ready(app) == (503, "failed")
        theirs.script = answer(401, {})
        await card(app, lambda found: found.get("failure") == "it refuses the router's key")
        theirs.script = answer(200, ANSWER)
        await in_state(app, "awake")
        assert await ready(app) == (200, "awake")
    async with routed(config("http://127.0.0.1:1/v1")) as app:
        assert (await in_state(app, "failed"))["failure"] == "it does not answer"
        call = await Call(app, body(model=NAME)).done()
    assert (call.status, call.error["code"], call.headers["retry-after"]) == (503, "upstream_unreachable", "5")


async def test_a_key_file_is_read_again_and_a_faulty_one_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "key"
    file.write_text(KEY + "\n")
    async with Upstream(answer(200, ANSWER)) as theirs, routed(config(url(theirs), api_key_file=str(file))) as app:
        await until(lambda: theirs.seen and theirs.seen[-1].headers.get("authorization") == f"Bearer {KEY}")
        file.write_text("sk-two\nlines")
        await until(lambda: "cannot be read" in caplog.text)
        await Call(app, body(model=NAME)).done()
        assert asked(theirs)[-1].headers["authorization"] == f"Bearer {KEY}"
        file.write_text("sk-new")
        await until(lambda: theirs.seen[-1].headers["authorization"] == "Bearer sk-new")
        await Call(app, body(model=NAME)).done()
        assert asked(theirs)[-1].headers["authorization"] == "Bearer sk-new"
    assert "sk-" not in caplog.text


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate for 127.0.0.1 that nobody has signed, with its key in the same file."""
    directory = tmp_path_factory.mktemp("tls")
    command = (
        "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=127.0.0.1 -addext subjectAltName=IP:127.0.0.1"
    )
    files = ["-keyout", str(directory / "key.pem"), "-out", str(directory / "ca.pem")]
    subprocess.run([*command.split(), *files], check=True, capture_output=True)
    return directory


async def test_a_certificate_is_checked_and_may_be_ones_own(certificate: Path) -> None:
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(certificate / "ca.pem", certificate / "key.pem")
    async with Upstream(answer(200, ANSWER), tls=tls) as theirs:
        async with routed(config(url(theirs))) as app:
            assert (await in_state(app, "failed"))["failure"] == "it does not answer"
            call = await Call(app, body(model=NAME)).done()
            assert (call.status, call.error["code"]) == (503, "upstream_unreachable")
        async with routed(config(url(theirs), ca_file=str(certificate / "ca.pem"))) as app:
            await in_state(app, "awake")
            assert (await Call(app, body(model=NAME)).done()).json == ANSWER


def records(directory: Path) -> list[dict[str, Any]]:
    (file,) = directory.iterdir()
    return [orjson.loads(line) for line in file.read_text().splitlines()]


async def test_what_it_counts_is_recorded_however_it_writes_json(tmp_path: Path) -> None:
    choice = b'{"message": {"content": "x"}, "finish_reason": "stop"}'
    raw = b'{\n  "choices": [%b],\n  "usage": {"prompt_tokens": 7, "completion_tokens": 5}\n}' % choice
    async with Upstream(answer(200, raw)) as theirs:
        settings = config(url(theirs)).model_dump()
        settings["audit"] = {"directory": str(tmp_path)}
        async with routed(Config.model_validate(settings)) as app:
            app._audit.start()
            await in_state(app, "awake")
            await Call(app, body(model=NAME)).done()
            await asyncio.to_thread(app._audit.close)
    (record,) = await asyncio.to_thread(records, tmp_path)
    assert (record["prompt_tokens"], record["completion_tokens"], record["finish"]) == (7, 5, "stop")


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"external": {"urls": []}}, "models[0].external.urls: List should have at least 1 item"),
        ({"external": {"urls": ["host:8000"]}}, "models[0].external.urls[0]: is no http:// or https:// URL"),
        ({"external": {"urls": ["http://h:99999"]}}, "models[0].external.urls[0]: is no http:// or https:// URL"),
        ({"external": {"urls": ["http://u:p4ss@h"]}}, "models[0].external.urls[0]: holds a secret"),
        ({"external": {"urls": ["http://h/v1?key=p4ss"]}}, "models[0].external.urls[0]: a base URL has neither"),
        ({"external": {"urls": ["http://h", "http://h/v1/"]}}, "models[0].external.urls: names a server twice"),
        (
            {"external": {"urls": ["http://h"], "api_key_file": "a", "api_key_env": "B"}},
            "models[0].external.api_key_env: the key comes from api_key_file already",
        ),
        ({"external": {"urls": ["http://h"], "key": "p4ss"}}, "models[0].external.key: no such key"),
        ({"tier": "lazy"}, "models[0].tier: an external server is always there"),
        ({"engine": {"max_num_seqs": 1}}, "models[0].engine: is for engines of ours"),
        ({"replicas": 2}, "models[0].replicas: is for engines of ours"),
        ({"fake": {}}, "models[0].fake: is for engines of ours"),
    ],
)
def test_what_is_wrong_with_one_is_named_by_its_path_and_not_quoted(fields: dict[str, Any], problem: str) -> None:
    model = {"id": "m", "tier": "resident", "context": 4096, "external": {"urls": ["http://h"]}, **fields}
    with pytest.raises(ValueError, match=r".") as refused:
        parse_config({"models": [model]})
    assert str(refused.value).startswith(problem)
    assert "p4ss" not in str(refused.value)


def test_an_adapter_has_no_external_base() -> None:
    models = [
        {"id": "m", "tier": "resident", "context": 4096, "external": {"urls": ["http://h"]}},
        {"id": "a", "base": "m", "adapter": "org/a"},
    ]
    with pytest.raises(ValidationError, match="is an external server"):
        Config.model_validate({"models": models})


def test_a_configuration_survives_the_trip_to_the_router() -> None:
    settings = config("https://h/v1", "http://[::1]:8000", api_key_file="k")
    assert Config.model_validate(settings.model_dump()) == settings
