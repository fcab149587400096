"""serve_app.engines.gate: who comes in, exactly how many at once, and that every place is given back."""

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

import orjson
import pytest
from starlette.types import Message, Receive, Scope, Send

from serve_app.engines.base import REFUSAL_HEADER, SECRET_HEADER
from serve_app.engines.gate import SERVED_PATHS, Gate

SECRET = "s3cret"
PLACES = 3


class App:
    """An engine's app: every request stays until `finish` is set, then answers or raises."""

    def __init__(self) -> None:
        self.running = 0
        self.most = 0
        self.finish = asyncio.Event()
        self.error: BaseException | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            if scope["path"] not in ("/health", "/v1/models"):
                await self.finish.wait()
            if self.error:
                raise self.error
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"ok"})
        finally:
            self.running -= 1


class Reply:
    """What one request got."""

    def __init__(self) -> None:
        self.messages: list[Message] = []

    async def send(self, message: Message) -> None:
        self.messages.append(message)

    @property
    def status(self) -> int:
        return int(self.messages[0]["status"])

    @property
    def refusal(self) -> str | None:
        return {name.decode(): value.decode() for name, value in self.messages[0]["headers"]}.get(REFUSAL_HEADER)


@pytest.fixture
def app() -> App:
    return App()


@pytest.fixture
def gate(app: App) -> Gate:
    return Gate(app, max_ongoing=PLACES, secret=SECRET)


async def never() -> Message:
    await asyncio.Event().wait()
    raise AssertionError


async def ask(gate: Gate, path: str = "/v1/completions", secret: str | None = SECRET, kind: str = "http") -> Reply:
    reply = Reply()
    headers = [] if secret is None else [(SECRET_HEADER.encode(), secret.encode())]
    await gate({"type": kind, "path": path, "headers": headers}, never, reply.send)
    return reply


async def holds(condition: Callable[[], object]) -> None:
    """Let every ready task run until the condition holds."""
    for _ in range(1000):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError("it never came to hold")


async def running(gate: Gate, app: App, count: int) -> list[asyncio.Task[Reply]]:
    tasks = [asyncio.create_task(ask(gate)) for _ in range(count)]
    await holds(lambda: app.running == count)
    return tasks


@pytest.mark.case(70)
async def test_the_limit_is_exact_and_the_next_request_is_refused_at_once(gate: Gate, app: App) -> None:
    tasks = [asyncio.create_task(ask(gate)) for _ in range(20)]
    await holds(lambda: sum(task.done() for task in tasks) == 20 - PLACES)
    refused = [task.result() for task in tasks if task.done()]
    assert all((reply.status, reply.refusal) == (503, "full") for reply in refused)
    app.finish.set()
    answers = [(await task).status for task in tasks]
    assert (answers.count(200), app.most, gate.in_flight, gate.served) == (PLACES, PLACES, 0, PLACES)


async def test_place_that_became_free_is_given_to_the_next(gate: Gate, app: App) -> None:
    tasks = await running(gate, app, PLACES)
    tasks[0].cancel()
    await holds(tasks[0].done)
    app.finish.set()
    assert (await ask(gate)).status == 200


@pytest.mark.parametrize("path", ["/health", "/v1/models"])
async def test_health_and_models_answer_when_full_and_when_closed(gate: Gate, app: App, path: str) -> None:
    tasks = await running(gate, app, PLACES)
    gate.close()
    assert (await ask(gate, path)).status == 200
    app.finish.set()
    await asyncio.gather(*tasks)


async def test_gate_in_use_does_not_close_and_still_admits(gate: Gate, app: App) -> None:
    await running(gate, app, 1)
    assert not gate.close_if_idle()
    app.finish.set()
    assert (await ask(gate)).status == 200


async def test_idle_gate_closes_and_refuses_the_request_that_comes_right_after(gate: Gate) -> None:
    assert gate.close_if_idle()
    reply = await ask(gate)
    assert (reply.status, reply.refusal) == (503, "closed")


async def test_request_and_close_at_the_same_moment_never_both_succeed(gate: Gate, app: App) -> None:
    app.finish.set()
    for _ in range(50):
        fresh = Gate(app, max_ongoing=1, secret=SECRET)
        task = asyncio.create_task(ask(fresh))
        closed = fresh.close_if_idle()
        assert ((await task).status == 503) == closed


async def test_closed_gate_lets_what_runs_finish(gate: Gate, app: App) -> None:
    tasks = await running(gate, app, 2)
    gate.close()
    assert (await ask(gate)).refusal == "closed"
    idle = asyncio.create_task(gate.wait_idle())
    await asyncio.sleep(0)
    assert not idle.done()
    app.finish.set()
    await idle
    assert [(await task).status for task in tasks] == [200, 200]


