"""The deployment of one resident model: an engine that is always there, and is started again when it dies."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

from serve_app import log
from serve_app.config import Config, ConfigError
from serve_app.engines.base import EngineSpec, Phase
from serve_app.engines.port import reserve_port
from serve_app.engines.process import EngineProcess, new_secret
from serve_app.live import with_live
from serve_app.models.autoscaling import load_stats
from serve_app.models.network import engine_host
from serve_app.models.replicas import PublishedModel, metadata, own_replica_id, published
from serve_app.residency.events import Transition
from serve_app.residency.manager import measured
from serve_app.telemetry.meters import Flusher
from serve_app.telemetry.metric_table import REPLICA_METRICS
from serve_app.telemetry.ray_metrics import RaySink
from serve_app.telemetry.replica_metrics import ReplicaMetrics

logger = logging.getLogger(__name__)

# So many deaths within the window, and Serve gets to replace the replica (perhaps on another node).
_MAX_RESTARTS = 3
_RESTART_WINDOW_S = 600.0


class Resident:
    """One replica of a resident model. Ready, for Serve, once the model has generated a token.

    `args`: the application's. The engine starts in `reconfigure`, which Serve calls right after.
    """

    async def __init__(self, args: dict[str, Any], model_id: str) -> None:  # type: ignore[misc] # Serve awaits it
        config = Config.model_validate(args)
        log.configure(config.log_level, config.log_format)
        self._args = args
        self._spec = spec_of(config, model_id)
        self._log_level = config.log_level
        self._drain_s = config.router.drain_s
        self._secret = new_secret()
        self._address, self._port = reserve_port(engine_host(config.engine_host))
        self._restarts: list[float] = []
        self._problem: str | None = None
        self._guard: asyncio.Task[None] | None = None
        self._metrics = ReplicaMetrics(own_replica_id())
        self._flusher = Flusher([self._metrics.collect], RaySink(REPLICA_METRICS))
        self._flusher.start()
        self._load_s = 0.0
        self._memory_bytes = 0
        self._engine = self._new_engine()

    async def reconfigure(self, live: dict[str, Any]) -> None:
        """Serve's hook, with `user_config`: start the engine, or start it anew where its arguments have changed.

        Serve does so with one replica after the other. A wrong `user_config` leaves the engine alone.
        """
        try:
            spec = spec_of(with_live(self._args, live), self._spec.model_id)
        except ConfigError as error:
            if self._guard is None:
                raise
            logger.error("%s goes on as it was: %s", self._spec.model_id, error)
            return
        if self._guard is None:
            self._spec = spec
        elif spec == self._spec:
            return
        else:
            logger.warning("%s starts its engine anew: its arguments have changed", spec.model_id)
            self._guard.cancel()
            self._spec = spec
            await self._engine.drain(self._drain_s)
            await self._engine.stop()
        self._engine = self._new_engine()
        await self._start()
        self._guard = asyncio.create_task(self._keep_alive())

    def _new_engine(self) -> EngineProcess:
        return EngineProcess(self._spec, self._address, secret=self._secret, log_level=self._log_level)

    async def _start(self) -> None:
        began = time.monotonic()
        await self._engine.start()
        self._load_s = time.monotonic() - began
        self._metrics.went(Transition(self._spec.model_id, "loading", "awake", self._load_s))
        self._memory_bytes = await measured(self._engine)

    async def _keep_alive(self) -> None:
        while True:
            reason = await self._engine.wait_exit()
            now = time.monotonic()
            self._restarts = [*(at for at in self._restarts if now - at < _RESTART_WINDOW_S), now]
            if len(self._restarts) > _MAX_RESTARTS:
                self._problem = f"the engine died {len(self._restarts)} times; last: {reason}"
                return
            logger.error("%s has died: %s; starting it again", self._spec.model_id, reason)
            self._metrics.went(Transition(self._spec.model_id, "awake", "failed", 0.0))
            self._engine = self._new_engine()
            try:
                await self._start()
            except Exception as error:
                self._problem = str(error) or type(error).__name__
                self._metrics.went(Transition(self._spec.model_id, "loading", "failed", 0.0))
                logger.exception("%s could not be started again", self._spec.model_id)
                return

    async def describe(self, model: str) -> dict[str, Any]:
        """What this replica publishes; a Router calls it once, to make Serve open the way to the replicas."""
        return self.record_routing_stats()

    def record_replica_metadata(self) -> dict[str, Any]:
        """Serve's hook, called once when the replica is ready."""
        return metadata({self._spec.model_id: self._address.url}, self._secret)

    def record_routing_stats(self) -> dict[str, Any]:
        """Serve's hook, called every `PUBLISH_EVERY_S`."""
        ready = self._engine.phase is Phase.READY
        model = PublishedModel(
            state="awake" if ready else "loading",
            in_flight=self._engine.in_flight,
            kv_cache=self._engine.reported.kv_cache,
            waiting=self._engine.reported.waiting,
            expected_load_s=round(self._load_s, 1),
            loads=1 + len(self._restarts),
            memory_bytes=self._memory_bytes,
        )
        models, moving = {self._spec.model_id: model}, self._problem is None
        self._metrics.publish(models, moving=moving)
        return published(models, moving=moving)

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Serve's hook, called every `autoscaling.METRICS_EVERY_S` where the model is autoscaled."""
        return load_stats(self._engine.in_flight, self._engine.in_flight_tokens, self._engine.reported.kv_cache)

    async def check_health(self) -> None:
        """Serve's hook: an exception has the replica replaced."""
        if self._problem:
            raise RuntimeError(self._problem)

    async def __del__(self) -> None:
        """Serve awaits this on shutdown and scale-down: finish what runs, then end the engine."""
        if self._guard:
            self._guard.cancel()
        await self._engine.drain(self._drain_s)
        await self._engine.stop()
        await asyncio.to_thread(self._flusher.close)


def spec_of(config: Config, model_id: str) -> EngineSpec:
    """What the engine of one resident model is told."""
    return config.engine_spec(next(model for model in config.residents if model.id == model_id))
