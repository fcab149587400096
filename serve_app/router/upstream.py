"""HTTP/1.1 connections to engines, kept alive and pooled: the way of every byte of every answer.

A general client costs a task switch and several objects for each piece of a stream; here the socket's own callback
hands the piece on (`Answer.pour`). httptools parses, as it does for uvicorn.
"""

from __future__ import annotations

import asyncio
import dataclasses
import ssl
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import cast
from urllib.parse import urlsplit

import httptools

from serve_app.models.replicas import Target

# What nobody reads yet is not read from the socket either, past this.
_HIGH_WATER_BYTES = 256 * 1024
_MAX_HEAD_BYTES = 64 * 1024
_KEEP_ALIVE_S = 60.0

Sink = Callable[[bytes], None]


class UpstreamError(Exception):
    """The exchange failed. The message is a word or two for a log, without an address."""


class Unreachable(UpstreamError):
    """No connection could be made."""


class ConnectTimeout(UpstreamError):
    """No connection was made in time."""


class _Stray(Exception):
    """The other side goes on speaking after its answer."""


class Broken(UpstreamError):
    """The connection ended, or spoke something else than HTTP, before the answer was complete.

    `idle`: it had been kept alive, and not one byte of an answer came: the other side was gone before it was asked.
    """

    def __init__(self, what: str, *, idle: bool = False) -> None:
        super().__init__(what)
        self.idle = idle


@dataclasses.dataclass(eq=False, slots=True)
class _Origin:
    """Where a URL leads, and the connections that wait there. `host`: the header's value; `root`: before every path."""

    address: str
    port: int
    tls: ssl.SSLContext | None
    host: bytes
    root: str
    idle: list[Answer] = dataclasses.field(default_factory=list)


class Answer(asyncio.Protocol):
    """One connection, and the answer under way on it. As a context manager it drops what is left unread.

    `headers`: by lower-case name; of several with one name the last.
    """

    def __init__(self, upstream: Upstream, origin: _Origin) -> None:
        self.status = 0
        self.headers: dict[bytes, bytes] = {}
        self._upstream = upstream
        self._origin = origin
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._used = False
        self._asked = False
        self._heard_bytes = 0
        self._said = False
        self._complete = False
        self._keeps = False
        self._framed = False
        self._paused = False
        self._waiter: asyncio.Future[None] | None = None
        self._parts: list[bytes] = []
        self._sink: Sink | None = None
        self._error: Exception | None = None
        self.idle_since = 0.0

    # What a request does with it.

    async def asked(self, request: bytes) -> None:
        """Send a request; return when the answer's headers have come. Raises `Broken`."""
        if self._transport is None:
            raise Broken("connection lost", idle=self._used)
        self._asked = True
        self._said = self._complete = self._framed = self._keeps = False
        self._heard_bytes = 0
        self.status, self.headers = 0, {}
        self._error = None
        self._transport.write(request)
        try:
            while not self._said:
                await self._wait()
        except BaseException:
            self.drop()
            raise

    async def some(self) -> bytes:
        """What has come of the body, or comes next; empty at its end. Raises `Broken`."""
        while not self._parts:
            if self._complete:
                return b""
            self.resume()
            await self._wait()
        return self._taken()

    async def read(self) -> bytes:
        """The whole body. Raises `Broken`."""
        while not self._complete:
            self.resume()
            await self._wait()
        return self._taken()

    async def pour(self, sink: Sink) -> None:
        """Give the body to `sink` as it comes, from the socket's own callback; return at its end.

        Raises `Broken`, or what the sink raises.
        """
        self.resume()
        if self._parts:
            sink(self._taken())
        self._sink = sink
        try:
            while not self._complete:
                await self._wait()
        finally:
            self._sink = None

    def pause(self) -> None:
        """Read nothing more from the engine for now: the client does not take it."""
        if not self._paused and self._transport and not self._complete:
            self._paused = True
            self._transport.pause_reading()

    def resume(self) -> None:
        """Read on."""
        if self._paused:
            self._paused = False
            if self._transport:
                self._transport.resume_reading()

    def __aiter__(self) -> Answer:
        return self

    async def __anext__(self) -> bytes:
        if chunk := await self.some():
            return chunk
        raise StopAsyncIteration

    def __enter__(self) -> Answer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # A request of which it did not want the rest would stand before the next one.
        sent = self._transport is not None and not self._transport.get_write_buffer_size()
        if self._complete and self._keeps and sent:
            self._parts.clear()
            self._used = True
            self.resume()
            self._upstream.keep(self._origin, self)
        else:
            self.drop()

    # What the event loop calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's are no subclass of it.
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if not self._asked:
            self.drop()  # it speaks although nobody asked
            return
        self._heard_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            if not self._complete:
                self._fail(Broken("not HTTP"))
                return
            self._keeps = False  # the answer is whole, and what follows it is nobody's
        if not self._said and self._heard_bytes > _MAX_HEAD_BYTES:
            self._fail(Broken("head too large"))
            return
        if self._sink is not None and self._parts:
            try:
                self._sink(self._taken())
            except Exception as error:
                self._fail(error)
                return
            if self._complete:
                self._wake()
        elif self._said or self._complete:
            if sum(map(len, self._parts)) > _HIGH_WATER_BYTES:
                self.pause()
            self._wake()

    def eof_received(self) -> None:
        """The transport closes itself."""

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if self in self._origin.idle:
            self._origin.idle.remove(self)
        if not self._asked or self._error is not None:
            return
        if self._said and not self._framed and exc is None:
            self._complete = True  # a body that ends with its connection
            self._wake()
            return
        self._fail(Broken("connection lost", idle=self._used and not self._heard_bytes))

    # What the parser calls.

    def on_message_begin(self) -> None:
        if self._complete:
            raise _Stray

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status < 200:
            self.headers.clear()  # an interim response (RFC 9110 §15.2); the one that counts follows
            return
        self.status = status
        self._said = True
        self._framed = b"content-length" in self.headers or b"transfer-encoding" in self.headers

    def on_body(self, body: bytes) -> None:
        self._parts.append(body)

    def on_message_complete(self) -> None:
        if self.status:
            self._complete, self._asked = True, False
            self._keeps = self._parser.should_keep_alive()

    # Within.

    def _taken(self) -> bytes:
        parts = self._parts
        if len(parts) == 1:
            return parts.pop()
        whole = b"".join(parts)
        parts.clear()
        return whole

    async def _wait(self) -> None:
        if self._error is not None:
            raise self._error
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None
        if self._error is not None:
            raise self._error

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _fail(self, error: Exception) -> None:
        self._error = error
        self.drop()
        self._wake()

    def drop(self) -> None:
        """Close the connection, whatever is under way on it."""
        self._keeps = self._paused = False
        if self._transport:
            self._transport.abort()


