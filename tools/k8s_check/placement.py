"""Whether every replica finds room: the deployments' resources against the worker groups'."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from serve_app.config import Config, deployment_name
from serve_app.model_schema import Resources
from tools.k8s_check.pods import Pods, cluster_path, groups, whole
from tools.k8s_check.problem import Document, Problem, at, dig, items, mapping
from tools.k8s_check.quantity import number

ROUTER = "Router"
POOL = "LazyPool"
# Ray, the Router with its scorer, and what is not ours in a pod besides engines: measured 2 GB on CPUs, and some more.
_OVERHEAD_GB = 6.0


@dataclasses.dataclass(frozen=True, slots=True)
class Group:
    """Nodes of one kind as Ray sees them. Memory in bytes."""

    name: str
    least: int
    most: int
    cpus: float
    gpus: int
    custom: Mapping[str, float]
    memory: float
    object_store: float


@dataclasses.dataclass(frozen=True, slots=True)
class Demand:
    """Replicas of one deployment: at least `least`, at most `most` of them."""

    name: str
    least: int
    most: int
    resources: Resources
    alone: bool = False


@dataclasses.dataclass(slots=True)
class _Node:
    group: Group
    cpus: float
    gpus: list[float]
    custom: dict[str, float]
    holds: set[str]

    def take(self, demand: Demand) -> bool:
        """Put one replica here, if there is room."""
        wanted = demand.resources
        if (demand.alone and demand.name in self.holds) or wanted.num_cpus > self.cpus + 1e-9:
            return False
        if any(self.custom.get(name, 0.0) + 1e-9 < amount for name, amount in wanted.custom.items()):
            return False
        if not self._take_gpus(wanted.num_gpus):
            return False
        self.cpus -= wanted.num_cpus
        for name, amount in wanted.custom.items():
            self.custom[name] -= amount
        self.holds.add(demand.name)
        return True

    def _take_gpus(self, wanted: float) -> bool:
        """A share lies on one GPU; whole ones must be free."""
        if 0 < wanted < 1:
            free = sorted((share, place) for place, share in enumerate(self.gpus) if share + 1e-9 >= wanted)
            if not free:
                return False
            self.gpus[free[0][1]] -= wanted
            return True
        free_whole = [place for place, share in enumerate(self.gpus) if share > 1 - 1e-9]
        if len(free_whole) < wanted:
            return False
        for place in free_whole[: int(wanted)]:
            self.gpus[place] = 0.0
        return True


def placement_problems(document: Document, config: Config, options: Mapping[str, Any]) -> list[Problem]:
    """Replicas without room. `options`: the Router's `max_replicas_per_node`, from the Serve configuration."""
    found, kinds = [], []
    for index, group in enumerate(groups(document)):
        where = at(document, "spec", "rayClusterConfig", "workerGroupSpecs", index)
        made = _group(group)
        if isinstance(made, str):
            found.append(Problem(where, made))
        else:
            kinds.append(made)
    wanted = demands(config, alone=options.get("max_replicas_per_node") == 1)
    where = at(document, "spec", "rayClusterConfig", "workerGroupSpecs")
    for demand in wanted:
        if not any(_fresh(group).take(demand) for group in kinds):
            found.append(Problem(where, f"no group has room for a replica of {demand.name}: {_shown(demand)}"))
    if found:
        return found
    for title, counts in (("at their least", "least"), ("at their most", "most")):
        if left := _unplaced(kinds, wanted, counts):
            shown = f"{left.name} ({_shown(left)})"
            found.append(Problem(where, f"all groups at maxReplicas, and replicas {title}: no room for {shown}"))
    return [*found, *_memory(document, kinds, config), *_counts(document, kinds, wanted)]


def demands(config: Config, *, alone: bool) -> list[Demand]:
    """What Serve will ask Ray to place."""
    router = Resources(num_cpus=config.router.num_cpus)
    found = [Demand(ROUTER, config.router.replicas, config.router.replicas, router, alone=alone)]
    for model in config.residents:
        if model.external:
            continue
        most = model.autoscaling.max_replicas if model.autoscaling else model.replicas
        found.append(Demand(deployment_name(model), model.least_replicas, most, model.resources))
    if config.lazy:
        scaling = config.pool.autoscaling
        least = scaling.min_replicas if scaling else config.pool.replicas
        most = scaling.max_replicas if scaling else config.pool.replicas
        found.append(Demand(POOL, least, most, config.pool.resources))
    return found


