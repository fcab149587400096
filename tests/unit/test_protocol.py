"""The front door over raw sockets: what HTTP clients and attackers send beside ordinary requests."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest

from serve_app.router import protocol
from serve_app.router.listener import Listener, PortTaken, open_port
from serve_app.service_schema import RouterSettings

JSON = b"content-type: application/json\r\n"


async def echo(scope: Any, receive: Any, send: Any) -> None:
    """Answers with the path and the body it got."""
    if scope["type"] == "lifespan":
        while (await receive())["type"] != "lifespan.shutdown":
            await send({"type": "lifespan.startup.complete"})
        await send({"type": "lifespan.shutdown.complete"})
        return
    body = b""
    while (message := await receive())["type"] == "http.request":
        body += message["body"]
        if not message["more_body"]:
            break
    answer = json.dumps({"service": "test", "path": scope["path"], "body": body.decode()}).encode()
    headers = [(b"content-length", str(len(answer)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": answer})


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.asynccontextmanager
async def listening() -> AsyncIterator[int]:
    settings = RouterSettings(port=free_port(), drain_s=1)
    listener = Listener(settings, lambda: echo, "test")
    listener.start()
    async with asyncio.timeout(10):
        while True:
            with contextlib.suppress(ConnectionRefusedError):
                _, writer = await asyncio.open_connection("127.0.0.1", settings.port)
                writer.close()
                break
    try:
        yield settings.port
    finally:
        await listener.stop()


class Connection:
    """One raw connection to the front door."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def send(self, *segments: bytes) -> None:
        for segment in segments:
            self.writer.write(segment)
            await self.writer.drain()
            await asyncio.sleep(0.02)  # so that they arrive apart

    async def answer(self) -> tuple[int, dict[str, str], Any]:
        async with asyncio.timeout(10):
            head = (await self.reader.readuntil(b"\r\n\r\n")).decode()
            status = int(head.split(" ")[1])
            headers = dict(line.lower().split(": ", 1) for line in head.split("\r\n")[1:] if line)
            body = await self.reader.readexactly(int(headers["content-length"]))
        return status, headers, json.loads(body)

    async def closed(self) -> bool:
        async with asyncio.timeout(10):
            with contextlib.suppress(ConnectionResetError):
                return await self.reader.read() == b""
            return True


@contextlib.asynccontextmanager
async def connected() -> AsyncIterator[Connection]:
    async with listening() as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            yield Connection(reader, writer)
        finally:
            writer.close()


UPGRADES = [
    b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n",
    b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Key: x\r\nSec-WebSocket-Version: 13\r\n",
]


@pytest.mark.case(140)
@pytest.mark.parametrize("upgrade", UPGRADES)
@pytest.mark.parametrize("pieces", [1, 2])
async def test_a_wish_to_upgrade_is_ignored_and_the_body_stays_a_body(upgrade: bytes, pieces: int) -> None:
    body = b"GET /inner HTTP/1.1\r\nhost: x\r\n\r\n"
    head = b"POST /outer HTTP/1.1\r\nhost: x\r\n" + upgrade + b"content-length: %d\r\n\r\n" % len(body)
    async with connected() as connection:
        await connection.send(*([head + body] if pieces == 1 else [head, body]))
        status, _, answer = await connection.answer()
        assert (status, answer["path"], answer["body"]) == (200, "/outer", body.decode())
        await connection.send(b"GET /next HTTP/1.1\r\nhost: x\r\n\r\n")
        assert (await connection.answer())[2]["path"] == "/next"


async def test_too_large_a_head_is_a_431_and_ends_the_connection() -> None:
    async with connected() as connection:
        await connection.send(b"GET / HTTP/1.1\r\nhost: x\r\n")
        with contextlib.suppress(ConnectionError):
            for _ in range(40):
                await connection.send(b"x-filler: " + b"a" * 4000 + b"\r\n")
        status, headers, answer = await connection.answer()
        assert (status, headers["connection"]) == (431, "close")
        assert answer["error"]["code"] == "headers_too_large"


async def test_what_is_not_http_is_refused_in_openais_shape() -> None:
    async with connected() as connection:
        await connection.send(b"\x16\x03\x01\x02\x00 hello\r\n\r\n")
        status, _, answer = await connection.answer()
        assert status == 400
        assert set(answer["error"]) == {"message", "type", "param", "code"}
        assert await connection.closed()


async def test_a_head_that_never_ends_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "HEAD_TIMEOUT_S", 0.2)
    async with connected() as connection:
        await connection.send(b"GET / HTTP/1.1\r\nhost:")
        assert await connection.closed()


@pytest.mark.case(118)
async def test_pipelined_chunked_and_expecting_requests_are_answered_in_order() -> None:
    async with connected() as connection:
        chunked = b"POST /a HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n"
        await connection.send(chunked + b"GET /b HTTP/1.1\r\nhost: x\r\n\r\n")
        assert (await connection.answer())[2]["body"] == "abc"
        assert (await connection.answer())[2]["path"] == "/b"
        await connection.send(b"POST /c HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: 2\r\n\r\n")
        async with asyncio.timeout(5):
            assert b"100 Continue" in await connection.reader.readuntil(b"\r\n\r\n")
        await connection.send(b"hi")
        assert (await connection.answer())[2]["body"] == "hi"


async def test_a_port_is_shared_with_the_same_service_and_refused_beside_another() -> None:
    async with listening() as port:
        (await asyncio.to_thread(open_port, "127.0.0.1", port, "test")).close()
        with pytest.raises(PortTaken, match=f"port {port} on 127.0.0.1 is in use"):
            await asyncio.to_thread(open_port, "127.0.0.1", port, "another")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(PortTaken, match="in use by another program"):
            open_port("127.0.0.1", taken.getsockname()[1], "test")
