"""A Router with one resident model in front of scripted engines, with the settings that a test is about."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from asgi_call import Call
from scripted_pool import SECRET, Pool
from scripted_upstream import Script, Upstream, answer, event

from serve_app.config import Config
from serve_app.models.replicas import PublishedModel, Replica, set_replicas
from serve_app.router.app import RouterApp

HOT = "hot"
PATIENCE_S = 5.0
DONE = answer(200, {"id": "ok", "choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}})
FULL = answer(503, {"error": {"message": "no"}}, refusal="full")


def key(name: str, **limits: Any) -> dict[str, Any]:
    """A configured key; the key itself is `name-key`."""
    return {"id": name, "sha256": hashlib.sha256(f"{name}-key".encode()).hexdigest(), **limits}


def by(name: str) -> dict[str, str]:
    """The headers of a client with that key."""
    return {"authorization": f"Bearer {name}-key"}


def body(text: str = "hi", **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], **fields}


def settings(
    model: dict[str, Any] | None = None, models: list[dict[str, Any]] | None = None, **sections: Any
) -> Config:
    hot = {"id": HOT, "tier": "resident", "source": "org/hot", "context": 4096, **(model or {})}
    return Config.model_validate({"models": [hot, *(models or [])], "audit": {"sink": "none"}, **sections})


def audited(directory: Path, **audit: Any) -> dict[str, Any]:
    return {"audit": {"sink": "file", "directory": str(directory), **audit}}


@contextlib.asynccontextmanager
async def front(
    *scripts: Script, model: dict[str, Any] | None = None, **sections: Any
) -> AsyncIterator[tuple[RouterApp, list[Upstream]]]:
    """A router, and one replica of its model for each script."""
    config = settings(model, **sections)
    async with contextlib.AsyncExitStack() as stack:
        upstreams = [await stack.enter_async_context(Upstream(script)) for script in scripts]
        names = [found.id for found in config.models]
        set_replicas(
            "Hot",
            [
                Replica(
                    f"hot-{i}",
                    dict.fromkeys(names, upstream.url),
                    SECRET,
                    {name: PublishedModel("awake") for name in names},
                    True,
                )
                for i, upstream in enumerate(upstreams)
            ],
        )
        app = RouterApp(config, dict.fromkeys(names, "Hot"), Pool(), "test")
        if "audit" in sections:
            app._audit.start()
        try:
            yield app, upstreams
        finally:
            await app._relay.close()
            await app._rates.close()
            await asyncio.to_thread(app._audit.close)
            set_replicas("Hot", [])


async def until(condition: Callable[[], object], what: str = "the state is reached") -> None:
    """Wait for a state that nobody announces."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"not within {PATIENCE_S} s: {what}"
        await asyncio.sleep(0.002)


class Places:
    """An engine with so many places, whose requests end when a test says so; what is too much is refused as full."""

    def __init__(self, places: int, *, opened: bool = False, says: Script = DONE) -> None:
        self.places = places
        self._says = says
        # How long an answer takes where no test decides; no outcome depends on it.
        self._takes_s = 0.005 if opened else 0.0
        self.taken = 0
        self.most = 0
        self.tries = 0
        self.served: list[str] = []
        self._ends = asyncio.Semaphore(10**6 if opened else 0)

    def end(self, count: int = 1) -> None:
        """Let so many requests be answered."""
        for _ in range(count):
            self._ends.release()

    async def __call__(self, writer: asyncio.StreamWriter) -> None:
        self.tries += 1
        if self.taken >= self.places:
            await FULL(writer)
            return
        self.taken += 1
        self.most = max(self.most, self.taken)
        try:
            await self._ends.acquire()
            await asyncio.sleep(self._takes_s)
        finally:
            self.taken -= 1
        await self._says(writer)


def usage_event(**tokens: int) -> bytes:
    """What vLLM sends before [DONE] when it is asked for the usage."""
    import orjson

    return b"data: " + orjson.dumps({"choices": [], "usage": tokens}) + b"\n\n"


__all__ = ["HOT", "Call", "Places", "audited", "body", "by", "event", "front", "key", "settings", "until"]
