"""How the models, the pool and the nodes are at this moment, as `/v1/router/events` says it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from serve_app.catalog import Catalog, allowing
from serve_app.engines.base import Phase
from serve_app.model_schema import Model, Resources
from serve_app.models.replicas import PublishedModel, Replica
from serve_app.router.auth import Caller
from serve_app.router.fleet import Fleet

_GB = 1_000_000_000
_LOADING = (Phase.STANDBY, Phase.CONFIGURING, Phase.LOADING, Phase.WARMING)
_COMING = frozenset({"loading", "waking"})
_SLEEPS = "asleep"
_GONE = frozenset({"stopped", "failed"})


class Overview:
    """Looks at what this process knows; asks nobody. `queued`: requests that wait here for a place of a model."""

    def __init__(self, catalog: Catalog, fleet: Fleet, pool_resources: Resources, queued: Callable[[str], int]) -> None:
        self._catalog = catalog
        self._fleet = fleet
        self._pool_resources = pool_resources
        self._queued = queued

    def __call__(self, caller: Caller, last_used: Mapping[str, float]) -> dict[str, Any]:
        """What a caller may see. Only operators see the pool and the nodes.

        `last_used`: by model, when its last request ended; each model has that as `used_at`.
        """
        seen = self._seen(caller).models.values()
        return {
            "models": [self._model(model, caller, last_used.get(model.id)) for model in seen],
            "pool": self._pool() if caller.admin else None,
            "nodes": self._nodes() if caller.admin else [],
        }

    def default_of(self, caller: Caller) -> str:
        """The id of the model that answers `auto` where nothing speaks for another one."""
        return self._seen(caller).default_id

    def _seen(self, caller: Caller) -> Catalog:
        return self._catalog if caller.models is None else allowing(self._catalog, caller.models)

    def _model(self, model: Model, caller: Caller, used_at: float | None) -> dict[str, Any]:
        status = self._fleet.status(model)
        engine = self._fleet.engine_of(model)
        found = [
            (replica, replica.models[engine.id])
            for replica in self._fleet.replicas(model)
            if engine.id in replica.models and replica.models[engine.id].state != "stopped"
        ]
        memory = [] if model.base else [_memory(engine, published) for _, published in found]
        return {
            "id": model.id,
            "tier": "external" if model.external else model.tier,
            "state": status.state,
            "phase": _phase(status),
            "progress": status.progress if status.state in _COMING else None,
            "error": status.failure or None,
            "replicas": [
                {
                    "id": replica.id,
                    "node": replica.node or None if caller.admin else None,
                    "state": published.state,
                }
                for replica, published in found
            ],
            "running": status.in_flight,
            "waiting": status.waiting,
            "queued": self._queued(engine.id),
            "used_at": used_at,
            "wake_s": None if status.state == "awake" else status.expected_wake_s,
            "gpu_bytes": sum(gpu for gpu, _ in memory) or None,
            "host_bytes": sum(host for _, host in memory) or None,
            "pinned": status.pinned,
            "thinking": model.thinking.supported,
            "abilities": model.abilities,
            "context": model.context,
        }

    def _pool(self) -> dict[str, int] | None:
        replicas = self._pool_replicas()
        if not replicas:
            return None
        return {
            "gpu_used": sum(replica.used_bytes for replica in replicas),
            "gpu_budget": sum(replica.limit_bytes for replica in replicas),
            "host_used": sum(replica.host_used_bytes for replica in replicas),
            "host_budget": sum(replica.host_limit_bytes for replica in replicas),
        }

    def _pool_replicas(self) -> tuple[Replica, ...]:
        lazy = next((model for model in self._catalog.models.values() if model.tier == "lazy"), None)
        return self._fleet.replicas(lazy) if lazy else ()

    def _nodes(self) -> list[dict[str, Any]]:
        used: Counter[str] = Counter()
        for model in self._catalog.models.values():
            if model.tier == "resident" and not (model.base or model.external):
                for replica in self._fleet.replicas(model):
                    used[replica.node] += model.resources.num_gpus  # type: ignore[assignment] # a Counter counts anything
        for replica in self._pool_replicas():
            used[replica.node] += self._pool_resources.num_gpus  # type: ignore[assignment]
        return [
            {"id": node.id, "name": node.name, "gpus": node.resources.get("GPU", 0), "gpus_used": used[node.id]}
            for node in self._fleet.nodes() or ()
        ]


def _phase(status: PublishedModel) -> str | None:
    """The phase of a load that is under way: the first that has not been timed yet."""
    if status.state != "loading":
        return None
    return next((phase.value for phase in _LOADING if phase.value not in status.phases), None)


def _memory(model: Model, published: PublishedModel) -> tuple[int, int]:
    """What it holds on one replica, in bytes: GPU (or the machine's, without GPUs), and asleep the host's."""
    if published.state == _SLEEPS:
        return int(model.sleep.gpu_gb * _GB), int(model.asleep_host_gb * _GB)
    return (0 if published.state in _GONE else published.memory_bytes), 0
