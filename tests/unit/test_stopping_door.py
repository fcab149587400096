"""A Router's listener that stops, as on an upgrade: whoever had reached it is answered, whatever the moment was."""

from __future__ import annotations

import asyncio
import contextlib
import logging.handlers
import time
from collections.abc import AsyncIterator
from typing import Any

from front import HOT, settings
from scripted_pool import SECRET, Pool
from scripted_upstream import Upstream, answer
from test_protocol import Connection, echo, free_port

from serve_app.models.replicas import PublishedModel, Replica, set_replicas
from serve_app.router.app import RouterApp
from serve_app.router.listener import Listener
from serve_app.service_schema import RouterSettings

HELLO = b"GET /hello HTTP/1.1\r\nhost: x\r\n\r\n"
BUSY_S = 0.5


async def app(scope: Any, receive: Any, send: Any) -> None:
    """As `echo`; `/busy` keeps the whole loop busy, and `/stream` is answered in two pieces with a pause."""
    path = scope.get("path")
    if path == "/stream":
        headers = [(b"content-length", b"2")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"1", "more_body": True})
        await asyncio.sleep(BUSY_S)
        await send({"type": "http.response.body", "body": b"2"})
        return
    if path == "/busy":
        time.sleep(BUSY_S)  # noqa: ASYNC251 # that is the point
    await echo(scope, receive, send)


@contextlib.asynccontextmanager
async def stopping(leave_s: float = 0, new_app: Any = None) -> AsyncIterator[tuple[Listener, Any]]:
    """A listener, and what opens a connection to it; afterwards it has stopped."""
    chosen = RouterSettings(port=free_port(), leave_s=leave_s, drain_s=5)
    listener = Listener(chosen, lambda: new_app(listener) if new_app else app, "test")
    listener.start()
    async with contextlib.AsyncExitStack() as opened:

        async def connect() -> Connection:
            async with asyncio.timeout(10):
                while True:
                    with contextlib.suppress(ConnectionRefusedError):
                        reader, writer = await asyncio.open_connection("127.0.0.1", chosen.port)
                        opened.callback(writer.close)
                        return Connection(reader, writer)

        await said(await connect())
        yield listener, connect
        await listener.stop()


async def said(connection: Connection, request: bytes = HELLO) -> tuple[int, str | None]:
    """Status, and what the answer says of the connection."""
    await connection.send(request)
    status, headers, _ = await connection.answer()
    return status, headers.get("connection")


async def begun(listener: Listener, connect: Any) -> asyncio.Task[None]:
    """The listener stops, and listens no more."""
    stop = asyncio.create_task(listener.stop())
    async with asyncio.timeout(10):
        with contextlib.suppress(ConnectionRefusedError):
            while not stop.done():
                _, writer = await asyncio.open_connection("127.0.0.1", listener._settings.port)
                writer.close()
                await asyncio.sleep(0.01)
    return stop


async def test_a_request_that_is_on_its_way_when_the_listener_stops_is_answered() -> None:
    async with stopping() as (listener, connect):
        fresh, kept, silent = await connect(), await connect(), await connect()
        assert await said(kept) == (200, None)
        stop = await begun(listener, connect)
        assert await said(fresh) == (200, "close")
        assert await said(kept) == (200, "close")
        for connection in (fresh, kept, silent):
            assert await connection.closed()
        await stop


async def test_a_connection_whose_answer_was_under_way_takes_one_request_more() -> None:
    async with stopping() as (listener, connect):
        connection = await connect()
        await connection.send(HELLO.replace(b"hello", b"stream"))
        head = await connection.reader.readuntil(b"\r\n\r\n")
        assert b"connection: close" not in head
        stop = await begun(listener, connect)
        assert await connection.reader.readexactly(2) == b"12"
        assert await said(connection) == (200, "close")
        assert await connection.closed()
        await stop


async def test_connections_that_the_kernel_has_accepted_are_answered_too() -> None:
    """The loop has had no time for them yet when it learns that it is to stop."""
    async with stopping() as (listener, connect):
        busy = await connect()
        busy.writer.write(HELLO.replace(b"hello", b"busy"))
        await busy.writer.drain()
        await asyncio.sleep(BUSY_S / 5)  # not a wait for a state: it is busy now
        waiting = [await connect() for _ in range(20)]
        stop = asyncio.create_task(listener.stop())
        answers = await asyncio.gather(*(said(connection) for connection in waiting))
        assert {status for status, _ in answers} == {200}
        assert (await busy.answer())[0] == 200
        await stop


async def test_until_balancers_have_noticed_it_says_that_it_goes_and_serves_who_comes() -> None:
    def router(listener: Listener) -> RouterApp:
        return RouterApp(settings(), {HOT: "Leaving"}, Pool(), "test", leaving=lambda: listener.leaving)

    ready = b"GET /ready HTTP/1.1\r\nhost: localhost\r\n\r\n"
    health = ready.replace(b"ready", b"health")
    async with Upstream(answer(200, {})) as engine, stopping(leave_s=1, new_app=router) as (listener, connect):
        set_replicas("Leaving", [Replica("r", {HOT: engine.url}, SECRET, {HOT: PublishedModel("awake")}, True)])
        assert (await said(await connect(), ready))[0] == 200
        stop = asyncio.create_task(listener.stop())
        async with asyncio.timeout(10):
            while (await said(await connect(), ready))[0] == 200:
                pass
        assert await said(await connect(), health) == (200, None)
        assert not stop.done()
        await stop


async def test_a_listener_leaves_the_logging_of_its_process_alone() -> None:
    """Serve asks a replica's buffering handler for its file, when the controller comes back on a new head."""
    target = logging.NullHandler()
    buffering = logging.handlers.MemoryHandler(10, target=target)
    async with stopping() as (_, connect):
        assert (await said(await connect()))[0] == 200
        assert buffering.target is target
