"""One HTTP/1.1 connection to an engine, and the answer under way on it: the way of every byte of every answer.

A general client costs a task switch and several objects for each piece of a stream; here the socket's own callback
hands the piece on (`Answer.pour`). httptools parses, as it does for uvicorn.

Of an engine that is quicker than any reader a millisecond's pieces are read and handed on together: after two within
one it is not read for another. Each read and each write is a call to the kernel, which is most of what a piece costs.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from types import TracebackType
from typing import cast

import httptools

# What nobody reads yet is not read from the socket either, past this.
_HIGH_WATER_BYTES = 256 * 1024
_MAX_HEAD_BYTES = 64 * 1024
_REST_S = 0.001

Sink = Callable[[bytes], None]


class UpstreamError(Exception):
    """The exchange failed. The message is a word or two for a log, without an address."""


class Broken(UpstreamError):
    """The connection ended, or spoke something else than HTTP, before the answer was complete.

    `idle`: it had been kept alive, and not one byte of an answer came: the other side was gone before it was asked.
    """

    def __init__(self, what: str, *, idle: bool = False) -> None:
        super().__init__(what)
        self.idle = idle


class _Stray(Exception):
    """The other side goes on speaking after its answer."""


class Answer(asyncio.Protocol):
    """One connection, and the answer under way on it. As a context manager it drops what is left unread.

    `headers`: by lower-case name; of several with one name the last. `keep` takes the connection back when it may be
    used again; `lost` is told of one that is gone.
    """

    def __init__(self, keep: Callable[[Answer], None], lost: Callable[[Answer], None]) -> None:
        self.status = 0
        self.headers: dict[bytes, bytes] = {}
        self._keep = keep
        self._lost = lost
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
        self._rests = False
        self._poured_at = 0.0
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
            if not self._rests:
                self._transport.pause_reading()

    def resume(self) -> None:
        """Read on."""
        if self._paused:
            self._paused = False
            if self._transport and not self._rests:
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
            self._keep(self)
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
                return
            now = time.monotonic()
            if now - self._poured_at < _REST_S:
                self._rest()
            self._poured_at = now
        elif self._said or self._complete:
            if sum(map(len, self._parts)) > _HIGH_WATER_BYTES:
                self.pause()
            self._wake()

    def eof_received(self) -> None:
        """The transport closes itself."""

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._lost(self)
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

    def _rest(self) -> None:
        if self._transport:
            self._rests = True
            if not self._paused:
                self._transport.pause_reading()
            self._loop.call_later(_REST_S, self._rested)

    def _rested(self) -> None:
        self._rests = False
        if self._transport and not self._paused:
            self._transport.resume_reading()

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
