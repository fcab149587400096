"""The router's side of one answer: headers once, then bytes; an error in the form that still fits."""

from __future__ import annotations

import math

import orjson
from starlette.responses import Response
from starlette.types import Send

from serve_app.errors import ApiError
from serve_app.router.dialect import OPENAI, Dialect
from serve_app.router.wire import Wire

_SSE = b"text/event-stream; charset=utf-8"

# The rest of such a request's body is not read.
_CLOSING = frozenset({408, 413})


def retry_after(seconds: float) -> str:
    """The header's value: whole seconds, at least one."""
    return str(max(1, math.ceil(seconds)))


def json_response(content: object, status: int = 200) -> Response:
    """A whole answer of our own."""
    return Response(orjson.dumps(content), status, media_type="application/json")


def error_response(error: ApiError, dialect: Dialect = OPENAI) -> Response:
    """An error as a whole response, for what is not answered by a `Reply`."""
    response = Response(dialect.error(error), error.status, media_type="application/json")
    if error.retry_after_s is not None:
        response.headers["retry-after"] = retry_after(error.retry_after_s)
    if error.status == 401:
        response.headers["www-authenticate"] = "Bearer"  # RFC 9110 §15.5.2
    return response


class Reply:
    """Writes one response. Not started, an error is a status; on a running stream it is an SSE event."""

    def __init__(self, send: Send, *, stream: bool, dialect: Dialect = OPENAI, wire: Wire | None = None) -> None:
        self._send = send
        self.dialect = dialect
        self.wire = wire
        self.stream = stream
        self.started = False
        # What the client got: the status, or the fault in a stream that had begun; 0: nothing.
        self.status = 0
        self.fault = ""
        self._ended = False
        self.headers: dict[str, str] = {}
        self._at_boundary = True

    async def start(self, status: int, content_type: bytes, length: int | None = None) -> None:
        """Send the status line and the headers, with all that was put into `headers` until now."""
        headers = [(b"content-type", content_type)]
        if length is not None:
            headers.append((b"content-length", str(length).encode()))
        if self.stream and status == 200:
            headers += [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
        headers += [(name.encode(), value.encode("latin-1", "replace")) for name, value in self.headers.items()]
        self.started = True
        self.status = status
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def start_stream(self) -> None:
        """Send the headers of an event stream, unless they are sent."""
        if not self.started:
            await self.start(200, _SSE)

    async def chunk(self, data: bytes) -> None:
        """Pass on bytes of the body."""
        if data:
            self._at_boundary = data.endswith(b"\n\n")
            await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def comment(self, text: str) -> None:
        """An SSE comment: clients ignore it, and whatever stands between sees that the stream lives."""
        await self.start_stream()
        await self.chunk(f": {text}\n\n".encode())

    async def end(self) -> None:
        """Finish the body."""
        self._ended = True
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def whole(self, status: int, content_type: bytes, body: bytes) -> None:
        """Send a complete response."""
        await self.start(status, content_type, len(body))
        self._ended = True
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    async def error(self, error: ApiError) -> None:
        """Tell the client. After the first byte it is an event that the API's clients raise, then the end."""
        if self._ended:
            return
        self.fault = error.code or error.type
        if not self.started:
            if error.retry_after_s is not None:
                self.headers["retry-after"] = retry_after(error.retry_after_s)
            if error.status in _CLOSING:
                self.headers["connection"] = "close"
            await self.whole(error.status, b"application/json", self.dialect.error(error))
            return
        # What came before may have been cut in the middle of an event.
        gap = b"" if self._at_boundary else b"\n\n"
        await self.chunk(gap + self.dialect.error_event(error))
        await self.end()
