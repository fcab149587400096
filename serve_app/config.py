"""The whole configuration: one schema for the application `args` of `deployments/*.yaml`.

Everything is validated here, at start and by `python -m serve_app check`; unknown keys are refused. What
needs vLLM or model files to be checked is in `check.py`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from cronsim import CronSim, CronSimError
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from serve_app.engine_arguments import refused_arguments
from serve_app.engines.base import EngineSpec
from serve_app.routing_schema import RoutingSettings

REPOSITORY = Path(__file__).resolve().parent.parent

Tier = Literal["resident", "lazy"]
Ability = Literal["chat", "completions", "tools", "json", "vision", "embeddings", "score"]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]

# Tokens of thinking for each `reasoning_effort`; None: no limit. Where the model is asked not to think the
# budget is 0. The steps follow the ratio that OpenAI-compatible gateways use between their efforts.
DEFAULT_EFFORTS: dict[Effort, int | None] = {
    "none": 0,
    "minimal": 256,
    "low": 1024,
    "medium": 4096,
    "high": 8192,
    "xhigh": 16384,
    "max": None,
}


class ConfigError(ValueError):
    """The configuration is wrong. The message names each wrong key by its path, one a line."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Thinking(_Strict):
    """Whether a model can think before it answers, and how much."""

    supported: bool = False
    default: bool = Field(False, description="Think when neither client nor router said anything.")
    efforts: dict[Effort, Annotated[int, Field(ge=0)] | None] = Field(
        default_factory=lambda: dict(DEFAULT_EFFORTS),
        description="Thinking budget in tokens for each reasoning_effort; null: unlimited.",
    )

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if missing := DEFAULT_EFFORTS.keys() - self.efforts.keys():
            raise ValueError(f"efforts: {', '.join(sorted(missing))} missing; every effort needs a budget or null")
        if self.default and not self.supported:
            raise ValueError("default: true needs supported: true")
        return self


class Sampling(_Strict):
    """Sampling values for one mode, used where the client set none. Unset: the model's own."""

    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None

    def values(self) -> dict[str, float | int]:
        """The values that are set, by request field."""
        return self.model_dump(exclude_none=True)


class SamplingByMode(_Strict):
    """Sampling defaults when the model thinks and when it does not."""

    thinking: Sampling = Sampling()
    plain: Sampling = Sampling()


class Resources(_Strict):
    """What Ray must find on a node for one replica."""

    num_cpus: Annotated[float, Field(ge=0)] = 1
    num_gpus: Annotated[float, Field(ge=0)] = 0
    accelerator_type: str | None = None
    custom: dict[str, float] = Field(default_factory=dict)

    def actor_options(self) -> dict[str, Any]:
        """As Ray's `ray_actor_options`."""
        options: dict[str, Any] = {"num_cpus": self.num_cpus, "num_gpus": self.num_gpus}
        if self.accelerator_type:
            options["accelerator_type"] = self.accelerator_type
        if self.custom:
            options["resources"] = self.custom
        return options


class FakeScript(_Strict):
    """Run a scripted engine instead of vLLM (tests, load drills). Fields: `engines/fake.py`."""

    load_s: float = 0.0
    fail_load: str = ""
    hang_load: bool = False
    sleep_s: float = 0.0
    wake_s: float = 0.0
    fail_sleep: str = ""
    fail_wake: str = ""
    hang_sleep: bool = False
    hang_wake: bool = False
    memory_mb: int = 0
    context: int = 4096
    ttft_s: float = 0.0
    tpot_s: float = 0.0
    tokens: int = 16
    text: str = ""
    reasoning: str = ""
    fail_at: int = -1
    die_at: int = -1
    stall_at: int = -1
    cut: int = 0


class Sleep(_Strict):
    """How a lazy model sleeps, where the pool has `host_memory_gb` for it."""

    level: Literal[0, 1, 2] = Field(
        1, description="1: weights wait in the host's memory; 2: they are read anew; 0: it is stopped instead."
    )
    host_gb: Annotated[float, Field(ge=0)] | None = Field(
        None, description="Host memory that it takes asleep: its weights at level 1. Unset: memory_gb."
    )
    gpu_gb: Annotated[float, Field(ge=0)] = Field(0.8, description="GPU memory that it keeps asleep: the CUDA context.")
    timeout_s: Annotated[float, Field(gt=0)] = Field(
        60, description="Falling asleep or waking for longer than this, it is stopped."
    )


