"""The thin layer on an engine's own app: who may come in, how many at once, and whether any more at all."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Callable

import orjson
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve_app.admission.kv_cache import refuses
from serve_app.engines.base import REFUSAL_HEADER, SECRET_HEADER, EngineLoad, Refusal

# What a Router may ask of an engine. vLLM's app has more (control, profiling): none of it is reachable.
SERVED_PATHS = frozenset(
    {
        "/health",
        "/metrics",
        "/v1/models",
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/embeddings",
        "/v1/responses",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/tokenize",
        "/detokenize",
        "/v1/score",
        "/v1/rerank",
    }
)
# Of English text; Chinese has about 2. Only ever a load estimate, of prompts with their JSON around them.
_BYTES_PER_TOKEN = 4
# These cost the engine nothing and must answer when it is full.
UNCOUNTED_PATHS = frozenset({"/health", "/metrics", "/v1/models"})

_SECRET = SECRET_HEADER.encode()
_RESPONSES = "/v1/responses"
_STREAM_END = b"data: [DONE]\n\n"


class Gate:
    """ASGI middleware around one engine's app.

    Counting happens in the host's own event loop, so the limit is exact and `close_if_idle` is atomic:
    between its look at the counter and the refusal of the next request nothing else can run. The same goes for the KV
    cache: what replicas publish is up to a second old, `load` is of the engine's last step.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        max_ongoing: int,
        secret: str,
        load: Callable[[], EngineLoad] = EngineLoad,
        kv_cache_limit: float | None = None,
    ) -> None:
        self.app = app
        self._load = load
        self._kv_cache_limit = kv_cache_limit
        self.max_ongoing = max_ongoing
        self.in_flight = 0
        self.in_flight_bytes = 0
        self.served = 0
        self.dead = False
        self._closed = False
        self._secret = secret.encode()
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def in_flight_tokens(self) -> int:
        """About so many prompt tokens are in flight, whether they run or wait in the engine."""
        return self.in_flight_bytes // _BYTES_PER_TOKEN

    def close(self) -> None:
        """Refuse every further request; those in flight go on."""
        self._closed = True

    def open(self) -> None:
        """Admit requests again."""
        self._closed = False

    def close_if_idle(self) -> bool:
        """Close if nothing is in flight; otherwise change nothing and return False."""
        if self.in_flight:
            return False
        self._closed = True
        return True

    async def wait_idle(self) -> None:
        """Wait until nothing is in flight."""
        await self._idle.wait()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        path = scope["path"]
        if not self._from_router(scope):
            await _answer(send, 403, "This port belongs to the router; ask the router instead.", None)
        elif path not in SERVED_PATHS:
            await _answer(send, 404, "No such path on an engine.", None)
        elif path in UNCOUNTED_PATHS:
            await self.app(scope, receive, send)
        elif self.dead:
            await _answer(send, 503, "The engine has died and is being restarted.", Refusal.DEAD)
        elif self._closed:
            await _answer(send, 503, "The engine is closing.", Refusal.CLOSED)
        elif self.in_flight >= self.max_ongoing:
            await _answer(send, 503, f"All {self.max_ongoing} places are taken.", Refusal.FULL)
        elif refuses(self._load(), self.in_flight, self._kv_cache_limit):
            await _answer(send, 503, "The KV cache is full, and requests wait for it.", Refusal.FULL)
        else:
            await self._count(scope, receive, _ended(send) if path == _RESPONSES else send)

    def _from_router(self, scope: Scope) -> bool:
        for name, value in scope["headers"]:
            if name == _SECRET:
                return hmac.compare_digest(value, self._secret)
        return False

    async def _count(self, scope: Scope, receive: Receive, send: Send) -> None:
        size = _body_bytes(scope)
        self.in_flight += 1
        self.in_flight_bytes += size
        self._idle.clear()
        try:
            await self.app(scope, receive, send)
        finally:
            self.in_flight -= 1
            self.in_flight_bytes -= size
            self.served += 1
            if not self.in_flight:
                self._idle.set()


def _ended(send: Send) -> Send:
    """Ends a stream of the Responses API as all other streams end; without it a Router takes the stream for cut."""
    streams = False

    async def sending(message: Message) -> None:
        nonlocal streams
        if message["type"] == "http.response.start":
            streams = any(
                name == b"content-type" and value.startswith(b"text/event-stream") for name, value in message["headers"]
            )
        elif streams and not message.get("more_body"):
            message = {**message, "body": message.get("body", b"") + _STREAM_END}
        await send(message)

    return sending


def _body_bytes(scope: Scope) -> int:
    """The size that the Router gives; it never sends a body in chunks."""
    for name, value in scope["headers"]:
        if name == b"content-length":
            return int(value)
    return 0


async def _answer(send: Send, status: int, message: str, refusal: Refusal | None) -> None:
    body = orjson.dumps(
        {
            "error": {
                "message": message,
                "type": "server_error",
                "param": None,
                "code": refusal and refusal.value,
            }
        }
    )
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if refusal:
        headers.append((REFUSAL_HEADER.encode(), refusal.value.encode()))
    start: Message = {"type": "http.response.start", "status": status, "headers": headers}
    await send(start)
    await send({"type": "http.response.body", "body": body})
