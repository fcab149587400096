"""The deployment of the lazy models: each replica holds those that are asked for, as far as its memory goes."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import Mapping
from typing import Any

from serve_app import log
from serve_app.config import Config, ConfigError
from serve_app.engines.base import EngineKind, EngineSpec
from serve_app.engines.port import reserve_port
from serve_app.engines.process import EngineProcess, StandbyHost, new_secret
from serve_app.live import with_live
from serve_app.models.network import engine_host
from serve_app.models.replicas import PublishedModel, metadata, own_replica_id, published
from serve_app.models.waiting import Waiting
from serve_app.residency.events import LazyModel, Limits, Order
from serve_app.residency.manager import Refused, ResidencyManager
from serve_app.telemetry.meters import Flusher
from serve_app.telemetry.metric_table import REPLICA_METRICS
from serve_app.telemetry.ray_metrics import RaySink
from serve_app.telemetry.replica_metrics import Memory, ReplicaMetrics

logger = logging.getLogger(__name__)

_GB = 1_000_000_000


# A call waits this long and is asked again: Serve waits for open calls before it lets a replica shut down.
_ACQUIRE_S = 2.0
# Serve tells Routers and pool of a new `user_config` one after the other, within a second or two.
_ROUTERS_HEAR_S = 10.0
_RETIRE_POLL_S = 0.5
_HEAR_POLL_S = 0.05


@dataclasses.dataclass(frozen=True, slots=True)
class PoolPlan:
    """All that a pool needs of the configuration."""

    specs: Mapping[str, EngineSpec]
    models: Mapping[str, LazyModel]
    limits: Limits
    sleep_levels: Mapping[str, int]
    host: str
    log_level: str
    log_format: log.Style
    standby: bool
    drain_s: float


def pool_plan(config: Config) -> PoolPlan:
    """What the pool needs of a configuration."""
    specs = {model.id: config.engine_spec(model) for model in config.lazy}
    return PoolPlan(
        specs=specs,
        models={
            model.id: LazyModel(
                id=model.id,
                memory_bytes=int(model.memory_gb * _GB),
                priority=model.priority,
                idle_unload_s=model.idle_unload_s,
                sleeps=config.sleeps(model),
                asleep_bytes=int(model.sleep.gpu_gb * _GB),
                host_bytes=int(model.asleep_host_gb * _GB),
                process_bytes=int(config.pool.process_gb * _GB),
                load_s=model.expected_load_s,
                wake_s=model.expected_wake_s,
                idle_sleep_s=model.idle_sleep_s,
            )
            for model in config.lazy
        },
        limits=Limits(
            memory_bytes=int(config.pool.memory_gb * _GB),
            min_residency_s=config.pool.min_residency_s,
            ageing_s=config.pool.ageing_s,
            backoff_s=config.pool.backoff_s,
            host_bytes=int((config.pool.host_memory_gb or 0) * _GB),
            grace_s=config.pool.grace_s,
            evicts=config.pool.evict,
            measured=config.pool.resources.num_gpus > 0,
        ),
        sleep_levels={model.id: model.sleep.level for model in config.lazy},
        host=config.engine_host,
        log_level=config.log_level,
        log_format=config.log_format,
        standby=config.pool.standby and any(spec.kind == "vllm" for spec in specs.values()),
        drain_s=config.router.drain_s,
    )


class LazyPool:
    """One replica of the pool. Nothing is loaded until somebody asks for it. `args`: the application's."""

    async def __init__(self, args: dict[str, Any]) -> None:  # type: ignore[misc] # Serve awaits it
        plan = pool_plan(Config.model_validate(args))
        log.configure(plan.log_level, plan.log_format)
        self._args = args
        self._plan = plan
        self._configured = False
        self._retiring: dict[str, asyncio.Task[None]] = {}
        self._specs_of_retired: dict[str, EngineSpec] = {}
        self._secret = new_secret()
        host = engine_host(plan.host)
        self._ports = {model_id: reserve_port(host) for model_id in plan.specs}
        self._standby = StandbyKeeper("vllm", plan.log_level) if plan.standby else None
        self._metrics = ReplicaMetrics(own_replica_id())
        self._flusher = Flusher([self._metrics.collect], RaySink(REPLICA_METRICS))
        self._flusher.start()
        self._manager = ResidencyManager(
            plan.models, plan.limits, self._new_engine, sleep_levels=plan.sleep_levels, went=self._metrics.went
        )
        self._manager.start()
        self._waiting = Waiting(self._manager.acquire)

    async def reconfigure(self, live: dict[str, Any]) -> None:
        """Serve's hook, with `user_config`: the lazy models of now. A wrong one leaves everything as it was."""
        try:
            plan = pool_plan(with_live(self._args, live))
        except ConfigError as error:
            if not self._configured:
                raise
            logger.error("the pool goes on as it was: %s", error)
            return
        self._configured = True
        before, self._plan = self._plan, plan
        host = engine_host(plan.host)
        for model_id in plan.specs.keys() - self._ports.keys():
            self._ports[model_id] = reserve_port(host)
        for model_id, model in plan.models.items():
            if retiring := self._retiring.pop(model_id, None):
                retiring.cancel()
            self._manager.configure(model, plan.sleep_levels[model_id])
            old = before.specs.get(model_id) or self._specs_of_retired.pop(model_id, None)
            if old and old != plan.specs[model_id]:
                self._manager.replace(model_id)
        for model_id in before.specs.keys() - plan.specs.keys():
            self._specs_of_retired[model_id] = before.specs[model_id]
            self._retiring[model_id] = asyncio.create_task(self._retire(model_id))

    async def _retire(self, model_id: str) -> None:
        """Let a model go that is no longer configured: when every Router has heard, and its requests are done."""
        await asyncio.sleep(_ROUTERS_HEAR_S)
        while not self._manager.forget(model_id):  # noqa: ASYNC110 # rare and short
            await asyncio.sleep(_RETIRE_POLL_S)
        self._specs_of_retired.pop(model_id, None)
        _, port = self._ports.pop(model_id)
        port.close()
        self._retiring.pop(model_id, None)

    def _new_engine(self, model_id: str) -> EngineProcess:
        spec = self._plan.specs.get(model_id) or self._specs_of_retired[model_id]
        standby = self._standby.take() if self._standby and spec.kind == self._standby.kind else None
        address, _ = self._ports[model_id]
        return EngineProcess(spec, address, secret=self._secret, log_level=self._plan.log_level, standby=standby)

    async def acquire(self, model_id: str, **choice: Any) -> dict[str, Any]:
        """Wait until the model is awake on this replica; loads it if need be.

        `choice` is for the choice of the replica (`TableRouter`): `memory_bytes` that the model takes, replicas to
        `avoid`, or the `only` one to ask.
        Returns `{"target": {...}}`, `{"pending": true}` (ask again), or `{"refused": {code, reason, retry_after_s}}`:
        an answer rather than an exception, because Ray would wrap that in a traceback.
        """
        if not await self._heard_of(model_id):
            return {"refused": _reason(Refused("unknown_model", "this pool does not have it", _ROUTERS_HEAR_S))}
        try:
            engine = await self._waiting.acquire(model_id, _ACQUIRE_S)
        except TimeoutError:
            return {"pending": True}
        except Refused as refused:
            self._refill()
            return {"refused": _reason(refused)}
        self._refill()
        return {"target": {"replica_id": own_replica_id(), "url": engine.address.url, "secret": self._secret}}

    async def _heard_of(self, model_id: str) -> bool:
        """Whether the model is configured here, or comes to be at once: a Router may have heard of it first."""
        deadline = time.monotonic() + _ROUTERS_HEAR_S
        while not self._manager.knows(model_id) and time.monotonic() < deadline:  # noqa: ASYNC110 # short
            await asyncio.sleep(_HEAR_POLL_S)
        return self._manager.knows(model_id)

    async def order(self, model_id: str, order: str, **choice: Any) -> dict[str, Any]:
        """Have an operator's order carried out; returns `{}` or `{"refused": …}` as `acquire` does."""
        try:
            self._manager.order(model_id, Order(order))
        except Refused as refused:
            return {"refused": _reason(refused)}
        return {}

    def _refill(self) -> None:
        if self._standby:
            self._standby.refill()

    async def describe(self, model: str) -> dict[str, Any]:
        """What this replica publishes. A Router calls it once, when the resident models answer."""
        self._refill()
        return self.record_routing_stats()

    def record_replica_metadata(self) -> dict[str, Any]:
        """Serve's hook, called once when the replica is ready."""
        urls = {model_id: address.url for model_id, (address, _) in self._ports.items()}
        return metadata(urls, self._secret)

    def record_routing_stats(self) -> dict[str, Any]:
        """Serve's hook, called every `PUBLISH_EVERY_S`."""
        models = {
            model_id: PublishedModel(**dataclasses.asdict(status))
            for model_id, status in self._manager.status().items()
        }
        limits, moving = self._plan.limits, self._manager.moving()
        used_bytes, host_used_bytes = self._manager.used_bytes(), self._manager.used_host_bytes()
        memory = Memory(used_bytes, limits.memory_bytes, host_used_bytes, limits.host_bytes)
        self._metrics.publish(models, moving=moving, memory=memory)
        return published(
            models,
            moving=moving,
            used_bytes=used_bytes,
            limit_bytes=limits.memory_bytes,
            host_used_bytes=host_used_bytes,
            host_limit_bytes=limits.host_bytes,
            urls={model_id: address.url for model_id, (address, _) in self._ports.items()},
        )

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Serve's hook, called every `autoscaling.METRICS_EVERY_S` where the pool is autoscaled."""
        return self._manager.demand().stats()

    async def check_health(self) -> None:
        """Serve's hook: an exception has the replica replaced."""
        if problem := self._manager.problem():
            raise RuntimeError(problem)

    async def __del__(self) -> None:
        """Serve awaits this on shutdown and scale-down: finish what runs, then end the engines."""
        await self._manager.close(self._plan.drain_s)
        if self._standby:
            self._standby.close()
        await asyncio.to_thread(self._flusher.close)


def _reason(refused: Refused) -> dict[str, Any]:
    return {"code": refused.code, "reason": str(refused), "retry_after_s": refused.retry_after_s}


class StandbyKeeper:
    """Keeps one host with its imports done, so that the next load costs only its own work."""

    def __init__(self, kind: EngineKind, log_level: str) -> None:
        self.kind = kind
        self._log_level = log_level
        self._host: StandbyHost | None = None
        self._spawning: asyncio.Task[None] | None = None

    def take(self) -> StandbyHost | None:
        """The standby host, if there is a living one; it is the caller's now."""
        host, self._host = self._host, None
        return host if host and not host.exited.is_set() else None

    def refill(self) -> None:
        """See that there is one again. Called when a load is over: importing beside it would slow it."""
        if (self._host is None or self._host.exited.is_set()) and (not self._spawning or self._spawning.done()):
            self._spawning = asyncio.create_task(self._spawn())

    async def _spawn(self) -> None:
        self._host = await StandbyHost.spawn(self.kind, self._log_level)

    def close(self) -> None:
        """End the standby host."""
        if self._spawning:
            self._spawning.cancel()
        if self._host:
            self._host.kill()
