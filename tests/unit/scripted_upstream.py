"""An engine's port that answers raw bytes from a script, in pieces of the script's choosing."""

import asyncio
import contextlib
import dataclasses
import ssl
from collections.abc import Awaitable, Callable
from typing import Any

import orjson

from serve_app.engines.base import REFUSAL_HEADER

DONE = b"data: [DONE]\n\n"


@dataclasses.dataclass(slots=True)
class Seen:
    """One request as it arrived, and whether its connection was closed before it was answered to the end."""

    path: str
    headers: dict[str, str]
    body: Any
    closed: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)


Script = Callable[[asyncio.StreamWriter], Awaitable[None]]


class Upstream:
    """`script` answers every request; `seen` holds them; `arrived` is set by each."""

    def __init__(self, script: Script, *, tls: ssl.SSLContext | None = None) -> None:
        self.script = script
        self._tls = tls
        self.seen: list[Seen] = []
        self.arrived = asyncio.Event()
        self.url = ""
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> "Upstream":
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=self._tls)
        scheme = "https" if self._tls else "http"
        self.url = f"{scheme}://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *exc: object) -> None:
        assert self._server
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        except asyncio.IncompleteReadError:  # a connection that was not used in the end
            writer.close()
            return
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:] if line)}
        raw = await reader.readexactly(int(headers.get("content-length", 0)))
        seen = Seen(head[0].split()[1], headers, orjson.loads(raw) if raw else None)
        self.seen.append(seen)
        self.arrived.set()
        answering = asyncio.create_task(self._answer(writer))
        with contextlib.suppress(ConnectionError):
            await reader.read()
        if not answering.done():
            seen.closed.set()
            answering.cancel()
        writer.close()

    async def _answer(self, writer: asyncio.StreamWriter) -> None:
        await self.script(writer)
        await writer.drain()
        writer.close()


async def forever() -> None:
    """A stall."""
    await asyncio.Event().wait()


async def _piece(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(b"%x\r\n%s\r\n" % (len(data), data))
    await writer.drain()
    # Paces the pieces, so that they arrive apart; no outcome depends on it.
    await asyncio.sleep(0.002)


def stream(*pieces: bytes, end: str = "whole", status: str = "200 OK") -> Script:
    """A chunked response in these pieces. `end`: whole, cut (the connection breaks off) or stall."""

    async def script(writer: asyncio.StreamWriter) -> None:
        writer.write(
            f"HTTP/1.1 {status}\r\ncontent-type: text/event-stream\r\n".encode()
            + b"connection: close\r\ntransfer-encoding: chunked\r\n\r\n"
        )
        for piece in pieces:
            await _piece(writer, piece)
        if end == "stall":
            await forever()
        if end == "whole":
            writer.write(b"0\r\n\r\n")

    return script


def answer(status: int, body: object, *, refusal: str | None = None, pieces: int = 1, cut: bool = False) -> Script:
    """A JSON response, its body in so many pieces; `cut` drops the last one and the connection."""
    raw = body if isinstance(body, bytes) else orjson.dumps(body)

    async def script(writer: asyncio.StreamWriter) -> None:
        extra = f"{REFUSAL_HEADER}: {refusal}\r\n" if refusal else ""
        writer.write(
            f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\nconnection: close\r\n".encode()
            + f"content-length: {len(raw)}\r\n{extra}\r\n".encode()
        )
        step = -(-len(raw) // pieces)
        parts = [raw[start : start + step] for start in range(0, len(raw), step)]
        for part in parts[:-1] if cut else parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0.002)

    return script


async def silent(writer: asyncio.StreamWriter) -> None:
    """Takes the request and never says anything."""
    await forever()


async def hang_up(writer: asyncio.StreamWriter) -> None:
    """Takes the request and closes the connection."""
    writer.close()


def error(code: int, message: str, param: object = None) -> dict[str, Any]:
    """vLLM's error body."""
    return {"error": {"message": message, "type": "BadRequestError", "param": param, "code": code}}


def event(text: str) -> bytes:
    """One event of a chat stream."""
    return b"data: " + orjson.dumps({"choices": [{"delta": {"content": text}}]}) + b"\n\n"