class Autoscaling(_Strict):
    """How many replicas there may be, and how long more or fewer must be wanted before it is done."""

    min_replicas: Annotated[int, Field(ge=1)] = 1
    max_replicas: Annotated[int, Field(ge=1)]
    upscale_delay_s: Annotated[float, Field(ge=0)] = 5
    downscale_delay_s: Annotated[float, Field(ge=0)] = 300

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.max_replicas < self.min_replicas:
            raise ValueError(f"max_replicas: {self.max_replicas} is less than min_replicas: {self.min_replicas}")
        return self


class ResidentAutoscaling(Autoscaling):
    """Replicas of a resident model by its load, tokens or requests, whichever asks for more."""

    target_ongoing_requests: Annotated[int, Field(ge=1)] | None = Field(
        None, description="Requests in flight that one replica should have; null: half of max_ongoing_requests."
    )
    target_tokens: Annotated[int, Field(ge=1)] | None = Field(
        None, description="Prompt tokens in flight (estimated) that one replica should have; null: four contexts."
    )


class PoolAutoscaling(Autoscaling):
    """Replicas of the pool by the distinct models that wait and find no room."""

    min_replicas: Annotated[int, Field(ge=0)] = Field(0, description="0: the first request starts the first replica.")
    upscale_delay_s: Annotated[float, Field(ge=0)] = Field(
        1, description="From zero replicas to one it is done at once."
    )
    downscale_delay_s: Annotated[float, Field(ge=0)] = Field(
        60, description="Counts from when no model is awake any more; see idle_unload_s."
    )


class Queue(_Strict):
    """Requests that wait because every place of every replica is taken."""

    size: Annotated[int, Field(ge=0)] = Field(100, description="How many may wait in one Router; 0: none does.")
    wait_s: Annotated[float, Field(gt=0)] = Field(10, description="Then a request is refused.")


