"""What KubeRay 1.7 refuses or ignores and its schema does not say.

From the operator's validation (`ray-operator/controllers/ray/utils/validation.go`), with the feature gates that are
on by default. The schema has types and enumerations; here is what depends on another field.
"""

from __future__ import annotations

import importlib.metadata
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from tools.k8s_check.pods import KUBERAY_LABELS, all_pods, cluster_path, groups, whole
from tools.k8s_check.problem import Document, Problem, at, dig, items, mapping

# The operator appends up to 16 characters for the cluster's Services: 63 - len("-serve-svc") - 6.
_LONGEST_NAME = 47
_DNS_1035 = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_DNS_1123 = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
_LABEL_VALUE = re.compile(r"(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?")
_STRATEGIES = ("None", "NewCluster", "NewClusterWithIncrementalUpgrade")
_RESOURCE_PARAMS = ("num-cpus", "num-gpus", "memory", "resources")
_GATED = {
    "networkPolicy": "RayClusterNetworkPolicy",
    "tlsOptions": "RayClusterMTLS",
    "historyServerOptions": "RayClusterHistoryServer",
}
_CLUSTER = ("spec", "rayClusterConfig")


def operator_problems(document: Document) -> list[Problem]:
    """Everything that KubeRay would refuse in a RayService, or quietly do otherwise."""
    checks = (_name, _strategy, _groups, _group_forms, _fault_tolerance, _autoscaler, _authentication, _gates, _labels)
    return [problem for check in checks for problem in check(document)]


def _name(document: Document) -> Iterator[Problem]:
    name = str(dig(document, "metadata", "name", default=""))
    if len(name) > _LONGEST_NAME:
        yield Problem(at(document, "metadata", "name"), f"longer than {_LONGEST_NAME} characters")
    if not _DNS_1035.fullmatch(name):
        yield Problem(at(document, "metadata", "name"), "must begin with a letter, and hold a-z, 0-9 and -")
    for key in ("ray.io/ft-enabled", "ray.io/external-storage-namespace"):
        if key in mapping(dig(document, "metadata", "annotations")):
            yield Problem(at(document, "metadata", "annotations"), f"{key} is gcsFaultToleranceOptions' to say")


def _strategy(document: Document) -> Iterator[Problem]:
    where = at(document, "spec", "upgradeStrategy")
    strategy = dig(document, "spec", "upgradeStrategy", "type")
    if strategy is None:
        yield Problem(f"{where}.type", "missing; KubeRay would start a second cluster, with as many GPUs, for upgrades")
    elif strategy not in _STRATEGIES:
        yield Problem(f"{where}.type", f"{strategy} is none of {', '.join(_STRATEGIES)}")
    if strategy == _STRATEGIES[2]:
        options = mapping(dig(document, "spec", "upgradeStrategy", "clusterUpgradeOptions"))
        if not options:
            yield Problem(f"{where}.clusterUpgradeOptions", f"missing; {strategy} needs them, and a feature gate")
        step, surge = whole(options.get("stepSizePercent")), whole(options.get("maxSurgePercent"), 100)
        if not 0 <= step <= surge <= 100:
            yield Problem(f"{where}.clusterUpgradeOptions", "must hold 0 <= stepSizePercent <= maxSurgePercent <= 100")
        if whole(options.get("intervalSeconds")) <= 0:
            yield Problem(f"{where}.clusterUpgradeOptions.intervalSeconds", "must be more than 0")
        if not cluster_path(document).get("enableInTreeAutoscaling"):
            yield Problem(f"{where}.type", f"{strategy} needs enableInTreeAutoscaling: true")
    if dig(document, *_CLUSTER, "upgradeStrategy") is not None:
        yield Problem(at(document, *_CLUSTER, "upgradeStrategy"), "is for a RayCluster; the RayService has its own")


def _groups(document: Document) -> Iterator[Problem]:
    scaled = bool(cluster_path(document).get("enableInTreeAutoscaling"))
    names = Counter(group.get("groupName") for group in groups(document))
    for index, group in enumerate(groups(document)):
        path = (*_CLUSTER, "workerGroupSpecs", index)
        name = str(group.get("groupName"))
        if names[group.get("groupName")] > 1:
            yield Problem(at(document, *path, "groupName"), f"another group is called {name}")
        if not _DNS_1123.fullmatch(name):
            yield Problem(at(document, *path, "groupName"), f"{name}: must hold a-z, 0-9 and -")
        low, high = whole(group.get("minReplicas")), whole(group.get("maxReplicas"), 2**31)
        if "minReplicas" not in group or "maxReplicas" not in group:
            yield Problem(at(document, *path), "minReplicas and maxReplicas: missing; the default has no upper bound")
        if low < 0 or high < 1:
            yield Problem(at(document, *path), f"minReplicas {low} or maxReplicas {high} is too small")
        if not low <= whole(group.get("replicas")) <= high:
            yield Problem(at(document, *path, "replicas"), f"is not between minReplicas {low} and maxReplicas {high}")
        if group.get("suspend"):
            yield Problem(at(document, *path, "suspend"), "is refused with the autoscaler")
        if not scaled and low != high:
            yield Problem(at(document, *path), "minReplicas differs from maxReplicas, and nothing scales the group")
        idle = group.get("idleTimeoutSeconds")
        if idle is not None and (
            whole(idle, -1) < 0 or dig(document, *_CLUSTER, "autoscalerOptions", "version") != "v2"
        ):
            yield Problem(
                at(document, *path, "idleTimeoutSeconds"), "needs autoscalerOptions.version: v2, and 0 or more"
            )


