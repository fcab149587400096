"""Streams from an engine's socket to a client's: pressure back to the engine, and idle connections."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import orjson
from door_call import listening, request_of
from front import body, event, front
from scripted_upstream import DONE

PATIENCE_S = 20.0
# More than all buffers between an engine and a client that does not read.
EVENTS = 40_000
BUFFERED = 16_000_000
JSON = {"content-type": "application/json"}


class Talker:
    """An engine that says as much as it is let; `said` counts the bytes."""

    def __init__(self) -> None:
        self.event = event("word " * 100)
        self.said = 0
        self.stalled = asyncio.Event()

    async def __call__(self, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        for _ in range(EVENTS):
            await self._say(writer, self.event)
        await self._say(writer, DONE)
        writer.write(b"0\r\n\r\n")

    async def _say(self, writer: asyncio.StreamWriter, data: bytes) -> None:
        writer.write(b"%x\r\n%b\r\n" % (len(data), data))
        self.said += len(data)
        try:
            async with asyncio.timeout(0.3):
                await writer.drain()
        except TimeoutError:
            self.stalled.set()
            await writer.drain()


@contextlib.asynccontextmanager
async def streaming(talker: Talker) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A client's connection on which a stream was asked for."""
    async with front(talker) as (app, _), listening(app) as (host, port):
        reader, writer = await asyncio.open_connection(host, port, limit=1 << 16)
        writer.write(
            request_of("POST", "/v1/chat/completions", "", JSON, [orjson.dumps(body(stream=True))], unfinished=False)
        )
        yield reader, writer
        writer.close()


async def test_engine_is_held_up_by_a_client_that_does_not_read_and_goes_on_when_it_does() -> None:
    talker = Talker()
    async with streaming(talker) as (reader, _), asyncio.timeout(PATIENCE_S):
        await reader.readuntil(b"\r\n\r\n")
        await talker.stalled.wait()
        assert talker.said < BUFFERED
        events, tail = 0, b""
        while not tail.endswith(b"0\r\n\r\n"):
            data = tail + await reader.read(1 << 20)
            events += data.count(b"data: {")
            # What may be the beginning of one is counted with what follows.
            keep = min(len(data), 6)
            tail = data[-keep:]
            events -= tail.count(b"data: {")
        assert events == EVENTS


async def test_client_that_leaves_while_it_is_waited_for_lets_the_engine_go() -> None:
    talker = Talker()
    async with streaming(talker) as (reader, writer), asyncio.timeout(PATIENCE_S):
        await talker.stalled.wait()
        writer.transport.abort()
        with contextlib.suppress(ConnectionError):
            await reader.read()
    assert talker.said < BUFFERED
