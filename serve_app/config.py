"""The whole configuration: one schema for the application `args` of `deployments/*.yaml`.

Everything is validated here, at start and by `python -m serve_app check`; unknown keys are refused. What
needs vLLM or model files to be checked is in `check.py`.
"""

from __future__ import annotations

import ipaddress
import re
from collections import Counter
from collections.abc import Sequence
from datetime import datetime
from typing import Annotated, Any, Literal, Self
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from cronsim import CronSim, CronSimError
from pydantic import Field, ValidationError, field_validator, model_validator

from serve_app.engines.base import EngineSpec
from serve_app.gpu_shares import share_problems
from serve_app.model_schema import (
    PROFILES,
    Model,
    Pool,
    Resources,
)
from serve_app.routing_schema import RoutingSettings
from serve_app.service_schema import (
    AuditSettings,
    Batches,
    Conversations,
    Page,
    RouterSettings,
    Security,
    Telemetry,
    is_address,
    is_loopback,
)
from serve_app.strict import Strict

# What vLLM allows by itself.
_VLLM_LOGPROBS = 20


class ConfigError(ValueError):
    """The configuration is wrong. The message names each wrong key by its path, one a line."""


class Config(Strict):
    """The application's `args`."""

    models_dir: str = Field(".models", description="Relative: below the repository.")
    log_level: Literal["debug", "info", "warning", "error"] = "warning"
    log_format: Literal["text", "json"] = Field(
        "text", description="Of our own lines; json: one object a line. Lines about a request carry its id."
    )
    engine_host: str = Field(
        "127.0.0.1", description="Address on which engines listen; `node` for the node's own on a cluster."
    )
    router: RouterSettings = RouterSettings()
    pool: Pool = Pool()
    routing: RoutingSettings = RoutingSettings()
    telemetry: Telemetry = Telemetry()
    audit: AuditSettings = AuditSettings()
    security: Security = Security()
    batches: Batches = Batches()
    conversations: Conversations = Conversations()
    ui: Page = Page()
    models: Annotated[list[Model], Field(min_length=1)]

    @field_validator("engine_host")
    @classmethod
    def _one_address(cls, value: str) -> str:
        """Routers are told of it, so `all addresses` is none; nor is a typo for `node`."""
        if value not in ("node", "localhost") and (not is_address(value) or ipaddress.ip_address(value).is_unspecified):
            raise ValueError("must be `node`, or one address of the node")
        return value

    @model_validator(mode="before")
    @classmethod
    def _adapters_take_after_their_base(cls, args: Any) -> Any:
        """An adapter has its base's tier, and what it does not say itself."""
        if not isinstance(args, dict) or not isinstance(args.get("models"), list):
            return args
        by_id = {
            model["id"]: model
            for model in args["models"]
            if isinstance(model, dict) and isinstance(model.get("id"), str)
        }

        def complete(model: Any) -> Any:
            named = model.get("base") if isinstance(model, dict) else None
            base = by_id.get(named) if isinstance(named, str) else None
            inherited = ("tier", "context", "abilities", "thinking", "sampling")
            return {**{key: base[key] for key in inherited if key in base}, **model} if base else model

        return {**args, "models": [complete(model) for model in args["models"]]}

    @model_validator(mode="after")
    def _adapters(self) -> Self:
        engines = {model.id: model for model in self.models if not model.base}
        for index, model in enumerate(self.models):
            if model.base and model.base not in engines:
                raise ValueError(f"models[{index}].base: {model.base} is not the id of a model with an engine here")
            if model.base and engines[model.base].external:
                raise ValueError(
                    f"models[{index}].base: {model.base} is an external server, whose adapters are models of their own;"
                    " give this one `external`, too"
                )
            if model.base and model.tier != engines[model.base].tier:
                raise ValueError(f"models[{index}].tier: an adapter has its base's: {engines[model.base].tier}")
        return self

    @model_validator(mode="after")
    def _names(self) -> Self:
        if not self.residents:
            raise ValueError("models: one must have tier: resident; it answers `auto`")
        names = Counter(name for model in self.models for name in {model.id, *model.aliases})
        if doubled := [name for name, count in names.items() if count > 1]:
            raise ValueError(f"models: {', '.join(doubled)} names more than one model")
        for name in names:
            base, _, suffix = name.rpartition(":")
            if suffix in PROFILES and base in names:
                raise ValueError(f"models: {name} is what {base} is called with its thinking set; rename it")
        return self

    @model_validator(mode="after")
    def _fits(self) -> Self:
        for index, model in enumerate(self.models):
            where = f"models[{index}]"
            if model.tier == "lazy" and model.memory_gb > self.pool.memory_gb:
                raise ValueError(
                    f"{where}.memory_gb: {model.memory_gb:g} is more than the pool's {self.pool.memory_gb:g};"
                    " it could never load"
                )
            own = model.resources != Resources() or model.replicas != 1 or model.autoscaling or model.gpu_memory_gb
            if model.tier == "lazy" and own:
                raise ValueError(
                    f"{where}: resources, gpu_memory_gb, replicas and autoscaling of a lazy model are the pool's;"
                    " remove them here"
                )
        real = [model.id for model in self.lazy if not model.fake and self.sleeps(model)]
        if not self.pool.resources.num_gpus and real:
            raise ValueError(f"pool.host_memory_gb: vLLM sleeps on GPUs only, and the pool has none for {real[0]}")
        host_gb = self.pool.host_memory_gb
        if host_gb and self.pool.process_gb > host_gb and self.lazy:
            raise ValueError(
                f"pool.process_gb: {self.pool.process_gb:g} is more than pool.host_memory_gb: {host_gb:g};"
                " nothing could ever load"
            )
        size = self.pool.gpu_memory_gb
        if size and self.pool.memory_gb > size:
            raise ValueError(f"pool.memory_gb: {self.pool.memory_gb:g} is more than pool.gpu_memory_gb: {size:g}")
        if problem := next(share_problems(self.models, self.pool), None):
            raise ValueError(problem)
        return self

    @model_validator(mode="after")
    def _drains(self) -> Self:
        """A model that says how long its answers may take is promised so long, on an upgrade or a scale-down too."""
        for index, model in enumerate(self.models):
            if model.total_timeout_s is not None and model.total_timeout_s > self.router.drain_s:
                raise ValueError(
                    f"models[{index}].total_timeout_s: {model.total_timeout_s:g} is more than router.drain_s:"
                    f" {self.router.drain_s:g}; an upgrade or a scale-down would cut such an answer: raise drain_s"
                )
        return self

    @model_validator(mode="after")
    def _schedule(self) -> Self:
        try:
            ZoneInfo(self.pool.timezone)
        except (ZoneInfoNotFoundError, ValueError, OSError):
            raise ValueError(f"pool.timezone: {self.pool.timezone} is no time zone") from None
        for index, model in enumerate(self.models):
            if model.tier == "resident" and (model.preload or model.warm_at):
                raise ValueError(f"models[{index}]: preload and warm_at are for lazy models; this one is always loaded")
            for place, line in enumerate(model.warm_at):
                try:
                    comes = next(CronSim(line, datetime.now()), None)
                except CronSimError as error:
                    raise ValueError(f"models[{index}].warm_at[{place}]: no cron expression: {error}") from None
                if comes is None:
                    raise ValueError(f"models[{index}].warm_at[{place}]: no cron expression: it never comes")
        return self

    @model_validator(mode="after")
    def _routing_names(self) -> Self:
        ids = {model.id for model in self.models if "chat" in model.abilities}
        small = self.routing.small_model
        if small is not None and small not in ids:
            raise ValueError(f"routing.small_model: {small} is not the id of a chat model here")
        if self.routing.scorer.kind == "self" and "chat" not in self.residents[0].abilities:
            raise ValueError(f"routing.scorer.kind: self needs a chat model; {self.residents[0].id} is none")
        for index, rule in enumerate(self.routing.rules):
            if rule.then.size == "small" and small is None:
                raise ValueError(f"routing.rules[{index}].then.size: small needs routing.small_model")
            if rule.then.model is not None and rule.then.model not in ids:
                raise ValueError(
                    f"routing.rules[{index}].then.model: {rule.then.model} is not the id of a chat model here"
                )
        return self

    @model_validator(mode="after")
    def _key_models(self) -> Self:
        ids = {model.id for model in self.models}
        for index, key in enumerate(self.security.keys):
            for name in key.models or ():
                if name not in ids:
                    raise ValueError(f"security.keys[{index}].models: {name} is not the id of a model here")
        return self

    @model_validator(mode="after")
    def _page_is_closed(self) -> Self:
        keyed = self.security.keys or self.security.keys_file
        if self.ui.enabled and not keyed and not is_loopback(self.router.host):
            raise ValueError(
                f"ui.enabled: others reach router.host {self.router.host}, where the page needs security.keys or"
                " security.keys_file; give one, or listen on 127.0.0.1"
            )
        return self

    @model_validator(mode="after")
    def _one_memory(self) -> Self:
        kept = self.conversations
        if kept.enabled and not kept.redis_url and self.router.replicas > 1:
            raise ValueError(
                f"conversations.redis_url: missing; {self.router.replicas} Routers do not see each other's memory"
            )
        return self

    @model_validator(mode="after")
    def _deployment_names(self) -> Self:
        names = Counter(deployment_name(model) for model in self.residents)
        if doubled := [name for name, count in names.items() if count > 1]:
            raise ValueError(f"models: two resident models would both be deployed as {doubled[0]}; rename one id")
        return self

    @property
    def residents(self) -> Sequence[Model]:
        """The engines that are always loaded, in the order of the file; the first one answers `auto`."""
        return [model for model in self.models if model.tier == "resident" and not model.base]

    @property
    def lazy(self) -> Sequence[Model]:
        """The engines that are loaded when asked for."""
        return [model for model in self.models if model.tier == "lazy" and not model.base]

    def adapters_of(self, base: Model) -> Sequence[Model]:
        """The LoRA adapters that run on this engine."""
        return [model for model in self.models if model.base == base.id]

    def engine_spec(self, model: Model) -> EngineSpec:
        """What an engine host is told about this model."""
        if model.fake:
            args = model.fake.model_dump()
        else:
            args = {"max_model_len": model.context, **model.engine}
            if model.trust_remote_code:
                args["trust_remote_code"] = True
            if self.telemetry.otlp_endpoint:
                args.setdefault("otlp_traces_endpoint", self.telemetry.otlp_endpoint)
            if adapters := self.adapters_of(model):
                args["enable_lora"] = True
                args["lora_modules"] = [
                    {"name": each.id, "path": each.adapter_path(self.models_dir), "base_model_name": model.id}
                    for each in adapters
                ]
            if model.tier == "lazy" and self.sleeps(model):
                args["enable_sleep_mode"] = True
            if model.max_logprobs > _VLLM_LOGPROBS:
                args.setdefault("max_logprobs", model.max_logprobs)
            if "tools" in model.abilities:
                args.setdefault("enable_auto_tool_choice", True)
            if model.tier == "lazy" and self.pool.gpu_memory_gb and "gpu_memory_utilization" not in args:
                args["gpu_memory_utilization"] = round(model.memory_gb / self.pool.gpu_memory_gb, 4)
        return EngineSpec(
            model_id=model.id,
            kind="fake" if model.fake else "vllm",
            source="" if model.fake else model.path(self.models_dir),
            args=args,
            env={**self._tracing_env(), **model.engine_env},
            max_ongoing=model.max_ongoing_requests,
            load_timeout_s=model.load_timeout_s,
            steer_timeout_s=model.sleep.timeout_s,
            kv_cache_limit=model.kv_cache_limit,
            stall_timeout_s=model.stall_timeout_s,
        )

    def _tracing_env(self) -> dict[str, str]:
        """vLLM's spans go where ours do, in the same protocol; its own choice would be gRPC."""
        if not self.telemetry.otlp_endpoint:
            return {}
        return {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf", "OTEL_SERVICE_NAME": "switchyard-engine"}

    def sleeps(self, model: Model) -> bool:
        """Whether a lazy model is put to sleep rather than stopped."""
        return bool(self.pool.host_memory_gb and model.sleep.level)


def deployment_name(model: Model) -> str:
    """What a resident model's deployment is called in Serve and the Ray dashboard."""
    return "Resident-" + re.sub(r"[^A-Za-z0-9._-]+", "-", model.id)


def parse_config(args: object) -> Config:
    """Validate application `args`. Raises `ConfigError` that names every wrong key by its path."""
    if not isinstance(args, dict):
        raise ConfigError("args: must be a mapping with at least `models`")
    try:
        return Config.model_validate(args)
    except ValidationError as error:
        raise ConfigError("\n".join(problems_of(error))) from None


def problems_of(error: ValidationError) -> list[str]:
    """pydantic's findings, one a line: the path of the key, and what is wrong with it. Quotes no values."""
    lines = []
    for problem in error.errors(include_url=False, include_input=False):
        path = _path(problem["loc"])
        message = problem["msg"].removeprefix("Value error, ")
        if problem["type"] == "extra_forbidden":
            message = "no such key"
        elif problem["type"] == "missing":
            message = "missing"
        elif problem["type"] == "value_error" and (inner := re.match(r"([A-Za-z_.\[\]0-9-]+): (.*)", message, re.S)):
            separator = "" if inner[1].startswith((".", "[")) or not path else "."
            path += separator + inner[1]
            message = inner[2]
        lines.append(f"{path}: {message}" if path else message)
    return lines


def _path(loc: tuple[int | str, ...]) -> str:
    path = ""
    for part in loc:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    return path