def _group_forms(document: Document) -> Iterator[Problem]:
    head = (*_CLUSTER, "headGroupSpec")
    named: list[tuple[tuple[str | int, ...], Mapping[str, Any]]] = [(head, mapping(dig(document, *head)))]
    named += [((*_CLUSTER, "workerGroupSpecs", index), group) for index, group in enumerate(groups(document))]
    for path, group in named:
        params = mapping(group.get("rayStartParams"))
        if not items(dig(group, "template", "spec", "containers")):
            yield Problem(at(document, *path, "template.spec.containers"), "needs one at least")
        if group.get("resources") and (doubled := [key for key in _RESOURCE_PARAMS if params.get(key)]):
            yield Problem(at(document, *path), f"resources and rayStartParams.{doubled[0]}: only one of them")
        if "labels" in params:
            yield Problem(at(document, *path, "rayStartParams", "labels"), "is refused; use the group's labels")
        for key, value in mapping(group.get("labels")).items():
            if not _LABEL_VALUE.fullmatch(str(value)) or len(str(value)) > 63:
                yield Problem(at(document, *path, "labels", key), "is no value of a label")
        restart = dig(group, "template", "spec", "restartPolicy")
        if restart not in (None, "Never") and dig(document, *_CLUSTER, "autoscalerOptions", "version") == "v2":
            yield Problem(at(document, *path, "template.spec.restartPolicy"), "must be Never with autoscaler v2")
    if dig(document, *head, "headService", "metadata", "name"):
        yield Problem(at(document, *head, "headService.metadata.name"), "must not be set")


def _fault_tolerance(document: Document) -> Iterator[Problem]:
    options = dig(document, *_CLUSTER, "gcsFaultToleranceOptions")
    where = at(document, *_CLUSTER, "gcsFaultToleranceOptions")
    if options is None:
        yield Problem(where, "missing; when the head dies all workers would be replaced, and every stream cut")
        return
    head = mapping(dig(document, *_CLUSTER, "headGroupSpec"))
    if mapping(options).get("backend", "redis") == "rocksdb":
        yield Problem(f"{where}.backend", "rocksdb needs a feature gate that is off in KubeRay 1.7")
    if not mapping(options).get("redisAddress"):
        yield Problem(f"{where}.redisAddress", "missing")
    if mapping(options).get("storage") is not None:
        yield Problem(f"{where}.storage", "is rocksdb's")
    env = {entry.get("name") for entry in items(dig(head, "template", "spec", "containers", 0, "env"))}
    for name in env & {"RAY_REDIS_ADDRESS", "REDIS_PASSWORD", "REDIS_USERNAME"}:
        yield Problem(at(document, *_CLUSTER, "headGroupSpec"), f"{name}: gcsFaultToleranceOptions says that")
    for name in mapping(head.get("rayStartParams")).keys() & {"redis-password", "redis-username"}:
        yield Problem(
            at(document, *_CLUSTER, "headGroupSpec.rayStartParams"), f"{name}: gcsFaultToleranceOptions' to say"
        )


def _autoscaler(document: Document) -> Iterator[Problem]:
    cluster = cluster_path(document)
    options = mapping(cluster.get("autoscalerOptions"))
    where = at(document, *_CLUSTER, "autoscalerOptions")
    if not cluster.get("enableInTreeAutoscaling"):
        yield Problem(at(document, *_CLUSTER, "enableInTreeAutoscaling"), "must be true: replicas ask for nodes")
    if options.get("version") != "v2":
        yield Problem(f"{where}.version", "must be v2: v1 takes nodes without draining them")
    if whole(options.get("idleTimeoutSeconds"), 60) < 0:
        yield Problem(f"{where}.idleTimeoutSeconds", "must be 0 or more")
    for place, env in (("autoscalerOptions", options.get("env")), ("head", _head_env(document))):
        for name in {entry.get("name") for entry in items(env)} & {
            "KUBERAY_GEN_AUTOSCALER_START_CMD",
            "RAY_enable_autoscaler_v2",
        }:
            yield Problem(where, f"{name} in the environment of {place}: KubeRay sets it")


def _head_env(document: Document) -> Any:
    return dig(document, *_CLUSTER, "headGroupSpec", "template", "spec", "containers", 0, "env")


def _authentication(document: Document) -> Iterator[Problem]:
    options: Mapping[str, Any] = mapping(dig(document, *_CLUSTER, "authOptions"))
    where = at(document, *_CLUSTER, "authOptions")
    version = str(cluster_path(document).get("rayVersion", ""))
    if options.get("mode") != "token":
        yield Problem(f"{where}.mode", "must be token; Ray runs code for whoever reaches its ports otherwise")
    if options.get("enableK8sTokenAuth"):
        yield Problem(f"{where}.enableK8sTokenAuth", "is refused in a RayService")
    parts = version.split(".")
    if len(parts) != 3 or not all(part.isdigit() for part in parts):
        yield Problem(at(document, *_CLUSTER, "rayVersion"), f"{version or 'missing'}: must be like 2.60.0")
    elif version != importlib.metadata.version("ray"):
        where = at(document, *_CLUSTER, "rayVersion")
        yield Problem(where, f"{version}: pyproject.toml has {importlib.metadata.version('ray')}")


def _gates(document: Document) -> Iterator[Problem]:
    for key, gate in _GATED.items():
        if dig(document, *_CLUSTER, key) is not None:
            yield Problem(at(document, *_CLUSTER, key), f"needs the feature gate {gate}, which is off in KubeRay 1.7")


def _labels(document: Document) -> Iterator[Problem]:
    for pods in all_pods([document]):
        for key in pods.labels:
            if key in KUBERAY_LABELS or key.startswith("ray.io/"):
                yield Problem(pods.where("metadata", "labels"), f"{key} is KubeRay's: its Services select by it")
