"""Takes in a request body: bounded in size and time, of the right type, and parsed once."""

from __future__ import annotations

import asyncio
import codecs
import contextlib
from typing import Any

import orjson
from starlette.datastructures import Headers
from starlette.types import Receive

from serve_app.errors import ApiError, bad_request
from serve_app.router.disconnect import ClientGone
from serve_app.router.wire import Wire

_DROPPED_FACTOR = 8


async def read_json(
    headers: Headers, receive: Receive, *, max_bytes: int, timeout_s: float, wire: Wire | None = None
) -> object:
    """The parsed body. Raises `ApiError` (400, 408, 413, 415) or `ClientGone`."""
    raw = await read_body(headers, receive, max_bytes=max_bytes, timeout_s=timeout_s, wire=wire)
    try:
        return orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        where = f" at line {error.lineno}, column {error.colno}" if raw else "; it is empty"
        raise bad_request(f"The body is not valid JSON{where}.", code="invalid_json") from None


async def read_body(
    headers: Headers, receive: Receive, *, max_bytes: int, timeout_s: float, wire: Wire | None = None
) -> bytes:
    """The body, said to be JSON. Raises `ApiError` (408, 413, 415) or `ClientGone`."""
    content_type = (headers.get("content-type") or "application/json").split(";")[0].strip().lower()
    if content_type != "application/json" and not content_type.endswith("+json"):
        raise ApiError(
            415,
            "The body must be JSON: send `content-type: application/json`.",
            code="unsupported_media_type",
        )
    if (headers.get("content-encoding") or "identity").lower() != "identity":
        raise ApiError(415, "Compressed bodies are not accepted; send it plain.", code="unsupported_media_type")
    try:
        # Most bodies have come with their heads, and need no clock.
        async with contextlib.nullcontext() if wire and wire.has_all else asyncio.timeout(timeout_s):
            # RFC 8259 §8.1: whoever reads JSON may pass over it, and .NET and PowerShell write one.
            return (await _read(receive, max_bytes)).removeprefix(codecs.BOM_UTF8)
    except TimeoutError:
        raise ApiError(408, f"The body did not arrive within {timeout_s:g} s.", code="body_timeout") from None


def encoded(body: dict[str, Any]) -> bytes:
    """A body as JSON. Raises `ApiError` (400): orjson reads 1024 levels and writes 254."""
    try:
        return orjson.dumps(body)
    except orjson.JSONEncodeError:
        raise bad_request("The body is nested too deeply.", code="invalid_json") from None


async def _read(receive: Receive, max_bytes: int) -> bytes:
    """All bytes of the body; what is too much is read and dropped, within reason.

    A client that is still writing sees its connection reset, not our answer, if we answer and close at once.
    """
    chunks: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        chunk: bytes = message.get("body", b"")
        size += len(chunk)
        if size <= max_bytes:
            chunks.append(chunk)
        else:
            chunks.clear()
        if not message.get("more_body") or size > _DROPPED_FACTOR * max_bytes:
            break
    if size > max_bytes:
        raise ApiError(413, f"The body is larger than {max_bytes} bytes.", code="request_too_large")
    return chunks[0] if len(chunks) == 1 else b"".join(chunks)