async def test_dead_engine_refuses_so_that_the_request_may_go_elsewhere(gate: Gate) -> None:
    gate.dead = True
    assert (await ask(gate)).refusal == "dead"


@pytest.mark.parametrize("secret", [None, "", "S3CRET", SECRET + "x", "é"])
async def test_request_without_the_secret_is_a_403_and_reaches_nothing(
    gate: Gate, app: App, secret: str | None
) -> None:
    for path in ("/v1/completions", "/health", "/nope"):
        reply = await ask(gate, path, secret)
        assert (reply.status, reply.refusal) == (403, None)
    assert app.most == 0


@pytest.mark.case(13, 127)
@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/metrics/",
        "/sleep",
        "/invocations",
        "/v1",
        "//v1/completions",
        "/V1/completions",
        "/v1/completions/",
    ],
)
async def test_path_that_is_not_served_is_a_404_and_reaches_nothing(gate: Gate, app: App, path: str) -> None:
    assert path not in SERVED_PATHS
    reply = await ask(gate, path)
    assert (reply.status, app.most) == (404, 0)
    assert set(orjson.loads(reply.messages[1]["body"])["error"]) == {"message", "type", "param", "code"}


async def test_websocket_is_refused_even_with_the_secret(gate: Gate, app: App) -> None:
    reply = await ask(gate, kind="websocket")
    assert [message["type"] for message in reply.messages] == ["websocket.close"]
    assert app.most == 0


async def test_lifespan_reaches_the_engines_app(app: App) -> None:
    seen: list[str] = []

    async def inner(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(scope["type"])

    await Gate(inner, max_ongoing=1, secret=SECRET)({"type": "lifespan"}, never, Reply().send)
    assert seen == ["lifespan"]


@pytest.mark.parametrize("error", [RuntimeError("boom"), ConnectionResetError(), asyncio.CancelledError()])
async def test_count_returns_to_zero_when_the_app_fails(gate: Gate, app: App, error: BaseException) -> None:
    app.error = error
    app.finish.set()
    for _ in range(PLACES + 1):
        with pytest.raises(type(error)):
            await ask(gate)
    assert gate.in_flight == 0
    await gate.wait_idle()


@pytest.mark.case(22)
async def test_count_returns_to_zero_when_the_client_leaves(gate: Gate, app: App) -> None:
    tasks = await running(gate, app, PLACES)
    for task in tasks:
        task.cancel()
    results: list[Any] = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(result, asyncio.CancelledError) for result in results)
    assert gate.in_flight == 0
    assert gate.close_if_idle()


async def test_prompt_tokens_in_flight_are_estimated_from_the_bodies(app: App, gate: Gate) -> None:
    def request(size: int) -> Scope:
        headers = [(SECRET_HEADER.encode(), SECRET.encode()), (b"content-length", str(size).encode())]
        return {"type": "http", "path": "/v1/completions", "headers": headers}

    calls = [asyncio.create_task(gate(request(size), never, Reply().send)) for size in (400, 2000)]
    await asyncio.sleep(0)
    assert gate.in_flight_tokens == 600
    app.finish.set()
    await asyncio.gather(*calls)
    assert gate.in_flight_tokens == 0


# Streams of the Responses API


async def through_gate(path: str, *parts: bytes, kind: bytes = b"text/event-stream; charset=utf-8") -> bytes:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", kind)]})
        for part in parts:
            await send({"type": "http.response.body", "body": part, "more_body": True})
        if b"breaks" in parts:
            raise RuntimeError
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def receive() -> Message:
        return {"type": "http.request", "body": b""}

    reply = Reply()
    scope: Scope = {"type": "http", "path": path, "headers": [(SECRET_HEADER.encode(), SECRET.encode())]}
    with contextlib.suppress(RuntimeError):
        await Gate(app, max_ongoing=1, secret=SECRET)(scope, receive, reply.send)
    return b"".join(message.get("body", b"") for message in reply.messages)


async def test_a_stream_of_responses_ends_as_all_streams_do() -> None:
    assert await through_gate("/v1/responses", b"one", b"two") == b"onetwodata: [DONE]\n\n"


async def test_nothing_is_added_to_what_breaks_off_or_is_no_stream_of_responses() -> None:
    assert await through_gate("/v1/responses", b"one", b"breaks") == b"onebreaks"
    assert await through_gate("/v1/responses", b"{}", kind=b"application/json") == b"{}"
    assert await through_gate("/v1/chat/completions", b"one") == b"one"
