"""`POST` to what an engine answers (`PATHS`): one request from its body to the last byte."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

from starlette.types import Receive, Scope, Send

from serve_app import log
from serve_app.admission.queue import Ticket
from serve_app.config import Config
from serve_app.errors import ApiError, bad_request, own_fault, unavailable
from serve_app.model_schema import Model
from serve_app.models.replicas import PublishedModel, Target
from serve_app.router.auth import CALLER, Caller
from serve_app.router.body import encoded, read_json
from serve_app.router.claim import PRIORITY, priority_of, rough_tokens
from serve_app.router.decider import Decided, Decider
from serve_app.router.dialect import MESSAGES, dialect_of
from serve_app.router.disconnect import ClientGone, while_connected
from serve_app.router.easing import Easing
from serve_app.router.engine_call import EngineCall
from serve_app.router.engine_errors import broken
from serve_app.router.explain import Explain
from serve_app.router.fleet import Fleet
from serve_app.router.headers import headers_of
from serve_app.router.lines import Line, Updates
from serve_app.router.messages_shape import messages_shape_of
from serve_app.router.rates import Rates
from serve_app.router.record import RECORDED, Asked, Keep, audit_record, new_id, request_id
from serve_app.router.relay import NotServed, Relay
from serve_app.router.reply import Reply
from serve_app.router.shape import shape_of
from serve_app.router.tokens import most_tokens
from serve_app.router.wire import WIRE
from serve_app.routing.facts import PLAIN_ENDPOINTS, Endpoint, estimate_of
from serve_app.routing.outgoing import engine_body
from serve_app.routing.prompt_text import texts_of
from serve_app.routing.reading import ESTIMATE_ERROR
from serve_app.routing.responses import named_as_written
from serve_app.telemetry.tracing import Tracing, passed_on

logger = logging.getLogger(__name__)

PATHS: dict[Endpoint, str] = {
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
    "embeddings": "/v1/embeddings",
    "responses": "/v1/responses",
    "messages": MESSAGES,
    "count_tokens": MESSAGES + "/count_tokens",
    "tokenize": "/tokenize",
    "detokenize": "/detokenize",
    "score": "/v1/score",
    "rerank": "/v1/rerank",
}
_PROMPT_FIELDS: dict[Endpoint, str] = {
    "chat": "messages",
    "completions": "prompt",
    "embeddings": "input",
    "responses": "input",
    "score": "text_2",
    "rerank": "documents",
    "messages": "messages",
}
# A model that goes to sleep between look and request is woken again; more often than this is a fault.
_MAX_WAKES = 5
_WAKE_PAUSE_S = 0.2
# Idle connections to one engine that died; each is found out when it is used.
_MAX_DEATHS = 8
# One more gets the request of a replica that died with it. Where that one dies, too, it is the request's doing.
_MAX_DEAD_REPLICAS = 1
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
        tracing: Tracing,
        rates: Rates,
        lines: Mapping[str, Line],
        keep: Keep,
    ) -> None:
        self._endpoint = endpoint
        self._decider = decider
        self._explain = explain
        self._fleet = fleet
        self._relay = relay
        self._tracing = tracing
        self._rates = rates
        self._keep = keep
        self._lines = lines
        self._settings = config.router
        self._easing = Easing(config.router.degrade, fleet.load)
        self._reasoning_fields = config.routing.reasoning_fields
        self._models = {model.id: model for model in config.models}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = headers_of(scope)
        reply = Reply(send, stream=False, dialect=dialect_of(PATHS[self._endpoint]), wire=scope.get(WIRE))
        reply.headers["x-request-id"] = request_id(headers)
        if name := reply.dialect.id_header:
            reply.headers[name] = reply.headers["x-request-id"]
        caller: Caller = scope[CALLER]
        asked = Asked(headers, caller, time.monotonic(), batch=PRIORITY in scope)
        asked.trace = self._tracing.begin(PATHS[self._endpoint], headers)
        log.about(reply.headers["x-request-id"], asked.trace.id if asked.trace else None)
        try:
            parsed = await read_json(
                headers,
                receive,
                max_bytes=self._settings.max_body_bytes,
                timeout_s=self._settings.body_timeout_s,
                wire=reply.wire,
            )
            asked.priority = priority_of(parsed, scope, caller)
            # A line of a batch waits its turn elsewhere, and takes no place of its key's own requests.
            places = contextlib.nullcontext() if asked.batch else self._rates.at_once(asked.caller)
            with places:
                taken = await self._rates.take(asked.caller, rough_tokens(asked.caller, parsed), reply.headers)
                asked.step("admit", asked.began)
                try:
                    await self._answer(asked, parsed, receive, reply)
                finally:
                    await self._rates.settle(asked.caller, taken, asked.tally)
        except ApiError as error:
            await reply.error(named_as_written(error) if self._endpoint == "responses" else error)
        except ClientGone:
            reply.fault = "client_left"
        except Exception as error:
            log.fault(logger, error)
            await reply.error(own_fault())
        except asyncio.CancelledError:
            # The listener's drain time is over. A stream must not just stop.
            with contextlib.suppress(Exception):
                await reply.error(unavailable("The router is shutting down.", code="shutting_down", retry_after_s=1))
            raise
        finally:
            scope.setdefault(RECORDED, set()).add(asked.began)
            record = audit_record(PATHS[self._endpoint], asked, reply)
            self._keep(record, asked.steps)
            if asked.trace:
                asked.trace.end(record, asked.steps)

    async def _answer(self, asked: Asked, parsed: object, receive: Receive, reply: Reply) -> None:
        headers = asked.headers
        began = time.monotonic()
        decided = await self._decider.decide(parsed, self._endpoint, headers, asked.caller.models)
        if decided.cold and decided.wait_s is not None:
            asked.step("decide", began)
            began = time.monotonic()
            await while_connected(reply.wire, receive, self._await_better(decided.cold, decided.wait_s))
            asked.held_s += asked.step("hold", began)
            began = time.monotonic()
            decided = await self._decider.decide(parsed, self._endpoint, headers, asked.caller.models)
        decided = await self._lighter(decided, parsed, asked, reply)
        asked.decision_s = asked.step("decide", began)
        self._decider.remember(decided)
        facts, decision = decided.facts, decided.decision
        model = self._models[decision.model_id]
        engine = self._fleet.engine_of(model)
        decision, note = self._easing.thinks_less(decision, engine)
        if note:
            reply.headers["x-router-degraded"] = note
        asked.decision, asked.stream, asked.degraded = (
            decision,
            facts.stream,
            reply.headers.get("x-router-degraded", ""),
        )
        body = engine_body(facts, decision, model)
        await self._bound(decided, model, body)
        if decision is not decided.decision:
            decided = dataclasses.replace(decided, decision=decision)
        self._explain(reply.headers, decided, headers)
        if decision.better and self._decider.warms:
            self._fleet.warm(self._models[decision.better])
        reply.stream = facts.stream
        if self._endpoint == "detokenize" and isinstance(given := body.get("tokens"), list):
            asked.tally.given = len(given)
        asked.tally.hides = not (facts.body.get("stream_options") or {}).get("include_usage")
        patience = self._settings.hold_s if decided.wait_s is None else min(decided.wait_s, self._settings.hold_s)
        # An id of our own: two clients may send the same one, and an engine must not mix them up.
        passed = {"x-request-id": new_id()}
        if asked.trace is None:
            passed |= passed_on(headers)
        call = EngineCall(
            path=PATHS[self._endpoint],
            body=encoded(body),
            headers=passed,
            shape=messages_shape_of(facts, decision)
            if self._endpoint == "messages"
            else shape_of(facts, decision, model, self._reasoning_fields, asked.tally),
            tally=asked.tally,
            began=asked.began,
            ttft_s=model.ttft_timeout_s,
            idle_s=model.idle_timeout_s,
            total_s=model.total_timeout_s,
            comment_s=self._settings.comment_s,
        )
        steps = self._fleet.steps(engine, lambda: texts_of(facts))
        await while_connected(reply.wire, receive, self._serve(engine, call, asked, reply, patience, steps))

    async def _lighter(self, decided: Decided, parsed: object, asked: Asked, reply: Reply) -> Decided:
        """The same request decided without a model that is overloaded, if an awake one with room can answer."""
        model = self._models[decided.decision.model_id]
        if not self._easing.wants_lighter(decided, model):
            return decided
        allowed = frozenset(self._models) if asked.caller.models is None else asked.caller.models
        others = allowed - {model.id}
        # Only what answers at once helps: a load would take the same machine.
        awake = frozenset(name for name in others if self._fleet.target(self._models[name]))
        try:
            lighter = await self._decider.decide(parsed, self._endpoint, asked.headers, awake) if awake else decided
        except ApiError:
            return decided  # none of them can
        chosen = self._models[lighter.decision.model_id]
        if chosen.id == model.id or self._fleet.load(chosen) >= self._settings.degrade.lighter_model_at:
            return decided
        reply.headers["x-router-degraded"] = f"{model.id} is full: {chosen.id} answers"
        return lighter

    async def _bound(self, decided: Decided, model: Model, body: dict[str, Any]) -> None:
        """Hold the request to the model's own limits. Raises `ApiError` (400)."""
        facts = decided.facts
        estimate = estimate_of(facts)
        most_prompt = model.max_prompt_tokens if self._endpoint in _PROMPT_FIELDS else None
        # Counted unless it cannot be too long. An estimate is no judge of that: digits have four times as many tokens.
        if most_prompt is not None and most_tokens(len(encoded(body))) > most_prompt:
            tokens, exact = await self._decider.tokens(decided, self._fleet.engine_of(model), body)
            if tokens > most_prompt:
                size = tokens if exact else f"about {tokens}"
                raise bad_request(
                    f"The prompt has {size} tokens; {model.id} takes {most_prompt} here.",
                    _PROMPT_FIELDS[self._endpoint],
                    "context_length_exceeded",
                )
        most = model.max_answer_tokens
        if most is None or self._endpoint in PLAIN_ENDPOINTS:
            return
        if facts.max_tokens is not None and facts.max_tokens > most:
            raise bad_request(f"max_tokens is {facts.max_tokens}; {model.id} gives at most {most} here.", "max_tokens")
        if facts.max_tokens is None and estimate * ESTIMATE_ERROR + most <= model.context:
            body["max_output_tokens" if self._endpoint == "responses" else "max_tokens"] = most
        # Else what the context leaves is about the limit or less. Engines know it exactly; from an estimate it would
        # be an answer of one token, or a refusal. For completions their default is 16 tokens, though.
        elif facts.max_tokens is None and self._endpoint == "completions":
            body["max_tokens"] = max(16, min(most, int(model.context - estimate * ESTIMATE_ERROR)))

    async def _await_better(self, model_id: str, patience_s: float) -> None:
        """Wait for a cold model that `auto` would rather have, as long as the client said; it may stay cold."""
        model = self._fleet.engine_of(self._models[model_id])
        with self._fleet.cold.wait(model.id) as call:
            await asyncio.wait([call], timeout=min(patience_s, self._settings.hold_s))

    async def _serve(
        self, model: Model, call: EngineCall, asked: Asked, reply: Reply, patience_s: float, steps: Sequence[int]
    ) -> None:
        deadline = time.monotonic() + patience_s
        line = self._lines[model.id]
        ticket: Ticket | None = None
        updates = Updates(reply, model.id, self._settings.comment_s)
        tried: set[str] = set()
        wakes = 0
        deaths = 0
        died: set[str] = set()
        full = False
        told: ApiError | None = None
        queues = len(line) > 0  # who came before goes before
        await self._fleet.until_known(model)
        while True:
            target = None if queues else self._fleet.target(model, tried, steps)
            if target is None and model.tier == "lazy" and not (full or queues):
                if wakes == _MAX_WAKES:
                    raise self._absent(model)
                # A pool hears of an engine's death a moment after we do.
                await asyncio.sleep(_WAKE_PAUSE_S * wakes)
                wakes += 1
                tried.clear()
                held = time.monotonic()
                try:
                    target = await self._wake(model, reply, deadline, patience_s)
                finally:
                    asked.held_s += asked.step("hold", held)
            if target is None and (full or queues):
                self._fleet.spread(model, tried)
                queued = time.monotonic()
                try:
                    ticket = await line.turn(asked.caller.id, asked.priority, ticket, updates)
                finally:
                    asked.queued_s += asked.step("queue", queued)
                tried.clear()
                full = queues = False
                continue
            if target is None:
                raise told or (broken("died") if deaths else self._absent(model))
            line.started(asked.caller.id)
            self._fleet.sent(target, steps)
            asked.sent_at = time.monotonic()
            if asked.trace:
                asked.trace.sent(call.headers)
            served = True
            try:
                # Waiting for a model to load has a limit of its own (`hold_s`).
                if asked.held_s:
                    call = dataclasses.replace(call, began=asked.began + asked.held_s)
                await self._relay.run(target, call, reply)
                return
            except NotServed as not_served:
                served, asked.sent_at = False, None
                if not_served.died:
                    deaths += 1
                    died.add(target.replica_id)
                if deaths > _MAX_DEATHS or len(died) > _MAX_DEAD_REPLICAS:
                    raise broken(not_served.reason) from None
                # Only of an idle connection; the engine may have been started again since.
                if not not_served.died:
                    tried.add(target.replica_id)
                full = full or not_served.reason == "full"
                told = not_served.told or told
                if not_served.reason != "full":
                    self._fleet.cold.forget(model.id)
            finally:
                # No place was freed where none was had: else two that wait would send each other to a full engine.
                if served:
                    line.ended(asked.caller.id)
                else:
                    line.withdrew(asked.caller.id)

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
            f"{model.id} is still loading; it was waited for {patience_s:g} s{self._why_not(model)}.",
            code="model_loading",
            retry_after_s=max(1.0, status.expected_wake_s),
        )

    def _why_not(self, model: Model) -> str:
        shortage = self._fleet.shortage(model)
        return f"; {shortage}" if shortage else ""

    def _absent(self, model: Model) -> ApiError:
        expected = self._fleet.status(model).expected_load_s
        return unavailable(
            f"{model.id} is being started{self._why_not(model)}.",
            code="model_starting",
            retry_after_s=expected or _RESTART_RETRY_AFTER_S,
        )


def _progress(model: Model, status: PublishedModel) -> str:
    """What a client that waits is told: a comment, which every reader of SSE skips."""
    if status.place:
        return f"{model.id} waits for memory, place {status.place}"
    return f"{'waking' if status.state == 'waking' else 'loading'} {model.id} {status.progress:.0%}"
