"""The Router's view of the running models: who serves what, in which state, and how to reach it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from serve_app.catalog import Catalog
from serve_app.config import Model
from serve_app.models.replicas import PublishedModel, Replica, Target, choose, known, replicas_of
from serve_app.router.cold import Acquire, ColdStarts
from serve_app.router.relay import Relay
from serve_app.routing.policy import ModelState

# Of several replicas' states of one model the first in this order is the model's.
_STATE_RANKS = {"awake": 0, "loading": 1, "unloading": 2, "failed": 3, "stopped": 4}
_PROBE_TIMEOUT_S = 2.0
_KNOWN_WITHIN_S = 3.0
_KNOWN_POLL_S = 0.02
_WARM_PAUSE_S = 5.0


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
        return ModelState(awake=False, wake_s=status.expected_load_s * (1 - status.progress))

    def __iter__(self) -> Iterator[str]:
        return iter(self._models)

    def __len__(self) -> int:
        return len(self._models)


class Fleet:
    """Finds targets. `deployments` says which deployment (by its name in Serve) holds each model.

    `warm_s`: how long a load in the background waits for room. Less than the pool's `ageing_s`, or it would get room
    from a model that is in use.
    """

    def __init__(
        self,
        catalog: Catalog,
        deployments: Mapping[str, str],
        acquire: Acquire,
        relay: Relay,
        *,
        warm_s: float = 30.0,
    ) -> None:
        self._catalog = catalog
        self._deployments = deployments
        self._relay = relay
        self.cold = ColdStarts(acquire)
        self._warm_s = warm_s
        self._warming: dict[str, asyncio.Task[None]] = {}
        self._known_by = time.monotonic() + _KNOWN_WITHIN_S

    def target(self, model: Model, tried: Collection[str] = ()) -> Target | None:
        """An engine that may answer for the model; None if this process knows of none that was not tried."""
        replicas = [replica for replica in self._replicas(model) if model.id in replica.urls]
        awake = {
            replica.id: Target(replica.id, replica.urls[model.id], replica.secret)
            for replica in replicas
            if self._awake(replica, model)
        }
        if last := self.cold.last(model.id):
            if (replicas or self._empty(model)) and last.replica_id not in {replica.id for replica in replicas}:
                self.cold.forget(model.id)
            else:
                awake.setdefault(last.replica_id, last)
        found = choose(awake.values(), self._relay.in_flight.__getitem__, tried)
        if found is None and model.tier == "resident":
            # What is published is up to a second old, and a port that nobody listens on says so at once.
            every = (Target(replica.id, replica.urls[model.id], replica.secret) for replica in replicas)
            found = choose(every, self._relay.in_flight.__getitem__, tried)
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

    def _replicas(self, model: Model) -> tuple[Replica, ...]:
        return replicas_of(self._deployments[model.id])

    def _empty(self, model: Model) -> bool:
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
        """The model over all replicas: its best state, and all its requests in flight."""
        states = [replica.models[model.id] for replica in self._replicas(model) if model.id in replica.models]
        if not states:
            # A lazy model of a pool without a replica is simply not loaded; a resident one is on its way.
            state = "stopped" if model.tier == "lazy" else "loading"
            return PublishedModel(state, expected_load_s=model.expected_load_s)
        best = min(states, key=lambda found: _STATE_RANKS.get(found.state, len(_STATE_RANKS)))
        return PublishedModel(
            state=best.state,
            progress=max(found.progress for found in states),
            in_flight=sum(found.in_flight for found in states),
            expected_load_s=best.expected_load_s,
            loads=sum(found.loads for found in states),
            failure=best.failure,
        )

    def warm(self, model: Model) -> None:
        """Have a model loaded in the background, once; nobody is told how it went."""
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
        models |= {model.id: "loading" for model, answer in zip(residents, answers, strict=True) if not answer}
        return all(answers) and moving, {"models": models, "load_path": "moving" if moving else "stuck"}

    async def _answers(self, model: Model) -> bool:
        target = self.target(model)
        return target is not None and await self._relay.healthy(target, _PROBE_TIMEOUT_S)
