"""The Router's kept-alive connections to an engine: used again for everything, and found out when they are stale."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

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
    models = [{"id": "hot", "tier": "resident", "context": 4096, "fake": {}}]
    app = RouterApp(Config.model_validate({"models": models}), {"hot": "Kept"}, lambda model: asyncio.sleep(0), "test")
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
