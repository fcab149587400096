"""The Router's view of the running models: who serves what, in which state, and how to reach it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from serve_app.admission.affinity import Prefixes, cost_of, steps_of
from serve_app.admission.kv_cache import is_full
from serve_app.admission.pressure import Usage, load_of
from serve_app.catalog import Catalog
from serve_app.engines.base import EngineLoad
from serve_app.errors import ApiError, unavailable
from serve_app.model_schema import Model, Resources
from serve_app.models.placement import Node, lacking
from serve_app.models.replicas import PublishedModel, Replica, Target, choose, known, last_known, replicas_of
from serve_app.residency.events import Order
from serve_app.router.cold import ColdStarts, PoolCalls, refusal
from serve_app.router.relay import Relay
from serve_app.routing.policy import ModelState

logger = logging.getLogger(__name__)

# Of several replicas' states of one model the first in this order is the model's.
_STATE_RANKS = {
    state: rank
    for rank, state in enumerate(
        ("awake", "waking", "loading", "asleep", "falling_asleep", "unloading", "failed", "stopped")
    )
}
_PROBE_TIMEOUT_S = 2.0
_KNOWN_WITHIN_S = 3.0
_KNOWN_POLL_S = 0.02
_WARM_PAUSE_S = 5.0
_POOL_RETRY_AFTER_S = 5.0


NodeView = Callable[[], Sequence[Node] | None]


def unknown_nodes() -> None:
    """Before anything was heard of the cluster's nodes."""


class FleetView(Mapping[str, ModelState]):
    """How soon each model would answer, looked up when asked."""

    def __init__(self, fleet: Fleet, models: Mapping[str, Model]) -> None:
        self._fleet = fleet
        self._models = models

    def __getitem__(self, model_id: str) -> ModelState:
        model = self._models[model_id]
        if model.tier == "resident":
            return ModelState(awake=True)
        if self._fleet.target(model):
            return ModelState(awake=True)
        status = self._fleet.status(model)
        return ModelState(awake=False, wake_s=status.expected_wake_s)

    def __iter__(self) -> Iterator[str]:
        return iter(self._models)

    def __len__(self) -> int:
        return len(self._models)