class Model(_Strict):
    """One model that clients can ask for."""

    id: Annotated[str, Field(min_length=1, max_length=200)]
    aliases: list[Annotated[str, Field(min_length=1, max_length=200)]] = Field(default_factory=list)
    tier: Tier
    source: str = Field("", description="Hub id, or a path (relative: below models_dir).")
    context: Annotated[int, Field(ge=16)] = Field(description="Tokens of prompt and answer together.")
    abilities: list[Ability] = ["chat", "completions"]
    thinking: Thinking = Thinking()
    sampling: SamplingByMode = SamplingByMode()
    base: str | None = Field(
        None, description="Id of the model whose engine runs this one: it is a LoRA adapter, and takes no engine."
    )
    adapter: str = Field("", description="The adapter's directory (relative: below models_dir) or hub id.")
    priority: int = Field(0, description="Higher stays longer when lazy models compete for memory.")
    memory_gb: Annotated[float, Field(gt=0)] = Field(
        1.0,
        description="Memory of the running engine: weights, KV cache, processes. GPU memory where GPUs are used.",
    )
    max_ongoing_requests: Annotated[int, Field(ge=1)] = Field(
        256, description="Requests in flight in one replica; the next is refused with 503, exactly."
    )
    queue: Queue = Queue()
    max_prompt_tokens: Annotated[int, Field(ge=1)] | None = Field(
        None, description="Longer prompts are refused with 400 (by estimate, near the limit by count)."
    )
    max_answer_tokens: Annotated[int, Field(ge=1)] | None = Field(
        None, description="A larger max_tokens is refused with 400, and one that is not given is this."
    )
    ttft_timeout_s: Annotated[float, Field(gt=0)] | None = Field(
        600, description="From the request to its first token (or the whole answer of one that does not stream)."
    )
    idle_timeout_s: Annotated[float, Field(gt=0)] | None = Field(120, description="Between two tokens of a stream.")
    total_timeout_s: Annotated[float, Field(gt=0)] | None = Field(None, description="For the whole answer.")
    engine: dict[str, Any] = Field(default_factory=dict, description="vLLM engine arguments, underscored.")
    engine_env: dict[str, str] = Field(default_factory=dict, description="Environment of the engine process.")
    trust_remote_code: bool = Field(False, description="Run Python code that comes with the model's files.")
    fake: FakeScript | None = None
    load_timeout_s: Annotated[float, Field(gt=0)] = 900
    expected_load_s: Annotated[float, Field(gt=0)] = Field(
        20, description="First guess of the load time, until one was measured."
    )
    expected_wake_s: Annotated[float, Field(gt=0)] = Field(
        3, description="First guess of the time to wake from sleep, until one was measured."
    )
    sleep: Sleep = Sleep()
    idle_unload_s: Annotated[float, Field(gt=0)] = Field(600, description="Unused for so long it is unloaded. Lazy.")
    idle_sleep_s: Annotated[float, Field(gt=0)] | None = Field(
        None, description="Unused for so long it is put to sleep; unset: only when its memory is needed. Lazy."
    )
    preload: bool = Field(False, description="Load it when the service starts. Lazy models only.")
    warm_at: list[str] = Field(
        default_factory=list,
        description='Load it at these times: cron expressions, e.g. "30 8 * * mon-fri". Lazy models only.',
    )
    resources: Resources = Field(Resources(), description="Resident models only; lazy ones use the pool's.")
    replicas: Annotated[int, Field(ge=1)] = Field(1, description="Resident models only.")
    autoscaling: ResidentAutoscaling | None = Field(None, description="Resident models only; instead of replicas.")

    @field_validator("id", "aliases")
    @classmethod
    def _printable(cls, value: str | list[str]) -> str | list[str]:
        for name in [value] if isinstance(value, str) else value:
            if not name.isprintable() or name != name.strip() or " " in name:
                raise ValueError(f"{name!r} must be printable and hold no spaces")
            if name == "auto" or name.startswith("auto:"):
                raise ValueError(f"{name!r} is the router's own choice; call the model something else")
        return value

    @model_validator(mode="after")
    def _coherent(self) -> Self:
        if self.autoscaling and self.replicas != 1:
            raise ValueError("replicas: is decided by autoscaling; remove one of the two")
        if bool(self.base) != bool(self.adapter):
            raise ValueError("base: a LoRA adapter has both base and adapter")
        if self.base:
            if self.engine or self.source or self.fake or self.trust_remote_code:
                raise ValueError(
                    "base: an adapter runs on its base's engine; remove source, engine, trust_remote_code and fake"
                )
            return self
        if self.fake and (self.engine or self.source):
            raise ValueError("fake: a scripted engine takes neither source nor engine")
        if not self.fake and not self.source:
            raise ValueError("source: missing; give a hub id or a path")
        own = self.engine.get("max_model_len")
        if own is not None and own != self.context:
            raise ValueError(f"engine.max_model_len: {own} contradicts context: {self.context}; give context only")
        if not self.fake:
            self._check_parsers()
        if refused := next(refused_arguments(self.engine, self.engine_env), None):
            raise ValueError(refused)
        return self

    def _check_parsers(self) -> None:
        """Without its parser vLLM answers raw tags in the text, or refuses the fields that need it."""
        if self.thinking.supported and not self.engine.get("reasoning_parser"):
            raise ValueError("engine.reasoning_parser: missing; a model with thinking.supported needs one")
        if "tools" in self.abilities and not self.engine.get("tool_call_parser"):
            raise ValueError("engine.tool_call_parser: missing; a model with the ability tools needs one")
        if {"embeddings", "score"} & set(self.abilities) and {"chat", "completions"} & set(self.abilities):
            raise ValueError("abilities: an engine makes embeddings and scores, or text; not both")

    @property
    def least_replicas(self) -> int:
        """So many replicas are there whatever the load."""
        return self.autoscaling.min_replicas if self.autoscaling else self.replicas

    def path(self, models_dir: str) -> str:
        """Where the engine finds the model: a directory below `models_dir` if there is one, else the hub id."""
        return _found(self.source, models_dir)

    def adapter_path(self, models_dir: str) -> str:
        """Where the engine finds the adapter, likewise."""
        return _found(self.adapter, models_dir)


