"""Numbers that make sense, and what must be said because the default is not what we want."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tools.k8s_check.pods import Pods, all_pods, groups
from tools.k8s_check.problem import Document, Problem, at, dig, items, mapping, name_of, walk
from tools.k8s_check.quantity import number

# By the field's name, wherever it stands; quantities in their unit.
_BOUNDS: Mapping[str, tuple[float, float]] = {
    "periodSeconds": (1, 60),
    "timeoutSeconds": (1, 60),
    "failureThreshold": (1, 20),
    "maxSkew": (1, 5),
    "sizeLimit": (1e8, 2e11),
    "storage": (1e9, 5e12),
    "backoffLimit": (1, 100),
    "ttlSecondsAfterFinished": (3600, 1e7),
    "terminationGracePeriodSeconds": (10, 1200),
    "idleTimeoutSeconds": (60, 7200),
    "rayClusterDeletionDelaySeconds": (10, 3600),
    "cpu": (0.1, 256),
    "memory": (2.5e8, 4e12),
    # Tokens do not pass Ray's object store, but Ray has a least size.
    "object-store-memory": (1e8, 2e9),
}
_MOST_WITHOUT_GPU = 7e10
_CLUSTER = "spec.rayClusterConfig"
_NEEDED: Mapping[str, tuple[str, ...]] = {
    "Namespace/switchyard": ("metadata.labels.pod-security_kubernetes_io/enforce",),
    "Service/switchyard": ("spec.ports", "spec.type"),
    "Service/switchyard-redis": ("spec.ports", "spec.type"),
    "PersistentVolumeClaim/switchyard-models": ("spec.accessModes", "spec.resources.requests.storage"),
    "StatefulSet/switchyard-redis": (
        "spec.replicas",
        "spec.template.spec.terminationGracePeriodSeconds",
        *(f"spec.template.spec.containers.0.{key}" for key in ("args", "env", "livenessProbe", "readinessProbe")),
        "spec.volumeClaimTemplates.0.spec.accessModes",
        "spec.volumeClaimTemplates.0.spec.resources.requests.storage",
    ),
    "Job/switchyard-models": ("spec.backoffLimit", "spec.ttlSecondsAfterFinished", "spec.template.spec.restartPolicy"),
    "Ingress/switchyard": ("spec.rules.0.http.paths", "spec.tls", "spec.ingressClassName"),
    "RayService/switchyard": (
        "spec.rayClusterDeletionDelaySeconds",
        *(f"{_CLUSTER}.autoscalerOptions.{key}" for key in ("idleTimeoutSeconds", "upscalingMode")),
        *(
            f"{_CLUSTER}.autoscalerOptions.resources.{kind}.{name}"
            for kind in ("requests", "limits")
            for name in ("cpu", "memory")
        ),
        f"{_CLUSTER}.headGroupSpec.serviceType",
        *(f"{_CLUSTER}.headGroupSpec.rayStartParams.{key}" for key in ("dashboard-host", "object-store-memory")),
    ),
}
_USERS: Mapping[str, int] = {"switchyard": 1000, "redis": 999}  # of the images


def bound_problems(document: Document) -> list[Problem]:
    """Numbers out of any reason, and what is missing, in one object."""
    found = list(_numbers(document)) + list(_needed(document))
    for index, group in enumerate(groups(document)):
        path = ("spec", "rayClusterConfig", "workerGroupSpecs", index)
        if "object-store-memory" not in mapping(group.get("rayStartParams")):
            found.append(
                Problem(at(document, *path, "rayStartParams"), "object-store-memory: missing; Ray takes a third")
            )
        for name, amount in mapping(group.get("resources")).items():
            if amount != "1":
                found.append(Problem(at(document, *path, "resources", name), f'{amount}: must be "1", for one replica'))
    for pods in all_pods([document]):
        found += _pod(pods)
        if pods.role == "worker":
            found += _worker(pods)
    return found


def _numbers(document: Document) -> Iterator[Problem]:
    for path, value in walk(document):
        bounds = _BOUNDS.get(str(path[-1])) if path else None
        if bounds is None or isinstance(value, Mapping | list):
            continue
        low, high = bounds
        if path[-1] == "memory" and "nvidia.com/gpu" not in dig(document, *path[:-1]):
            high = _MOST_WITHOUT_GPU
        amount = number(value)
        if amount is None or not low <= amount <= high:
            yield Problem(at(document, *path), f"{value}: must be {low:g} to {high:g}")


# The ports that clients and configurations name.
_SERVICE_PORTS: Mapping[str, Mapping[str, int]] = {
    "Service/switchyard": {"http": 8000},
    "Service/switchyard-redis": {"redis": 6379},
}


def _needed(document: Document) -> Iterator[Problem]:
    for dotted in _NEEDED.get(name_of(document), ()):
        path = [int(part) if part.isdigit() else part.replace("_", ".") for part in dotted.split(".")]
        if dig(document, *path) in (None, "", [], {}):
            yield Problem(at(document, *path), "missing")
    if ports := _SERVICE_PORTS.get(name_of(document)):
        found = {str(port.get("name")): port.get("port") for port in items(dig(document, "spec", "ports"))}
        if found != ports:
            yield Problem(at(document, "spec", "ports"), f"must be {dict(ports)}, and are {found}")
    if document.get("kind") == "RayService":
        host = dig(document, *_CLUSTER.split("."), "headGroupSpec", "rayStartParams", "dashboard-host")
        if host != "0.0.0.0":
            yield Problem(at(document, _CLUSTER, "headGroupSpec.rayStartParams"), "dashboard-host: must be 0.0.0.0")


def _pod(pods: Pods) -> Iterator[Problem]:
    component = pods.role or ("models" if pods.owner.get("kind") == "Job" else None)
    wanted = {"app": "switchyard", "component": component} if component else {"app": "switchyard-redis"}
    if pods.labels != wanted:
        yield Problem(pods.where("metadata", "labels"), f"must be {wanted}: Services and policies select by them")
    image = str(dig(pods.containers, 0, "image")).rpartition("/")[2]
    user = next((number for name, number in _USERS.items() if image.startswith(name)), None)
    for key in ("runAsUser", "runAsGroup"):
        if dig(pods.spec, "securityContext", key) != user:
            yield Problem(pods.where("spec", "securityContext", key), f"must be {user}, as in the image")
    claimed = [volume for volume in items(pods.spec.get("volumes")) if "persistentVolumeClaim" in volume]
    if claimed and dig(pods.spec, "securityContext", "fsGroupChangePolicy") != "OnRootMismatch":
        yield Problem(
            pods.where("spec", "securityContext"), "fsGroupChangePolicy: OnRootMismatch, or it walks all models"
        )
    given = {
        str(volume.get("name")) for volume in items(pods.spec.get("volumes")) if volume.keys() & {"secret", "configMap"}
    }
    for index, container in enumerate(pods.containers):
        for mount in items(container.get("volumeMounts")):
            if mount.get("name") in given and mount.get("readOnly") is not True:
                yield Problem(pods.container(index, "volumeMounts"), f"{mount.get('name')}: must be readOnly: true")
        for entry in items(container.get("env")):
            secret = mapping(dig(entry, "valueFrom", "secretKeyRef"))
            if secret.get("name") == "switchyard-hub" and secret.get("optional") is not True:
                yield Problem(pods.container(index, "env"), "switchyard-hub: must be optional; not everybody has one")
    for volume in items(pods.spec.get("volumes")):
        if "emptyDir" in volume and not dig(volume, "emptyDir", "sizeLimit"):
            yield Problem(
                pods.where("spec", "volumes"), f"{volume.get('name')}: needs a sizeLimit; it fills the node's disk"
            )


def _worker(pods: Pods) -> Iterator[Problem]:
    tolerations = items(pods.spec.get("tolerations"))
    if not any(each.get("key") == "nvidia.com/gpu" and each.get("operator") == "Exists" for each in tolerations):
        yield Problem(
            pods.where("spec", "tolerations"), "nvidia.com/gpu, operator Exists: missing; GPU nodes are tainted"
        )
    for toleration in tolerations:
        operator = toleration.get("operator")
        if operator is None or (operator == "Equal") != ("value" in toleration):
            yield Problem(pods.where("spec", "tolerations"), f"{toleration.get('key')}: Exists, or Equal and a value")
    terms = items(
        dig(
            pods.spec, "affinity", "nodeAffinity", "requiredDuringSchedulingIgnoredDuringExecution", "nodeSelectorTerms"
        )
    )
    where = pods.where("spec", "affinity")
    for term in terms or [{}]:
        expressions = {each.get("key"): each for each in items(term.get("matchExpressions"))}
        if not expressions.keys() & {"nvidia.com/gpu.memory", "nvidia.com/gpu.product"}:
            yield Problem(where, "every term must name the card, by nvidia.com/gpu.memory or nvidia.com/gpu.product")
        for key, each in expressions.items():
            yield from _expression(where, str(key), each)
    if not items(pods.spec.get("topologySpreadConstraints")):
        yield Problem(pods.where("spec", "topologySpreadConstraints"), "missing; one node's death could take all pods")
    for constraint in items(pods.spec.get("topologySpreadConstraints")):
        if mapping(dig(constraint, "labelSelector", "matchLabels")) != pods.labels:
            yield Problem(pods.where("spec", "topologySpreadConstraints"), "must count the pods of these labels")


def _expression(where: str, key: str, expression: Mapping[str, Any]) -> Iterator[Problem]:
    operator, values = expression.get("operator"), expression.get("values") or []
    if (operator in ("Exists", "DoesNotExist")) == bool(values):
        yield Problem(where, f"{key}: {operator} and {values or 'no values'} do not belong together")
    if operator in ("Gt", "Lt") and (len(values) != 1 or not str(values[0]).isdigit()):
        yield Problem(where, f"{key}: {operator} needs one number, in quotes")
    elif key == "nvidia.com/gpu.memory" and not (operator == "Gt" and 8_000 <= int(values[0]) <= 300_000):
        yield Problem(where, f"{key}: must be Gt and MiB of a card; {operator} {values} is none")
