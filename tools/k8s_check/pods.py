"""The pods that a set of manifests makes, wherever their templates stand."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tools.k8s_check.problem import Document, at, dig, items, mapping

# What KubeRay puts on its pods by itself: its Services select by them.
KUBERAY_LABELS = ("app.kubernetes.io/name", "app.kubernetes.io/created-by")


@dataclasses.dataclass(frozen=True, slots=True)
class Pods:
    """Pods of one template. `role`: head or worker for Ray's, else empty; `count`: how many there are at least."""

    owner: Document
    path: tuple[str | int, ...]
    role: str
    count: int
    template: Mapping[str, Any]

    @property
    def labels(self) -> Mapping[str, str]:
        """Labels of the template."""
        return mapping(dig(self.template, "metadata", "labels"))

    @property
    def spec(self) -> Mapping[str, Any]:
        """The pod's own spec."""
        return mapping(self.template.get("spec"))

    @property
    def containers(self) -> list[Mapping[str, Any]]:
        """Its containers; the first one is Ray's."""
        return items(self.spec.get("containers"))

    def ports(self) -> dict[str, int]:
        """Named ports of all containers."""
        return {
            str(port.get("name")): port["containerPort"]
            for container in self.containers
            for port in items(container.get("ports"))
            if "containerPort" in port
        }

    def where(self, *path: str | int) -> str:
        """A path in the template, as problems name it."""
        return at(self.owner, *self.path, *path)

    def container(self, index: int, *path: str | int) -> str:
        """A path in one of its containers."""
        return self.where("spec", "containers", index, *path)


def all_pods(documents: Sequence[Document]) -> list[Pods]:
    """Every template of every object."""
    return [pods for document in documents for pods in _of(document)]


def selected(pods: Sequence[Pods], selector: Mapping[str, Any]) -> list[Pods]:
    """Those that `matchLabels` (or a Service's selector) matches; none for an empty selector."""
    return [each for each in pods if selector and all(each.labels.get(key) == selector[key] for key in selector)]


def cluster_path(document: Document) -> Mapping[str, Any]:
    """A RayService's cluster."""
    return mapping(dig(document, "spec", "rayClusterConfig"))


def groups(document: Document) -> list[Mapping[str, Any]]:
    """Its worker groups."""
    return items(cluster_path(document).get("workerGroupSpecs"))


def whole(value: Any, default: int = 0) -> int:
    """A count, or `default` where there is something else: the schema says so."""
    return value if isinstance(value, int) and not isinstance(value, bool) else default


def _of(document: Document) -> Iterator[Pods]:
    spec = mapping(document.get("spec"))
    if document.get("kind") == "RayService":
        path: tuple[str | int, ...] = ("spec", "rayClusterConfig")
        head = dig(cluster_path(document), "headGroupSpec", "template")
        yield Pods(document, (*path, "headGroupSpec", "template"), "head", 1, mapping(head))
        for index, group in enumerate(groups(document)):
            count = whole(group.get("minReplicas")) * whole(group.get("numOfHosts"), 1)
            inside = (*path, "workerGroupSpecs", index, "template")
            yield Pods(document, inside, "worker", count, mapping(group.get("template")))
    elif "template" in spec:
        yield Pods(document, ("spec", "template"), "", whole(spec.get("replicas"), 1), mapping(spec["template"]))
