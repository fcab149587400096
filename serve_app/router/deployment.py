"""The Router as a Serve deployment: its listener on the front door's port, and the same app on Serve's own."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Collection
from typing import Any

import ray
from ray import serve
from ray.serve.handle import DeploymentHandle, DeploymentResponse
from starlette.types import ASGIApp

from serve_app import log
from serve_app.config import Config, deployment_name
from serve_app.router.app import RouterApp
from serve_app.router.cold import PoolCalls
from serve_app.router.listener import Listener
from serve_app.telemetry.meters import Flusher
from serve_app.telemetry.metric_table import ROUTER_METRICS
from serve_app.telemetry.ray_metrics import RaySink
from serve_app.telemetry.request_metrics import RouterMetrics

logger = logging.getLogger(__name__)

_ORDER_TIMEOUT_S = 30.0
_NODES_EVERY_S = 5.0
# Longer than a pool takes to answer: so long is waited for a replica before it is asked whether anybody still waits.
_ACQUIRE_S = 10.0

_ingress_app: RouterApp | None = None


def ingress() -> ASGIApp:
    """The app for Serve's proxy (port 8001). Serve asks for it right after the Router was made."""
    assert _ingress_app, "Serve asked for the ingress before the Router was made"
    return _ingress_app


@serve.ingress(ingress)
class Router:
    """One replica of the front door. `residents`: by model id, the name of its deployment and its handle."""

    async def __init__(  # type: ignore[misc] # Serve awaits it
        self,
        config_args: dict[str, Any],
        residents: dict[str, tuple[str, DeploymentHandle]],
        pool: tuple[str, DeploymentHandle] | None,
    ) -> None:
        config = Config.model_validate(config_args)
        log.configure(config.log_level, config.log_format)
        calls: PoolCalls = ServePool(pool[1], config) if pool else NoPool()
        deployments = {model_id: name for model_id, (name, _) in residents.items()}
        deployments |= {model.id: deployment_name(model) for model in config.residents if model.external}
        if pool:
            deployments |= {model.id: pool[0] for model in config.lazy}
        deployments |= {model.id: deployments[model.base] for model in config.models if model.base}
        identity = ray.get_runtime_context().get_job_id() + "@" + ray.get_runtime_context().gcs_address

        metrics = RouterMetrics()
        nodes = ClusterNodes()

        def new_app(*, front_door: bool = True) -> RouterApp:
            return RouterApp(
                config,
                deployments,
                calls,
                identity,
                metrics=metrics,
                nodes=nodes.resources,
                front_door=front_door,
            )

        self._listener = Listener(config.router, new_app, identity)
        global _ingress_app
        _ingress_app = new_app(front_door=False)
        handles = [(handle, model_id) for model_id, (_, handle) in residents.items()]
        scaling = config.pool.autoscaling
        may_be_empty = scaling is not None and scaling.min_replicas == 0
        last = (pool[1], config.lazy[0].id) if pool else None
        self._opening = asyncio.create_task(_open_ways(handles, last, pool_may_be_empty=may_be_empty))
        self._listener.start()
        self._flusher = Flusher([metrics.collect], RaySink(ROUTER_METRICS))
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
    """What the living nodes offer, asked for in the background where somebody wants to know."""

    def __init__(self) -> None:
        self._nodes: list[dict[str, float]] | None = None
        self._asked_at = -_NODES_EVERY_S
        self._asking = threading.Lock()

    def resources(self) -> list[dict[str, float]] | None:
        """As last heard; None until then. Returns at once."""
        if time.monotonic() - self._asked_at >= _NODES_EVERY_S and self._asking.acquire(blocking=False):
            self._asked_at = time.monotonic()
            threading.Thread(target=self._ask, name="cluster-nodes", daemon=True).start()
        return self._nodes

    def _ask(self) -> None:
        try:
            self._nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
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
