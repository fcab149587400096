"""The Router's kept-alive connections to an engine: used again for everything, and found out when they are stale."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator

import pytest
import uvicorn

from serve_app.config import Config
from serve_app.engines.base import EngineSpec
from serve_app.engines.fake import serve
from serve_app.engines.gate import Gate
from serve_app.engines.port import reserve_port
from serve_app.models.replicas import PublishedModel, Replica, set_replicas
from serve_app.router.app import RouterApp
from tests.unit.asgi_call import Call

SECRET = "s"
BODY = {"messages": [{"role": "user", "content": "hi"}]}


def config() -> Config:
    models = [{"id": "hot", "tier": "resident", "context": 4096, "fake": {}}]
    return Config.model_validate({"models": models, "audit": {"sink": "none"}})


@contextlib.asynccontextmanager
async def engine(port: int) -> AsyncIterator[Gate]:
    """A scripted engine behind a real HTTP server on this port."""
    spec = EngineSpec("hot", "fake", "", {}, {}, 8)
    async with serve(spec, lambda phase: None) as served:
        gate = Gate(served.app, max_ongoing=8, secret=SECRET)
        server = uvicorn.Server(uvicorn.Config(gate, port=port, log_level="warning", lifespan="off"))
        running = asyncio.create_task(server.serve())
        async with asyncio.timeout(10):
            while not server.started:  # noqa: ASYNC110 # uvicorn has no event for it
                await asyncio.sleep(0.01)
        yield gate
        server.should_exit = True
        await running


async def test_probes_and_requests_share_connections_and_a_restarted_engine_is_found_again() -> None:
    address, reserved = reserve_port("127.0.0.1")
    reserved.close()
    app = RouterApp(config(), {"hot": "Kept"}, lambda model: asyncio.sleep(0), "test")
    set_replicas("Kept", [Replica("r", {"hot": address.url}, SECRET, {"hot": PublishedModel("awake")}, True)])
    for _ in range(2):
        async with engine(address.port) as gate:
            for _ in range(3):
                assert (await Call(app, path="/ready", method="GET").done()).status == 200
                assert (await Call(app, BODY).done()).status == 200
            assert gate.served == 3
        assert (await Call(app, path="/ready", method="GET").done()).status == 503
        assert (await Call(app, BODY).done()).status == 503
    await app._relay.close()


class Fragile:
    """A replica's port that keeps connections, answers probes, and dies of the first prompt with `poison` in it."""

    def __init__(self) -> None:
        self.died = False
        self.url = ""
        self._writers: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> Fragile:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *error: object) -> None:
        self._die()

    def _die(self) -> None:
        assert self._server
        self._server.close()
        for writer in self._writers:
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                length = re.search(rb"content-length: (\d+)", head)
                if b"poison" in await reader.readexactly(int(length[1]) if length else 0):
                    self.died = True
                    self._die()
                writer.write(b'HTTP/1.1 200 OK\r\ncontent-length: 14\r\n\r\n{"choices":[]}')


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_that_kills_engines_does_not_get_one_after_the_other(stream: bool) -> None:
    app = RouterApp(config(), {"hot": "Kept"}, lambda model: asyncio.sleep(0), "test")
    async with contextlib.AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(Fragile()) for _ in range(4)]
        replicas = [
            Replica(f"r{number}", {"hot": engine.url}, SECRET, {"hot": PublishedModel("awake")}, True)
            for number, engine in enumerate(engines)
        ]
        for replica in replicas:
            set_replicas("Kept", [replica])
            assert (await Call(app, BODY).done()).status == 200  # leaves a connection to be used again
        set_replicas("Kept", replicas)
        poison = {"messages": [{"role": "user", "content": "poison"}], "stream": stream}
        call = await Call(app, poison).done()
        assert (call.status, call.error["code"]) == (503, "engine_died")
        assert sum(engine.died for engine in engines) <= 2
        assert (await Call(app, BODY).done()).status == 200
        await app._relay.close()
