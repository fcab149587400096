"""`POST /v1/chat/completions`, `/v1/completions`, `/v1/embeddings`: one request from its body to the last byte."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
import uuid
from collections.abc import Coroutine
from typing import Any

import orjson
from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from serve_app.config import Config, Model
from serve_app.errors import ApiError, bad_request, unavailable
from serve_app.models.replicas import PublishedModel, Target
from serve_app.router.auth import CALLER, Caller
from serve_app.router.body import ClientGone, read_json
from serve_app.router.decider import Decider
from serve_app.router.explain import Explain
from serve_app.router.fleet import Fleet
from serve_app.router.relay import NotServed, Relay, broken
from serve_app.router.reply import Reply
from serve_app.router.shape import Shape, shape_of
from serve_app.routing.facts import Endpoint
from serve_app.routing.outgoing import engine_body
from serve_app.telemetry.decisions import DecisionCounts
from serve_app.telemetry.tracing import Tracing, describe

PATHS: dict[Endpoint, str] = {
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
    "embeddings": "/v1/embeddings",
}
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
# A model that goes to sleep between look and request is woken again; more often than this is a fault.
_MAX_WAKES = 5
_WAKE_PAUSE_S = 0.2
# Idle connections to one engine that died; each is found out when it is used.
_MAX_DEATHS = 8
_FULL_RETRY_AFTER_S = 1.0
# For a resident model that is away when its load time is not known yet.
_RESTART_RETRY_AFTER_S = 5.0


class Generate:
    """ASGI endpoint for one of the APIs that an engine answers."""

    def __init__(
        self,
        endpoint: Endpoint,
        config: Config,
        decider: Decider,
        explain: Explain,
        fleet: Fleet,
        relay: Relay,
        counts: DecisionCounts,
        tracing: Tracing,
    ) -> None:
        self._endpoint = endpoint
        self._decider = decider
        self._explain = explain
        self._fleet = fleet
        self._relay = relay
        self._counts = counts
        self._tracing = tracing
        self._settings = config.router
        self._reasoning_fields = config.routing.reasoning_fields
        self._models = {model.id: model for model in config.models}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        reply = Reply(send, stream=False)
        reply.headers["x-request-id"] = request_id(headers)
        try:
            parsed = await read_json(
                headers,
                receive,
                max_bytes=self._settings.max_body_bytes,
                timeout_s=self._settings.body_timeout_s,
            )
            caller: Caller = scope[CALLER]
            decided = await self._decider.decide(parsed, self._endpoint, headers, caller.models)
            if decided.cold and decided.wait_s is not None:
                await _while_connected(receive, self._await_better(decided.cold, decided.wait_s))
                decided = await self._decider.decide(parsed, self._endpoint, headers, caller.models)
            self._decider.remember(decided)
            facts, decision = decided.facts, decided.decision
            model = self._models[decision.model_id]
            engine = self._fleet.engine_of(model)
            body = _encoded(engine_body(facts, decision, model))
            self._explain(reply.headers, decided, headers)
            self._counts.count(decision)
            if decision.better and self._decider.warms:
                self._fleet.warm(self._models[decision.better])
            reply.stream = facts.stream
            patience = self._settings.hold_s if decided.wait_s is None else min(decided.wait_s, self._settings.hold_s)
            shape = shape_of(facts, decision, model, self._reasoning_fields)
            passed: dict[str, str] = {}
            with self._tracing.request(PATHS[self._endpoint], headers, passed) as span:
                describe(span, decision)
                await _while_connected(receive, self._serve(engine, body, shape, passed, reply, patience))
        except ApiError as error:
            await reply.error(error)
        except ClientGone:
            pass
        except asyncio.CancelledError:
            # The listener's drain time is over. A stream must not just stop.
            with contextlib.suppress(Exception):
                await reply.error(unavailable("The router is shutting down.", code="shutting_down", retry_after_s=1))
            raise

    async def _await_better(self, model_id: str, patience_s: float) -> None:
        """Wait for a cold model that `auto` would rather have, as long as the client said; it may stay cold."""
        model = self._fleet.engine_of(self._models[model_id])
        with self._fleet.cold.wait(model.id) as call:
            await asyncio.wait([call], timeout=min(patience_s, self._settings.hold_s))

    async def _serve(
        self, model: Model, body: bytes, shape: Shape, passed: dict[str, str], reply: Reply, patience_s: float
    ) -> None:
        # An id of our own: two clients may send the same one, and an engine must not mix them up.
        passed["x-request-id"] = uuid.uuid4().hex
        deadline = time.monotonic() + patience_s
        tried: set[str] = set()
        wakes = 0
        deaths = 0
        full = False
        await self._fleet.until_known(model)
        while True:
            target = self._fleet.target(model, tried)
            if target is None and model.tier == "lazy" and not full:
                if wakes == _MAX_WAKES:
                    raise self._absent(model)
                # A pool hears of an engine's death a moment after we do.
                await asyncio.sleep(_WAKE_PAUSE_S * wakes)
                wakes += 1
                tried.clear()
                target = await self._wake(model, reply, deadline, patience_s)
            if target is None:
                if full:
                    self._fleet.spread(model, tried)
                raise self._full(model) if full else broken("died") if deaths else self._absent(model)
            try:
                await self._relay.run(target, PATHS[self._endpoint], body, passed, reply, shape)
                return
            except NotServed as not_served:
                deaths += not_served.died
                if deaths > _MAX_DEATHS:
                    raise broken(not_served.reason) from None
                # Only of an idle connection; the engine may have been started again since.
                if not not_served.died:
                    tried.add(target.replica_id)
                full = full or not_served.reason == "full"
                if not_served.reason != "full":
                    self._fleet.cold.forget(model.id)

    async def _wake(self, model: Model, reply: Reply, deadline: float, patience_s: float) -> Target:
        """Wait for the model to load, until the deadline; a stream hears how far it is."""
        self._check_room_to_wait(model)
        began = time.monotonic()
        with self._fleet.cold.wait(model.id) as call:
            while not call.done():
                step = deadline - time.monotonic()
                if step <= 0:
                    raise self._still_loading(model, patience_s)
                if reply.stream:
                    step = min(step, self._settings.loading_comment_s)
                await asyncio.wait([call], timeout=step)
                if not call.done() and reply.stream:
                    await reply.comment(_progress(model, self._fleet.status(model)))
        target = call.result()
        reply.headers["x-router-cold-start-ms"] = str(round((time.monotonic() - began) * 1000))
        return target

    def _check_room_to_wait(self, model: Model) -> None:
        cold = self._fleet.cold
        if cold.waiting(model.id) < self._settings.max_held_per_model and cold.all_waiting() < self._settings.max_held:
            return
        raise unavailable(
            f"Too many requests wait for {model.id} or other models to load.",
            code="too_many_waiting",
            retry_after_s=max(1.0, self._fleet.status(model).expected_wake_s),
        )

    def _still_loading(self, model: Model, patience_s: float) -> ApiError:
        status = self._fleet.status(model)
        return unavailable(
            f"{model.id} is still loading; it was waited for {patience_s:g} s.",
            code="model_loading",
            retry_after_s=max(1.0, status.expected_wake_s),
        )

    def _full(self, model: Model) -> ApiError:
        return unavailable(
            f"Every replica of {model.id} is full.", code="overloaded", retry_after_s=_FULL_RETRY_AFTER_S
        )

    def _absent(self, model: Model) -> ApiError:
        expected = self._fleet.status(model).expected_load_s
        return unavailable(
            f"{model.id} is being started.",
            code="model_starting",
            retry_after_s=expected or _RESTART_RETRY_AFTER_S,
        )


def _progress(model: Model, status: PublishedModel) -> str:
    """What a client that waits is told: a comment, which every reader of SSE skips."""
    if status.place:
        return f"{model.id} waits for memory, place {status.place}"
    return f"{'waking' if status.state == 'waking' else 'loading'} {model.id} {status.progress:.0%}"


def _encoded(body: dict[str, Any]) -> bytes:
    try:
        return orjson.dumps(body)
    except orjson.JSONEncodeError:
        # orjson reads 1024 levels and writes 254.
        raise bad_request("The body is nested too deeply.", code="invalid_json") from None


def request_id(headers: Headers) -> str:
    """The client's own id where it is a sane header value, else a new one."""
    given = headers.get("x-request-id", "")
    return given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex


async def _while_connected(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Do the work, but drop it at once when the client leaves; raises what the work raises."""
    doing = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_left(receive))
    try:
        await asyncio.wait([doing, leaving], return_when=asyncio.FIRST_COMPLETED)
        if not doing.done():
            raise ClientGone
        doing.result()
    finally:
        leaving.cancel()
        if not doing.done():
            doing.cancel()
            await asyncio.wait([doing])


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