class Pool(_Strict):
    """The deployment that holds the lazy models."""

    resources: Resources = Resources()
    replicas: Annotated[int, Field(ge=1)] = 1
    autoscaling: PoolAutoscaling | None = Field(None, description="Instead of replicas.")
    memory_gb: Annotated[float, Field(gt=0)] = Field(
        8.0, description="Memory that the awake lazy models of one replica may take together."
    )
    gpu_memory_gb: Annotated[float, Field(gt=0)] | None = Field(
        None, description="Size of the GPU; each model's gpu_memory_utilization is its memory_gb over this."
    )
    standby: bool = Field(True, description="Keep one process with the engine imported, so that loads are quick.")
    min_residency_s: Annotated[float, Field(ge=0)] = Field(
        20, description="A loaded model stays at least this long, whatever else is wanted."
    )
    ageing_s: Annotated[float, Field(ge=0)] = Field(
        60,
        description="A model that waits this long for room gets it from a busy one, once that has drained.",
    )
    backoff_s: Annotated[float, Field(gt=0)] = Field(
        10, description="After a failed load its model is refused this long, doubling to 32 times."
    )
    grace_s: Annotated[float, Field(ge=0)] = Field(
        10, description="A load that nobody waits for any more is given up after this, if another needs its memory."
    )
    evict: bool = Field(True, description="False: a model that finds no room is refused, and nothing goes for it.")
    host_memory_gb: Annotated[float, Field(gt=0)] | None = Field(
        None,
        description="Host memory of one replica for its processes and sleeping models. Unset: nothing sleeps.",
    )
    process_gb: Annotated[float, Field(ge=0)] = Field(
        1.0, description="Host memory of one running engine besides weights, counted in host_memory_gb."
    )
    timezone: str = Field("UTC", description="Of the models' warm_at, e.g. Asia/Shanghai.")

    @model_validator(mode="after")
    def _one_count(self) -> Self:
        if self.autoscaling and self.replicas != 1:
            raise ValueError("replicas: is decided by autoscaling; remove one of the two")
        return self


class Degrade(_Strict):
    """What is given up before requests are refused. `load`: taken places over all places of the model's replicas."""

    shrink_thinking_at: Annotated[float, Field(ge=0)] = Field(
        0.9, description="From this load on thinking that the client did not ask for in tokens is cut to..."
    )
    thinking_budget: Annotated[int, Field(ge=0)] = Field(1024, description="...so many tokens.")
    lighter_model_at: Annotated[float, Field(ge=0)] = Field(
        1.0, description="From this load on `auto` is answered by a lighter model that is awake, where one can."
    )


class RouterSettings(_Strict):
    """The front door."""

    host: str = Field("127.0.0.1", description="Address to listen on; 0.0.0.0 for all.")
    port: Annotated[int, Field(ge=1, le=65535)] = 8000
    replicas: Annotated[int, Field(ge=1)] = 1
    num_cpus: Annotated[float, Field(ge=0)] = 1
    max_body_bytes: Annotated[int, Field(ge=1024)] = 8 * 1024 * 1024
    body_timeout_s: Annotated[float, Field(gt=0)] = 30
    max_in_flight: Annotated[int, Field(ge=1)] = Field(4096, description="Requests in flight in one replica.")
    hold_s: Annotated[float, Field(ge=0)] = Field(
        120, description="How long a request waits for its lazy model to load."
    )
    max_held: Annotated[int, Field(ge=1)] = Field(
        1024, description="Requests that wait for a lazy model in one replica; the next is refused with 503."
    )
    max_held_per_model: Annotated[int, Field(ge=1)] = Field(256, description="The same, for one model.")
    degrade: Degrade = Degrade()
    comment_s: Annotated[float, Field(gt=0)] = Field(
        15, description="A stream whose engine says nothing gets a comment this often, which keeps proxies awake."
    )
    loading_comment_s: Annotated[float, Field(gt=0)] = Field(
        1.0, description="A held stream gets a comment about the load this often."
    )
    keep_alive_s: Annotated[int, Field(ge=1)] = Field(
        620, description="Idle connections are kept this long; longer than common load balancers do (600 s)."
    )
    connect_timeout_s: Annotated[float, Field(gt=0)] = 5
    drain_s: Annotated[float, Field(ge=0)] = Field(
        600, description="On shutdown, scale-down and upgrade running streams get this long to finish."
    )


