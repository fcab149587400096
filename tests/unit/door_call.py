"""The client's side of one request to the front door, over a real socket."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any

import httptools
import uvicorn
from starlette.types import ASGIApp, Message
from uvicorn.server import ServerState

from serve_app.router.protocol import FrontDoorProtocol

Say = Callable[[Message], None]


def _protocol_of(app: ASGIApp, state: ServerState) -> Callable[[], FrontDoorProtocol]:
    config = uvicorn.Config(app, http=FrontDoorProtocol, lifespan="off", access_log=False, server_header=False)
    config.load()
    return lambda: FrontDoorProtocol(config=config, server_state=state, app_state={})


@contextlib.asynccontextmanager
async def listening(app: ASGIApp) -> AsyncIterator[tuple[str, int]]:
    """The front door on a port of its own."""
    server = await asyncio.get_running_loop().create_server(_protocol_of(app, ServerState()), "127.0.0.1", 0)
    yield server.sockets[0].getsockname()
    server.close()


class Door:
    """One connection. What it receives is told as the messages that an ASGI app would have sent."""

    def __init__(self, app: ASGIApp, say: Say) -> None:
        self._state = ServerState()
        self._protocol = _protocol_of(app, self._state)
        self._reading = _Reading(say)
        self._writer: asyncio.StreamWriter | None = None
        self._left = False

    async def run(self, request: bytes) -> None:
        """Send it, and read until the answer is over or the connection is."""
        ours, theirs = socket.socketpair()
        await asyncio.get_running_loop().connect_accepted_socket(self._protocol, theirs)
        reader, self._writer = await asyncio.open_connection(sock=ours)
        if self._left:
            self._writer.close()
        self._writer.write(request)
        parser = self._reading.parser = httptools.HttpResponseParser(self._reading)
        try:
            while not self._reading.over and (data := await reader.read(65536)):
                parser.feed_data(data)
        except ConnectionError:
            pass
        if self._reading.over:
            self._writer.close()
        if tasks := list(self._state.tasks):
            await asyncio.wait(tasks)

    def leave(self) -> None:
        """Close the connection."""
        self._left = True
        if self._writer:
            self._writer.close()


class _Reading:
    """httptools' callbacks."""

    def __init__(self, say: Say) -> None:
        self.over = False
        self._say = say
        self.parser: Any = None
        self._headers: list[tuple[bytes, bytes]] = []

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() not in (b"date", b"transfer-encoding"):
            self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        self._say({"type": "http.response.start", "status": self.parser.get_status_code(), "headers": self._headers})

    def on_body(self, body: bytes) -> None:
        self._say({"type": "http.response.body", "body": body, "more_body": True})

    def on_message_complete(self) -> None:
        self._say({"type": "http.response.body", "body": b"", "more_body": False})
        self.over = True


def request_of(
    method: str, path: str, query: str, headers: dict[str, str], parts: list[bytes], *, unfinished: bool
) -> bytes:
    """The bytes of a request. Of several parts, or an unfinished body, in chunks."""
    target = f"{path}?{query}" if query else path
    announced = "content-length" in headers
    chunked = not announced and (unfinished or len(parts) > 1)
    framing = {"transfer-encoding": "chunked"} if chunked else {"content-length": str(sum(map(len, parts)))}
    fields = {"host": "door", **framing, **headers}
    lines = [f"{method} {target} HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items())]
    head = "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n"
    if not chunked:
        return head + b"".join(parts)
    pieces = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts if part)
    return head + pieces + (b"" if unfinished else b"0\r\n\r\n")
