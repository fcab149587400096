"""Single faults planted into built manifests, and which of them matter.

A mutation changes one key of one object: its name gets a typo, its value one, its value gets another type, it is
gone, or it is a number that is too small or too large. It matters unless it is in `HARMLESS`, each with its reason.
"""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tools.k8s_check.problem import joined, name_of, walk

Path = tuple[str | int, ...]

# What a cluster does just the same, or what is right with another value, too: no check can tell it from a wish.
HARMLESS: Mapping[str, str] = {
    r"drop .*\.protocol": "TCP is the default",
    r"drop .*\.imagePullPolicy": "IfNotPresent is the default for a tag",
    r"drop .*Probe\.(periodSeconds|timeoutSeconds|failureThreshold)": "Kubernetes has defaults for them",
    r"drop .*headGroupSpec.*\.fsGroupChangePolicy": "only matters where a claim is mounted",
    r"drop .*workerGroupSpecs\[\d\]\.idleTimeoutSeconds": "autoscalerOptions has the same",
    r"drop .*\.tolerations\[\d\]\.effect": "every effect is tolerated then",
    r"drop NetworkPolicy/switchyard-ray: spec.egress\[1\].ports": "Redis's own policy lets in at one port only",
    r"drop NetworkPolicy/switchyard-redis: spec.egress": "missing and empty are the same: nothing goes out",
    r"drop .*workerGroupSpecs\[1\]\.replicas": "0 is the default, and what these groups begin with",
    r"(value|less) .*\.env\[2\]\.value": "another host name of a mirror; HF_HUB_OFFLINE that is off",
    r"value (NetworkPolicy|PodDisruptionBudget|Ingress)/[^:]*: metadata.name": "nothing refers to it",
    r"value .*\.containers\[\d\]\.name": "nothing refers to it; KubeRay takes the first container",
    r"value .*\.groupName": "nothing refers to it",
    r"value Job/[^:]*: .*\.command\[3\]": "the name of the script in its own messages",
    r"value StatefulSet/[^:]*: .*\.image": "another version of Redis, which may well exist",
    r"value (StatefulSet|Job)/[^:]*: .*\.limits\.cpu": "11 CPUs instead of 1 are a wish, too",
    r"value (ConfigMap/[^:]*: data\.redis\.conf|RayService/[^:]*: spec\.serveConfigV2)": "an empty line at its end",
}


@dataclasses.dataclass(frozen=True, slots=True)
class Mutation:
    """One fault. `index`: of the object in its set."""

    index: int
    owner: str
    path: Path
    kind: str

    def __str__(self) -> str:
        return f"{self.kind} {self.owner}: {joined(self.path)}"

    @property
    def matters(self) -> bool:
        """Whether a check should find it."""
        return not any(re.fullmatch(pattern, str(self)) for pattern in HARMLESS)

    def planted(self, documents: Sequence[Mapping[str, Any]]) -> list[Any]:
        """The objects with this fault in them."""
        changed: list[Any] = list(documents)
        changed[self.index] = copy.deepcopy(dict(documents[self.index]))
        around = changed[self.index]
        for part in self.path[:-1]:
            around = around[part]
        key = self.path[-1]
        if self.kind == "key":
            around[_typo(str(key))] = around.pop(key)
        elif self.kind == "drop":
            del around[key]
        elif self.kind == "type":
            around[key] = _other_type(around[key])
        elif self.kind == "value":
            around[key] = _typo(around[key])
        elif self.kind == "less":
            around[key] = _scaled(around[key], 0)
        else:
            around[key] = _scaled(around[key], 1000)
        return changed


def mutations(documents: Sequence[Mapping[str, Any]]) -> Iterator[Mutation]:
    """Every single fault of every key, harmless ones too."""
    for index, document in enumerate(documents):
        for path, value in walk(document):
            if not path:
                continue
            owner = name_of(document)
            if isinstance(path[-1], str):
                yield Mutation(index, owner, path, "key")
                yield Mutation(index, owner, path, "drop")
            yield Mutation(index, owner, path, "type")
            if isinstance(value, str) and value:
                yield Mutation(index, owner, path, "value")
            if _scaled(value, 0) not in (None, value):
                yield Mutation(index, owner, path, "less")
                yield Mutation(index, owner, path, "more")


def _typo(text: str) -> str:
    """The last letter twice, as a finger that rests does it."""
    return text + text[-1]


def _other_type(value: Any) -> Any:
    if isinstance(value, Mapping):
        return [1]
    return {"is": "something else"}


def _scaled(value: Any, factor: int) -> Any:
    """A number, or a text that is one, times a factor; None for anything else."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return value * factor
    if isinstance(value, str) and (found := re.fullmatch(r"(\d+)(m|[KMGT]i?)?", value)):
        return f"{int(found[1]) * factor}{found[2] or ''}"
    return None
