"""`/v1/responses`: `store` and `previous_response_id` over our own store, around the endpoint that asks an engine."""

from __future__ import annotations

import uuid
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from serve_app.conversations.answer import ResponseAnswer
from serve_app.conversations.history import Entry, Item, entry_of, merge
from serve_app.conversations.items import input_items, page
from serve_app.conversations.store import Kept, Store, key_of
from serve_app.errors import ApiError, bad_request
from serve_app.router.conversation import Limits, encoded, forget, found, owner_of, parsed_object, put, recall
from serve_app.router.files import limit_of, order_of
from serve_app.router.tap import DROPPED_HEADER, HEADER, UNAVAILABLE, Tap, body_of, refuse, with_body
from serve_app.router.wire import WIRE

_LONGEST_PAGE = 100
_PREVIOUS = "previous_response_id"


class Responses:
    """ASGI layer. Engines keep nothing: each response is kept here, with all that led to it. `store`: None: off."""

    def __init__(self, app: ASGIApp, store: Store | None, limits: Limits) -> None:
        self._app = app
        self._store = store
        self._limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope.pop(WIRE, None)
        raw = await body_of(scope, receive, send, self._limits.router)
        if raw is None:
            return
        body = parsed_object(raw)
        items = _items(body.get("input")) if body else None
        try:
            if self._store is None and body and body.get(_PREVIOUS) is not None:
                raise bad_request(
                    "Nothing is kept here (`conversations.enabled`): send the whole input.",
                    _PREVIOUS,
                    "unsupported_value",
                )
            if body is None or items is None or self._store is None:
                await self._app(scope, with_body(raw, receive), Tap(send, {}, ends=False))
            else:
                await self._continue(self._store, scope, receive, send, raw, body, items)
        except ApiError as error:
            await refuse(scope, send, error)

    async def _continue(
        self,
        store: Store,
        scope: Scope,
        receive: Receive,
        send: Send,
        raw: bytes,
        body: dict[str, Any],
        items: list[Item],
    ) -> None:
        owner, previous, stores = owner_of(scope), body.get(_PREVIOUS), body.get("store") is not False
        headers = {HEADER: "new"} if stores else {}
        entries: tuple[Entry, ...] = ()
        if previous is not None:
            kept = await self._previous(store, owner, previous, headers)
            entries = kept.entries if kept else ()
            merged = merge(entries, items, self._limits.tokens(body, raw, body.get("max_output_tokens")))
            if merged.dropped:
                headers[DROPPED_HEADER] = str(merged.dropped)
            raw = encoded({**body, _PREVIOUS: None, "input": merged.items}) or raw
        answer = ResponseAnswer()

        async def keep() -> bool:
            response = {**answer.response, "store": True, _PREVIOUS: previous}
            entry = entry_of(uuid.uuid4().hex, [*items, *answer.items])
            key = key_of(owner, "response", response["id"])
            return await put(store.append(key, [*entries, entry], orjson.dumps(response)))

        def edit(whole: bytes, kept: bool) -> bytes:
            response = parsed_object(whole)
            return orjson.dumps({**response, "store": kept, _PREVIOUS: previous}) if response else whole

        tap = Tap(send, headers, answer, keep if stores else None, edit=edit, ends=False)
        await self._app(scope, with_body(raw, receive), tap)

    async def _previous(self, store: Store, owner: str, name: object, headers: dict[str, str]) -> Kept | None:
        """Raises `ApiError` (400) where there is no such response."""
        if not isinstance(name, str):
            raise bad_request(f"`{_PREVIOUS}` must be a string.", _PREVIOUS)
        kept = await recall(store, key_of(owner, "response", name), headers)
        if kept is None and headers[HEADER] != UNAVAILABLE:
            raise bad_request(
                "There is no such previous response; it may have expired.", _PREVIOUS, "previous_response_not_found"
            )
        return kept


class ResponseRoutes:
    """`GET` and `DELETE /v1/responses/{id}`, and what is below it: one's own only."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def read(self, request: Request) -> Response:
        """The endpoint. Raises `ApiError`, as all of them do."""
        if request.query_params.get("stream", "false").lower() != "false":
            raise bad_request("A response that is kept is whole: read it without `stream`.", "stream")
        kept = await found(self._store, self._key(request), "response")
        return Response(kept.head, media_type="application/json")

    async def input_items(self, request: Request) -> Response:
        """The endpoint. Newest first, as OpenAI lists them, and with all that went before the response."""
        order = order_of(request)
        limit = limit_of(request, default=20, most=_LONGEST_PAGE)
        kept = await found(self._store, self._key(request), "response")
        answer = ResponseAnswer()
        answer.whole(kept.head or b"")
        items = input_items(kept.entries, len(answer.items))
        try:
            shown, more = page(items[::-1] if order == "desc" else items, request.query_params.get("after"), limit)
        except LookupError:
            raise bad_request("There is no such item.", "after") from None
        ends = {"first_id": shown[0]["id"], "last_id": shown[-1]["id"]} if shown else {"first_id": "", "last_id": ""}
        content = {"object": "list", "data": shown, **ends, "has_more": more}
        return Response(orjson.dumps(content), media_type="application/json")

    async def cancel(self, request: Request) -> Response:
        """The endpoint: there is nothing to cancel, since nothing runs in the background."""
        await found(self._store, self._key(request), "response")
        raise bad_request(
            "This response is complete; only one in the background can be cancelled. To end one that runs, close its"
            " connection.",
            code="response_not_cancellable",
        )

    async def delete(self, request: Request) -> Response:
        """The endpoint."""
        await forget(self._store, self._key(request), "response")
        content = {"id": request.path_params["id"], "object": "response", "deleted": True}
        return Response(orjson.dumps(content), media_type="application/json")

    def _key(self, request: Request) -> str:
        return key_of(owner_of(request.scope), "response", request.path_params["id"])


def _items(given: object) -> list[Item] | None:
    """The input as items; what is wrong with another is said where bodies are checked."""
    if isinstance(given, str):
        return [{"type": "message", "role": "user", "content": given}]
    if isinstance(given, list) and all(isinstance(item, dict) for item in given):
        return given
    return None