class ApiKey(_Strict):
    """One API key, by its hash, and what its owner may do."""

    id: Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9._@-]+$")] = Field(
        description="A name for records and metrics; never the key."
    )
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")] = Field(description="Hex SHA-256 of the key.")
    models: list[str] | None = Field(None, description="Ids of the models it may use; null: all.")
    requests_per_minute: Annotated[int, Field(ge=1)] | None = None
    tokens_per_minute: Annotated[int, Field(ge=1)] | None = Field(
        None, description="Prompt tokens and max_tokens of what was let in, corrected when the answer is counted."
    )
    max_concurrent: Annotated[int, Field(ge=1)] | None = Field(None, description="Requests at once, in each Router.")
    max_priority: int = Field(0, description="The highest `priority` that its requests may ask for; 0 without one.")
    admin: bool = Field(False, description="May load, unload and pin models.")


class Anonymous(_Strict):
    """What everybody may where there are no keys."""

    requests_per_minute: Annotated[int, Field(ge=1)] | None = None
    tokens_per_minute: Annotated[int, Field(ge=1)] | None = None
    max_concurrent: Annotated[int, Field(ge=1)] | None = None
    max_priority: int = 0


class Security(_Strict):
    """Who may do what. Without keys everybody may do all but give orders, and these too on the loopback address."""

    keys: list[ApiKey] = Field(default_factory=list)
    keys_file: str = Field(
        "", description="A YAML list of more keys, read again when it changes; relative: below the repository."
    )
    redis_url: str = Field(
        "", description="Redis that counts rates over all Routers, e.g. redis://host:6379/0; unset: each on its own."
    )
    anonymous: Anonymous = Field(Anonymous(), description="Limits of all clients together where there are no keys.")
    cors_origins: list[Annotated[str, Field(pattern=r"^(\*|[a-z][a-z0-9+.-]*://[^/?#@*\sA-Z]+)$")]] = Field(
        default_factory=list,
        description="Origins whose web pages may call the API, e.g. https://chat.example.org; * for all.",
    )

    @model_validator(mode="after")
    def _distinct(self) -> Self:
        for field in ("id", "sha256"):
            values = Counter(getattr(key, field) for key in self.keys)
            if doubled := [place for place, key in enumerate(self.keys) if values[getattr(key, field)] > 1]:
                raise ValueError(f"keys[{doubled[-1]}].{field}: another key has the same")
        return self


class AuditSettings(_Strict):
    """One record for each request; without prompts and keys."""

    sink: Literal["file", "stdout", "otlp", "none"] = "file"
    directory: str = Field(".audit", description="Of the files; relative: below the repository.")
    max_bytes: Annotated[int, Field(ge=1024)] = Field(64 * 1024 * 1024, description="A file is rotated at this size.")
    keep: Annotated[int, Field(ge=1)] = Field(10, description="Rotated files that are kept, for each Router.")
    queue: Annotated[int, Field(ge=1)] = Field(10_000, description="Records that may wait to be written; more drop.")
    otlp_endpoint: str = Field("", description="For sink otlp, e.g. http://host:4318/v1/logs.")

    @model_validator(mode="after")
    def _endpoint(self) -> Self:
        if self.sink == "otlp" and not self.otlp_endpoint:
            raise ValueError("otlp_endpoint: missing; sink otlp sends to it")
        return self


class Batches(_Strict):
    """Files and batches. Without a directory there are none."""

    directory: str = Field(
        "", description="Where they are kept, shared by all Routers. Relative: below the repository. Unset: off."
    )
    max_file_bytes: Annotated[int, Field(ge=1024)] = 200 * 1024 * 1024
    max_lines: Annotated[int, Field(ge=1)] = 50_000
    concurrency: Annotated[int, Field(ge=1)] = Field(8, description="Lines that run at once, at most.")
    run_below_load: Annotated[float, Field(gt=0, le=1)] = Field(
        0.5,
        description="Share of a model's places that lines and interactive requests take together; where interactive"
        " requests alone take so many, no line runs.",
    )
    keep_days: Annotated[float, Field(gt=0)] = Field(30, description="Then files and ended batches are removed.")


class Telemetry(_Strict):
    """What leaves the service besides answers and Ray's metrics."""

    otlp_endpoint: str = Field("", description="OTLP/HTTP collector for traces, e.g. http://host:4318/v1/traces.")


