"""The listener as it is shipped, uvloop and all, with the whole Router and a server behind it, under load."""

from __future__ import annotations

import asyncio
import contextlib
import urllib.request
from collections.abc import AsyncIterator, Iterator

import pytest
from scripted_pool import Pool

from benchmarks.closed_loop import Kind, Load
from benchmarks.instant_engine import Connection
from serve_app.config import Config
from serve_app.models.replicas import set_replicas
from serve_app.router.app import RouterApp
from serve_app.router.listener import Listener
from tests.ports import free_port

NAME = TABLE = "theirs"
LOAD_S = 0.3


@pytest.fixture(autouse=True)
def empty_table() -> Iterator[None]:
    yield
    set_replicas(TABLE, [])


def ready(url: str) -> bool:
    with contextlib.suppress(OSError), urllib.request.urlopen(url + "/ready", timeout=2) as answer:
        return bool(answer.status == 200)
    return False


@contextlib.asynccontextmanager
async def front_door() -> AsyncIterator[str]:
    server = await asyncio.get_running_loop().create_server(Connection, "127.0.0.1", 0)
    external = {"urls": [f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"], "health_every_s": 0.05}
    model = {"id": NAME, "tier": "resident", "context": 4096, "external": external}
    router = {"port": free_port(), "drain_s": 1}
    config = Config.model_validate({"models": [model], "audit": {"sink": "none"}, "router": router})
    listener = Listener(config.router, lambda: RouterApp(config, {NAME: TABLE}, Pool(), "test"), "test")
    listener.start()
    url = f"http://127.0.0.1:{config.router.port}"
    try:
        async with asyncio.timeout(10):
            while not await asyncio.to_thread(ready, url):  # noqa: ASYNC110 # of another thread
                await asyncio.sleep(0.02)
        yield url
    finally:
        await listener.stop()
        server.close()


async def test_every_token_of_every_reply_passes_the_shipped_listener() -> None:
    kinds = [Kind("plain", 16), Kind("stream", 128, stream=True), Kind("paced", 16, stream=True, pace_s=0.004)]
    async with front_door() as url:
        for kind in kinds:
            run = await Load(url, "auto", kind, 16).run(LOAD_S)
            assert not run.errors
            assert len(run.replies) >= 16
