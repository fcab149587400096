"""Changes that tests make to built manifests."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import yaml


def ray_service(documents: list[dict[str, Any]]) -> dict[str, Any]:
    return next(document for document in documents if document["kind"] == "RayService")


def changed(documents: list[dict[str, Any]], change: Callable[[dict[str, Any]], Any]) -> list[dict[str, Any]]:
    """The same objects, after a change of the RayService's spec."""
    copied = copy.deepcopy(documents)
    change(ray_service(copied)["spec"])
    return copied


def deployed(documents: list[dict[str, Any]], change: Callable[[dict[str, Any], dict[str, Any]], Any]) -> Any:
    """The same objects, after a change of the application in `serveConfigV2`, and of its args."""

    def edit(spec: dict[str, Any]) -> None:
        config = yaml.safe_load(spec["serveConfigV2"])
        change(config["applications"][0], config["applications"][0]["args"])
        spec["serveConfigV2"] = yaml.safe_dump(config, sort_keys=False)

    return changed(documents, edit)


def worker(spec: dict[str, Any], group: int = 0) -> dict[str, Any]:
    """A worker group."""
    found: dict[str, Any] = spec["rayClusterConfig"]["workerGroupSpecs"][group]
    return found


def pod(spec: dict[str, Any], group: int = 0) -> dict[str, Any]:
    """The spec of a worker group's pods."""
    found: dict[str, Any] = worker(spec, group)["template"]["spec"]
    return found


def head(spec: dict[str, Any]) -> dict[str, Any]:
    """The head group."""
    found: dict[str, Any] = spec["rayClusterConfig"]["headGroupSpec"]
    return found
