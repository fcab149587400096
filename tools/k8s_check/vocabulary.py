"""Words that no schema checks: keys of free-form maps, and values that the API takes as any text.

A typo in one is accepted everywhere and does nothing, or leaves a pod pending. Whoever needs another word adds it here.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping
from typing import Any

from tools.k8s_check.pods import Pods, all_pods, cluster_path, groups
from tools.k8s_check.problem import Document, Problem, at, dig, items, joined, mapping, name_of, walk

# Values by the field that holds them, where the schemas of Kubernetes or KubeRay have no enumeration.
_VALUES: Mapping[str, frozenset[str]] = {
    "imagePullPolicy": frozenset({"IfNotPresent", "Always", "Never"}),
    "restartPolicy": frozenset({"Always", "OnFailure", "Never"}),
    "protocol": frozenset({"TCP", "UDP", "SCTP"}),
    "effect": frozenset({"NoSchedule", "PreferNoSchedule", "NoExecute"}),
    "whenUnsatisfiable": frozenset({"ScheduleAnyway", "DoNotSchedule"}),
    "fsGroupChangePolicy": frozenset({"OnRootMismatch", "Always"}),
    "pathType": frozenset({"Prefix", "Exact", "ImplementationSpecific"}),
    "serviceType": frozenset({"ClusterIP", "NodePort", "LoadBalancer"}),
    "medium": frozenset({"", "Memory"}),
    "ingressClassName": frozenset({"nginx"}),  # whose annotations those of the example are
}
_ITEMS: Mapping[str, frozenset[str]] = {
    "accessModes": frozenset({"ReadWriteOnce", "ReadWriteMany", "ReadOnlyMany", "ReadWriteOncePod"}),
    "policyTypes": frozenset({"Ingress", "Egress"}),
    "drop": frozenset({"ALL"}),
}
_TYPES: Mapping[str, frozenset[str]] = {  # of `type`, by the field around it
    "seccompProfile": frozenset({"RuntimeDefault"}),
    "Service.spec": frozenset({"ClusterIP", "NodePort", "LoadBalancer"}),
}
_OPERATORS: Mapping[str, frozenset[str]] = {
    "tolerations": frozenset({"Exists", "Equal"}),
    "matchExpressions": frozenset({"In", "NotIn", "Exists", "DoesNotExist", "Gt", "Lt"}),
}
_RESOURCES = frozenset({"cpu", "memory", "nvidia.com/gpu", "ephemeral-storage", "storage"})
_LABELS = frozenset({"app", "component", "pod-security.kubernetes.io/enforce"})
_POD_SECURITY = frozenset({"restricted", "baseline", "privileged"})
# Labels and taints of nodes: NVIDIA's discovery, Kubernetes, and how clouds mark their spot nodes.
_NODES = frozenset(
    {
        "nvidia.com/gpu",
        "nvidia.com/gpu.memory",
        "nvidia.com/gpu.product",
        "kubernetes.io/hostname",
        "topology.kubernetes.io/zone",
        "karpenter.sh/capacity-type",
        "cloud.google.com/gke-spot",
        "kubernetes.azure.com/scalesetpriority",
    }
)
_NODE_VALUES: Mapping[str, frozenset[str]] = {
    "karpenter.sh/capacity-type": frozenset({"spot", "on-demand"}),
    "cloud.google.com/gke-spot": frozenset({"true"}),
    "kubernetes.azure.com/scalesetpriority": frozenset({"spot"}),
}
# Pods that are not ours, as network policies name them.
_OTHERS = (
    {"app.kubernetes.io/name": "kuberay-operator"},
    {"app.kubernetes.io/name": "prometheus"},
    {"k8s-app": "kube-dns"},
)
_ENVIRONMENT = frozenset(
    {"HF_HOME", "HF_TOKEN", "HF_HUB_OFFLINE", "HF_ENDPOINT", "REDIS_PASSWORD", "REDISCLI_AUTH", "NCCL_SOCKET_IFNAME"}
)
# Of nginx's ingress: all of them are needed for streams, and what each may say.
_ANNOTATIONS: Mapping[str, str] = {
    f"nginx.ingress.kubernetes.io/{name}": pattern
    for name, pattern in {
        "proxy-buffering": "off",
        "proxy-request-buffering": "off",
        "proxy-http-version": "1[.]1",
        "proxy-read-timeout": "[6-9][0-9]{2}",
        "proxy-send-timeout": "[6-9][0-9]{2}",
        "proxy-body-size": "[1-9][0-9]{0,2}m",
        "proxy-next-upstream": "error|off",
        "ssl-redirect": "true",
    }.items()
}
_ENVIRONMENT_VALUES: Mapping[str, str] = {"HF_HUB_OFFLINE": "[01]", "HF_ENDPOINT": r"https?://[a-z0-9.-]+(:\d+)?"}


def vocabulary_problems(document: Document) -> list[Problem]:
    """Words in one object that nobody would know."""
    found = list(_values(document))
    for pods in all_pods([document]):
        found += [*_pod_words(pods)]
    if document.get("kind") == "RayService":
        found += _start_params(document)
    found += _metadata(document)
    return found


def _values(document: Document) -> Iterator[Problem]:
    for path, value in walk(document):
        key = path[-1] if path else ""
        around = path[-2] if len(path) > 1 else ""
        allowed = _VALUES.get(str(key)) if isinstance(key, str) else _ITEMS.get(str(around))
        if key == "type" and isinstance(value, str):
            allowed = _TYPES.get(str(around)) or _TYPES.get(f"{document.get('kind')}.{joined(path[:-1])}")
        if key == "operator" and len(path) > 2:
            allowed = _OPERATORS.get(str(path[-3]))
        if allowed is not None and isinstance(value, str) and value not in allowed:
            yield Problem(at(document, *path), f"{value} is none of {', '.join(sorted(allowed))}")


def _metadata(document: Document) -> Iterator[Problem]:
    labels = mapping(dig(document, "metadata", "labels"))
    for key in labels:
        if key not in _LABELS:
            yield Problem(at(document, "metadata", "labels"), f"{key}: nobody asks for this label")
    level = labels.get("pod-security.kubernetes.io/enforce", "restricted")
    if level not in _POD_SECURITY:
        yield Problem(at(document, "metadata", "labels"), f"{level} is no level of pod security")
    annotations = mapping(dig(document, "metadata", "annotations"))
    for key, value in annotations.items():
        if key not in _ANNOTATIONS:
            yield Problem(at(document, "metadata", "annotations"), f"{key}: nobody reads this annotation")
        elif not re.fullmatch(_ANNOTATIONS[key], str(value)):
            yield Problem(at(document, "metadata", "annotations", key), f"{value}: must be like {_ANNOTATIONS[key]}")
    if document.get("kind") == "Ingress" and (missing := _ANNOTATIONS.keys() - annotations.keys()):
        yield Problem(
            at(document, "metadata", "annotations"), f"{', '.join(sorted(missing))}: missing; streams need it"
        )


def _pod_words(pods: Pods) -> Iterator[Problem]:
    for key in pods.labels:
        if key not in _LABELS:
            yield Problem(pods.where("metadata", "labels"), f"{key}: nothing here selects by this label")
    for index, container in enumerate(pods.containers):
        for kind in ("requests", "limits"):
            for name in mapping(dig(container, "resources", kind)):
                if name not in _RESOURCES:
                    yield Problem(pods.container(index, "resources", kind), f"{name} is no resource")
        for entry in items(container.get("env")):
            if entry.get("name") not in _ENVIRONMENT:
                yield Problem(pods.container(index, "env"), f"{entry.get('name')}: nobody reads this variable")
            pattern = _ENVIRONMENT_VALUES.get(str(entry.get("name")), ".*")
            if not re.fullmatch(pattern, str(entry.get("value"))):
                yield Problem(pods.container(index, "env"), f"{entry.get('name')}: must be like {pattern}")
    for key, value in _node_words(pods.spec):
        if key not in _NODES:
            yield Problem(pods.where("spec"), f"{key} is no label or taint of nodes")
        elif value is not None and value not in _NODE_VALUES.get(key, {value}):
            yield Problem(pods.where("spec"), f"{value} is no value of {key}")


def _node_words(spec: Mapping[str, Any]) -> Iterator[tuple[str, str | None]]:
    for toleration in items(spec.get("tolerations")):
        yield str(toleration.get("key")), toleration.get("value")
    for constraint in items(spec.get("topologySpreadConstraints")):
        yield str(constraint.get("topologyKey")), None
    for key, value in mapping(spec.get("nodeSelector")).items():
        yield key, value
    terms = dig(spec, "affinity", "nodeAffinity", "requiredDuringSchedulingIgnoredDuringExecution", "nodeSelectorTerms")
    for term in items(terms):
        for expression in items(term.get("matchExpressions")):
            key, values = str(expression.get("key")), expression.get("values") or []
            yield from ((key, str(value)) for value in values)
            if not values:
                yield key, None


def is_somebody_else(selector: Mapping[str, Any]) -> bool:
    """Whether a network policy means pods that are not ours."""
    return dict(selector) in _OTHERS


def _start_params(document: Document) -> Iterator[Problem]:
    cluster = cluster_path(document)
    for name, group in [("head", mapping(cluster.get("headGroupSpec"))), *_named(document)]:
        for key, value in mapping(group.get("rayStartParams")).items():
            if key not in start_options():
                yield Problem(f"{name_of(document)}: rayStartParams of {name}", f"`ray start` has no --{key}")
            elif key in ("num-cpus", "num-gpus", "object-store-memory", "memory") and not str(value).isdigit():
                yield Problem(f"{name_of(document)}: rayStartParams of {name}", f"{key}: {value} is no number")
    for path, value in walk(cluster.get("autoscalerOptions"), ("spec", "rayClusterConfig", "autoscalerOptions")):
        if len(path) > 4 and path[-2] in ("requests", "limits") and path[-1] not in _RESOURCES:
            yield Problem(at(document, *path[:-1]), f"{path[-1]} is no resource ({value})")


def _named(document: Document) -> Iterator[tuple[str, Mapping[str, Any]]]:
    return ((str(group.get("groupName")), group) for group in groups(document))


@functools.cache
def start_options() -> frozenset[str]:
    """Options of `ray start`, as Ray's own command line has them."""
    from ray.scripts.scripts import start

    return frozenset(option.lstrip("-") for parameter in start.params for option in parameter.opts)
