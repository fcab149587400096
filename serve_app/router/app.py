"""The Router's HTTP surface: a table of its routes, and OpenAI's error shape for everything else."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import orjson
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve_app import __version__, log
from serve_app.batches.runner import Runner
from serve_app.catalog import catalog_of
from serve_app.config import Config
from serve_app.conversations.store import Store, store_of
from serve_app.errors import ApiError, own_fault, unavailable
from serve_app.router.admin import Admin
from serve_app.router.auth import CALLER, Keys
from serve_app.router.batches import BatchesApi, batch_store
from serve_app.router.cold import PoolCalls
from serve_app.router.conversation import ChatHistory, ConversationRoutes, Limits
from serve_app.router.cors import Cors
from serve_app.router.decider import Decider
from serve_app.router.dialect import dialect_of
from serve_app.router.engine_metrics import EngineMetrics
from serve_app.router.events import PATH as EVENTS
from serve_app.router.events import About, Feed
from serve_app.router.explain import Explain, policy_hash
from serve_app.router.external import Externals
from serve_app.router.faults import HANDLERS
from serve_app.router.files import FilesApi
from serve_app.router.fleet import Fleet, FleetView, NodeView, unknown_nodes
from serve_app.router.gauges import Gauges
from serve_app.router.generate import PATHS, Generate
from serve_app.router.headers import headers_of
from serve_app.router.lines import Line
from serve_app.router.model_cards import ModelCards
from serve_app.router.offline import Offline
from serve_app.router.openapi import document
from serve_app.router.overview import Overview
from serve_app.router.preview import Preview
from serve_app.router.rates import Rates
from serve_app.router.record import RECORDED, refused_record, request_id, with_request_id
from serve_app.router.relay import Relay
from serve_app.router.reply import error_response, json_response
from serve_app.router.responses import ResponseRoutes, Responses
from serve_app.router.schedule import Schedule
from serve_app.router.slashes import without_slashes
from serve_app.router.tokens import TokenCounter
from serve_app.router.ui import Page
from serve_app.routing.facts import Endpoint
from serve_app.routing.policy import policy_of
from serve_app.scoring import scorer_of
from serve_app.scoring.guard import NotReady
from serve_app.telemetry.audit import Audit
from serve_app.telemetry.request_metrics import RouterMetrics
from serve_app.telemetry.tracing import Tracing, tracing_of
from serve_app.telemetry.traffic import Step, Traffic

logger = logging.getLogger(__name__)

# Probes must see a full Router as alive.
_ALWAYS_ANSWERED = frozenset({"/health", "/ready"})
_ENGINE_PATHS = frozenset(PATHS.values())
_WITHOUT_A_NAME = _ENGINE_PATHS | {"/v1/models"}


class RouterApp:
    """One ASGI app with its own connections, for one event loop.

    `deployments`: see `Fleet`. `identity` tells this service from another one on the same machine. What is not the
    `front_door` gets few requests, and starts its scorer with the first one. `metrics`: who counts, if anybody does;
    `nodes` tells of the nodes of the cluster; `name`: this replica's. `before`: the app of the configuration until now;
    what has a state is taken over from it. `refused` says why a newer configuration was not taken, if one was not;
    `leaving` whether the front door closes soon.
    """

    def __init__(
        self,
        config: Config,
        deployments: Mapping[str, str],
        pool: PoolCalls,
        identity: str,
        *,
        metrics: RouterMetrics | None = None,
        nodes: NodeView = unknown_nodes,
        name: str = "",
        front_door: bool = True,
        before: RouterApp | None = None,
        refused: Callable[[], str] = lambda: "",
        leaving: Callable[[], bool] = lambda: False,
    ) -> None:
        self._identity = identity
        self._front_door = front_door
        self._refused, self._leaving = refused, leaving
        self._version = policy_hash(config)
        self._took_over = before is not None
        self._background: list[asyncio.Task[None]] = []
        self._catalog = catalog_of(config)
        self._relay: Relay = before._relay if before else Relay(config.router.connect_timeout_s)
        self._lines = {model.id: Line(model.id, model.queue) for model in config.models}
        if before:
            self._lines |= {name: line for name, line in before._lines.items() if name in self._lines}
            for model in config.models:
                self._lines[model.id].change(model.queue)
        self.fleet = Fleet(
            self._catalog,
            deployments,
            pool,
            self._relay,
            queued=lambda model_id: len(self._lines[model_id]),
            warm_s=config.pool.ageing_s / 2,
            nodes=nodes,
            pool_resources=config.pool.resources,
            affine=config.router.prefix_affinity,
        )
        self._externals = Externals(config, deployments, self._relay)
        self._schedule = Schedule(config.models, self.fleet, config.pool.timezone)
        self._max_open = config.router.max_in_flight
        self._open = 0
        policy = policy_of(self._catalog, config.routing)
        view = FleetView(self.fleet, self._catalog.models)
        self._decider: Decider = (
            before._decider.with_policy(policy, view)
            if before
            else Decider(policy, view, scorer_of(config, self._ask_default), TokenCounter(config.models_dir))
        )
        explain = Explain(self._version)
        self._tracing: Tracing = before._tracing if before else tracing_of(config.telemetry)
        self._metrics = metrics
        lost = metrics.lost if metrics else lambda: None
        self._audit: Audit = before._audit if before else Audit(config.audit, config.audit.otlp_endpoint, lost)
        self._rates: Rates = before._rates if before else Rates(config.security.redis_url)

        def generate(endpoint: Endpoint) -> Generate:
            return Generate(
                endpoint,
                config,
                self._decider,
                explain,
                self.fleet,
                self._relay,
                self._tracing,
                self._rates,
                self._lines,
                self._keep,
            )

        kept_before = before._store if before else None
        opens = config.conversations.enabled and not kept_before
        self._store: Store | None = store_of(config.conversations) if opens else kept_before
        limits = Limits(self._catalog, config.conversations, config.router)
        endpoints: dict[Endpoint, ASGIApp] = {endpoint: generate(endpoint) for endpoint in PATHS}
        endpoints["responses"] = Responses(endpoints["responses"], self._store, limits)
        # Where a layer before `Generate` may answer: only these pay for a look at every message.
        self._layered = {PATHS["responses"], *([PATHS["chat"]] if self._store else [])}
        kept: list[Route] = []
        if self._store:
            endpoints["chat"] = ChatHistory(endpoints["chat"], self._store, limits)
            chats, responses = ConversationRoutes(self._store), ResponseRoutes(self._store)
            kept = [
                Route("/v1/router/conversations/{id:path}", chats.read, methods=["GET"]),
                Route("/v1/router/conversations/{id:path}", chats.delete, methods=["DELETE"]),
                Route("/v1/responses/{id}/input_items", responses.input_items, methods=["GET"]),
                Route("/v1/responses/{id}/cancel", responses.cancel, methods=["POST"]),
                Route("/v1/responses/{id}", responses.read, methods=["GET"]),
                Route("/v1/responses/{id}", responses.delete, methods=["DELETE"]),
            ]
        # Answered without a look at the table of routes, which costs as much as a decision.
        self._engine_apps = {PATHS[endpoint]: app for endpoint, app in endpoints.items()}
        cards = ModelCards(self._catalog, self.fleet)
        admin = Admin(self._catalog, self.fleet)
        engine_metrics = EngineMetrics(self.fleet, self._relay)
        self._keys = Keys(config, front_door=front_door)
        self._page = Page(enabled=config.ui.enabled and front_door)
        self._traffic: Traffic = before._traffic if before else Traffic(time.time())
        self._feed = Feed(
            # Serve waits for its own ingress's requests to end before it stops a replica.
            config.router.viewers if front_door else 0,
            About(__version__, self._version, name),
            Overview(self._catalog, self.fleet, config.pool.resources, lambda name: len(self._lines[name])),
            self._traffic,
            self._keys,
        )
        store = batch_store(config.batches)
        files = FilesApi(store, config.batches, config.router.body_timeout_s)
        batches = BatchesApi(store, config.router.body_timeout_s)
        self._offline = Offline(
            self, config.batches, self._catalog, self.fleet, self._relay, deployments, self._keys, self._lines
        )
        self._runner = Runner(store, self._offline, config.batches, config.router.max_body_bytes) if store else None
        self._gauges: Gauges | None = None
        if metrics:
            self._gauges = Gauges(
                self._catalog,
                self.fleet,
                self._relay,
                self._lines,
                lambda: self._open - self._feed.viewers,
                runner=self._runner,
                front_door=front_door,
            )
            metrics.watch(self._gauges)
        self._app = Starlette(
            routes=[
                *(Route(path, endpoints[endpoint], methods=["POST"]) for endpoint, path in PATHS.items()),
                *kept,
                Route("/v1/router/preview", Preview(self._decider, explain, config.router), methods=["POST"]),
                Route("/v1/router/models/{name:path}/{order}", admin.order, methods=["POST"]),
                Route("/v1/router/metrics", engine_metrics.read),
                Route(EVENTS, self._feed, methods=["GET"]),
                Route("/v1/models", cards.list),
                Route("/v1/models/{name:path}", cards.one),
                Route("/v1/files", files.create, methods=["POST"]),
                Route("/v1/files", files.list),
                Route("/v1/files/{file_id}", files.retrieve),
                Route("/v1/files/{file_id}", files.delete, methods=["DELETE"]),
                Route("/v1/files/{file_id}/content", files.content),
                Route("/v1/batches", batches.create, methods=["POST"]),
                Route("/v1/batches", batches.list),
                Route("/v1/batches/{batch_id}", batches.retrieve),
                Route("/v1/batches/{batch_id}/cancel", batches.cancel, methods=["POST"]),
                *self._page.routes,
                Route("/openapi.json", self.openapi),
                Route("/health", self.health),
                Route("/ready", self.ready),
            ],
            exception_handlers=HANDLERS,
        )
        self._app.router.redirect_slashes = False
        origins = config.security.cors_origins
        self._entrance: ASGIApp = Cors(self._admit, config.security) if origins else self._admit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
        elif scope["type"] == "websocket":  # Serve's proxy passes them on
            await send({"type": "websocket.close", "code": 1008})
        else:
            await self._entrance(without_slashes(scope, _WITHOUT_A_NAME), receive, send)

    async def _admit(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._open += 1
        try:
            open_to_all = scope["path"] in _ALWAYS_ANSWERED or scope["path"] in self._page.paths
            generates = scope["path"] in _ENGINE_PATHS and scope["method"] == "POST"
            if refusal := None if open_to_all else self._refusal(scope):
                own_id = request_id(headers_of(scope))
                if generates:
                    self._keep(refused_record(scope, own_id, refusal.status, refusal.code))
                response = error_response(refusal, dialect_of(scope["path"]))
                await response(scope, receive, with_request_id(own_id, send))
            elif scope["path"] in self._layered and generates:
                await self._recorded(scope, receive, send)
            elif generates:
                # Says its id, keeps its record, and answers for its own faults (`Generate`).
                await self._engine_apps[scope["path"]](scope, receive, send)
            else:
                await self._app(scope, receive, with_request_id(request_id(headers_of(scope)), send))
        finally:
            self._open -= 1

    async def _recorded(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, and record what a layer before `Generate` refused."""
        status, own_id = 0, ""

        async def sending(message: Message) -> None:
            nonlocal status, own_id
            if message["type"] == "http.response.start":
                status, own_id = message["status"], Headers(raw=message["headers"]).get("x-request-id", "")
            await send(message)

        recorded: set[float] = scope.setdefault(RECORDED, set())
        try:
            await self._engine_apps[scope["path"]](scope, receive, sending)
        except Exception as error:
            log.fault(logger, error)
            if not status:
                await error_response(own_fault(), dialect_of(scope["path"]))(
                    scope, receive, with_request_id(request_id(headers_of(scope)), sending)
                )
        finally:
            if not recorded:
                self._keep(refused_record(scope, own_id, status or 499, None))

    def _keep(self, record: dict[str, Any], steps: Sequence[Step] = ()) -> None:
        """What became of a request: for the audit, for who watches, and for the metrics."""
        self._audit.write(record)
        self._traffic.take(record, steps)
        if self._metrics:
            self._metrics.take(record)

    def _refusal(self, scope: Scope) -> ApiError | None:
        """Why a request is refused before anybody looks what it is for."""
        # Who watches takes nobody's place, and may see that there is none.
        if self._open - self._feed.viewers > self._max_open and scope["path"] != EVENTS:
            return unavailable("The router is full.", code="overloaded", retry_after_s=1)
        if CALLER in scope:
            return None  # a line of a batch, from inside: no client can set this
        try:
            scope[CALLER] = self._keys.caller(headers_of(scope))
        except ApiError as error:
            return error
        return None

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        while True:
            message = await receive()
            if message["type"] == "lifespan.shutdown":
                await self.close()
                await send({"type": "lifespan.shutdown.complete"})
                return
            await self.start()
            await send({"type": "lifespan.startup.complete"})

    async def start(self) -> None:
        """Begin what goes on beside requests. One that took over starts only what `hand_over` has ended."""
        if not self._took_over:
            self._audit.start()
        if self._front_door:
            if not self._took_over:
                await self._decider.start()
            runs = [self._schedule.run(), self._externals.run(), *([self._runner.run()] if self._runner else [])]
            self._background = [asyncio.create_task(run) for run in runs]

    async def hand_over(self) -> None:
        """End what goes on beside requests; the next app does it. What both have stays open for running requests."""
        for task in self._background:
            task.cancel()
        if self._background:
            await asyncio.wait(self._background)
        self._background = []
        self._feed.close()
        if self._metrics and self._gauges:
            self._metrics.leave(self._gauges)
            self._gauges = None

    async def close(self) -> None:
        """End everything."""
        await self.hand_over()
        await self._decider.close()
        await self._relay.close()
        await self._rates.close()
        await asyncio.to_thread(self._audit.close)
        await asyncio.to_thread(self._tracing.close)
        if self._store:
            await self._store.close()

    async def _ask_default(self, body: dict[str, Any]) -> dict[str, Any]:
        """Have the default model answer a chat body of the scorer's."""
        target = self.fleet.target(self._catalog.models[self._catalog.default_id])
        if target is None:
            raise NotReady
        try:
            return await self._relay.call(target, PATHS["chat"], orjson.dumps(body))
        except ApiError as error:
            # What this engine does not take (a prompt too long, say) is no fault of the scorer's.
            if error.status < 500:
                raise NotReady from None
            raise

    async def openapi(self, request: Request) -> Response:
        """What all of this answers."""
        return json_response(document(keeps=self._store is not None))

    async def health(self, request: Request) -> Response:
        """The process answers; nothing else is looked at."""
        return json_response({"status": "ok", "service": self._identity})

    async def ready(self, request: Request) -> Response:
        """Whether requests to the resident models would be answered now, and loads go on."""
        ready, details = await self.fleet.readiness()
        ready = ready and not self._leaving()
        try:
            allowed = self._keys.caller(request.headers).models
        except ApiError:
            details = {}  # a probe has no key, and need not know which models there are
        else:
            if allowed is not None:
                details["models"] = {name: state for name, state in details["models"].items() if name in allowed}
            details["config"] = {"policy": self._version, "refused": self._refused() or None}
        return json_response({"ready": ready, **details}, 200 if ready else 503)
