"""What the Router knows about the replicas of a deployment, and how one is chosen.

Ray Serve tells the Router's process which replicas run and what they publish (`table_router`); it is kept
here as a plain table. So a replica is picked from data at hand, with no RPC per request.
"""

from __future__ import annotations

import dataclasses
import hashlib
import ssl
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from serve_app.engines.base import SECRET_HEADER

# How often Serve asks replicas for what they publish; what the Router shows is at most about twice as old.
PUBLISH_EVERY_S = 0.5
_API = "/v1"


@dataclasses.dataclass(frozen=True, slots=True)
class PublishedModel:
    """One model on one replica, as its replica last published it. `kv_cache`, `waiting`: see `EngineLoad`."""

    state: str
    progress: float = 0.0
    in_flight: int = 0
    kv_cache: float = 0.0
    waiting: int = 0
    expected_load_s: float = 0.0
    expected_wake_s: float = 0.0
    loads: int = 0
    wakes: int = 0
    failure: str = ""
    place: int = 0
    memory_bytes: int = 0
    pinned: bool = False
    phases: Mapping[str, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True)
class Foreign:
    """What is different about a server that is not ours. `api`: the path that stands for `/v1`.

    No gate is before it: `places` is how many requests one Router has in flight there at most.
    """

    api: str
    places: int
    connect_timeout_s: float
    key: str = dataclasses.field(default="", repr=False)
    tls: ssl.SSLContext | None = dataclasses.field(default=None, repr=False)


@dataclasses.dataclass(frozen=True, slots=True)
class Replica:
    """One running replica: where its engines listen, the secret they ask for, and what it publishes.

    `node`: Ray's id of the node it runs on; empty where that is not known.
    """

    id: str
    urls: Mapping[str, str]
    secret: str
    models: Mapping[str, PublishedModel]
    moving: bool
    used_bytes: int = 0
    limit_bytes: int = 0
    foreign: Foreign | None = None
    node: str = ""
    host_used_bytes: int = 0
    host_limit_bytes: int = 0

    def target(self, model: str) -> Target:
        """Its engine of that model."""
        return Target(self.id, self.urls[model], self.secret, self.foreign)


@dataclasses.dataclass(frozen=True, slots=True)
class Target:
    """One engine that may answer a request."""

    replica_id: str
    url: str
    secret: str = dataclasses.field(repr=False)
    foreign: Foreign | None = None

    def path(self, path: str) -> str:
        """What one of an engine's paths is called there."""
        if self.foreign and path.startswith(_API):
            return self.foreign.api + path[len(_API) :]
        return path

    @property
    def credentials(self) -> dict[str, str]:
        """The header by which the engine knows us."""
        if self.foreign is None:
            return {SECRET_HEADER: self.secret}
        return {"authorization": f"Bearer {self.foreign.key}"} if self.foreign.key else {}

    def without_key(self, text: str) -> str:
        """What a server that is not ours says, should it quote our key."""
        key = self.foreign.key if self.foreign else ""
        return text.replace(key, "***") if key else text


def metadata(urls: Mapping[str, str], secret: str) -> dict[str, Any]:
    """What a replica publishes once (`record_replica_metadata`)."""
    return {"urls": dict(urls), "secret": secret}


def published(
    models: Mapping[str, PublishedModel],
    *,
    moving: bool,
    used_bytes: int = 0,
    limit_bytes: int = 0,
    host_used_bytes: int = 0,
    host_limit_bytes: int = 0,
    urls: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """What a replica publishes again and again (`record_routing_stats`). Models that are not up may be missing.

    `urls`: where they can change after the start.
    """
    return {
        "models": {name: dataclasses.asdict(model) for name, model in models.items()},
        "moving": moving,
        "used_bytes": used_bytes,
        "limit_bytes": limit_bytes,
        "host_used_bytes": host_used_bytes,
        "host_limit_bytes": host_limit_bytes,
        "urls": dict(urls or {}),
    }


def read_replica(replica_id: str, meta: Mapping[str, Any], stats: Mapping[str, Any], node: str = "") -> Replica:
    """The typed form of what a replica published. Before the first publication there are no models.

    A replica of another version may publish more: what is not known here is passed over.
    """
    return Replica(
        id=replica_id,
        urls={**meta.get("urls", {}), **stats.get("urls", {})},
        secret=meta.get("secret", ""),
        models={name: _known(fields) for name, fields in stats.get("models", {}).items()},
        moving=stats.get("moving", True),
        used_bytes=stats.get("used_bytes", 0),
        limit_bytes=stats.get("limit_bytes", 0),
        node=node,
        host_used_bytes=stats.get("host_used_bytes", 0),
        host_limit_bytes=stats.get("host_limit_bytes", 0),
    )


def _known(fields: Mapping[str, Any]) -> PublishedModel:
    return PublishedModel(**{name: value for name, value in fields.items() if name in PublishedModel.__slots__})


# Awake costs nothing, a load under way is joined, a sleeping one wakes in a second or two.
_STATES = {"awake": 0, "loading": 1, "waking": 1, "asleep": 2, "falling_asleep": 2}
_WITH_ROOM, _MUST_EVICT, _FAILED = 3, 4, 5


def rank_for_load(model: str, replica_id: str, stats: Mapping[str, Any], memory_bytes: int) -> tuple[int, int]:
    """How well a replica could serve a model that must come up; the lowest is asked. Pure.

    Equal ones are ordered by a hash of both names (rendezvous hashing), so that Routers that cannot see each other
    send a burst for a new model to one replica, and different models to different ones.
    """
    state = str(stats.get("models", {}).get(model, {}).get("state", "stopped"))
    # One that has published nothing has just come, and is empty.
    free = stats["limit_bytes"] - stats["used_bytes"] if "limit_bytes" in stats else memory_bytes
    rank = _FAILED if state == "failed" else _STATES.get(state, _WITH_ROOM if memory_bytes <= free else _MUST_EVICT)
    # Not a CRC: of two names of one length it differs by the same bits whatever the model, and one would win too often.
    digest = hashlib.blake2b(f"{model}\n{replica_id}".encode(), digest_size=8).digest()
    return rank, int.from_bytes(digest)


def choose(targets: Iterable[Target], cost: Callable[[str], Any], tried: Collection[str]) -> Target | None:
    """The target that costs least, by its replica's id, of those not yet tried. Pure."""
    candidates = [target for target in targets if target.replica_id not in tried]
    return min(candidates, key=lambda target: cost(target.replica_id), default=None)


def own_replica_id() -> str:
    """The id of the replica that this process is, as a Router knows it."""
    from ray import serve

    return str(serve.get_replica_context().replica_id.unique_id)


_tables: dict[str, tuple[Replica, ...]] = {}
_last: dict[str, tuple[Replica, ...]] = {}


def replicas_of(deployment: str) -> tuple[Replica, ...]:
    """The running replicas of a deployment, as this process last heard."""
    return _tables.get(deployment, ())


def last_known(deployment: str) -> tuple[Replica, ...]:
    """The replicas that run, or where there is none those that ran last.

    While Serve (2.60) hands a replica a `user_config` it leaves it out; its engine answers all the time.
    """
    return replicas_of(deployment) or _last.get(deployment, ())


def known(deployment: str) -> bool:
    """Whether this process was told of the deployment's replicas yet, be it that there are none."""
    return deployment in _tables


def set_replicas(deployment: str, replicas: Iterable[Replica]) -> None:
    """Replace what is known of a deployment, as a whole: readers in other threads see the old or the new."""
    _tables[deployment] = tuple(replicas)
    if _tables[deployment]:
        _last[deployment] = _tables[deployment]
