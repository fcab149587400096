"""Routers behind their real front doors, so that clients' sockets are sockets, before scripted engines."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
from collections.abc import AsyncIterator
from typing import Any

from front import HOT, settings, until
from scripted_pool import SECRET, Pool
from scripted_upstream import Script, Upstream

from serve_app.models.replicas import PublishedModel, Replica, set_replicas
from serve_app.router.app import RouterApp
from serve_app.router.listener import Listener
from tests.ports import free_port

PATIENCE_S = 10.0
CHAT = "/v1/chat/completions"


@dataclasses.dataclass(slots=True)
class Door:
    """One Router and the port that it listens on."""

    port: int
    app: RouterApp

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def open(self) -> int:
        """Requests that it has in hand, whether they run or wait."""
        return self.app._open

    @property
    def queued(self) -> int:
        return len(self.app._lines[HOT])

    @property
    def running(self) -> int:
        return self.app._relay.in_flight.total()

    def idle(self) -> bool:
        return self.open == self.queued == self.running == 0


class Connection:
    """A client that speaks HTTP by hand."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def send(self, *segments: bytes) -> None:
        for segment in segments:
            self.writer.write(segment)
            await self.writer.drain()
            await asyncio.sleep(0.01)  # so that they arrive apart; no outcome depends on it

    async def answer(self) -> tuple[int, dict[str, str], bytes]:
        """The next answer: status, headers and body, decoded if it is chunked."""
        async with asyncio.timeout(PATIENCE_S):
            head = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
            headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:] if line)}
            return int(head[0].split()[1]), headers, await self._body(headers)

    async def _body(self, headers: dict[str, str]) -> bytes:
        if "content-length" in headers:
            return await self.reader.readexactly(int(headers["content-length"]))
        if headers.get("transfer-encoding") != "chunked":
            return b""
        whole = b""
        while size := int(await self.reader.readline(), 16):
            whole += await self.reader.readexactly(size)
            await self.reader.readline()
        await self.reader.readline()
        return whole

    async def ended(self) -> bool:
        """Whether the router closes the connection without another byte."""
        async with asyncio.timeout(PATIENCE_S):
            return await self.reader.read() == b""

    def leave(self) -> None:
        """Close at once, whatever is under way."""
        self.writer.transport.abort()


def request(body: object, *lines: bytes, target: str = CHAT, method: str = "POST") -> bytes:
    """A request as bytes; `lines`: more headers."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = [f"{method} {target} HTTP/1.1".encode(), b"host: x", b"content-type: application/json", *lines]
    return b"\r\n".join([*head, b"content-length: %d" % len(raw), b"", raw])


@contextlib.asynccontextmanager
async def connected(door: Door) -> AsyncIterator[Connection]:
    reader, writer = await asyncio.open_connection("127.0.0.1", door.port)
    try:
        yield Connection(reader, writer)
    finally:
        writer.close()


@contextlib.asynccontextmanager
async def front_doors(
    *scripts: Script, count: int = 1, model: dict[str, Any] | None = None, router: dict[str, Any] | None = None
) -> AsyncIterator[tuple[list[Door], list[Upstream]]]:
    """So many Routers, and one replica of the model for each script."""
    async with contextlib.AsyncExitStack() as stack:
        upstreams = [await stack.enter_async_context(Upstream(script)) for script in scripts]
        awake = {HOT: PublishedModel("awake")}
        set_replicas(
            "Hot", [Replica(f"hot-{i}", {HOT: each.url}, SECRET, awake, True) for i, each in enumerate(upstreams)]
        )
        stack.callback(set_replicas, "Hot", [])
        doors = [await _opened(stack, model, router or {}) for _ in range(count)]
        yield doors, upstreams


async def _opened(stack: contextlib.AsyncExitStack, model: dict[str, Any] | None, router: dict[str, Any]) -> Door:
    port = free_port()
    config = settings(model, router={"port": port, "drain_s": 1, **router})
    made: list[RouterApp] = []

    def new_app() -> RouterApp:
        made.append(RouterApp(config, {HOT: "Hot"}, Pool(), "test"))
        return made[0]

    listener = Listener(config.router, new_app, "test")
    listener.start()
    stack.push_async_callback(listener.stop)
    await until(lambda: made and listener._server and listener._server.started, "the door is open")
    return Door(port, made[0])
