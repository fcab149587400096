"""Chats whose history the Router keeps: a layer around the chat endpoint, and how clients read and delete theirs."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import uuid
from typing import Any

import orjson
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from serve_app.catalog import Catalog
from serve_app.conversations.answer import ChatAnswer
from serve_app.conversations.history import (
    continues_nothing,
    entry_of,
    is_readable,
    keeps_own_history,
    merge,
    split_system,
    tokens_of,
    turns_of,
)
from serve_app.conversations.store import Kept, Store, Unavailable, key_of
from serve_app.errors import ApiError, unavailable
from serve_app.router.auth import ANONYMOUS, CALLER, Caller, given_key
from serve_app.router.headers import headers_of
from serve_app.router.tap import DROPPED_HEADER, HEADER, UNAVAILABLE, Tap, body_of, with_body
from serve_app.router.wire import WIRE
from serve_app.routing.reading import ESTIMATE_ERROR
from serve_app.routing.sticky import named_by
from serve_app.service_schema import Conversations, RouterSettings

logger = logging.getLogger(__name__)

# An entry weighs at least a token for so many bytes (`history`): that keeps what is sent on below `max_body_bytes`.
_BYTES_PER_TOKEN = 64


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    """How much of a history a request is given."""

    catalog: Catalog
    kept: Conversations
    router: RouterSettings

    def tokens(self, body: dict[str, Any], raw: bytes, answer_tokens: object) -> int:
        """What history and request may have together: the model must have room for them, and for its answer."""
        name = body.get("model")
        model = None
        if isinstance(name, str):
            model = self.catalog.find(name) or self.catalog.find(name.rpartition(":")[0])
        context = (model or self.catalog.models[self.catalog.default_id]).context
        asked = isinstance(answer_tokens, int) and not isinstance(answer_tokens, bool)
        answer = answer_tokens if asked else context // 4
        assert isinstance(answer, int)
        room = (self.router.max_body_bytes - len(raw)) // _BYTES_PER_TOKEN
        return min(self.kept.max_tokens, int((context - answer) / ESTIMATE_ERROR), room)


class ChatHistory:
    """ASGI layer around the chat endpoint. Requests that name no conversation pass as they are."""

    def __init__(self, app: ASGIApp, store: Store, limits: Limits) -> None:
        self._app = app
        self._store = store
        self._limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        raw = await body_of(scope, receive, send, self._limits.router)
        if raw is None:
            return
        named = _named_chat(headers_of(scope), raw)
        if named is None:
            await self._app(scope, with_body(raw, receive), send)
        elif keeps_own_history(named[1]["messages"]):
            scope.pop(WIRE, None)
            await self._app(scope, with_body(raw, receive), Tap(send, {HEADER: "own-history"}))
        else:
            await self._continue(scope, receive, send, raw, *named)

    async def _continue(
        self, scope: Scope, receive: Receive, send: Send, raw: bytes, name: str, body: dict[str, Any]
    ) -> None:
        """Answer with what was said before, and keep what is said now."""
        key = key_of(owner_of(scope), "chat", name)
        headers: dict[str, str] = {}
        kept = await recall(self._store, key, headers)
        entries = kept.entries if kept else ()
        system, asked = split_system(body["messages"])
        said = system or (orjson.loads(kept.head) if kept and kept.head else [])
        limit = self._limits.tokens(body, raw, body.get("max_completion_tokens", body.get("max_tokens")))
        merged = merge(entries, asked, limit - tokens_of(said))
        if merged.dropped:
            headers[DROPPED_HEADER] = str(merged.dropped)
        answer = ChatAnswer()

        async def keep() -> bool:
            assert answer.message
            entry = entry_of(uuid.uuid4().hex, [*asked, answer.message])
            return await put(self._store.append(key, [entry], orjson.dumps(system) if system else None))

        keeps = bool(asked) and body.get("store") is not False and not (kept and continues_nothing(entries, asked))
        if kept:
            raw = encoded({**body, "messages": [*said, *merged.items]}) or raw
        scope.pop(WIRE, None)
        await self._app(scope, with_body(raw, receive), Tap(send, headers, answer, keep if keeps else None))


class ConversationRoutes:
    """`GET` and `DELETE /v1/router/conversations/{id}`: one's own only."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def read(self, request: Request) -> Response:
        """The endpoint."""
        kept = await found(self._store, self._key(request), "conversation")
        items = [item for turn in turns_of(kept.entries) for entry in turn for item in entry.items]
        content = {
            "id": request.path_params["id"],
            "object": "conversation",
            "turns": len(turns_of(kept.entries)),
            "tokens": sum(entry.tokens for entry in kept.entries),
            "messages": [*(orjson.loads(kept.head) if kept.head else ()), *items],
        }
        return Response(orjson.dumps(content), media_type="application/json")

    async def delete(self, request: Request) -> Response:
        """The endpoint."""
        await forget(self._store, self._key(request), "conversation")
        content = {"id": request.path_params["id"], "object": "conversation.deleted", "deleted": True}
        return Response(orjson.dumps(content), media_type="application/json")

    def _key(self, request: Request) -> str:
        return key_of(owner_of(request.scope), "chat", request.path_params["id"])


