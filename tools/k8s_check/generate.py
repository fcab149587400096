"""Writes what k8s/ takes from deployments/: `serveConfigV2`, and the models that the download job fetches.

A folder with a `serve.yaml` gets a `generated.yaml`. The base's serve.yaml names the deployment file and what
Kubernetes changes in it; an overlay's is laid over that.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from serve_app.check import IMPORT_PATH
from tools.k8s_check.manifests import CheckError, folders, read
from tools.k8s_check.problem import Problem

_KEYS = {"source", "args", "deployments", "drop_models"}
_HEADER = """\
# Made by `make k8s` from {made_of}. Do not edit: change those, and run it again.
"""


class _Block(str):
    """A text that is written as a block, not in quotes."""

    __slots__ = ()


class _Dumper(yaml.SafeDumper):
    """Never writes anchors: nobody should have to follow them in what is generated."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


_Dumper.add_representer(
    _Block, lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", str(text), style="|")
)


def generated(root: Path) -> dict[Path, str]:
    """What each generated file must hold. Raises `CheckError` for a serve.yaml that makes no sense."""
    base = _changes(root / "base" / "serve.yaml")
    if "source" not in base:
        raise CheckError(f"{root / 'base' / 'serve.yaml'}: source: missing; the deployment file to begin with")
    texts = {}
    for folder in folders(root):
        path = folder / "serve.yaml"
        if not path.is_file():
            continue
        own = base if folder.name == "base" else _changes(path)
        source = root.parent / own.get("source", base["source"])
        layers = [base] if own is base else [base, own]
        config = serve_config(source, layers)
        made_of = [source.relative_to(root.parent), *(root.relative_to(root.parent) / "base" / "serve.yaml",)]
        made_of += [] if own is base else [path.relative_to(root.parent)]
        texts[folder / "generated.yaml"] = _HEADER.format(made_of=", ".join(map(str, made_of))) + _patches(config)
    return texts


def drift(root: Path) -> list[Problem]:
    """Generated files that are not what they would be now."""
    return [
        Problem(str(path), "is not what `make k8s` writes; run it, and commit the result")
        for path, text in generated(root).items()
        if not path.is_file() or path.read_text() != text
    ]


def write(root: Path) -> list[Path]:
    """Write all of them anew; returns those that changed."""
    changed = []
    for path, text in generated(root).items():
        if not path.is_file() or path.read_text() != text:
            path.write_text(text)
            changed.append(path)
    return changed


def serve_config(source: Path, layers: list[Mapping[str, Any]]) -> dict[str, Any]:
    """A deployment file with changes laid over it, one after the other."""
    (config,) = read(source)
    application = next(app for app in config["applications"] if app["import_path"] == IMPORT_PATH)
    for layer in layers:
        application["args"] = _laid_over(application["args"], layer.get("args") or {})
        if layer.get("deployments"):
            application["deployments"] = layer["deployments"]
        dropped = set(layer.get("drop_models") or ())
        models = application["args"]["models"]
        if unknown := dropped - {model["id"] for model in models}:
            raise CheckError(f"drop_models: {', '.join(sorted(unknown))} is not in {source}")
        application["args"]["models"] = [model for model in models if model["id"] not in dropped]
    return dict(config)


def _changes(path: Path) -> Mapping[str, Any]:
    (changes,) = read(path)
    if unknown := changes.keys() - _KEYS:
        raise CheckError(f"{path}: {', '.join(sorted(unknown))}: no such key; there are {', '.join(sorted(_KEYS))}")
    return dict(changes)


def _laid_over(below: Any, above: Any) -> Any:
    """Mappings are merged, lists of things with an `id` by it, null removes; anything else is replaced."""
    if isinstance(below, dict) and isinstance(above, dict):
        merged = {key: value for key, value in below.items() if not (key in above and above[key] is None)}
        for key, value in above.items():
            if value is not None:
                merged[key] = _laid_over(below[key], value) if key in below else copy.deepcopy(value)
        return merged
    if _have_ids(below) and _have_ids(above):
        by_id = {item["id"]: item for item in above}
        if unknown := by_id.keys() - {item["id"] for item in below}:
            raise CheckError(f"models: {', '.join(sorted(unknown))} is not in the deployment file; add it there")
        return [_laid_over(item, by_id.get(item["id"], {})) for item in below]
    return copy.deepcopy(above)


def _have_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, dict) and "id" in item for item in value)


def _patches(config: dict[str, Any]) -> str:
    text = yaml.dump(config, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110)
    ray = {
        "apiVersion": "ray.io/v1",
        "kind": "RayService",
        "metadata": {"name": "switchyard"},
        "spec": {"serveConfigV2": _Block(text)},
    }
    download = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": "switchyard-models"},
        "spec": {"template": {"spec": {"containers": [{"name": "download", "args": hub_models(config)}]}}},
    }
    return yaml.dump_all([ray, download], Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=118)


def hub_models(config: Mapping[str, Any]) -> list[str]:
    """The hub's ids of all models and adapters, each once; not those that are paths."""
    application = next(app for app in config["applications"] if app["import_path"] == IMPORT_PATH)
    named = [model.get(key, "") for model in application["args"]["models"] for key in ("source", "adapter")]
    return list(dict.fromkeys(name for name in named if name and not name.startswith(("/", ".", "~"))))