class Upstream:
    """The pool of connections, by where they lead. `connect_timeout_s` holds where a target says nothing."""

    def __init__(self, connect_timeout_s: float) -> None:
        self._connect_timeout_s = connect_timeout_s
        self._origins: dict[tuple[str, ssl.SSLContext | None], _Origin] = {}
        self._sweeper: asyncio.TimerHandle | None = None
        self._closed = False

    async def post(self, target: Target, path: str, headers: Mapping[str, str], body: bytes) -> Answer:
        """Send a JSON body, on an idle connection where there is one; the answer's headers have come.

        No redirect is followed: it could lead anywhere, with our key and the client's prompt. Raises `UpstreamError`.
        """
        return await self._send(target, b"POST", path, {**headers, "content-type": "application/json"}, body)

    async def get(self, target: Target, path: str) -> Answer:
        """As `post`, without a body."""
        return await self._send(target, b"GET", path, {}, b"")

    async def close(self) -> None:
        """Close every idle connection, and keep no other."""
        self._closed = True
        if self._sweeper:
            self._sweeper.cancel()
        for origin in self._origins.values():
            while origin.idle:
                origin.idle.pop().drop()

    def keep(self, origin: _Origin, connection: Answer) -> None:
        """Take a connection back whose answer is complete."""
        if self._closed:
            connection.drop()
            return
        loop = asyncio.get_running_loop()
        connection.idle_since = loop.time()
        origin.idle.append(connection)
        if self._sweeper is None:
            self._sweeper = loop.call_later(_KEEP_ALIVE_S, self._sweep)

    async def _send(self, target: Target, method: bytes, path: str, headers: Mapping[str, str], body: bytes) -> Answer:
        foreign = target.foreign
        origin = self._origins.get((target.url, foreign.tls if foreign else None)) or self._origin(target)
        if origin.idle:
            answer = origin.idle.pop()
        else:
            answer = await self._connect(origin, foreign.connect_timeout_s if foreign else self._connect_timeout_s)
        lines = [b"%b %b HTTP/1.1\r\nhost: %b\r\n" % (method, (origin.root + target.path(path)).encode(), origin.host)]
        if foreign:
            # Without it any coding may be used (RFC 9110 §12.5.3), and what we pass on is text.
            lines.append(b"accept-encoding: identity\r\n")
        for name, value in {**headers, **target.credentials}.items():
            lines.append(f"{name}: {value}\r\n".encode("latin-1"))
        lines.append(b"content-length: %d\r\n\r\n" % len(body) if method == b"POST" else b"\r\n")
        lines.append(body)
        await answer.asked(b"".join(lines))
        return answer

    async def _connect(self, origin: _Origin, timeout_s: float) -> Answer:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(timeout_s):
                _, answer = await loop.create_connection(
                    lambda: Answer(self, origin), origin.address, origin.port, ssl=origin.tls
                )
        except TimeoutError:
            raise ConnectTimeout("connect timeout") from None
        except OSError as error:
            raise Unreachable(type(error).__name__) from None
        return answer

    def _origin(self, target: Target) -> _Origin:
        parts = urlsplit(target.url)
        secure = parts.scheme == "https"
        own = target.foreign.tls if target.foreign else None
        tls = (own or ssl.create_default_context()) if secure else None
        host = parts.netloc.rpartition("@")[2].encode()
        origin = _Origin(parts.hostname or "", parts.port or (443 if secure else 80), tls, host, parts.path.rstrip("/"))
        self._origins[target.url, own] = origin
        return origin

    def _sweep(self) -> None:
        """Drop what has been idle for long."""
        loop = asyncio.get_running_loop()
        self._sweeper = None
        past = loop.time() - _KEEP_ALIVE_S
        for origin in self._origins.values():
            for connection in [each for each in origin.idle if each.idle_since <= past]:
                origin.idle.remove(connection)
                connection.drop()
        if any(origin.idle for origin in self._origins.values()):
            self._sweeper = loop.call_later(_KEEP_ALIVE_S / 2, self._sweep)
