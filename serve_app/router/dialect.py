"""How an API says that something is wrong, and how its streams end: OpenAI's way, and Anthropic's."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import orjson

from serve_app.errors import ApiError

MESSAGES = "/v1/messages"
# https://docs.anthropic.com/en/api/errors; its 529 is a 503 here, as for all who use the same engines.
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


@dataclasses.dataclass(frozen=True, slots=True)
class Dialect:
    """`error`: the body of an error. `event` stands before it in a stream, `after` behind it.

    `engine_error`: how an engine's event begins that ends its stream with an error; `engine_end`: how the last one of a
    good stream does.
    `id_header`: where this API's own clients look for the request's id, beside `x-request-id`.
    """

    error: Callable[[ApiError], bytes]
    event: bytes
    after: bytes
    engine_error: bytes
    engine_end: bytes
    id_header: str = ""

    def ends(self, events: bytes) -> bool:
        """Whether the last of these whole events is a stream's last one."""
        last = events.rfind(b"\n\n", 0, -2)
        return events.startswith(self.engine_end, last + 2 if last >= 0 else 0)

    def error_event(self, error: ApiError) -> bytes:
        """The error as the end of a stream that has begun."""
        return self.event + self.error(error) + b"\n\n" + self.after


def _openai(error: ApiError) -> bytes:
    return orjson.dumps(error.payload())


def _anthropic(error: ApiError) -> bytes:
    kind = _ANTHROPIC_TYPES.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    return orjson.dumps({"type": "error", "error": {"type": kind, "message": error.message}})


_DONE = b"data: [DONE]\n\n"
OPENAI = Dialect(_openai, b"data: ", _DONE, b'data: {"error"', _DONE)
ANTHROPIC = Dialect(
    _anthropic,
    b"event: error\ndata: ",
    b"",
    b"event: error\n",
    b"event: message_stop\n",
    "request-id",
)


def dialect_of(path: str) -> Dialect:
    """What whoever asks for this path expects."""
    return ANTHROPIC if path == MESSAGES or path.startswith(MESSAGES + "/") else OPENAI
