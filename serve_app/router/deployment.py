"""The Router as a Serve deployment: its listener on the front door's port, and the same app on Serve's own."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Collection
from functools import partial
from typing import Any

import ray
from ray import serve
from ray.serve.handle import DeploymentHandle, DeploymentResponse
from starlette.types import ASGIApp

from serve_app import log
from serve_app.config import Config, ConfigError, deployment_name
from serve_app.live import with_live
from serve_app.models.placement import Node
from serve_app.models.replicas import own_replica_id
from serve_app.router.app import RouterApp
from serve_app.router.listener import Listener
from serve_app.router.live import LiveApp
from serve_app.telemetry.meters import Flusher
from serve_app.telemetry.metric_table import ROUTER_METRICS
from serve_app.telemetry.ray_metrics import RaySink
from serve_app.telemetry.request_metrics import RouterMetrics

logger = logging.getLogger(__name__)

_ORDER_TIMEOUT_S = 30.0
_NODES_EVERY_S = 5.0
# Longer than a pool takes to answer: so long is waited for a replica before it is asked whether anybody still waits.
_ACQUIRE_S = 10.0

# What the pool is called where a control call needs no model.
POOL_ITSELF = ""

_ingress_app: LiveApp | None = None


def ingress() -> ASGIApp:
    """The app for Serve's proxy (port 8001). Serve asks for it right after the Router was made."""
    assert _ingress_app, "Serve asked for the ingress before the Router was made"
    return _ingress_app


async def _exchange_ingress() -> None:
    if _ingress_app:
        await _ingress_app.exchange()


@serve.ingress(ingress)
class Router:
    """One replica of the front door. `config_args`: the application's.

    `residents`: by model id, the name of its deployment and its handle.
    """

    async def __init__(  # type: ignore[misc] # Serve awaits it
        self,
        config_args: dict[str, Any],
        residents: dict[str, tuple[str, DeploymentHandle]],
        pool: tuple[str, DeploymentHandle] | None,
    ) -> None:
        self._args = config_args
        self._residents, self._pool = residents, pool
        self._config = Config.model_validate(config_args)
        self._refused = ""
        self._opened = False
        log.configure(self._config.log_level, self._config.log_format)
        identity = ray.get_runtime_context().get_job_id() + "@" + ray.get_runtime_context().gcs_address
        metrics = RouterMetrics()
        self._flusher = Flusher([metrics.collect], RaySink(ROUTER_METRICS))
        nodes = ClusterNodes()
        nodes.known()  # has them asked for, so that the first who looks sees them

        def new_app(before: RouterApp | None, *, front_door: bool) -> RouterApp:
            config = self._config
            return RouterApp(
                config,
                self._deployments(config),
                ServePool(pool[1], config) if pool else NoPool(),
                identity,
                metrics=metrics,
                nodes=nodes.known,
                name=own_replica_id(),
                front_door=front_door,
                before=before,
                refused=lambda: self._refused,
                leaving=lambda: self._listener.leaving,
            )

        self._front: LiveApp | None = None

        def new_front() -> LiveApp:
            self._front = LiveApp(partial(new_app, front_door=True))
            return self._front

        self._listener = Listener(self._config.router, new_front, identity)
        global _ingress_app
        _ingress_app = LiveApp(partial(new_app, front_door=False))

    def _deployments(self, config: Config) -> dict[str, str]:
        names = {model_id: name for model_id, (name, _) in self._residents.items()}
        names |= {model.id: deployment_name(model) for model in config.residents if model.external}
        if self._pool:
            names |= {model.id: self._pool[0] for model in config.lazy}
        return names | {model.id: names[model.base] for model in config.models if model.base}

    async def reconfigure(self, live: dict[str, Any]) -> None:
        """Serve's hook, with `user_config`, also right after the start: only then the front door opens.

        A wrong one is refused as a whole, and the Router goes on as it was. Raising would have Serve stop it.
        """
        try:
            config = with_live(self._args, live)
            if config.lazy and not self._pool:
                raise ConfigError("user_config.models: there is no pool for lazy models; give args.pool")
        except ConfigError as error:
            if not self._opened:
                raise
            self._refused = str(error)
            logger.error("the new user_config is refused, the old one stays: %s", error)
            return
        self._refused = ""
        changed, self._config = config != self._config, config
        if self._opened:
            if changed:
                logger.warning("a new configuration applies from now on")
                if self._front:
                    await self._front.exchange()
                await _exchange_ingress()
            return
        await _exchange_ingress()
        self._opened = True
        handles = [(handle, model_id) for model_id, (_, handle) in self._residents.items()]
        scaling = config.pool.autoscaling
        may_be_empty = scaling is not None and scaling.min_replicas == 0
        last = (self._pool[1], POOL_ITSELF) if self._pool else None
        self._opening = asyncio.create_task(_open_ways(handles, last, pool_may_be_empty=may_be_empty))
        self._listener.start()
        self._flusher.start()

    async def check_health(self) -> None:
        """Serve's hook: a Router whose front door is shut is replaced."""
        if not self._listener.alive():
            raise RuntimeError("the front door has stopped")

    async def __del__(self) -> None:
        """Serve awaits this on shutdown and scale-down: finish what runs."""
        await self._listener.stop()
        await asyncio.to_thread(self._flusher.close)


