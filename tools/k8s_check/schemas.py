"""Schemas: Kubernetes' own from `kubernetes-validate`, KubeRay's from its custom resource definition.

Both are made strict: a field that they do not know is refused, as the API server does with `--validate=strict`.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import importlib.resources
import json
import re
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from jsonschema import Draft202012Validator
from jsonschema.exceptions import ValidationError
from referencing import Registry, Resource

from tools.k8s_check.manifests import CheckError
from tools.k8s_check.problem import Document, Problem, at

KUBERAY = "v1.7.0"
KUBERNETES = "1.34"
_CRD = "ray.io_rayservices.yaml"
_CRD_SHA256 = "0a8fc325e6e22b9231c1f282b309555e2ecf94227ca20a03df3d1d9a403907ab"
_CRD_URL = f"https://raw.githubusercontent.com/ray-project/kuberay/{KUBERAY}/ray-operator/config/crd/bases/{_CRD}"
_TIMEOUT_S = 30
_GROUP = re.compile(r"^([^./]*)(?:\.[^/]*)?/")


# KubeRay


def find_crd(given: Path | None, repository: Path) -> tuple[Path, str]:
    """KubeRay's definition of a RayService, and in words where it is from.

    A folder that was given, else one beside the checkout, else a download that is kept. Whichever: it must be the
    pinned release's. Raises `CheckError`.
    """
    kept = repository / ".cache" / f"kuberay-{KUBERAY}"
    beside = repository.parent / "shared" / "kuberay"
    if given is not None:
        folder, words = given, f"the folder {given}"
    elif (beside / _CRD).is_file():
        folder, words = beside, "../shared/kuberay, beside this checkout"
    else:
        folder, words = kept, f"a download of the release {KUBERAY}, kept in {kept.relative_to(repository)}"
        if not (kept / _CRD).is_file():
            _download(kept)
    path = folder / _CRD
    if not path.is_file():
        raise CheckError(f"{folder} holds no {_CRD}")
    if hashlib.sha256(path.read_bytes()).hexdigest() != _CRD_SHA256:
        raise CheckError(f"{path} is not the one of KubeRay {KUBERAY}: its checksum differs")
    return path, words


def _download(folder: Path) -> None:
    try:
        with urllib.request.urlopen(_CRD_URL, timeout=_TIMEOUT_S) as answer:
            content = answer.read()
    except (urllib.error.URLError, OSError) as error:
        raise CheckError(
            f"KubeRay's definitions are not here and cannot be downloaded ({error}); get"
            f" ray-operator/config/crd/bases of KubeRay {KUBERAY} and give the folder by --crds"
        ) from None
    folder.mkdir(parents=True, exist_ok=True)
    (folder / _CRD).write_bytes(content)


class KubeRay:
    """The schema of `ray.io/v1` RayService."""

    def __init__(self, definition: Path) -> None:
        crd = yaml.load(definition.read_text(), yaml.CSafeLoader)
        (version,) = (found for found in crd["spec"]["versions"] if found["name"] == "v1")
        self._schema = version["schema"]["openAPIV3Schema"]
        self._validator = Draft202012Validator(_strict(self._schema))

    def problems(self, document: Document) -> list[Problem]:
        """What the API server would refuse."""
        complete = self.with_defaults(document)
        found = [_told(document, error) for error in self._validator.iter_errors(complete)]
        return found + list(_doubles(document, self._schema, complete, ()))

    def with_defaults(self, document: Document) -> dict[str, Any]:
        """The object as the API server would store it."""
        completed = _completed(copy.deepcopy(dict(document)), self._schema)
        assert isinstance(completed, dict)
        return completed


def _strict(schema: Any) -> Any:
    """A structural schema as JSON schema that allows no unknown field."""
    if isinstance(schema, list):
        return [_strict(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    made = {
        key: {name: _strict(inner) for name, inner in value.items()} if key == "properties" else _strict(value)
        for key, value in schema.items()
        if not key.startswith("x-kubernetes-")
    }
    open_ended = schema.get("x-kubernetes-preserve-unknown-fields") or "additionalProperties" in schema
    if schema.get("type") == "object" and "properties" in schema and not open_ended:
        # `metadata` has a schema of its own in the API server, and none here.
        made["additionalProperties"] = False
    return made


def _completed(value: Any, schema: Mapping[str, Any]) -> Any:
    if isinstance(value, dict):
        for key, inner in schema.get("properties", {}).items():
            if key not in value and "default" in inner:
                value[key] = copy.deepcopy(inner["default"])
            if key in value:
                value[key] = _completed(value[key], inner)
    elif isinstance(value, list) and "items" in schema:
        return [_completed(item, schema["items"]) for item in value]
    return value


def _doubles(
    document: Document, schema: Mapping[str, Any], value: Any, path: tuple[str | int, ...]
) -> Iterator[Problem]:
    """Lists that are maps must not have two items with the same key."""
    if isinstance(value, dict):
        for key, inner in schema.get("properties", {}).items():
            if key in value:
                yield from _doubles(document, inner, value[key], (*path, key))
    elif isinstance(value, list):
        keys = schema.get("x-kubernetes-list-map-keys")
        seen = set()
        for index, item in enumerate(value):
            yield from _doubles(document, schema.get("items", {}), item, (*path, index))
            if keys and isinstance(item, dict):
                identity = tuple(str(item.get(key)) for key in keys)
                if identity in seen:
                    yield Problem(at(document, *path, index), f"there is another with {', '.join(identity)}")
                seen.add(identity)


# Kubernetes


def kubernetes_problems(document: Document, version: str = KUBERNETES) -> list[Problem]:
    """What the API server would refuse in one of Kubernetes' own objects."""
    kind, api = document.get("kind"), document.get("apiVersion")
    if not isinstance(kind, str) or not isinstance(api, str):
        return [Problem(at(document), "kind and apiVersion are missing")]
    group = _GROUP.sub(r"\1-", api)  # networking.k8s.io/v1 is in the files of networking-v1
    validator = _validator(f"{kind.lower()}-{group}", version)
    if validator is None:
        return [Problem(at(document), f"Kubernetes {version} has no {kind} of {api}")]
    return [_told(document, error) for error in validator.iter_errors(document)]


@functools.cache
def _validator(name: str, version: str) -> Draft202012Validator | None:
    folder = _folder(version)
    schema = folder / f"{name}.json"
    if not schema.is_file():
        return None
    return Draft202012Validator(json.loads(schema.read_text()), registry=_registry(version))


@functools.cache
def _registry(version: str) -> Registry[Any]:
    definitions = json.loads((_folder(version) / "_definitions.json").read_text())
    return Resource.from_contents(definitions) @ Registry()


def _folder(version: str) -> Any:
    try:
        root = importlib.resources.files("kubernetes_validate") / "kubernetes-json-schema"
    except ModuleNotFoundError:
        raise CheckError("kubernetes-validate is not installed; `make k8s-check` does that") from None
    folder = root / f"v{version}.0-local-strict"
    if not folder.is_dir():
        raise CheckError(f"kubernetes-validate has no schemas of Kubernetes {version}")
    return folder


def _told(document: Document, error: ValidationError) -> Problem:
    path = tuple(error.absolute_path)
    if error.validator == "additionalProperties":
        unknown = sorted(set(error.instance) - set(error.schema.get("properties", {})))
        return Problem(at(document, *path), f"{', '.join(map(str, unknown))}: no such field")
    message = error.message if len(error.message) < 200 else f"{error.message[:200]}…"
    return Problem(at(document, *path), message)
