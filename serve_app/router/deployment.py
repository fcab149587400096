"""The Router as a Serve deployment: its listener on the front door's port, and the same app on Serve's own."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import ray
from ray import serve
from ray.serve.handle import DeploymentHandle, DeploymentResponse
from starlette.types import ASGIApp

from serve_app import log
from serve_app.config import Config
from serve_app.router.app import RouterApp
from serve_app.router.listener import Listener
from serve_app.telemetry.ray_metrics import decision_meter

logger = logging.getLogger(__name__)

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
        log.configure(config.log_level)
        self._pool = pool[1] if pool else None
        scaling = config.pool.autoscaling
        self._pool_may_be_empty = scaling is not None and scaling.min_replicas == 0
        deployments = {model_id: name for model_id, (name, _) in residents.items()}
        if pool:
            deployments |= {model.id: pool[0] for model in config.lazy}
        identity = ray.get_runtime_context().get_job_id() + "@" + ray.get_runtime_context().gcs_address

        meter = decision_meter()

        def new_app(*, front_door: bool = True) -> RouterApp:
            return RouterApp(config, deployments, self._acquire, identity, meter=meter, front_door=front_door)

        self._listener = Listener(config.router, new_app, identity)
        global _ingress_app
        _ingress_app = new_app(front_door=False)
        self._opening = asyncio.create_task(self._open_ways(residents, config.lazy[0].id if pool else ""))
        self._listener.start()

    async def _open_ways(self, residents: dict[str, tuple[str, DeploymentHandle]], lazy_id: str) -> None:
        """Have Serve open the way to every deployment; from then on it keeps our tables of replicas true.

        The pool comes last: it begins with its standby engine then, and does not slow the residents' start.
        """
        await asyncio.gather(*(_describe(handle, model_id) for model_id, (_, handle) in residents.items()))
        if self._pool and self._pool_may_be_empty:
            # This opens the way, too, and asks for no replica.
            self._pool.options()
        elif self._pool:
            await _describe(self._pool, lazy_id)

    async def _acquire(self, model_id: str) -> dict[str, Any]:
        assert self._pool, "only lazy models are acquired, and they have a pool"
        # Without a replica the call waits in this process, and that makes Serve start one.
        call = self._pool.acquire.remote(model_id)
        try:
            answer: dict[str, Any] = await asyncio.wait_for(asyncio.ensure_future(_result(call)), _ACQUIRE_S)
        except TimeoutError:
            call.cancel()
            return {"pending": True}
        return answer

    async def check_health(self) -> None:
        """Serve's hook: a Router whose front door is shut is replaced."""
        if not self._listener.alive():
            raise RuntimeError("the front door has stopped")

    async def __del__(self) -> None:
        """Serve awaits this on shutdown and scale-down: finish what runs."""
        await self._listener.stop()


async def _result(call: DeploymentResponse) -> dict[str, Any]:
    answer: dict[str, Any] = await call
    return answer


async def _describe(handle: DeploymentHandle, model_id: str) -> None:
    try:
        await handle.describe.remote(model_id)
    except Exception as error:
        logger.warning("%s did not answer yet: %s", model_id, type(error).__name__)
