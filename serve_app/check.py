"""Validates deployment files offline: Serve's schema, our own, vLLM's arguments, contexts and resources."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from serve_app.config import Config, ConfigError, deployment_name, parse_config, problems_of
from serve_app.deployment_file import read_yaml
from serve_app.known_models import native_context
from serve_app.live import ENGINE_KEYS, with_live
from serve_app.model_schema import Model
from serve_app.scoring import missing_for
from serve_app.sizing.deployment import findings
from serve_app.sizing.quantization import SizingError
from serve_app.sizing.source import config_here

IMPORT_PATH = "serve_app.app:build"
# A repository with its owner or without, and what to take of it; or a bucket, for vLLM's own streamers.
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?(:[\w.-]+)?|(s3|gs|az)://\S+", re.ASCII)
# Longer than anybody waits: seconds that were meant as milliseconds.
_LONGEST_S = 86_400
_KEPT_LONG = frozenset({"ttl_s", "cache_half_life_s"})
# Of Serve's `http_options`, where a file says nothing.
_SERVE_PORT = 8000


@dataclasses.dataclass(frozen=True, slots=True)
class DeploymentFile:
    """A deployment file as it was read: the raw YAML, and the configuration of our application in it."""

    path: Path
    raw: dict[str, Any]
    config: Config


def read_file(path: Path) -> DeploymentFile:
    """Read and validate a file without looking at models or engines. Raises `ConfigError`."""
    raw = read_yaml(path)
    return DeploymentFile(path, raw, effective(raw))


def problems(path: Path) -> list[str]:
    """Everything that is wrong with a deployment file, each with the path of the key; empty if nothing is."""
    try:
        raw = read_yaml(path)
        found, sound = _schema_problems(raw)
        if not sound:
            return [*found, *_own_problems(raw)]
        config = effective(raw)
    except ConfigError as error:
        return str(error).splitlines()
    found += [
        *_door_problems(raw, config),
        *_override_problems(raw, config),
        *_live_problems(raw, config),
        *missing_for(config),
    ]
    for where, model in _places(raw, config):
        found += [f"{where}.{problem}" for problem in _model_problems(config, model)]
    return found


def warnings(path: Path) -> list[str]:
    """What may be wrong with a deployment file that has no problems, likewise: it rests on estimates."""
    file = read_file(path)
    config = file.config
    return list(_long_times(config.model_dump(exclude_unset=True), "")) + [
        f"{where}.{problem}"
        for where, model in _places(file.raw, config)
        for problem in (*_missing_files(config, model), *_memory_problems(config, model, certain=False))
    ]


def _long_times(section: Any, path: str) -> Iterator[str]:
    items = section.items() if isinstance(section, dict) else enumerate(section) if isinstance(section, list) else ()
    for key, value in items:
        where = f"{path}[{key}]" if isinstance(key, int) else f"{path}.{key}" if path else str(key)
        if isinstance(key, int) or not key.endswith("_s") or key in _KEPT_LONG:
            yield from () if key in ("engine", "engine_env") else _long_times(value, where)
        elif isinstance(value, int | float) and value > _LONGEST_S:
            yield f"{where}: {value:g} s are {value / _LONGEST_S:.1f} days; times are in seconds"


def _missing_files(config: Config, model: Model) -> Iterator[str]:
    """A directory that another machine may have."""
    if model.fake or model.external or model.base:
        return
    source = Path(model.path(config.models_dir))
    if source.is_absolute() and not source.exists():
        yield f"source: {model.source} is not on this machine"


def effective(raw: Mapping[str, Any]) -> Config:
    """What applies once the file is deployed. Raises `ConfigError`."""
    from serve_app.app import ROUTER

    config = parse_config(_our_args(raw))
    index, given = _user_configs(raw)
    for place, (_, live) in given.items():
        try:
            with_live(config.model_dump(), live)
        except ConfigError as error:
            where = f"applications[{index}].deployments[{place}]"
            raise ConfigError("\n".join(f"{where}.{line}" for line in str(error).splitlines())) from None
    return with_live(config.model_dump(), next((live for name, live in given.values() if name == ROUTER), None))


def _user_configs(raw: Mapping[str, Any]) -> tuple[int, dict[int, tuple[object, object]]]:
    """The place of our application, and by the place of a deployment in it its name and its `user_config`."""
    index, ours = next((place, app) for place, app in enumerate(raw["applications"]) if _is_ours(app))
    deployments = ours.get("deployments")
    return index, {
        place: (each.get("name"), each["user_config"])
        for place, each in enumerate(deployments if isinstance(deployments, list) else [])
        if isinstance(each, dict) and each.get("user_config") is not None
    }


def _live_problems(raw: Mapping[str, Any], config: Config) -> list[str]:
    """One deployment that hears something else than the others, or nothing, would go its own way."""
    from serve_app.app import POOL, ROUTER

    index, given = _user_configs(raw)
    if not given:
        return []
    said = dict(given.values())
    if ROUTER not in said:
        return [f"applications[{index}].deployments: {ROUTER} has no user_config, and the others have"]
    live: Any = said[ROUTER]
    found = [
        f"applications[{index}].deployments[{place}].user_config: is not that of {ROUTER}; give all of them the same"
        for place, (_, other) in given.items()
        if other != live
    ]
    needed = []
    residents = {model.id: deployment_name(model) for model in config.residents}
    for model in live.get("models", ()):
        if model["id"] not in residents:
            needed.append(POOL)
        elif model.keys() & ENGINE_KEYS:
            needed.append(residents[model["id"]])
    return found + [
        f"applications[{index}].deployments: {name} has no user_config; what models say there concerns it, too"
        for name in dict.fromkeys(needed)
        if name not in said
    ]


def _places(raw: Mapping[str, Any], config: Config) -> list[tuple[str, Model]]:
    """Each model with the path at which the file names it."""
    args: Any = _our_args(raw)
    in_args = {model["id"]: place for place, model in enumerate(args["models"])}
    index, given = _user_configs(raw)
    live: dict[str, str] = {}
    for place, (_, found) in given.items():
        if isinstance(found, dict):
            for at, model in enumerate(found.get("models", ())):
                live.setdefault(model["id"], f"applications[{index}].deployments[{place}].user_config.models[{at}]")
    return [
        (f"models[{in_args[model.id]}]" if model.id in in_args else live[model.id], model) for model in config.models
    ]


def _our_args(raw: Mapping[str, Any]) -> object:
    applications = raw.get("applications")
    if not isinstance(applications, list) or not applications:
        raise ConfigError("applications: missing; it needs one with import_path: " + IMPORT_PATH)
    ours = list(filter(_is_ours, applications))
    if len(ours) != 1:
        raise ConfigError(f"applications: needs exactly one with import_path: {IMPORT_PATH}, has {len(ours)}")
    return ours[0].get("args")


def _schema_problems(raw: dict[str, Any]) -> tuple[list[str], bool]:
    """What is wrong for Serve, and whether everything is at least of the type that it expects."""
    from ray.serve.schema import ServeDeploySchema

    try:
        ServeDeploySchema.model_validate(raw)
    except ValidationError as error:
        return problems_of(error), False
    except (AttributeError, TypeError):  # of its own validators (2.60), which expect mappings without a look
        return ["applications: is not of the form that Serve expects; something in it must be a mapping"], False
    return _unknown_keys(ServeDeploySchema, raw, ""), True


def _own_problems(raw: Mapping[str, Any]) -> list[str]:
    """What is wrong in our own part alone."""
    try:
        parse_config(_our_args(raw))
    except ConfigError as error:
        return str(error).splitlines()
    return []


def _door_problems(raw: Mapping[str, Any], config: Config) -> list[str]:
    """Serve has a door of its own, on 8000 unless it is told otherwise."""
    options = raw.get("http_options") or {}
    port = options.get("port", _SERVE_PORT)
    if port != config.router.port or raw.get("proxy_location") == "Disabled":
        return []
    return [f"http_options.port: {port} is router.port too; Serve's own ingress needs another one, such as 8001"]


def _override_problems(raw: Mapping[str, Any], config: Config) -> list[str]:
    """Serve passes over a deployment that the application does not have."""
    from ray.serve.config import AutoscalingConfig

    from serve_app.app import POOL, ROUTER, has_pool

    index, ours = next((place, app) for place, app in enumerate(raw["applications"]) if _is_ours(app))
    names = [
        ROUTER,
        *(deployment_name(model) for model in config.residents if not model.external),
        *([POOL] if has_pool(_our_args(raw)) else []),
    ]
    overrides = [
        (f"applications[{index}].deployments[{place}]", override)
        for place, override in enumerate(ours.get("deployments") or [])
        if isinstance(override, dict)
    ]
    # To Serve's schema it is any mapping, and what is unknown in it counts for nothing.
    misplaced = [
        f"{where}.autoscaling_config.{key}: no such key"
        for where, override in overrides
        for key in override.get("autoscaling_config") or ()
        if key not in AutoscalingConfig.model_fields
    ]
    cut = [
        f"{where}.graceful_shutdown_timeout_s: {given:g} is less than router.drain_s: {config.router.drain_s:g}; it"
        " would cut answers: leave it out"
        for where, override in overrides
        if isinstance(given := override.get("graceful_shutdown_timeout_s"), int | float)
        and given < config.router.drain_s
    ]
    return [*misplaced, *cut, *_variable_problems(f"applications[{index}].runtime_env.env_vars", ours)] + [
        f"{where}.name: there is no deployment {override.get('name')}; there are {', '.join(names)}"
        for where, override in overrides
        if override.get("name") not in names
    ]


def _variable_problems(where: str, app: Mapping[str, Any]) -> list[str]:
    """Ray wants texts, and says so when it starts the application."""
    variables: object = (app.get("runtime_env") or {}).get("env_vars")
    if variables is None:
        return []
    if not isinstance(variables, dict):
        return [f"{where}: must be a mapping"]
    return [
        f"{where}.{name}: must be a text; put it in quotes"
        for name, value in variables.items()
        if not isinstance(value, str)
    ]


def _is_ours(app: object) -> bool:
    return isinstance(app, dict) and app.get("import_path") == IMPORT_PATH


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


def _model_problems(config: Config, model: Model) -> list[str]:
    if model.fake or model.external:
        return []
    if model.base:
        return _adapter_problems(config, model)
    from serve_app.engines.vllm import argument_problems

    spec = config.engine_spec(model)
    if not Path(spec.source).is_absolute() and not _HUB_ID.fullmatch(spec.source):
        return [f"source: {model.source} is neither a directory below models_dir nor a hub id like Qwen/Qwen3-14B"]
    found = [
        f"engine.{key}: {message}" if key else f"engine: {message}"
        for key, message in argument_problems(spec.source, spec.args).items()
    ]
    # Not with arguments that vLLM refuses, nor where the share of the GPU is wrong already.
    found = found or _context_problems(spec.source, model) + _parallel_problems(config, model)
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
    if not isinstance(overrides, dict):
        return ["engine.hf_overrides: must be a mapping"]
    name = next((name for name in ("rope_parameters", "rope_scaling") if overrides.get(name)), "rope_parameters")
    rope = overrides.get(name) or {}
    if not isinstance(rope, dict):
        return [f"engine.hf_overrides.{name}: must be a mapping, of rope_type, factor and others"]
    factor = rope.get("factor", 1)
    original = rope.get("original_max_position_embeddings", native or 0)
    for key, value in (("factor", factor), ("original_max_position_embeddings", original)):
        if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
            return [f"engine.hf_overrides.{name}.{key}: must be a number"]
    if native is None or model.context <= max(native, int(original * factor)):
        return []
    return [
        f"context: {model.context} is more than {model.source}'s {native} without rope scaling;"
        " lower it, or add engine.hf_overrides.rope_parameters"
    ]


def _parallel_problems(config: Config, model: Model) -> list[str]:
    resources = model.resources if model.tier == "resident" else config.pool.resources
    kinds = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
    needed = math.prod(int(model.engine.get(kind) or 1) for kind in kinds)
    where = "resources.num_gpus" if model.tier == "resident" else "engine.tensor_parallel_size"
    if needed > 1 and resources.num_gpus < needed:
        return [f"{where}: the engine runs on {needed} GPUs, its replica has {resources.num_gpus:g}"]
    return []