class Conversations(_Strict):
    """History that the Router keeps for clients which name their conversation, and answers of `/v1/responses`."""

    enabled: bool = False
    ttl_s: Annotated[float, Field(gt=0)] = Field(86_400, description="Kept so long after the last turn.")
    max_tokens: Annotated[int, Field(ge=1)] = Field(
        16_384, description="Of one conversation (estimated); whole turns go from the oldest. The newest always stays."
    )
    max_conversations: Annotated[int, Field(ge=1)] = Field(
        10_000, description="In memory: those unused for the longest go first. Redis has its own maxmemory."
    )
    redis_url: str = Field(
        "", description="Keeps them in Redis: needed with more than one Router, and to outlive a restart."
    )

    @field_validator("redis_url")
    @classmethod
    def _is_redis(cls, value: str) -> str:
        if value and not value.startswith(("redis://", "rediss://", "unix://")):
            raise ValueError("must begin with redis://, rediss:// or unix://")
        return value


class Config(_Strict):
    """The application's `args`."""

    models_dir: str = Field(".models", description="Relative: below the repository.")
    log_level: Literal["debug", "info", "warning", "error"] = "warning"
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
    models: Annotated[list[Model], Field(min_length=1)]

    @model_validator(mode="before")
    @classmethod
    def _adapters_take_after_their_base(cls, args: Any) -> Any:
        """An adapter has its base's tier, and what it does not say itself."""
        if not isinstance(args, dict) or not isinstance(args.get("models"), list):
            return args
        by_id = {model["id"]: model for model in args["models"] if isinstance(model, dict) and "id" in model}

        def complete(model: Any) -> Any:
            base = by_id.get(model.get("base")) if isinstance(model, dict) and model.get("base") else None
            inherited = ("tier", "context", "abilities", "thinking", "sampling")
            return {**{key: base[key] for key in inherited if key in base}, **model} if base else model

        return {**args, "models": [complete(model) for model in args["models"]]}

    @model_validator(mode="after")
    def _adapters(self) -> Self:
        engines = {model.id: model for model in self.models if not model.base}
        for index, model in enumerate(self.models):
            if model.base and model.base not in engines:
                raise ValueError(f"models[{index}].base: {model.base} is not the id of a model with an engine here")
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
            if model.tier == "lazy" and (model.resources != Resources() or model.replicas != 1 or model.autoscaling):
                raise ValueError(
                    f"{where}: resources, replicas and autoscaling of a lazy model are the pool's; remove them here"
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
            if adapters := self.adapters_of(model):
                args["enable_lora"] = True
                args["lora_modules"] = [
                    {"name": each.id, "path": each.adapter_path(self.models_dir), "base_model_name": model.id}
                    for each in adapters
                ]
            if model.tier == "lazy" and self.sleeps(model):
                args["enable_sleep_mode"] = True
            if "tools" in model.abilities:
                args.setdefault("enable_auto_tool_choice", True)
            if model.tier == "lazy" and self.pool.gpu_memory_gb and "gpu_memory_utilization" not in args:
                args["gpu_memory_utilization"] = round(model.memory_gb / self.pool.gpu_memory_gb, 4)
        return EngineSpec(
            model_id=model.id,
            kind="fake" if model.fake else "vllm",
            source="" if model.fake else model.path(self.models_dir),
            args=args,
            env=model.engine_env,
            max_ongoing=model.max_ongoing_requests,
            load_timeout_s=model.load_timeout_s,
            steer_timeout_s=model.sleep.timeout_s,
        )

    def sleeps(self, model: Model) -> bool:
        """Whether a lazy model is put to sleep rather than stopped."""
        return bool(self.pool.host_memory_gb and model.sleep.level)


def deployment_name(model: Model) -> str:
    """What a resident model's deployment is called in Serve and the Ray dashboard."""
    return "Resident-" + re.sub(r"[^A-Za-z0-9._-]+", "-", model.id)


def _found(source: str, models_dir: str) -> str:
    local = resolve_dir(models_dir) / source
    is_path = source.startswith(("/", "./", "../", "~")) or local.is_dir()
    return str(local.expanduser()) if is_path else source


def resolve_dir(path: str) -> Path:
    """A directory of the configuration: relative ones lie below the repository, wherever Ray runs us."""
    return REPOSITORY / Path(path).expanduser()


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
