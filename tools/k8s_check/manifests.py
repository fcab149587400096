"""Reads k8s/: the files themselves, and what kustomize makes of them."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from tools.k8s_check.problem import Problem


class CheckError(Exception):
    """The check itself cannot be done. The message says what is missing and where to get it."""


class _Strict(yaml.SafeLoader):
    """Refuses a key that is there twice; YAML readers take the last one and say nothing."""


def _mapping(loader: yaml.SafeLoader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen = set()
    for key, _ in node.value:
        if key.tag != "tag:yaml.org,2002:merge" and key.value in seen:
            raise yaml.constructor.ConstructorError(None, None, f"the key {key.value} is there twice", key.start_mark)
        seen.add(key.value)
    loader.flatten_mapping(node)
    return {loader.construct_object(key): loader.construct_object(value, deep=True) for key, value in node.value}


_Strict.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)


def read(path: Path) -> list[Any]:
    """Every document of a YAML file. Raises `yaml.YAMLError`, for doubled keys too."""
    return [document for document in yaml.load_all(path.read_text(), _Strict) if document is not None]


def file_problems(root: Path) -> list[Problem]:
    """What is wrong with the files as YAML."""
    found = []
    for path in sorted(root.rglob("*.yaml")):
        try:
            read(path)
        except yaml.YAMLError as error:
            mark = getattr(error, "problem_mark", None)
            line = f":{mark.line + 1}" if mark else ""
            found.append(Problem(f"{path}{line}", str(getattr(error, "problem", error))))
    return found


def folders(root: Path) -> Iterator[Path]:
    """What an operator would build: the base and every overlay."""
    yield root / "base"
    yield from sorted(path.parent for path in (root / "overlays").glob("*/kustomization.yaml"))


def kustomize() -> Sequence[str]:
    """The command that builds a folder. Raises `CheckError` where there is none."""
    if found := shutil.which("kustomize"):
        return (found, "build")
    if found := shutil.which("kubectl"):
        return (found, "kustomize")
    raise CheckError(
        "neither kustomize nor kubectl is here; install one of them (kubectl 1.27 or newer, for kustomize 5)"
    )


def build(folder: Path, command: Sequence[str]) -> list[Any]:
    """What kustomize makes of a folder. Raises `CheckError` with its words where it refuses."""
    done = subprocess.run([*command, str(folder)], capture_output=True, text=True)
    if done.returncode:
        raise CheckError(f"{folder}: kustomize: {' '.join(done.stderr.split())}")
    return [document for document in yaml.load_all(done.stdout, yaml.CSafeLoader) if document is not None]
