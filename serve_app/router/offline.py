"""The offline lane: lines of batches go through the Router itself, where interactive requests leave room."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

from starlette.types import ASGIApp, Message, Scope

from serve_app.batches.drive import Answer, refused
from serve_app.batches.plan import OFFLINE_PRIORITY, Load
from serve_app.catalog import AUTO, Catalog
from serve_app.errors import ApiError
from serve_app.models.replicas import replicas_of
from serve_app.router.auth import CALLER, Keys
from serve_app.router.claim import PRIORITY
from serve_app.router.fleet import Fleet
from serve_app.router.lines import Line
from serve_app.router.relay import Relay
from serve_app.service_schema import Batches

# What replicas publish may be so old.
_PUBLISHED_S = 2.5


class Offline:
    """See `batches.runner.Service`. `app` is the whole Router, so that lines are limited and counted like requests."""

    def __init__(
        self,
        app: ASGIApp,
        settings: Batches,
        catalog: Catalog,
        fleet: Fleet,
        relay: Relay,
        deployments: Mapping[str, str],
        keys: Keys,
        lines: Mapping[str, Line],
    ) -> None:
        self._app = app
        self._settings = settings
        self._catalog = catalog
        self._fleet = fleet
        self._relay = relay
        self._deployments = deployments
        self._keys = keys
        self._lines = lines
        self._running = 0
        self._lately: deque[tuple[float, int]] = deque()

    def engine_of(self, model: str) -> str | None:
        """See `Service`."""
        if not model or model == AUTO:
            return None
        found = self._catalog.find(model)
        return self._fleet.engine_of(found).id if found else model

    def awake(self, engine: str) -> bool:
        """See `Service`."""
        model = self._catalog.models.get(engine)
        return model is not None and self._fleet.status(model).state == "awake"

    def load(self, engine: str | None) -> Load:
        """See `Service`. Of what other Routers do it knows what the replicas published, of our own all."""
        model = self._catalog.models.get(engine or self._catalog.default_id)
        if model is None:
            return Load(0, self._settings.concurrency)  # nobody's: it is refused at once
        replicas = [replica for replica in replicas_of(self._deployments[model.id]) if model.id in replica.models]
        # Everything on those replicas: the models of a pool's replica share its GPU.
        sent = sum(self._relay.in_flight[replica.id] for replica in replicas)
        here = sent + len(self._lines[model.id]) - self._running
        published = self._fleet.status(model).in_flight - self._most_lately()
        places = max(1, len(replicas)) * model.max_ongoing_requests
        # Where requests wait for KV cache no line would be begun either, and it would keep the next request waiting.
        return Load(places if self._fleet.kv_cache_full(model) else max(0, here, published), places)

    async def ask(self, key: str, url: str, body: bytes, request_id: str) -> Answer:
        """See `Service`."""
        caller = self._keys.named(key)
        if caller is None:
            error = ApiError(401, "The API key of this batch is not known any more.", code="invalid_api_key")
            return refused(error, request_id)
        scope = _scope(url, body, request_id) | {CALLER: caller, PRIORITY: OFFLINE_PRIORITY}
        self._count(1)
        try:
            return await _answered(self._app, scope, body, request_id)
        finally:
            self._count(-1)

    def _count(self, change: int) -> None:
        self._lately.append((time.monotonic(), self._running))
        self._running += change
        self._forget()

    def _most_lately(self) -> int:
        """The most lines that ran at once in the time that a published number may be from."""
        self._forget()
        return max(self._running, *(count for _, count in self._lately), 0)

    def _forget(self) -> None:
        while self._lately and self._lately[0][0] < time.monotonic() - _PUBLISHED_S:
            self._lately.popleft()


def _scope(url: str, body: bytes, request_id: str) -> dict[str, Any]:
    headers = {"content-type": "application/json", "content-length": str(len(body)), "x-request-id": request_id}
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": url,
        "raw_path": url.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
        "client": None,
        "server": None,
    }


async def _answered(app: ASGIApp, scope: Scope, body: bytes, request_id: str) -> Answer:
    """The whole answer of an app to one request."""
    incoming: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
    status = 0
    headers: dict[bytes, bytes] = {}
    parts: list[bytes] = []

    async def receive() -> Message:
        if not incoming:
            await asyncio.Event().wait()  # nobody hangs up here
        return incoming.pop()

    async def send(message: Message) -> None:
        nonlocal status, headers
        if message["type"] == "http.response.start":
            status, headers = message["status"], dict(message["headers"])
        else:
            parts.append(message.get("body", b""))

    try:
        await app(scope, receive, send)
    except Exception:
        # Starlette raises it again after it has answered.
        if not status:
            raise
    if not status:
        return refused(ApiError(500, "The router gave no answer.", code="internal_error"), request_id)
    retry_after = headers.get(b"retry-after", b"").decode()
    return Answer(status, b"".join(parts), request_id, float(retry_after) if retry_after.isdigit() else None)
