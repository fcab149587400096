"""`POST /v1/router/preview`: the decision that a chat body would get, and each step to it; nothing runs."""

from __future__ import annotations

import orjson
from starlette.types import Receive, Scope, Send

from serve_app.errors import ApiError
from serve_app.router.auth import CALLER
from serve_app.router.body import read_json
from serve_app.router.decider import Decider
from serve_app.router.disconnect import ClientGone
from serve_app.router.explain import Explain, facts_in_words
from serve_app.router.headers import headers_of
from serve_app.router.reply import Reply
from serve_app.routing.decision import as_json
from serve_app.service_schema import RouterSettings


class Preview:
    """ASGI endpoint."""

    def __init__(self, decider: Decider, explain: Explain, settings: RouterSettings) -> None:
        self._decider = decider
        self._explain = explain
        self._settings = settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = headers_of(scope)
        reply = Reply(send, stream=False)
        try:
            parsed = await read_json(
                headers, receive, max_bytes=self._settings.max_body_bytes, timeout_s=self._settings.body_timeout_s
            )
            decided = await self._decider.decide(parsed, "chat", headers, scope[CALLER].models)
        except ApiError as error:
            await reply.error(error)
            return
        except ClientGone:
            return
        content = as_json(decided.shadowed or decided.decision) | {
            "facts": facts_in_words(decided.facts),
            "decision_ms": round(decided.seconds * 1000, 3),
        }
        self._explain(reply.headers, decided, headers)
        await reply.whole(200, b"application/json", orjson.dumps(content))