def owner_of(scope: Scope) -> str:
    """Whose conversations a request may see: those of its key's id.

    Where there are no keys, those of whoever sends the same key, for a gateway before us may know its users.
    """
    caller: Caller = scope[CALLER]
    if caller.id != ANONYMOUS:
        return caller.id
    # No id holds a colon: nobody's id is this.
    return ANONYMOUS + ":" + hashlib.sha256(given_key(headers_of(scope)).encode()).hexdigest()


async def recall(store: Store, key: str, headers: dict[str, str]) -> Kept | None:
    """What is kept, and the header that says so; a store that is lost is as good as none."""
    try:
        kept = await store.read(key)
    except Unavailable:
        headers[HEADER] = UNAVAILABLE
        return None
    headers[HEADER] = "kept" if kept else "new"
    return kept


async def put(appending: Any) -> bool:
    """Whether it was kept."""
    try:
        await appending
    except Unavailable:
        logger.warning("conversations: a turn was not kept")
        return False
    return True


async def found(store: Store, key: str, what: str) -> Kept:
    """What is kept. Raises `ApiError` (404, 503)."""
    try:
        kept = await store.read(key)
    except Unavailable:
        raise _lost() from None
    if kept is None:
        raise ApiError(404, f"No such {what}; it may have expired.", code="not_found")
    return kept


async def forget(store: Store, key: str, what: str) -> None:
    """Delete it. Raises `ApiError` (404, 503)."""
    try:
        if not await store.delete(key):
            raise ApiError(404, f"No such {what}; it may have expired.", code="not_found")
    except Unavailable:
        raise _lost() from None


def _lost() -> ApiError:
    return unavailable(
        "Conversations cannot be reached at the moment.", code="conversations_unavailable", retry_after_s=1
    )


def parsed_object(raw: bytes) -> dict[str, Any] | None:
    """The body, if it is a JSON object; what is wrong with another is said by the endpoint."""
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError:
        return None
    return body if isinstance(body, dict) else None


def _named_chat(headers: Headers, raw: bytes) -> tuple[str, dict[str, Any]] | None:
    """The conversation's name, and the body: None for a request that names none, or cannot be read."""
    session = headers.get("x-session-id")
    # Parsed a second time, but only then.
    if not session and b'"conversation"' not in raw:
        return None
    body = parsed_object(raw)
    if body is None or not is_readable(body.get("messages")):
        return None
    name = session or named_by(body.get("conversation"))
    return (name, body) if name else None


def encoded(body: dict[str, Any]) -> bytes | None:
    """The body as JSON, if it can be written."""
    try:
        return orjson.dumps(body)
    except orjson.JSONEncodeError:
        return None  # nested too deeply: the endpoint says so