class Fleet:
    """Finds targets. `deployments` says which deployment (by its name in Serve) holds each model.

    `queued`: how many requests wait in this process for a place of a model's engine, by its id.
    `nodes`: the cluster's, as last heard. `affine`: whether replicas are chosen by their prefix caches, too.
    `warm_s`: how long a load in the background waits for room. Less than the pool's `ageing_s`, or it would get room
    from a model that is in use.
    """

    def __init__(
        self,
        catalog: Catalog,
        deployments: Mapping[str, str],
        pool: PoolCalls,
        relay: Relay,
        *,
        queued: Callable[[str], int] = lambda model_id: 0,
        warm_s: float = 30.0,
        nodes: NodeView = unknown_nodes,
        pool_resources: Resources = Resources(),  # noqa: B008 # frozen
        affine: bool = True,
    ) -> None:
        self._catalog = catalog
        self._deployments = deployments
        self._relay = relay
        self._pool = pool
        self._queued = queued
        self.cold = ColdStarts(pool)
        self._warm_s = warm_s
        self.nodes = nodes
        self._pool_resources = pool_resources
        self._affine = affine
        self._prefixes = Prefixes()
        self._warming: dict[str, asyncio.Task[None]] = {}
        self._spreading: dict[str, asyncio.Task[None]] = {}
        self._known_by = time.monotonic() + _KNOWN_WITHIN_S

    def engine_of(self, model: Model) -> Model:
        """The model whose engine answers: its base's for a LoRA adapter."""
        return self._catalog.models[model.base] if model.base else model

    def steps(self, model: Model, texts: Callable[[], Iterable[str]]) -> tuple[int, ...]:
        """Marks of a prompt by which `target` finds a replica that has its beginning; none where there is no choice."""
        if not self._affine or len(self.replicas(model)) < 2:
            return ()
        return steps_of(model.id, texts())

    def sent(self, target: Target, steps: Sequence[int]) -> None:
        """A request with these marks goes there."""
        if steps:
            self._prefixes.sent(target.replica_id, steps)

    def target(self, model: Model, tried: Collection[str] = (), steps: Sequence[int] = ()) -> Target | None:
        """An engine that may answer for the model; None if this process knows of none that was not tried.

        Of several the one with the fewest requests of ours, less what it has of the conversation; see `affinity`.
        """
        model = self.engine_of(model)
        here = self.replicas(model) if model.tier == "lazy" else last_known(self._deployments[model.id])
        replicas = [replica for replica in here if model.id in replica.urls]
        awake = {replica.id: replica.target(model.id) for replica in replicas if self._awake(replica, model)}
        if last := self.cold.last(model.id):
            if (replicas or self.empty(model)) and last.replica_id not in {replica.id for replica in replicas}:
                self.cold.forget(model.id)
            else:
                awake.setdefault(last.replica_id, last)
        shunned = self._relay.breaker.shunned(time.monotonic())
        in_flight = self._relay.in_flight.__getitem__

        shared = self._prefixes.shared(steps)

        def cost(replica: str) -> tuple[int, int]:
            return cost_of(in_flight(replica), self._prefixes.known(replica, steps), shared)

        found = (shunned and choose(awake.values(), cost, {*tried, *shunned})) or choose(awake.values(), cost, tried)
        if found is None and model.tier == "resident":
            # What is published is up to a second old, and a port that nobody listens on says so at once.
            every = (replica.target(model.id) for replica in replicas)
            found = choose(every, cost, tried)
        return found

    async def until_known(self, model: Model) -> None:
        """In a Router's first seconds: wait until Serve has told it of the model's replicas.

        On an upgrade it gets requests at once, and the model is there all the time.
        """
        deployment = self._deployments[model.id]
        # A pool may have none.
        told = known if model.tier == "lazy" else replicas_of
        while not told(deployment) and time.monotonic() < self._known_by:  # noqa: ASYNC110 # another thread's
            await asyncio.sleep(_KNOWN_POLL_S)

    def replicas(self, model: Model) -> tuple[Replica, ...]:
        """The replicas of the deployment that holds the model; for a lazy one those of the pool."""
        return replicas_of(self._deployments[model.id])

    def empty(self, model: Model) -> bool:
        """Whether the model's deployment has no replica; it is scaled to zero, or all have died."""
        deployment = self._deployments[model.id]
        return known(deployment) and not replicas_of(deployment)

    def _awake(self, replica: Replica, model: Model) -> bool:
        published = replica.models.get(model.id)
        # A resident replica joins the table when its model answers, perhaps before it first published.
        if published is None:
            return model.tier == "resident"
        return published.state == "awake"

    def status(self, model: Model) -> PublishedModel:
        """The model over all replicas: its best state, and all its engine's requests in flight."""
        model = self.engine_of(model)
        states = [replica.models[model.id] for replica in self.replicas(model) if model.id in replica.models]
        if not states:
            # A lazy model of a pool without a replica is simply not loaded; a resident one is on its way.
            state = "stopped" if model.tier == "lazy" else "loading"
            return PublishedModel(
                state,
                expected_load_s=model.expected_load_s,
                expected_wake_s=model.expected_load_s,
                # A pool at zero may well be without nodes, and gets one when it is asked for.
                failure=self.shortage(model) if model.tier == "resident" else "",
            )
        best = min(states, key=lambda found: _STATE_RANKS.get(found.state, len(_STATE_RANKS)))
        return PublishedModel(
            state=best.state,
            progress=max(found.progress for found in states),
            in_flight=self._sent(model) if model.external else sum(found.in_flight for found in states),
            kv_cache=max(found.kv_cache for found in states),
            waiting=sum(found.waiting for found in states),
            expected_load_s=best.expected_load_s,
            expected_wake_s=best.expected_wake_s,
            loads=sum(found.loads for found in states),
            wakes=sum(found.wakes for found in states),
            failure=best.failure,
            place=best.place,
            memory_bytes=best.memory_bytes,
            pinned=any(found.pinned for found in states),
            phases=best.phases,
        )

    def engines(self) -> list[tuple[str, Target]]:
        """Every engine of ours that is awake, as far as this process knows, with its model's id."""
        return [
            (model.id, replica.target(model.id))
            for model in self._catalog.models.values()
            if not model.base and not model.external
            for replica in self.replicas(model)
            if model.id in replica.urls and self._awake(replica, model)
        ]

    def _sent(self, model: Model) -> int:
        return sum(self._relay.in_flight[replica.id] for replica in self.replicas(model))

    def shortage(self, model: Model) -> str:
        """Why the model's deployment has no replica, where that is for want of a node that could hold one."""
        model = self.engine_of(model)
        nodes = self.nodes()
        if nodes is None or self.replicas(model):
            return ""
        return lacking(model.resources if model.tier == "resident" else self._pool_resources, nodes)

    async def order(self, model: Model, order: Order) -> None:
        """Have an operator's order carried out: a load where it is best, the rest wherever the model is up.

        Raises `ApiError` where the pool refuses, or does not answer; every replica that is concerned has heard it then.
        """
        model = self.engine_of(model)
        concerned: list[str | None] = [
            replica.id
            for replica in self.replicas(model)
            if order is not Order.LOAD and (found := replica.models.get(model.id)) and _concerned(found)
        ]
        problems = []
        # Where none is known the best one for a load is told: it has an order that was given just before.
        for replica_id in concerned or [None]:
            if problem := await self._tell(model, order, replica_id):
                problems.append(problem)
        if problems:
            raise problems[0]

    async def _tell(self, model: Model, order: Order, replica_id: str | None) -> ApiError | None:
        try:
            answer = await self._pool.order(model.id, order.value, replica_id)
        except (Exception, asyncio.CancelledError) as error:
            if (task := asyncio.current_task()) and task.cancelling():
                raise
            # Otherwise it is Serve's word for a replica that goes.
            logger.warning("the pool took no order for %s: %s", model.id, type(error).__name__)
            return unavailable(
                f"The pool did not answer for {model.id}.", code="pool_unavailable", retry_after_s=_POOL_RETRY_AFTER_S
            )
        refused = answer.get("refused")
        return refusal(model.id, refused) if refused else None

    def spread(self, model: Model, full: Collection[str]) -> None:
        """Where another replica of the pool could hold the model too, have it loaded there in the background."""
        others = [replica for replica in self.replicas(model) if replica.id not in full]
        if model.tier == "lazy" and others and model.id not in self._spreading:
            task = asyncio.create_task(self._spread(model, tuple(full)))
            self._spreading[model.id] = task
            task.add_done_callback(lambda _: self._spreading.pop(model.id, None))

    async def _spread(self, model: Model, full: tuple[str, ...]) -> None:
        # Asked again while it loads, as a waiting client would; not for so long that it drains a model in use.
        deadline = time.monotonic() + self._warm_s
        try:
            while (await self._pool.acquire(model.id, full)).get("pending") and time.monotonic() < deadline:
                pass
        except Exception as error:
            logger.warning("%s could not be spread: %s", model.id, type(error).__name__)

    def load(self, model: Model) -> float:
        """How loaded the model's engines are: 1 where every place of every replica is taken, more where some wait."""
        model = self.engine_of(model)
        return load_of(self._usages(model), self._queued(model.id))

    def kv_cache_full(self, model: Model) -> bool:
        """Whether requests wait for KV cache on every engine of the model, by what they published."""
        model = self.engine_of(model)
        usages = self._usages(model)
        return bool(usages) and all(is_full(usage.engine, model.kv_cache_limit) for usage in usages)

    def _usages(self, model: Model) -> list[Usage]:
        usages = []
        for replica in self.replicas(model):
            if self._awake(replica, model):
                published = replica.models.get(model.id)
                in_flight = published.in_flight if published else 0
                if model.tier == "resident":
                    in_flight = max(in_flight, self._relay.in_flight[replica.id])
                engine = EngineLoad(published.kv_cache, 0, published.waiting) if published else EngineLoad()
                usages.append(Usage(in_flight, model.max_ongoing_requests, engine, model.kv_cache_limit))
        return usages

    def warm(self, model: Model) -> None:
        """Have a model loaded in the background, once; nobody is told how it went."""
        model = self.engine_of(model)
        if model.tier == "lazy" and model.id not in self._warming:
            task = asyncio.create_task(self._warm(model))
            self._warming[model.id] = task
            task.add_done_callback(lambda _: self._warming.pop(model.id, None))

    async def _warm(self, model: Model) -> None:
        with self.cold.wait(model.id) as call:
            await asyncio.wait([call], timeout=self._warm_s)
        if call.done() and not call.cancelled() and call.exception():
            # A refusal (failed lately, no room): do not ask the pool again for every request.
            await asyncio.sleep(_WARM_PAUSE_S)

    async def readiness(self) -> tuple[bool, dict[str, Any]]:
        """Whether this Router can do its main job now, and the details: asked of the engines themselves."""
        residents = [model for model in self._catalog.models.values() if model.tier == "resident"]
        answers = await asyncio.gather(*(self._answers(model) for model in residents))
        replicas = [replica for name in set(self._deployments.values()) for replica in replicas_of(name)]
        moving = all(replica.moving for replica in replicas)
        models = {model.id: self.status(model).state for model in self._catalog.models.values()}
        models |= {
            model.id: "loading"
            for model, answer in zip(residents, answers, strict=True)
            if not (answer or model.external)  # of which more is known
        }
        return all(answers) and moving, {"models": models, "load_path": "moving" if moving else "stuck"}

    async def _answers(self, model: Model) -> bool:
        if model.external:
            # `Externals` asks them all the time, and not oftener than a probe comes by.
            return self.status(model).state == "awake"
        target = self.target(model)
        return target is not None and await self._relay.healthy(target, _PROBE_TIMEOUT_S)


def _concerned(found: PublishedModel) -> bool:
    """Whether a replica has something of the model that an order could change: it is up, on its way, or kept."""
    return found.state not in ("stopped", "failed") or found.pinned or bool(found.place)