async def _open_ways(
    residents: list[tuple[DeploymentHandle, str]], pool: tuple[DeploymentHandle, str] | None, *, pool_may_be_empty: bool
) -> None:
    """Have Serve open the way to every deployment; from then on it keeps our tables of replicas true.

    The pool comes last: it begins with its standby engine then, and does not slow the residents' start.
    """
    await asyncio.gather(*(_describe(handle, model_id) for handle, model_id in residents))
    if pool and pool_may_be_empty:
        # This opens the way, too, and asks for no replica.
        pool[0].options()
    elif pool:
        await _describe(*pool)


async def _result(call: DeploymentResponse) -> dict[str, Any]:
    answer: dict[str, Any] = await call
    return answer


async def _describe(handle: DeploymentHandle, model_id: str) -> None:
    try:
        await handle.describe.remote(model_id)
    except Exception as error:
        logger.warning("%s did not answer yet: %s", model_id, type(error).__name__)


class ServePool:
    """The pool behind a handle of Serve's; see `PoolCalls`."""

    def __init__(self, handle: DeploymentHandle, config: Config) -> None:
        self._handle = handle
        self._memory_bytes = {model.id: int(model.memory_gb * 1e9) for model in config.lazy}

    async def acquire(self, model: str, avoid: Collection[str] = ()) -> dict[str, Any]:
        """See `PoolCalls`."""
        # Without a replica the call waits in this process, and that makes Serve start one.
        call = self._handle.acquire.remote(model, memory_bytes=self._memory_bytes[model], avoid=tuple(avoid))
        try:
            return await asyncio.wait_for(asyncio.ensure_future(_result(call)), _ACQUIRE_S)
        except TimeoutError:
            call.cancel()
            return {"pending": True}

    async def order(self, model: str, order: str, only: str | None = None) -> dict[str, Any]:
        """See `PoolCalls`."""
        call = self._handle.order.remote(model, order, memory_bytes=self._memory_bytes[model], only=only)
        return await asyncio.wait_for(asyncio.ensure_future(_result(call)), _ORDER_TIMEOUT_S)


class ClusterNodes:
    """The living nodes and what they offer, asked for in the background where somebody wants to know."""

    def __init__(self) -> None:
        self._nodes: list[Node] | None = None
        self._asked_at = -_NODES_EVERY_S
        self._asking = threading.Lock()

    def known(self) -> list[Node] | None:
        """As last heard; None until then. Returns at once."""
        if time.monotonic() - self._asked_at >= _NODES_EVERY_S and self._asking.acquire(blocking=False):
            self._asked_at = time.monotonic()
            threading.Thread(target=self._ask, name="cluster-nodes", daemon=True).start()
        return self._nodes

    def _ask(self) -> None:
        try:
            self._nodes = [
                Node(node["NodeID"], node["NodeManagerHostname"], node["Resources"])
                for node in ray.nodes()
                if node["Alive"]
            ]
        except Exception as error:
            logger.warning("the nodes of the cluster are not known: %s", type(error).__name__)
        finally:
            self._asking.release()


class NoPool:
    """For a configuration without lazy models: nobody asks."""

    async def acquire(self, model: str, avoid: Collection[str] = ()) -> dict[str, Any]:
        """See `PoolCalls`."""
        raise AssertionError("only lazy models are acquired, and they have a pool")

    async def order(self, model: str, order: str, only: str | None = None) -> dict[str, Any]:
        """See `PoolCalls`."""
        raise AssertionError("only lazy models take orders, and they have a pool")
