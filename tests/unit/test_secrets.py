"""No key, prompt or engine secret is in a log, an error, a header, a record or `ps`; see docs/security.md."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import orjson
import psutil
import pytest
from asgi_call import Call
from scripted_pool import SECRET, Pool
from scripted_upstream import DONE, Script, Upstream, answer, error, event, hang_up, stream

from serve_app import log
from serve_app.config import Config
from serve_app.engines.base import EngineSpec
from serve_app.engines.port import reserve_port
from serve_app.engines.process import EngineProcess, new_secret
from serve_app.models.replicas import PublishedModel, Replica, set_replicas
from serve_app.router.app import RouterApp

KEY, WRONG = "sk-the-key-4711", "sk-not-a-key-0815"
PROMPT, ANSWER = "my-private-words", "the-private-answer"
TOOL, USER = "private_tool", "private-user"
PRIVATE = (KEY, WRONG, PROMPT, TOOL, USER, SECRET)


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Iterator[list[str]]:
    """Everything that any logger says at any level, traces of errors too, and what is printed."""
    lines: list[str] = []

    class Listening(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(logging.Formatter(log.FORMAT).format(record))

    handler = Listening(0)
    loggers = [logging.getLogger(), logging.getLogger("serve_app")]
    for logger in loggers:
        monkeypatch.setattr(logger, "level", 1)
        logger.addHandler(handler)
    logging.disable(logging.NOTSET)
    yield lines
    for logger in loggers:
        logger.removeHandler(handler)
    captured = capfd.readouterr()
    text = "\n".join([*lines, captured.out, captured.err])
    assert not [word for word in (*PRIVATE, ANSWER) if word in text]


def config(tmp_path: Path) -> Config:
    key = {"id": "one", "sha256": hashlib.sha256(KEY.encode()).hexdigest()}
    models = [
        {"id": "hot", "tier": "resident", "source": "org/hot", "context": 4096, "queue": {"wait_s": 0.01}},
        {"id": "cold", "tier": "lazy", "source": "org/cold", "context": 2048},
    ]
    shadow = {"enabled": True, "file": str(tmp_path / "shadow.jsonl")}
    return Config.model_validate(
        {
            "models": models,
            "security": {"keys": [key]},
            "routing": {"shadow": shadow},
            "router": {"max_body_bytes": 4096, "body_timeout_s": 0.05, "hold_s": 0.05},
            "log_level": "debug",
            "audit": {"directory": str(tmp_path / "audit")},
        }
    )


@pytest.fixture
async def pool(tmp_path: Path) -> AsyncIterator[Pool]:
    yield Pool()
    for name in ("Hot", "Pool"):
        set_replicas(name, [])


def chat(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": PROMPT}], "user": USER, **fields}


ECHO = f"1 validation error [type=bool_parsing, input_value='{PROMPT}', input_type=str]"
STREAMS = (1, 2, 3)
SCRIPTS: list[Script] = [
    answer(200, {"choices": [{"message": {"content": ANSWER}}]}),
    stream(event(ANSWER), DONE),
    stream(event(ANSWER), end="cut"),
    stream(event(ANSWER), b'data: {"error": {"message": "' + PROMPT.encode() + b' failed", "code": 500}}\n\n'),
    answer(400, error(400, ECHO, "temperature")),
    answer(422, error(422, f"[{{'loc': ('body',), 'input': '{PROMPT}'}}]")),
    answer(500, error(500, f"RuntimeError: could not sample {PROMPT}")),
    answer(500, f"Traceback (most recent call last): {PROMPT}".encode()),
    answer(200, ANSWER.encode()),
    answer(503, {"error": {"message": PROMPT}}, refusal="full"),
    answer(403, {"error": {"message": PROMPT}}),
    hang_up,
]
TOOLS = [{"type": "function", "function": {"name": TOOL, "parameters": {"type": "object"}}}]
BODIES: list[object] = [
    chat(),
    chat(messages=[{"role": "system", "content": PROMPT}, {"role": "user", "content": PROMPT}]),
    chat(tools=TOOLS, tool_choice="required"),
    chat(model=PROMPT),
    chat(model=f"{PROMPT}:think"),
    chat(reasoning_effort=PROMPT),
    chat(mode=PROMPT, thinking_token_budget=PROMPT),
    chat(temperature=PROMPT),
    chat(stop=[PROMPT] * 17),
    chat(tools=[PROMPT]),
    chat(tools=[{"type": "function", "function": {"name": TOOL, "parameters": {"type": TOOL}}}]),
    chat(response_format={"type": "json_schema", "json_schema": {"name": TOOL, "schema": {"type": PROMPT}}}),
    chat(logit_bias={PROMPT: 1}),
    chat(chat_template_kwargs={"enable_thinking": PROMPT}),
    chat(conversation=PROMPT),
    chat(**{PROMPT: PROMPT}),
    chat(max_tokens=10**6),
    {"messages": PROMPT},
    {"messages": [PROMPT]},
    {"messages": [{"role": PROMPT, "content": PROMPT}]},
    {"messages": [{"role": "user", "content": {"text": PROMPT}}]},
    {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": f"http://{PROMPT}/"}}]}]},
    PROMPT,
    [PROMPT],
    f'{{"messages": "{PROMPT}'.encode(),
    f'{{"messages": "{PROMPT}", "pad": "{"x" * 5000}"}}'.encode(),
]
HEADERS: list[dict[str, str]] = [
    {"authorization": f"Bearer {KEY}"},
    {"x-api-key": KEY, "x-router-debug": "true", "x-session-id": PROMPT},
    {"authorization": f"Bearer {KEY}", "content-type": f"text/{PROMPT}"},
    {"authorization": f"Bearer {KEY}", "prefer": f"wait=0 {PROMPT}", "traceparent": PROMPT},
    {"authorization": f"Bearer {WRONG}"},
    {"authorization": f"Basic {WRONG}"},
    {},
]


def _asking_for(*, streams: bool) -> Callable[[object], object]:
    """What an engine is asked for: a stream of one that streams."""
    return lambda body: {**body, "stream": streams} if isinstance(body, dict) else body


@pytest.mark.parametrize("script", range(len(SCRIPTS)))
async def test_nothing_private_is_logged_recorded_or_sent_back(
    script: int, pool: Pool, said: list[str], tmp_path: Path
) -> None:
    """Whatever the engine does, and whatever is wrong with a request."""
    pool.woken.set()
    pool.answers.append(RuntimeError(f"actor died with {SECRET}"))
    async with Upstream(SCRIPTS[script]) as upstream:
        set_replicas("Hot", [Replica("hot-0", {"hot": upstream.url}, SECRET, {"hot": PublishedModel("awake")}, True)])
        set_replicas("Pool", [Replica("pool-0", {}, SECRET, {}, True)])
        app = RouterApp(config(tmp_path), {"hot": "Hot", "cold": "Pool"}, pool, "test")
        app._audit.start()
        calls = [
            await Call(app, body, path=path, headers=headers).done()
            for body in map(_asking_for(streams=script in STREAMS), BODIES)
            for headers in HEADERS
            for path in ("/v1/chat/completions", "/v1/router/preview")
        ]
        calls.append(await Call(app, chat(model="cold"), headers=HEADERS[0]).done())
        calls.append(await Call(app, chunks=[PROMPT.encode()], unfinished=True, headers=HEADERS[0]).done())
        calls += [
            await Call(app, path=path, method="GET", headers=HEADERS[0]).done()
            for path in (f"/{PROMPT}", f"/v1/models/{PROMPT}", f"/v1/router/models/{PROMPT}/load", "/ready")
        ]
        await app._decider.close()
        await app._relay.close()
        app._audit.close()
    assert len({call.status for call in calls}) > 3
    for call in calls:
        text = call.body.decode() + str(call.headers)
        assert not [word for word in PRIVATE if word in text], text
        assert "Traceback" not in text
    assert said is not None
    (audit,) = (tmp_path / "audit").iterdir()
    for record in (audit, tmp_path / "shadow.jsonl"):
        recorded = record.read_text()
        assert recorded
        assert not [word for word in (*PRIVATE, ANSWER) if word in recorded]


async def test_param_of_an_engines_error_is_a_field_and_not_a_word_of_the_clients(pool: Pool, tmp_path: Path) -> None:
    async with Upstream(answer(400, error(400, "bad", PROMPT))) as upstream:
        set_replicas("Hot", [Replica("hot-0", {"hot": upstream.url}, SECRET, {"hot": PublishedModel("awake")}, True)])
        app = RouterApp(config(tmp_path), {"hot": "Hot", "cold": "Pool"}, pool, "test")
        call = await Call(app, chat(logit_bias={PROMPT: 1}), headers=HEADERS[0]).done()
        await app._relay.close()
    assert call.error["param"] is None


async def test_engine_gets_the_listed_headers_and_no_others(pool: Pool, tmp_path: Path) -> None:
    sent = {
        "authorization": f"Bearer {KEY}",
        "x-api-key": KEY,
        "cookie": "c=1",
        "proxy-authorization": "p",
        "x-forwarded-for": "1.2.3.4",
        "forwarded": "for=1.2.3.4",
        "x-switchyard-secret": "guess",
        "X-Switchyard-Secret": "guess",
        "x-request-id": "theirs",
        "x-session-id": USER,
        "x-router-debug": "true",
        "x-data-parallel-rank": "1",
        "x-vllm-anything": "1",
        "accept-encoding": "br",
        "accept": "text/html",
        "expect": "100-continue",
        "te": "trailers",
        "origin": "https://x.example",
        "referer": "https://x.example",
        "user-agent": "theirs",
        "content-type": "application/json; charset=utf-8",
        "traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
        "tracestate": "a=b",
        "baggage": "user=1",
    }
    async with Upstream(answer(200, {})) as upstream:
        set_replicas("Hot", [Replica("hot-0", {"hot": upstream.url}, SECRET, {"hot": PublishedModel("awake")}, True)])
        app = RouterApp(config(tmp_path), {"hot": "Hot", "cold": "Pool"}, pool, "test")
        assert (await Call(app, chat(), headers=sent).done()).status == 200
        await app._relay.close()
    (seen,) = upstream.seen
    ours = {"host", "content-length"}
    passed = {"x-request-id", "traceparent", "tracestate", "content-type", "x-switchyard-secret"}
    assert set(seen.headers) == ours | passed
    assert seen.headers["x-switchyard-secret"] == SECRET
    assert seen.headers["content-type"] == "application/json"
    assert not {"theirs", "br", "text/html"} & set(seen.headers.values())


async def test_answer_holds_no_header_of_the_engines(pool: Pool, tmp_path: Path) -> None:
    async def script(writer: asyncio.StreamWriter) -> None:
        writer.write(
            b"HTTP/1.1 200 OK\r\nserver: engine\r\nset-cookie: a=b\r\nx-switchyard-secret: " + SECRET.encode() + b"\r\n"
            b"content-type: application/json\r\nconnection: close\r\ncontent-length: 2\r\n\r\n{}"
        )

    async with Upstream(script) as upstream:
        set_replicas("Hot", [Replica("hot-0", {"hot": upstream.url}, SECRET, {"hot": PublishedModel("awake")}, True)])
        app = RouterApp(config(tmp_path), {"hot": "Hot", "cold": "Pool"}, pool, "test")
        call = await Call(app, chat(), headers=HEADERS[0]).done()
        await app._relay.close()
    assert call.status == 200
    assert {"server", "set-cookie", "x-switchyard-secret"}.isdisjoint(call.headers)


async def test_engine_hears_its_secret_where_ps_does_not_see_it() -> None:
    secret, token = new_secret(), "hf_private"
    address, reserved = reserve_port("127.0.0.1")
    spec = EngineSpec("m", "fake", "", {"text": ANSWER}, {"HF_TOKEN": token}, 4)
    engine = EngineProcess(spec, address, secret=secret)
    try:
        await engine.start()
        assert engine.pid
        host = psutil.Process(engine.pid)
        for process in (host, *host.children(recursive=True)):
            shown = " ".join(process.cmdline()) + str(process.environ())
            assert secret not in shown
            assert token not in shown
        assert secret not in " ".join(sys.argv) + str(os.environ)
    finally:
        await engine.stop(1)
        reserved.close()


def test_secrets_of_engines_are_long_and_never_the_same() -> None:
    made = {new_secret() for _ in range(100)}
    assert len(made) == 100
    assert min(map(len, made)) >= 32


def test_policy_hash_in_every_answer_tells_nothing_of_keys(tmp_path: Path) -> None:
    text = orjson.dumps(config(tmp_path).model_dump()).decode()
    assert KEY not in text
