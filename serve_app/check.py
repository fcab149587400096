"""Validates deployment files offline: Serve's schema, our own, vLLM's arguments, contexts and resources."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError

from serve_app.config import Config, ConfigError, deployment_name, parse_config, problems_of
from serve_app.known_models import native_context
from serve_app.model_schema import Model
from serve_app.scoring import missing_for
from serve_app.sizing.deployment import findings
from serve_app.sizing.quantization import SizingError
from serve_app.sizing.source import config_here

IMPORT_PATH = "serve_app.app:build"


@dataclasses.dataclass(frozen=True, slots=True)
class DeploymentFile:
    """A deployment file as it was read: the raw YAML, and the configuration of our application in it."""

    path: Path
    raw: dict[str, Any]
    config: Config


def read_file(path: Path) -> DeploymentFile:
    """Read and validate a file without looking at models or engines. Raises `ConfigError`."""
    raw = _yaml(path)
    args = _our_args(raw)
    return DeploymentFile(path, raw, parse_config(args))


def problems(path: Path) -> list[str]:
    """Everything that is wrong with a deployment file, each with the path of the key; empty if nothing is."""
    try:
        raw = _yaml(path)
        found = _schema_problems(raw)
        config = parse_config(_our_args(raw))
    except ConfigError as error:
        return str(error).splitlines()
    found += missing_for(config) + _deployment_problems(raw, config)
    for index, model in enumerate(config.models):
        found += [f"models[{index}].{problem}" for problem in _model_problems(config, model)]
    return found


def warnings(path: Path) -> list[str]:
    """What may be wrong with a deployment file that has no problems, likewise: it rests on estimates."""
    config = read_file(path).config
    return [
        f"models[{index}].{problem}"
        for index, model in enumerate(config.models)
        for problem in _memory_problems(config, model, certain=False)
    ]


def _yaml(path: Path) -> dict[str, Any]:
    try:
        raw = yaml.safe_load(path.read_text())
    except FileNotFoundError:
        raise ConfigError("no such file") from None
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise ConfigError(f"{where}not valid YAML: {getattr(error, 'problem', None) or error}") from None
    if not isinstance(raw, dict):
        raise ConfigError("not a mapping; see deployments/local.yaml for the form")
    return raw


def _our_args(raw: Mapping[str, Any]) -> object:
    applications = raw.get("applications")
    if not isinstance(applications, list) or not applications:
        raise ConfigError("applications: missing; it needs one with import_path: " + IMPORT_PATH)
    ours = [app for app in applications if isinstance(app, dict) and app.get("import_path") == IMPORT_PATH]
    if len(ours) != 1:
        raise ConfigError(f"applications: needs exactly one with import_path: {IMPORT_PATH}, has {len(ours)}")
    return ours[0].get("args")


def _schema_problems(raw: dict[str, Any]) -> list[str]:
    from ray.serve.schema import ServeDeploySchema

    try:
        ServeDeploySchema.model_validate(raw)
    except ValidationError as error:
        return problems_of(error)
    return _unknown_keys(ServeDeploySchema, raw, "")


def _unknown_keys(schema: type[BaseModel], raw: Mapping[str, Any], path: str) -> list[str]:
    """Serve passes over keys that it does not know, and a typo in one goes unseen."""
    found = []
    for key, value in raw.items():
        where = f"{path}.{key}" if path else key
        field = schema.model_fields.get(key)
        if field is None:
            found.append(f"{where}: no such key")
            continue
        for inner in _schemas_of(field.annotation):
            if isinstance(value, dict):
                found += _unknown_keys(inner, value, where)
            elif isinstance(value, list):
                for index, item in enumerate(value):
                    if isinstance(item, dict):
                        found += _unknown_keys(inner, item, f"{where}[{index}]")
    return found


def _schemas_of(annotation: Any) -> list[type[BaseModel]]:
    """The one schema in a field's type, looking into Optional and List; none where there are several."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    inner = [schema for part in get_args(annotation) for schema in _schemas_of(part)]
    return inner if len(inner) == 1 else []


def _deployment_problems(raw: Mapping[str, Any], config: Config) -> list[str]:
    """Serve finds a deployment that is not there only when it starts."""
    residents = (deployment_name(model) for model in config.residents if not model.external)
    known = ["Router", *residents, *(["LazyPool"] if config.lazy else [])]
    return [
        f"applications[{place}].deployments[{index}].name: there is no deployment {deployment.get('name')};"
        f" there are {', '.join(known)}"
        for place, application in enumerate(raw["applications"])
        if application.get("import_path") == IMPORT_PATH
        for index, deployment in enumerate(application.get("deployments") or [])
        if deployment.get("name") not in known
    ]


def _model_problems(config: Config, model: Model) -> list[str]:
    if model.fake or model.external:
        return []
    if model.base:
        return _adapter_problems(config, model)
    from serve_app.engines.vllm import argument_problems

    spec = config.engine_spec(model)
    found = [
        f"engine.{key}: {message}" if key else f"engine: {message}"
        for key, message in argument_problems(spec.source, spec.args).items()
    ]
    found += _context_problems(spec.source, model) + _parallel_problems(config, model)
    # Not with arguments that vLLM refuses, nor where the share of the GPU is wrong already.
    return found or _memory_problems(config, model, certain=True)


def _memory_problems(config: Config, model: Model, *, certain: bool) -> list[str]:
    """Where the model's dimensions are known on this machine."""
    if model.fake or model.base:
        return []
    try:
        files = config_here(model.path(config.models_dir))
    except SizingError:
        files = None
    found = findings(config, model, files)
    return [f"{each.key}: {each.message}" for each in found if each.certain is certain]


def _adapter_problems(config: Config, model: Model) -> list[str]:
    path = Path(model.adapter_path(config.models_dir))
    if path.is_absolute() and not (path / "adapter_config.json").is_file():
        return [f"adapter: {model.adapter} holds no adapter_config.json"]
    return []


def _context_problems(source: str, model: Model) -> list[str]:
    native = native_context(source)
    overrides = model.engine.get("hf_overrides") or {}
    rope = overrides.get("rope_parameters") or overrides.get("rope_scaling") or {}
    factor = float(rope.get("factor", 1))
    original = int(rope.get("original_max_position_embeddings", native or 0))
    if native is None or model.context <= max(native, int(original * factor)):
        return []
    return [
        f"context: {model.context} is more than {model.source}'s {native} without rope scaling;"
        " lower it, or add engine.hf_overrides.rope_parameters"
    ]


def _parallel_problems(config: Config, model: Model) -> list[str]:
    resources = model.resources if model.tier == "resident" else config.pool.resources
    needed = int(model.engine.get("tensor_parallel_size", 1)) * int(model.engine.get("pipeline_parallel_size", 1))
    where = "resources.num_gpus" if model.tier == "resident" else "engine.tensor_parallel_size"
    if needed > 1 and resources.num_gpus < needed:
        return [f"{where}: the engine runs on {needed} GPUs, its replica has {resources.num_gpus:g}"]
    share = config.engine_spec(model).args.get("gpu_memory_utilization")  # its own, or its share of the pool's GPU
    if 0 < resources.num_gpus < 1 and (share is None or share > resources.num_gpus):
        return [
            f"engine.gpu_memory_utilization: {share or 'missing'}; a replica with"
            f" num_gpus: {resources.num_gpus:g} may take at most that share of its GPU"
        ]
    return []
