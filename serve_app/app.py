"""What `deployments/*.yaml` import: the table of contents of the running service."""

from __future__ import annotations

import warnings
from typing import Any

from ray import serve
from ray.serve import Application
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig

from serve_app.autoscaling_schema import Autoscaling
from serve_app.config import Config, ConfigError, deployment_name, parse_config
from serve_app.model_schema import Model
from serve_app.models.autoscaling import METRICS_EVERY_S
from serve_app.models.lazy_pool import LazyPool, pool_plan
from serve_app.models.replicas import PUBLISH_EVERY_S
from serve_app.models.resident import Resident
from serve_app.models.table_router import TableRouter
from serve_app.router.deployment import Router
from serve_app.scoring import missing_for

# Control calls only (token bytes do not pass Serve): waits for loads are joined, so there are few.
_MAX_CONTROL_CALLS = 1000
SHUTDOWN_MARGIN_S = 15.0
# Serve calls `reconfigure` of a new replica only where there is a `user_config`; the deployment file's replaces it.
_NOTHING_LIVE: dict[str, Any] = {}
ROUTER, POOL = "Router", "LazyPool"
# With prompts that fill a quarter of it, so many contexts are sixteen requests.
_CONTEXTS_IN_FLIGHT = 4


def build(args: dict[str, Any]) -> Application:
    """Build the application from the `args` of a deployment file. Raises `ConfigError` for wrong ones."""
    config = parse_config(args)
    if missing := missing_for(config):
        raise ConfigError("\n".join(missing))
    residents = {
        model.id: (deployment_name(model), _resident(config, model)) for model in config.residents if not model.external
    }
    pool = (POOL, _pool(config)) if has_pool(args) else None
    router = serve.deployment(
        Router,
        name=ROUTER,
        user_config=_NOTHING_LIVE,
        num_replicas=config.router.replicas,
        ray_actor_options={"num_cpus": config.router.num_cpus},
        max_ongoing_requests=config.router.max_in_flight,
        graceful_shutdown_timeout_s=config.router.leave_s + config.router.drain_s + SHUTDOWN_MARGIN_S,
        graceful_shutdown_wait_loop_s=0.1,
        health_check_period_s=5,
    )
    return router.bind(config.model_dump(), residents, pool)


def has_pool(args: Any) -> bool:
    """Whether the pool is deployed; one without models waits for the lazy ones of `user_config`."""
    return "pool" in args or any(model.get("tier") == "lazy" for model in args["models"])


def _resident(config: Config, model: Model) -> Application:
    name = deployment_name(model)
    deployment = serve.deployment(
        Resident,
        name=name,
        user_config=_NOTHING_LIVE,
        **_resident_replicas(model),
        ray_actor_options=model.resources.actor_options(),
        max_ongoing_requests=_MAX_CONTROL_CALLS,
        request_router_config=_table(name),
        graceful_shutdown_timeout_s=config.router.drain_s + SHUTDOWN_MARGIN_S,
        graceful_shutdown_wait_loop_s=0.1,
        health_check_period_s=5,
    )
    return deployment.bind(config.model_dump(), model.id)


def _pool(config: Config) -> Application:
    deployment = serve.deployment(
        LazyPool,
        name=POOL,
        user_config=_NOTHING_LIVE,
        **_pool_replicas(config),
        ray_actor_options=config.pool.resources.actor_options(),
        max_ongoing_requests=_MAX_CONTROL_CALLS,
        request_router_config=_table(POOL),
        graceful_shutdown_timeout_s=config.router.drain_s + SHUTDOWN_MARGIN_S,
        graceful_shutdown_wait_loop_s=0.1,
        health_check_period_s=5,
    )
    return deployment.bind(config.model_dump())


def _resident_replicas(model: Model) -> dict[str, Any]:
    scaling = model.autoscaling
    if scaling is None:
        return {"num_replicas": model.replicas}
    targets = {
        "target_ongoing": scaling.target_ongoing_requests or max(1, model.max_ongoing_requests // 2),
        "target_tokens": scaling.target_tokens or _CONTEXTS_IN_FLIGHT * model.context,
    }
    return {"autoscaling_config": _autoscaling(scaling, "ResidentPolicy", **targets)}


def _pool_replicas(config: Config) -> dict[str, Any]:
    scaling = config.pool.autoscaling
    if scaling is None:
        return {"num_replicas": config.pool.replicas}
    replica_bytes = pool_plan(config).limits.memory_bytes
    return {"autoscaling_config": _autoscaling(scaling, "PoolPolicy", replica_bytes=replica_bytes)}


def _autoscaling(scaling: Autoscaling, policy: str, **settings: float) -> AutoscalingConfig:
    """Our policy does all of the deciding: of Serve's own settings only the bounds are left."""
    with warnings.catch_warnings():
        # Serve would have it in the environment of every node instead, where it is 10 s unless somebody sets it.
        warnings.simplefilter("ignore", DeprecationWarning)
        return AutoscalingConfig(
            min_replicas=scaling.min_replicas,
            max_replicas=scaling.max_replicas,
            metrics_interval_s=METRICS_EVERY_S,
            look_back_period_s=3 * METRICS_EVERY_S,
            upscale_delay_s=0,
            downscale_delay_s=0,
            policy=AutoscalingPolicy(
                policy_function=f"serve_app.models.autoscaling:{policy}",
                policy_kwargs={
                    "upscale_delay_s": scaling.upscale_delay_s,
                    "downscale_delay_s": scaling.downscale_delay_s,
                    **settings,
                },
            ),
        )


def _table(name: str) -> RequestRouterConfig:
    return RequestRouterConfig(
        request_router_class=TableRouter,
        request_router_kwargs={"table": name},
        request_routing_stats_period_s=PUBLISH_EVERY_S,
    )
