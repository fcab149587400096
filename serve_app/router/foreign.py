"""What servers that are not ours say otherwise than our engines do: refusals, line ends, and the end of a stream."""

from __future__ import annotations

import email.utils
import time
from collections.abc import AsyncIterator, Mapping
from typing import Self

from serve_app.errors import ApiError, unavailable
from serve_app.models.replicas import Target

_RETRY_AFTER_S = 5.0
_LONGEST_RETRY_AFTER_S = 3600.0
_RESPONSES = "/v1/responses"
_RESPONSE_ENDS = (b'"type":"response.completed"', b'"type":"response.incomplete"', b'"type":"response.failed"')
_SEEN_BYTES = 64
_STREAM_END = b"data: [DONE]\n\n"


def elsewhere(target: Target) -> ApiError | None:
    """What a client is told where a server that is not ours cannot be reached, and there is no other."""
    if target.foreign is None:
        return None
    return unavailable(
        "The server behind this model cannot be reached.", code="upstream_unreachable", retry_after_s=_RETRY_AFTER_S
    )


def refused_by(status: int, headers: Mapping[bytes, bytes]) -> ApiError | None:
    """What a client is told where the server refused the request for no fault of the client's; None for all else.

    Its limits and its key are between it and us: 429 is our overload, and 401 our operator's mistake.
    """
    if status in (429, 503):
        return unavailable(
            "The server behind this model takes no more requests now.",
            code="overloaded",
            retry_after_s=_seconds(headers.get(b"retry-after", b"").decode("latin-1")),
        )
    if status in (401, 403):
        return ApiError(502, "The server behind this model refused the router's key.", code="upstream_unauthorized")
    return None


def _seconds(retry_after: str) -> float:
    """A `Retry-After`, seconds or a date, within bounds."""
    try:
        seconds = float(retry_after)
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(retry_after).timestamp() - time.time()
        except (ValueError, TypeError, OverflowError):
            seconds = _RETRY_AFTER_S
    # Not a number is in no order to any; it ends here, too.
    return max(1.0, min(seconds, _LONGEST_RETRY_AFTER_S)) if seconds == seconds else _RETRY_AFTER_S


class ForeignStream:
    """Brings a stream into our engines' form: lines end with a line feed, and every stream with `[DONE]`.

    `differs` says, once the first chunk was seen, whether there is anything to be done; if not, go on with `chunks`.
    """

    def __init__(self, chunks: AsyncIterator[bytes], path: str) -> None:
        self.chunks = chunks
        # OpenAI ends these with an event, and so do others after it.
        self._responses = self.differs = path == _RESPONSES
        self._seen = b""
        self._ended = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        while chunk := await anext(self.chunks, b""):
            if b"\r" in chunk:
                self.differs = True
                # JSON holds none: it would be escaped there.
                chunk = chunk.replace(b"\r", b"")
            if self._responses:
                self._look(chunk)
            if chunk:
                return chunk
        if self._responses and self._ended:
            self._responses = False
            return _STREAM_END
        raise StopAsyncIteration

    def _look(self, chunk: bytes) -> None:
        seen = self._seen + chunk
        self._ended = self._ended or any(end in seen for end in _RESPONSE_ENDS)
        # Ours say it, too: another router may stand there.
        self._responses = _STREAM_END not in seen
        self._seen = seen[-_SEEN_BYTES:]
