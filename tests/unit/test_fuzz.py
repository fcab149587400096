"""The whole router against generated requests: every answer has the API's form, and none says what was sent.

One body and one set of headers go to every endpoint that takes a body.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
from collections.abc import AsyncIterator, Coroutine, Iterator
from typing import Any, Protocol

import orjson
import pytest
from asgi_call import Call
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scripted_pool import SECRET, Pool
from scripted_upstream import DONE, Upstream, answer, event, stream

from serve_app.config import Config
from serve_app.models.replicas import PublishedModel, Replica, set_replicas
from serve_app.router.app import RouterApp

REQUESTS = 20_000
MESSAGES = "/v1/messages"
STREAMING = ("/v1/chat/completions", "/v1/completions", "/v1/responses", MESSAGES)
PLAIN = ("/v1/messages/count_tokens", "/v1/embeddings", "/tokenize", "/detokenize", "/v1/score", "/v1/rerank")
PATHS = (*STREAMING, *PLAIN, "/v1/router/preview")
# Of the examples, how many are well-formed JSON objects; the rest is bytes, and paths with methods.
OBJECTS, BYTES, TARGETS = 0.7, 0.15, 0.15

KEY, MARK = "sk-zebra-4711", "zebra"
STATUSES = {200, 202, 400, 401, 403, 404, 405, 408, 413, 415, 429, 431, 503, 504}
TYPES = {"invalid_request_error", "authentication_error", "permission_error", "rate_limit_error", "server_error"}
# Anthropic's own.
TYPES |= {"not_found_error", "request_too_large", "overloaded_error", "timeout_error", "api_error"}


def config() -> Config:
    thinks = {"thinking": {"supported": True}, "engine": {"reasoning_parser": "qwen3"}}
    models = [
        {"id": "org/hot:1b", "aliases": ["nick"], "tier": "resident", "source": "o/hot", "context": 4096, **thinks},
        {"id": "cold", "tier": "lazy", "source": "o/cold", "context": 2048},
        {"id": "seer", "tier": "lazy", "source": "o/s", "context": 2048, "abilities": ["chat", "vision"]},
        {"id": "embedder", "tier": "lazy", "source": "o/e", "context": 512, "abilities": ["embeddings"]},
        {"id": "judge", "tier": "lazy", "source": "o/j", "context": 512, "abilities": ["score"]},
    ]
    keys = [{"id": "one", "sha256": hashlib.sha256(KEY.encode()).hexdigest(), "admin": True}]
    router = {"max_body_bytes": 65536, "body_timeout_s": 1, "hold_s": 1}
    kept = {"enabled": True, "max_conversations": 50}
    given = {"models": models, "router": router, "security": {"keys": keys}, "conversations": kept}
    given["audit"] = {"sink": "none"}
    return Config.model_validate(given)


# What clients send

words = st.sampled_from(
    [
        MARK,
        f"solve the {MARK} step by step",
        f"证明 {MARK} 是质数 🚀",
        f"```python\nprint('{MARK}')\n```",
        f"</think>{MARK}<tool_call>",
        f"<system-reminder>{MARK}</system-reminder> do",
        f"/think {MARK} /no_think",
        f"{MARK}\x00\u202e\u2028\ud7ff\ufffd",
        f"{MARK} " * 600,
        "",
    ]
)
numbers = st.sampled_from([0, 1, -1, 2, 7, 128, 4096, 10**6, 2**63, -(2**63), 2**64 - 1, 0.5, 1e308, -0.0, 1e-320])
plain = st.none() | st.booleans() | numbers | words
junk = st.recursive(
    plain, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3), max_leaves=6
)
urls = st.sampled_from(
    ["data:image/png;base64,AAAA", f"http://{MARK}/", "http://[::1", "file:///etc/passwd", "", "//x", "https://a@b:c/"]
)
part = st.one_of(
    st.fixed_dictionaries({"type": st.just("text"), "text": words}),
    st.fixed_dictionaries({"type": st.just("image_url"), "image_url": st.fixed_dictionaries({"url": urls}) | urls}),
    st.fixed_dictionaries({"type": st.sampled_from(["input_audio", "video_url", "file", "image", "document", MARK])}),
    st.fixed_dictionaries({"type": st.just("tool_use"), "id": words, "name": words, "input": junk}),
    st.fixed_dictionaries({"type": st.just("tool_result"), "tool_use_id": words, "content": junk}),
    st.fixed_dictionaries({"type": st.just("thinking"), "thinking": words}),
    junk,
)
call = st.fixed_dictionaries(
    {"id": words, "type": st.just("function"), "function": st.fixed_dictionaries({"name": words, "arguments": words})}
)
message = st.fixed_dictionaries(
    {
        "role": st.sampled_from(["user", "user", "user", "system", "assistant", "tool", "developer", "function", MARK]),
        "content": st.one_of(words, st.lists(part, max_size=3), st.none()),
    },
    optional={
        "tool_calls": st.lists(call | junk, max_size=2) | st.none(),
        "tool_call_id": words,
        "reasoning_content": words,
        "name": words,
        MARK: junk,
    },
)
schema = st.one_of(
    st.just({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}),
    st.just({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}),
    st.fixed_dictionaries({"type": st.sampled_from(["object", "string", MARK, ""]), "pattern": st.just("((a+)+")}),
    junk,
)
tool = st.one_of(
    st.fixed_dictionaries(
        {
            "type": st.just("function"),
            "function": st.fixed_dictionaries({"name": words}, optional={"parameters": schema, "strict": junk}),
        }
    ),
    st.fixed_dictionaries({"name": words, "input_schema": schema}, optional={"description": junk}),
    junk,
)
NAMES = ["auto", "auto:think", "auto:fast", "org/hot:1b", "nick", "nick:think", "cold", "seer"]
# What a request may hold, and what an engine would be sent.
SANE: dict[str, st.SearchStrategy[Any]] = {
    "model": st.sampled_from(NAMES),
    "stream": st.booleans(),
    "stream_options": st.fixed_dictionaries({"include_usage": st.booleans()}),
    "max_tokens": st.integers(1, 100),
    "max_completion_tokens": st.integers(1, 100),
    "temperature": st.floats(0, 2),
    "top_p": st.floats(0.1, 1),
    "n": st.integers(1, 4),
    "seed": st.integers(0, 2**63 - 1),
    "stop": words | st.lists(words.map(lambda text: text[:200]), max_size=3),
    "tools": st.lists(tool, max_size=3),
    "tool_choice": st.sampled_from(["auto", "none"]),
    "response_format": st.sampled_from([{"type": "text"}, {"type": "json_object"}]),
    "logit_bias": st.dictionaries(st.sampled_from(["1", "2"]), st.integers(-100, 100), max_size=2),
    "chat_template_kwargs": st.fixed_dictionaries({"enable_thinking": st.booleans(), MARK: words}),
    "enable_thinking": st.booleans(),
    "reasoning_effort": st.sampled_from(["none", "minimal", "low", "high", "xhigh", "max"]),
    "thinking_token_budget": st.integers(0, 5000),
    "mode": st.sampled_from(["thinking", "non-thinking"]),
    "conversation": words,
    "user": words,
    "store": st.booleans(),
    "instructions": words,
    "system": words | st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": words}), max_size=2),
    "stop_sequences": st.lists(words.map(lambda text: text[:200]), max_size=3),
    "thinking": st.sampled_from([{"type": "disabled"}, {"type": "adaptive"}, {"type": "enabled", "budget_tokens": 64}]),
    "output_config": st.fixed_dictionaries({}, optional={"effort": st.sampled_from(["low", "max"]), "format": junk}),
    "max_output_tokens": st.integers(16, 100),
    "metadata": junk,
    "priority": st.integers(0, 3),
    MARK: junk,
}
WILD: dict[str, st.SearchStrategy[Any]] = {
    **dict.fromkeys(SANE, junk),
    "messages": st.lists(message | junk, max_size=3) | junk,
    "model": st.sampled_from([MARK, "embedder", "judge", f"{MARK}:think", "auto:", ":think", "auto:auto", "cold:fast"])
    | junk,
    "prompt": words | st.lists(words, max_size=2) | st.lists(st.integers(), max_size=2) | junk,
    "input": words | st.lists(words, max_size=2) | junk,
    "max_tokens": numbers,
    "temperature": numbers,
    "n": numbers,
    "top_logprobs": numbers,
    "prompt_logprobs": numbers,
    "thinking_token_budget": numbers,
    "logprobs": junk,
    "tool_choice": st.sampled_from(["required", MARK]) | st.fixed_dictionaries({"type": words, "function": junk}),
    "response_format": st.fixed_dictionaries(
        {"type": st.sampled_from(["text", "json_object", "json_schema", MARK])},
        optional={"json_schema": st.fixed_dictionaries({"name": words, "schema": schema}) | junk},
    ),
    "structured_outputs": st.fixed_dictionaries({"json": schema}) | st.fixed_dictionaries({"regex": words}) | junk,
    "guided_json": schema,
    "chat_template_kwargs": st.fixed_dictionaries({"enable_thinking": junk}),
    "reasoning_effort": words,
    "reasoning": st.fixed_dictionaries({"effort": words | numbers}) | junk,
    "thinking": st.fixed_dictionaries({"type": words, "budget_tokens": numbers}) | junk,
    "mode": words,
    "previous_response_id": words,
    "text": st.fixed_dictionaries({"format": st.fixed_dictionaries({"type": words, "schema": schema})}) | junk,
    "extra_body": st.dictionaries(st.sampled_from(["mode", "stop", "messages", "chat_template_kwargs", MARK]), junk),
}


@st.composite
def bodies(draw: st.DrawFn) -> dict[str, Any]:
    """A request for all endpoints at once, with at most two things wrong."""
    messages = draw(st.lists(message, min_size=1, max_size=3))
    body: dict[str, Any] = {"messages": messages, "prompt": MARK, "input": draw(words | st.just(messages))}
    body |= {"tokens": [1, 2], "text_1": MARK, "text_2": [MARK], "query": MARK, "documents": [MARK]}
    if draw(st.booleans()):
        body["max_tokens"] = 9  # which one of the APIs needs
    for name in draw(st.lists(st.sampled_from(list(SANE)), max_size=5, unique=True)):
        body[name] = draw(SANE[name])
    for name in draw(st.lists(st.sampled_from(list(WILD)), max_size=2, unique=True)):
        body[name] = draw(WILD[name])
    return body


visible = st.text(st.characters(min_codepoint=0x20, max_codepoint=0xFF, exclude_characters="\x7f"), max_size=20)
HEADERS: dict[str, st.SearchStrategy[str]] = {
    "content-type": st.sampled_from(["application/json", "application/json; charset=x", "text/plain", "", ";", MARK]),
    "content-encoding": st.sampled_from(["identity", "gzip", MARK]),
    "prefer": st.sampled_from(["wait=0", "wait=999999", "wait=x", f"wait=0; {MARK}", "respond-async, wait=1"]),
    "x-session-id": words.map(lambda text: text.encode().decode("latin-1")) | visible,
    "x-router-debug": st.sampled_from(["true", MARK]),
    "traceparent": visible,
    "tracestate": visible,
    "accept": visible,
    "origin": visible,
    "x-api-key": st.sampled_from([KEY, MARK]),
    "expect": visible,
    "x-request-id": visible,
}


@st.composite
def some_headers(draw: st.DrawFn) -> dict[str, str]:
    """With the key nine times in ten."""
    headers = {"authorization": f"Bearer {KEY}"}
    if draw(st.integers(0, 9)) == 9:
        headers = draw(st.sampled_from([{}, {"authorization": "Bearer"}, {"authorization": f"Bearer {MARK}"}]))
    for name in draw(st.lists(st.sampled_from(list(HEADERS)), max_size=2, unique=True)):
        headers = headers | {name: draw(HEADERS[name])}
    return headers


# What they get


class Ask(Protocol):
    def __call__(self, path: str, method: str, body: bytes, headers: dict[str, str]) -> Call: ...


MESSAGE = [
    b'event: message_start\ndata: {"type":"message_start","message":{}}\n\n',
    b'event: content_block_start\ndata: {"type":"content_block_start","index":0,"content_block":{"type":"text"}}\n\n',
    b'event: content_block_stop\ndata: {"type":"content_block_stop","index":0}\n\n',
    b'event: message_delta\ndata: {"type":"message_delta","delta":{"stop_reason":"end_turn"}}\n\n',
    b'event: message_stop\ndata: {"type":"message_stop"}\n\n',
]


@contextlib.asynccontextmanager
async def service() -> AsyncIterator[RouterApp]:
    """Every model awake, on an engine that answers what it is asked for."""

    async def script(writer: asyncio.StreamWriter) -> None:
        seen = upstream.seen.pop()
        streams = seen.path in STREAMING and seen.body.get("stream") is True
        whole = {"choices": [{"index": 0, "message": {"content": "ok"}, "finish_reason": "stop"}]}
        if seen.path == MESSAGES:
            whole = {"content": [{"type": "text", "text": "ok"}], "stop_reason": "end_turn"}
            await (stream(*MESSAGE) if streams else answer(200, whole))(writer)
            return
        await (stream(event("ok"), DONE) if streams else answer(200, whole))(writer)

    async with Upstream(script) as upstream:
        awake = {name: PublishedModel("awake") for name in ("cold", "seer", "embedder", "judge")}
        hot = {"org/hot:1b": PublishedModel("awake")}
        set_replicas("Hot", [Replica("hot-0", {"org/hot:1b": upstream.url}, SECRET, hot, True)])
        set_replicas("Pool", [Replica("pool-0", dict.fromkeys(awake, upstream.url), SECRET, awake, True)])
        app = RouterApp(config(), {"org/hot:1b": "Hot", **dict.fromkeys(awake, "Pool")}, Pool(), "test")
        yield app
        await app._decider.close()
        await app._relay.close()
    for name in ("Hot", "Pool"):
        set_replicas(name, [])


@pytest.fixture(scope="module")
def ask() -> Iterator[Ask]:
    """One request to the one service."""
    with asyncio.Runner() as runner:
        stack = contextlib.AsyncExitStack()
        app = runner.run(stack.enter_async_context(service()))

        def ask(path: str, method: str, body: bytes, headers: dict[str, str]) -> Call:
            async def asked() -> Call:
                return await Call(app, body, path=path, method=method, headers=headers).done()

            coroutine: Coroutine[Any, Any, Call] = asked()
            return runner.run(coroutine)

        yield ask
        runner.run(stack.aclose())


def check(call: Call, headers: dict[str, str], path: str) -> None:
    """What holds for every answer."""
    assert call.status in STATUSES
    text = call.body.decode()
    said = {name: value for name, value in call.headers.items() if value != headers.get(name)}
    for word in (MARK, KEY, SECRET, "Traceback", 'File "', "serve_app"):
        assert word not in text + str(said)
    assert call.headers["x-request-id"]
    if call.headers["content-type"].startswith("text/event-stream"):
        assert call.status == 200
        if path == MESSAGES:
            assert call.named_events[-1]["type"] == "message_stop"
            return
        assert call.events
        # OpenAI ends streams of the Responses API with an event of their own.
        assert path == "/v1/responses" or call.events[-1] == b"[DONE]"
    elif call.status >= 400:
        error = call.anthropic_error if path.startswith(MESSAGES) else call.error
        assert error["type"] in TYPES
        assert error["message"]
        assert (call.status == 503) == ("retry-after" in call.headers)
    else:
        assert isinstance(call.json, dict)
    if "authorization" not in headers and headers.get("x-api-key") != KEY:
        assert call.status in (200, 401, 405)  # 200: the probes


def examples(share: float, requests: int) -> settings:
    return settings(
        max_examples=int(REQUESTS * share / requests),
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    """A warning a request would be most of the time."""
    caplog.set_level(logging.CRITICAL, "serve_app")


@examples(OBJECTS, len(PATHS))
@given(body=bodies(), headers=some_headers())
def test_no_body_makes_a_fault_or_is_echoed(ask: Ask, body: dict[str, Any], headers: dict[str, str]) -> None:
    raw = orjson.dumps(body, option=orjson.OPT_NON_STR_KEYS)
    for path in PATHS:
        check(ask(path, "POST", raw, headers), headers, path)


@st.composite
def broken_bytes(draw: st.DrawFn) -> bytes:
    """Bytes that are nearly a body."""
    raw = draw(st.sampled_from(SOUND))
    at, size = draw(st.integers(0, len(raw))), draw(st.integers(0, 8))
    put = draw(
        st.binary(max_size=6) | st.sampled_from([b"\\ud800", b"\\u0000", b"[" * 2000, b"NaN", b"1e999", b'"', b""])
    )
    return raw[:at] + put + raw[at + size :] if draw(st.booleans()) else raw[:at] + put


SOUND = [
    b'{"messages":[{"role":"user","content":"zebra"}],"stream":true,"max_tokens":5}',
    b'{"model":"auto","messages":[{"role":"user","content":[{"type":"text","text":"zebra"}]}],"stop":["zebra"]}',
    b'{"prompt":"zebra","input":["zebra"],"temperature":0.5,"n":1}',
    b"[]",
    b"",
]


@examples(BYTES, len(PATHS))
@given(raw=broken_bytes() | st.binary(max_size=60), headers=some_headers())
def test_no_bytes_make_a_fault_or_are_echoed(ask: Ask, raw: bytes, headers: dict[str, str]) -> None:
    for path in PATHS:
        check(ask(path, "POST", raw, headers), headers, path)


SEGMENTS = "v1 V1  .. . models chat completions router preview health ready openapi.json cold load unload pin auto org"
segment = st.sampled_from([*SEGMENTS.split(" "), "hot:1b", MARK, "%2e", ";a=b", "\x00", "世", "a" * 300])
paths = st.lists(segment, max_size=6).map(lambda parts: "/" + "/".join(parts))
methods = st.sampled_from(["GET", "POST", "HEAD", "OPTIONS", "PUT", "DELETE", "TRACE", "PATCH", "get", MARK.upper()])


@examples(TARGETS, 1)
@given(path=paths, method=methods, headers=some_headers())
def test_no_path_or_method_makes_a_fault_or_is_echoed(
    ask: Ask, path: str, method: str, headers: dict[str, str]
) -> None:
    call = ask(path, method, SOUND[0], headers)
    if method == "HEAD":
        assert call.status in STATUSES
    else:
        check(call, headers, path)
