"""The front door's HTTP/1.1 connection: uvicorn's, with what it leaves open closed.

- A request to upgrade to a protocol that we do not speak (`h2c`, which Java's client and `curl --http2` send with
  every first request, or a websocket) is answered as if it had not asked, as RFC 9110 §7.8 wants. The parser ends a
  message at such a head and would take its body for the next request.
- `CONNECT`, which the parser takes for such a request too, is refused.
- A head is bounded in size (431) and in time; uvicorn bounds neither here.
- It is the `Wire` of its requests.
- A client that takes nothing of its answer for a minute is dropped: else it would keep its place in an engine for as
  long as it likes, at no cost.
- There are only so many at once (`ConnectionLimit`).
- To HTTP/1.0, which nginx speaks unless told otherwise, no stream is chunked: it ends with its connection.
- What cannot be parsed is refused in OpenAI's shape.
- When the listener stops, a connection that looks idle is not closed at once: its client may just be sending.

Written against uvicorn 0.54; `tests/unit/test_protocol.py` speaks to it over raw sockets.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from typing import Any

import httptools
import orjson
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from serve_app.errors import ApiError, unavailable
from serve_app.router.connection_limit import ConnectionLimit
from serve_app.router.wire import WIRE

MAX_HEAD_BYTES = 64 * 1024
HEAD_TIMEOUT_S = 30.0
SEND_TIMEOUT_S = 60.0
_LINGER_S = 1.0
# Longer than a request is on its way to us, over oceans too.
_LEAVE_S = 1.0
_CHUNKED = b"\r\ntransfer-encoding: chunked\r\n"
_CONTINUE = b"HTTP/1.1 100 "
_HOP_BY_HOP = frozenset({b"upgrade", b"http2-settings", b"connection"})
_REASONS = {400: b"Bad Request", 431: b"Request Header Fields Too Large", 503: b"Service Unavailable"}
_FULL_RETRY_AFTER_S = 1.0


class _Unchunked:
    """The transport of an answer to HTTP/1.0: what uvicorn writes to it, without chunks (RFC 9112 §6.1).

    It writes the head at once, and then each chunk, and the end, whole.
    """

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._in_head = True
        self._chunked = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        """See `asyncio.WriteTransport`."""
        if data.startswith(_CONTINUE):
            return  # neither does HTTP/1.0 know an interim answer
        if self._in_head:
            self._in_head, self._chunked = False, _CHUNKED in data
            self._transport.write(data.replace(_CHUNKED, b"\r\n"))
        elif self._chunked:
            size, _, rest = data.partition(b"\r\n")
            self._transport.write(rest[: int(size or b"0", 16)])  # an empty piece is no chunk
        else:
            self._transport.write(data)


class FrontDoorProtocol(HttpToolsProtocol):
    """One client connection."""

    def __init__(self, *args: Any, limit: ConnectionLimit | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._limit = limit or ConnectionLimit(sys.maxsize)
        self._head_bytes = 0
        self._in_head = True
        self._ignored_upgrade = False
        self._refused = False
        self._chunks = True
        self._head_timer: asyncio.TimerHandle | None = None
        # Of the request that is being answered; others in the same connection wait for it.
        self.left: Callable[[], None] | None = None
        self.writable: Callable[[], None] | None = None
        self.closing: Callable[[], None] | None = None
        self.closes = False
        self._send_timer: asyncio.TimerHandle | None = None
        self._leave_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Count the time until the first head is complete."""
        super().connection_made(transport)
        if not self._limit.opened(self):
            self._refuse(
                unavailable(
                    "The router has too many connections.",
                    code="too_many_connections",
                    retry_after_s=_FULL_RETRY_AFTER_S,
                )
            )
            return
        self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self._head_is_late)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the timers."""
        self._stop_timer()
        self._stop_send_timer()
        self._stop_leave_timer()
        self._limit.closed(self)
        super().connection_lost(exc)
        if self.left:
            self.left()

    def close_idle(self) -> None:
        """See `Closable`."""
        self.transport.close()

    @property
    def open(self) -> bool:
        """See `Wire`."""
        return not self.transport.is_closing()

    @property
    def has_all(self) -> bool:
        """See `Wire`. Where another request stands behind this one it is that one's, which comes later."""
        return self.cycle is not None and not self.cycle.more_body

    def write(self, data: bytes) -> bool:
        """See `Wire`. The body of a stream is chunked (RFC 9112 §7.1): uvicorn said so in its headers."""
        if not self.transport.is_closing():
            self.transport.write(b"%x\r\n%b\r\n" % (len(data), data) if self._chunks else data)
        return not self.flow.write_paused

    def pause_writing(self) -> None:
        """The client has left so much unread that we wait for it."""
        super().pause_writing()
        self._send_timer = self.loop.call_later(SEND_TIMEOUT_S, self.transport.abort)

    def resume_writing(self) -> None:
        """It has read on, and takes more."""
        self._stop_send_timer()
        super().resume_writing()
        if self.writable:
            self.writable()

    def data_received(self, data: bytes) -> None:
        """Parse what came; go on after a request to upgrade as if it were an ordinary one."""
        if self._refused:
            return
        self._unset_keepalive_if_required()
        if self._in_head:
            self._head_bytes += len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            if self.parser.get_method() == b"CONNECT":
                # To the parser an upgrade without any header that asks for it: again it would be one again, for ever.
                self._refuse(ApiError(400, "This is no proxy.", code="not_a_proxy"))
                return
            rest = data[upgrade.args[0] :]
            head = self._head_without_upgrade()
            self.parser = httptools.HttpRequestParser(self)
            self._head_bytes = 0
            self.data_received(head + rest)
            return
        except httptools.HttpParserError:
            self._refuse(ApiError(400, "This is not HTTP/1.1.", code="invalid_http"))
            return
        if self._in_head and self._head_bytes > MAX_HEAD_BYTES:
            self._refuse(
                ApiError(431, f"The headers are larger than {MAX_HEAD_BYTES} bytes.", code="headers_too_large")
            )

    def on_message_begin(self) -> None:
        """A new head begins, perhaps behind another request in the same segment."""
        self._in_head = True
        self._ignored_upgrade = False
        self._limit.busy(self)
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self._head_is_late)
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """Start the request, unless its head must be parsed again without the wish to upgrade."""
        self._in_head = False
        self._head_bytes = 0
        self._stop_timer()
        self._ignored_upgrade = self.parser.should_upgrade()
        if not self._ignored_upgrade:
            super().on_headers_complete()
            self.scope[WIRE] = self  # type: ignore[literal-required]
            if self.closes:
                self._stop_leave_timer()
                self.cycle.keep_alive = False
            if self.scope["http_version"] == "1.0":
                self._chunks = False
                self.cycle.transport = _Unchunked(self.transport)  # type: ignore[assignment]

    def on_body(self, body: bytes) -> None:
        """Body bytes of the request under way."""
        if not self._ignored_upgrade:
            super().on_body(body)

    def on_message_complete(self) -> None:
        """The end of the request under way."""
        if self._ignored_upgrade:
            return
        super().on_message_complete()
        # The end of a long body stopped the reading. Nobody asks for more, but its client's leaving is to be heard.
        if not self.pipeline:
            self.flow.resume_reading()

    def on_response_complete(self) -> None:
        """An answer is written; another request may wait behind it, and one more may come where the door closes."""
        waits = bool(self.pipeline)
        super().on_response_complete()
        if waits or self.transport.is_closing():
            return
        self._limit.idle(self)
        if self.closes:
            self._leave_soon()

    def shutdown(self) -> None:
        """The front door closes: the next answer ends the connection and says so, or a moment without a request does.

        An answer that would never end by itself is told.
        """
        self.closes = True
        if self.cycle is None or self.cycle.response_complete:
            self._leave_soon()
        elif not self.cycle.response_started:
            self.cycle.keep_alive = False
        if self.closing:
            self.closing()

    def _leave_soon(self) -> None:
        self._leave_timer = self.loop.call_later(_LEAVE_S, self.transport.close)

    def _stop_leave_timer(self) -> None:
        if self._leave_timer:
            self._leave_timer.cancel()
            self._leave_timer = None

    def _head_without_upgrade(self) -> bytes:
        lines = [self.parser.get_method() + b" " + self.url + b" HTTP/1.1"]
        lines += [name + b": " + value for name, value in self.headers if name not in _HOP_BY_HOP]
        return b"\r\n".join(lines) + b"\r\n\r\n"

    def _head_is_late(self) -> None:
        if self.cycle is None or self.cycle.response_complete:
            self.transport.close()
        else:  # it waits behind an answer, which is not to be cut off
            self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self._head_is_late)

    def _stop_timer(self) -> None:
        if self._head_timer:
            self._head_timer.cancel()
            self._head_timer = None

    def _stop_send_timer(self) -> None:
        if self._send_timer:
            self._send_timer.cancel()
            self._send_timer = None

    def _refuse(self, error: ApiError) -> None:
        """Answer and close; what comes after cannot be told from a request.

        Closed at once, with bytes unread, the client would see a reset connection instead of the answer.
        """
        self._refused = True
        body = orjson.dumps(error.payload())
        again = b"retry-after: %d\r\n" % error.retry_after_s if error.retry_after_s else b""
        self.transport.write(
            b"HTTP/1.1 %d %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\n%sconnection: close\r\n\r\n%s"
            % (error.status, _REASONS[error.status], len(body), again, body)
        )
        self.loop.call_later(_LINGER_S, self.transport.close)
