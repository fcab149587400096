"""A router before scripted engines, in one process: what the tests of the relay stand on."""

import contextlib
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from asgi_call import Call
from scripted_pool import SECRET, Pool
from scripted_upstream import (
    DONE,
    Script,
    Upstream,
    answer,
    event,
)

from serve_app.config import Config
from serve_app.models.replicas import PublishedModel, Replica, set_replicas
from serve_app.router.app import RouterApp

HOT, COLD = "org/hot:1b", "cold"
PROMPT = "my-private-words"
TEXT = "héllo 世界 🚀 done"
EVENTS = [event(word) for word in (TEXT, "second", "third")]
WHOLE = b"".join(EVENTS) + DONE


def config(**router: Any) -> Config:
    models = [
        {"id": HOT, "aliases": ["nick"], "tier": "resident", "source": "org/hot", "context": 4096},
        {"id": COLD, "tier": "lazy", "source": "org/cold", "context": 2048, "expected_load_s": 30},
        {"id": "embedder", "tier": "lazy", "source": "org/e", "context": 512, "abilities": ["embeddings"]},
    ]
    for model in models:
        model.setdefault("queue", {"size": 0})
    return Config.model_validate({"models": models, "router": {"loading_comment_s": 0.01, **router}})


@pytest.fixture(autouse=True, params=["asgi", "door"])
def through(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Call, "through", request.param)


@pytest.fixture
def pool() -> Pool:
    return Pool()


@pytest.fixture(autouse=True)
def empty_tables() -> Iterator[None]:
    yield
    for deployment in ("Hot", "Pool"):
        set_replicas(deployment, [])


@contextlib.asynccontextmanager
async def routed(pool: Pool, settings: Config | None = None) -> AsyncIterator[RouterApp]:
    set_replicas("Pool", [Replica("pool-0", {}, SECRET, {}, True)])
    app = RouterApp(settings or config(), {HOT: "Hot", COLD: "Pool", "embedder": "Pool"}, pool, "test")
    yield app
    await app._relay.close()


def hot_replicas(*upstreams: Upstream) -> None:
    set_replicas(
        "Hot",
        [
            Replica(f"hot-{i}", {HOT: upstream.url}, SECRET, {HOT: PublishedModel("awake")}, True)
            for i, upstream in enumerate(upstreams)
        ],
    )


@contextlib.asynccontextmanager
async def behind(*scripts: Script, settings: Config | None = None) -> AsyncIterator[tuple[RouterApp, list[Upstream]]]:
    """A router, and one replica of the hot model for each script."""
    async with contextlib.AsyncExitStack() as stack:
        upstreams = [await stack.enter_async_context(Upstream(script)) for script in scripts]
        hot_replicas(*upstreams)
        yield await stack.enter_async_context(routed(Pool(), settings)), upstreams


def body(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": PROMPT}], **fields}


async def asked(script: Script, **fields: Any) -> Call:
    """The whole exchange with one engine that follows the script."""
    async with behind(script) as (app, _):
        call = await Call(app, body(**fields)).done()
    if call.status != 200:
        assert PROMPT not in str(call.json)
        assert call.error
    return call


def refuses(word: str) -> Script:
    return answer(503, {"error": {"message": "no"}}, refusal=word)


def publish(*cold: PublishedModel) -> None:
    """The cold model as each replica of the pool publishes it."""
    set_replicas("Pool", [Replica(f"pool-{i}", {}, SECRET, {COLD: found}, True) for i, found in enumerate(cold)])
