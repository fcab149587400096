"""More streams at once than there is room for, over real sockets: who gets in is served, and nothing stays behind."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest
from front import HOT, settings, until
from scripted_pool import SECRET, Pool
from scripted_upstream import DONE, event

from serve_app.models.replicas import PublishedModel, Replica, set_replicas
from serve_app.router.app import RouterApp
from serve_app.router.listener import Listener
from tests.ports import free_port

CROWD, ROOM = 1500, 1000
WORDS = 5
BODY = b'{"messages":[{"role":"user","content":"hi"}],"stream":true}'
ASK = (
    b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s"
    % (
        len(BODY),
        BODY,
    )
)


async def slow_words(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """An engine: a token every 100 ms to everybody who asks, then the end; the connection is kept."""
    with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            size = next(int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
            await reader.readexactly(size)
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
            for word in [event("word")] * WORDS:
                writer.write(b"%x\r\n%s\r\n" % (len(word), word))
                await asyncio.sleep(0.1)
            writer.write(b"%x\r\n%s\r\n0\r\n\r\n" % (len(DONE), DONE))
    writer.close()


@contextlib.asynccontextmanager
async def served() -> AsyncIterator[tuple[int, RouterApp]]:
    """The front door, with `ROOM` places in it, and an engine behind it."""
    engine = await asyncio.start_server(slow_words, "127.0.0.1", 0, backlog=CROWD)
    url = f"http://127.0.0.1:{engine.sockets[0].getsockname()[1]}"
    set_replicas("Hot", [Replica("hot-0", {HOT: url}, SECRET, {HOT: PublishedModel("awake")}, True)])
    config = settings(
        {"max_ongoing_requests": CROWD}, router={"port": free_port(), "drain_s": 1, "max_in_flight": ROOM}
    )
    apps: list[RouterApp] = []

    def new_app() -> RouterApp:
        apps.append(RouterApp(config, {HOT: "Hot"}, Pool(), "test", front_door=False))
        return apps[0]

    listener = Listener(config.router, new_app, "test")
    listener.start()
    try:
        async with asyncio.timeout(10):
            while True:
                with contextlib.suppress(ConnectionRefusedError):
                    _, writer = await asyncio.open_connection("127.0.0.1", config.router.port)
                    writer.close()
                    break
        yield config.router.port, apps[0]
    finally:
        await listener.stop()
        engine.close()
        set_replicas("Hot", [])


async def client(port: int, begin: asyncio.Event) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    await begin.wait()
    writer.write(ASK)
    head = await reader.readuntil(b"\r\n\r\n")
    if b"transfer-encoding: chunked" in head.lower():
        head += await reader.readuntil(b"0\r\n\r\n")
    writer.close()
    return head


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.case(68)
async def test_a_crowd_of_streams_is_served_or_told_when_to_come_back_and_leaves_nothing() -> None:
    async with served() as (port, app):
        assert await _crowd(port, 10) == (10, 0)
        files, memory = open_files(), psutil.Process().memory_info().rss
        served_whole, refused = await _crowd(port, CROWD)
        assert served_whole + refused == CROWD
        assert (served_whole >= ROOM - 1, refused > 0) == (True, True)
        # And the next ones are served as if nothing had been.
        assert await _crowd(port, 10) == (10, 0)
        await until(lambda: (app._open, app._relay.in_flight.total()) == (0, 0), "nothing is in flight")
        gc.collect()
        assert psutil.Process().memory_info().rss - memory < 200e6
    await until(lambda: open_files() <= files, "every socket is closed")


async def _crowd(port: int, size: int) -> tuple[int, int]:
    begin = asyncio.Event()
    clients = [asyncio.create_task(client(port, begin)) for _ in range(size)]
    await asyncio.sleep(0)
    begin.set()
    async with asyncio.timeout(60):
        answers = await asyncio.gather(*clients)
    whole = [got for got in answers if got.startswith(b"HTTP/1.1 200")]
    assert all(got.count(b"word") == WORDS and got.count(DONE) == 1 for got in whole)
    refused = [got for got in answers if got.startswith(b"HTTP/1.1 503") and b"retry-after: " in got.lower()]
    return len(whole), len(refused)