def _group(group: Mapping[str, Any]) -> Group | str:
    """As Ray's autoscaler reads it: the group's own resources, else `rayStartParams`, else the container's limits."""
    own, params = mapping(group.get("resources")), mapping(group.get("rayStartParams"))
    limits = mapping(dig(group, "template", "spec", "containers", 0, "resources", "limits"))
    gpu = next((name for name in limits if name.endswith("gpu")), None)
    cpus = number(own.get("CPU", params.get("num-cpus", limits.get("cpu"))))
    gpus = number(own.get("GPU", params.get("num-gpus", limits.get(gpu) if gpu else 0)))
    memory = number(limits.get("memory"))
    store = number(params.get("object-store-memory", (memory or 0) * 0.3))
    if cpus is None or memory is None or gpus is None or store is None:
        return "limits of the first container: cpu and memory must be there; Ray has its resources from them"
    custom = {name: number(amount) or 0.0 for name, amount in own.items() if name not in ("CPU", "GPU", "memory")}
    hosts = whole(group.get("numOfHosts"), 1)
    least, most = whole(group.get("minReplicas")) * hosts, whole(group.get("maxReplicas")) * hosts
    return Group(str(group.get("groupName")), least, most, math.ceil(cpus), int(gpus), custom, memory, store)


def _fresh(group: Group) -> _Node:
    return _Node(group, group.cpus, [1.0] * group.gpus, dict(group.custom), set())


def _unplaced(kinds: Sequence[Group], wanted: Sequence[Demand], counts: str, nodes_at: str = "most") -> Demand | None:
    """First fit, the largest first: the first replica for which there is no room."""
    nodes = [_fresh(group) for group in kinds for _ in range(getattr(group, nodes_at))]
    largest_first = sorted(wanted, key=lambda demand: (-demand.resources.num_gpus, -demand.resources.num_cpus))
    for demand in largest_first:
        for _ in range(getattr(demand, counts)):
            if not any(node.take(demand) for node in nodes):
                return demand
    return None


def _shown(demand: Demand) -> str:
    """What one replica asks for."""
    wanted = demand.resources
    custom = "".join(f", {name} {amount:g}" for name, amount in wanted.custom.items())
    return f"{wanted.num_cpus:g} CPUs, {wanted.num_gpus:g} GPUs{custom}"


def _memory(document: Document, kinds: Sequence[Group], config: Config) -> Iterator[Problem]:
    """Sleeping models are in the host's memory, and a pod that has too little is killed with all it holds."""
    needed = (config.pool.host_memory_gb or 0) * 1e9
    pool = Demand(POOL, 0, 0, config.pool.resources)
    for index, group in enumerate(kinds):
        room = group.memory - group.object_store - _OVERHEAD_GB * 1e9
        if config.lazy and _fresh(group).take(pool) and room < needed:
            where = at(document, "spec", "rayClusterConfig", "workerGroupSpecs", index, "template")
            yield Problem(
                where,
                f"memory: {group.memory / 1e9:.0f} GB; pool.host_memory_gb {needed / 1e9:.0f}, the object store"
                f" {group.object_store / 1e9:.0f} and {_OVERHEAD_GB:.0f} for the rest need more",
            )


def _counts(document: Document, kinds: Sequence[Group], wanted: Sequence[Demand]) -> Iterator[Problem]:
    """As many Routers as nodes that are always there, one on each; and no more nodes than anybody could use."""
    router = wanted[0]
    always, most = sum(group.least for group in kinds), sum(demand.most for demand in wanted)
    where = at(document, "spec", "serveConfigV2")
    if not router.alone:
        yield Problem(
            where, "deployments: Router needs max_replicas_per_node: 1; two on one node leave another without"
        )
    if router.least < always:
        yield Problem(where, f"router.replicas: {router.least} for {always} nodes that are always there; one has none")
    hot = [demand for demand in wanted if demand.name not in (ROUTER, POOL)]
    if left := _unplaced(kinds, hot, "least", "least"):
        groups_at = at(document, "spec", "rayClusterConfig", "workerGroupSpecs")
        yield Problem(groups_at, f"minReplicas: {left.name} must always be there, and so must a node for it")
    for index, group in enumerate(kinds):
        if group.most > most:
            path = ("spec", "rayClusterConfig", "workerGroupSpecs", index, "maxReplicas")
            yield Problem(at(document, *path), f"{group.most} nodes for {most} replicas at most")


def head_problems(pods: Pods, document: Document) -> list[Problem]:
    """The head must hold no replica: requests would notice when it dies."""
    params = mapping(dig(cluster_path(document), "headGroupSpec", "rayStartParams"))
    found = []
    if str(params.get("num-cpus")) != "0":
        found.append(
            Problem(at(document, "spec.rayClusterConfig.headGroupSpec.rayStartParams"), 'num-cpus: must be "0"')
        )
    if document.get("spec", {}).get("excludeHeadPodFromServeSvc") is not True:
        found.append(Problem(at(document, "spec", "excludeHeadPodFromServeSvc"), "must be true"))
    gpus = [name for name in mapping(dig(pods.containers, 0, "resources", "limits")) if name.endswith("gpu")]
    if gpus:
        found.append(Problem(pods.container(0, "resources"), "the head holds a GPU and no replica"))
    return found


def router_options(serve: Mapping[str, Any]) -> Mapping[str, Any]:
    """What the Serve configuration says about the Router beyond its application's args."""
    applications = items(serve.get("applications"))
    deployments = items(applications[0].get("deployments")) if applications else []
    return next((each for each in deployments if each.get("name") == ROUTER), {})
