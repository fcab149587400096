"""The front door over raw sockets: what HTTP clients and attackers send beside ordinary requests."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import resource
import socket
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest

from serve_app.router import protocol
from serve_app.router.listener import Listener, PortTaken, open_port, raise_file_limit
from serve_app.router.wire import WIRE
from serve_app.service_schema import RouterSettings
from tests.ports import free_port

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


@contextlib.asynccontextmanager
async def listening(app: Any = echo, **router: Any) -> AsyncIterator[int]:
    settings = RouterSettings(port=free_port(), drain_s=1, **router)
    listener = Listener(settings, lambda: app, "test")
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


@pytest.mark.case(82)
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


async def in_pieces(scope: Any, receive: Any, send: Any) -> None:
    """Answers a stream in three pieces, an empty one among them, by ASGI or by the wire."""
    if scope["type"] == "lifespan":
        await echo(scope, receive, send)
        return
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
    for piece in (b"data: a\n\n", b"", b"data: b\r\n0\r\n\n\n"):
        if scope["path"] == "/wire":
            scope[WIRE].write(piece)
        else:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
    await send({"type": "http.response.body", "body": b"data: [DONE]\n\n" if scope["path"] == "/asgi" else b""})


@pytest.mark.parametrize("path", [b"/wire", b"/asgi"])
async def test_a_stream_to_http_1_0_has_no_chunks_and_ends_with_its_connection(path: bytes) -> None:
    async with listening(in_pieces) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET %s HTTP/1.0\r\nexpect: 100-continue\r\nconnection: keep-alive\r\n\r\n" % path)
        async with asyncio.timeout(10):
            head, _, said = (await reader.read()).partition(b"\r\n\r\n")
        writer.close()
    assert head.startswith(b"HTTP/1.1 200 ")
    assert b"transfer-encoding" not in head
    assert b"connection: close" in head
    assert said == b"data: a\n\ndata: b\r\n0\r\n\n\n" + (b"data: [DONE]\n\n" if path == b"/asgi" else b"")


async def test_a_whole_answer_to_http_1_0_has_its_length() -> None:
    async with connected() as connection:
        await connection.send(b"POST /a HTTP/1.0\r\ncontent-length: 2\r\n\r\nhi")
        status, headers, said = await connection.answer()
        assert (status, headers["connection"], said["body"]) == (200, "close", "hi")
        assert await connection.closed()


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


@pytest.mark.parametrize(
    "framing",
    [
        b"content-length: 5\r\ntransfer-encoding: chunked\r\n",
        b"transfer-encoding: chunked\r\ncontent-length: 5\r\n",
        b"transfer-encoding: xchunked\r\n",
        b"transfer-encoding: chunked, identity\r\n",
        b"content-length: 5\r\ncontent-length: 6\r\n",
        b"content-length: +5\r\n",
        b"content-length: -1\r\n",
        b"content-length: 5, 5\r\n",
        b"content-length : 5\r\n",
        b"x-request-id: a\x00b\r\n",
        b"x-request-id: a\n b: c\r\n",
    ],
)
async def test_a_head_that_two_servers_would_read_differently_is_refused(framing: bytes) -> None:
    async with connected() as connection:
        await connection.send(
            b"POST /outer HTTP/1.1\r\nhost: x\r\n" + framing + b"\r\n0\r\n\r\nGET /inner HTTP/1.1\r\n\r\n"
        )
        status, headers, answer = await connection.answer()
        assert (status, headers["connection"], answer["error"]["code"]) == (400, "close", "invalid_http")
        assert await connection.closed()


async def flood(scope: Any, receive: Any, send: Any) -> None:
    """A stream without end; says on the way out that its client has gone."""
    if scope["type"] == "lifespan":
        await echo(scope, receive, send)
        return
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
    gone = asyncio.ensure_future(_left(receive))
    while not gone.done():
        await send({"type": "http.response.body", "body": b"x" * 65536, "more_body": True})
        await asyncio.sleep(0)
    GONE.set()


async def _left(receive: Any) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


GONE = threading.Event()


async def test_a_client_that_takes_nothing_of_its_answer_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "SEND_TIMEOUT_S", 0.3)
    GONE.clear()
    async with listening(flood) as port:
        _, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024)
        writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        assert await asyncio.to_thread(GONE.wait, 10)
        writer.close()


async def test_a_client_that_reads_slowly_keeps_its_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "SEND_TIMEOUT_S", 1.0)
    GONE.clear()
    async with listening(flood) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=65536)
        writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        # Read in pauses that are shorter than the limit, for longer than the limit in all.
        for _ in range(15):
            await reader.readexactly(1 << 20)
            await asyncio.sleep(0.1)
        assert not GONE.is_set()
        writer.close()
        assert await asyncio.to_thread(GONE.wait, 10)


def test_a_router_may_open_as_many_files_as_its_requests_need(caplog: pytest.LogCaptureFixture) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 512), hard))
        raise_file_limit(max_in_flight=100)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 2 * 100
        assert not caplog.records
        raise_file_limit(max_in_flight=10**9)
        assert "router.max_in_flight: 1000000000" in caplog.text
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_nothing_that_a_client_sends_writes_to_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    oddities = [
        *(
            b"\x16\x03\x01 hello\r\n\r\n",
            b"GET / HTTP/9.9\r\n\r\n",
            b"CONNECT a:1 HTTP/1.1\r\n\r\n",
            b"\r\n\r\n\0\0\r\n\r\n",
        ),
        *(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\nshort", b"GET " + b"a" * 70_000),
        *(b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n", UPGRADES[0] + b"\r\n"),
    ]
    async with listening() as port:
        logging.getLogger("uvicorn").addHandler(caplog.handler)  # what it says goes no further
        for odd in oddities * 5:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(odd)
            writer.close()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        connection = Connection(reader, writer)
        await connection.send(b"GET /last HTTP/1.1\r\nhost: x\r\n\r\n")
        assert (await connection.answer())[0] == 200
        writer.close()
    logging.getLogger("uvicorn").removeHandler(caplog.handler)
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []


ASK = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"


async def opened(port: int, *, asks: bool = True) -> Connection:
    connection = Connection(*await asyncio.open_connection("127.0.0.1", port))
    if asks:
        await connection.send(ASK)
        assert (await connection.answer())[0] == 200
    return connection


async def is_closed(connection: Connection) -> bool:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(0.2):
            return await connection.reader.read() == b""
    return False


@pytest.mark.parametrize("asks", [True, False], ids=["after an answer", "silent"])
async def test_of_too_many_connections_the_one_idle_for_the_longest_is_closed(asks: bool) -> None:
    async with listening(max_connections=3) as port:
        crowd = [await opened(port, asks=asks) for _ in range(3)]
        await crowd[0].send(ASK)  # it is the last that became idle now
        assert (await crowd[0].answer())[0] == 200
        newcomer = await opened(port)
        assert [await is_closed(each) for each in (*crowd, newcomer)] == [False, True, False, False]
        for _ in range(20):
            await opened(port)
        assert all([await is_closed(each) for each in crowd])


async def test_where_all_connections_are_busy_one_more_is_told_when_to_come_back() -> None:
    async def slow(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and scope["path"] == "/slow":
            await asyncio.to_thread(released.wait, 10)
        await echo(scope, receive, send)

    released = threading.Event()
    async with listening(slow, max_connections=2) as port:
        busy = [await opened(port, asks=False) for _ in range(2)]
        for each in busy:
            await each.send(ASK.replace(b"/ ", b"/slow "))
        status, headers, answer = await (await opened(port, asks=False)).answer()
        assert (status, headers["retry-after"], answer["error"]["code"]) == (503, "1", "too_many_connections")
        released.set()
        assert [(await each.answer())[0] for each in busy] == [200, 200]
        assert await opened(port)
