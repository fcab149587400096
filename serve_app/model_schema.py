"""The sections of the configuration that are about models: each one, and the pool of the lazy ones."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from serve_app.autoscaling_schema import PoolAutoscaling, ResidentAutoscaling
from serve_app.engine_arguments import refused_arguments
from serve_app.external_schema import External
from serve_app.strict import VARIABLE, Strict

REPOSITORY = Path(__file__).resolve().parent.parent

Tier = Literal["resident", "lazy"]
Ability = Literal["chat", "completions", "tools", "json", "vision", "embeddings", "score"]
# `model:think`: the same model, with its thinking on or off.
PROFILES: Mapping[str, bool] = {"think": True, "fast": False}
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


class Thinking(Strict):
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


class Sampling(Strict):
    """Sampling values for one mode, used where the client set none. Unset: the model's own."""

    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None

    def values(self) -> dict[str, float | int]:
        """The values that are set, by request field."""
        return self.model_dump(exclude_none=True)


class SamplingByMode(Strict):
    """Sampling defaults when the model thinks and when it does not."""

    thinking: Sampling = Sampling()
    plain: Sampling = Sampling()


class Resources(Strict):
    """What Ray must find on a node for one replica."""

    num_cpus: Annotated[float, Field(ge=0)] = 1
    num_gpus: Annotated[float, Field(ge=0)] = 0
    accelerator_type: str | None = None
    custom: dict[str, float] = Field(default_factory=dict)

    @field_validator("num_gpus")
    @classmethod
    def _as_ray_counts(cls, value: float) -> float:
        if value > 1 and value != int(value):
            raise ValueError("must be a whole number, or less than 1: Ray shares out parts of one GPU only")
        return value

    def actor_options(self) -> dict[str, Any]:
        """As Ray's `ray_actor_options`."""
        options: dict[str, Any] = {"num_cpus": self.num_cpus, "num_gpus": self.num_gpus}
        if self.accelerator_type:
            options["accelerator_type"] = self.accelerator_type
        if self.custom:
            options["resources"] = self.custom
        return options


class FakeScript(Strict):
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
    call: str = ""
    kv_places: int = 0
    fail_at: int = -1
    die_at: int = -1
    stall_at: int = -1
    wedge_at: int = -1
    cut: int = 0


class Sleep(Strict):
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


class Queue(Strict):
    """Requests that wait because every place of every replica is taken."""

    size: Annotated[int, Field(ge=0)] = Field(100, description="How many may wait in one Router; 0: none does.")
    wait_s: Annotated[float, Field(gt=0)] = Field(10, description="Then a request is refused.")


class Model(Strict):
    """One model that clients can ask for."""

    id: Annotated[str, Field(min_length=1, max_length=200)]
    aliases: list[Annotated[str, Field(min_length=1, max_length=200)]] = Field(default_factory=list)
    tier: Tier
    source: str = Field("", description="Hub id, or a path (relative: below models_dir).")
    context: Annotated[int, Field(ge=16)] = Field(description="Tokens of prompt and answer together.")
    abilities: Annotated[list[Ability], Field(min_length=1)] = ["chat", "completions"]  # noqa: RUF012 # pydantic copies it
    thinking: Thinking = Thinking()
    sampling: SamplingByMode = SamplingByMode()
    base: str | None = Field(
        None, description="Id of the model whose engine runs this one: it is a LoRA adapter, and takes no engine."
    )
    adapter: str = Field("", description="The adapter's directory (relative: below models_dir) or hub id.")
    control_tokens: Literal["neutralise", "refuse", "pass"] = Field(
        "neutralise",
        description="What becomes of a chat template's markers in the text of a chat, e.g. `<|im_end|>`: broken in two"
        " by a space, refused with 400, or left to be read as what they say.",
    )
    priority: int = Field(0, description="Higher stays longer when lazy models compete for memory.")
    memory_gb: Annotated[float, Field(gt=0)] = Field(
        1.0,
        description="Memory of the running engine: weights, KV cache, processes. GPU memory where GPUs are used.",
    )
    max_ongoing_requests: Annotated[int, Field(ge=1)] = Field(
        256, description="Requests in flight in one replica; the next is refused with 503, exactly."
    )
    queue: Queue = Queue()
    kv_cache_limit: Annotated[float, Field(gt=0, le=1)] | None = Field(
        None,
        description="From this part of its KV cache in use on, and while a request waits for it, an engine takes no"
        " more: they wait in the queue. Unset: they wait in the engine.",
    )
    max_prompt_tokens: Annotated[int, Field(ge=1)] | None = Field(
        None, description="Longer prompts are refused with 400: by count, or by estimate without a tokenizer here."
    )
    max_answer_tokens: Annotated[int, Field(ge=1)] | None = Field(
        None, description="A larger max_tokens is refused with 400, and one that is not given is this."
    )
    max_logprobs: Annotated[int, Field(ge=0)] = Field(
        20,
        description="More alternatives for a token (top_logprobs, prompt_logprobs) are refused with 400: for each"
        " token of a long prompt they take gigabytes.",
    )
    ttft_timeout_s: Annotated[float, Field(gt=0)] | None = Field(
        600, description="From the request to its first token (or the whole answer of one that does not stream)."
    )
    idle_timeout_s: Annotated[float, Field(gt=0)] | None = Field(120, description="Between two tokens of a stream.")
    total_timeout_s: Annotated[float, Field(gt=0)] | None = Field(None, description="For the whole answer.")
    stall_timeout_s: Annotated[float, Field(gt=0)] | None = Field(
        300, description="An engine that has requests and takes no step for so long hangs, and is started again."
    )
    engine: dict[str, Any] = Field(default_factory=dict, description="vLLM engine arguments, underscored.")
    engine_env: dict[str, str] = Field(default_factory=dict, description="Environment of the engine process.")
    trust_remote_code: bool = Field(False, description="Run Python code that comes with the model's files.")
    fake: FakeScript | None = None
    external: External | None = Field(
        None, description="An OpenAI-compatible server that runs elsewhere answers, instead of an engine of ours."
    )
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
    gpu_memory_gb: Annotated[float, Field(gt=0)] | None = Field(
        None, description="Size of one of its GPUs, for `check`; unset: by resources.accelerator_type. Resident only."
    )
    replicas: Annotated[int, Field(ge=1)] = Field(1, description="Resident models only.")
    autoscaling: ResidentAutoscaling | None = Field(None, description="Resident models only; instead of replicas.")

    @field_validator("engine", "engine_env")
    @classmethod
    def _filled_in(cls, value: dict[str, Any]) -> dict[str, Any]:
        for key, given in value.items():
            if isinstance(given, str) and (found := VARIABLE.search(given)):
                raise ValueError(f".{key}: {found[0]} stays as it is: nothing fills in variables here; write the value")
        return value

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
        if self.autoscaling and self.max_ongoing_requests == 1:
            raise ValueError("max_ongoing_requests: 1 leaves autoscaling nothing to go by; give 2 or more")
        target = self.autoscaling.target_ongoing_requests if self.autoscaling else None
        if target is not None and target >= self.max_ongoing_requests:
            raise ValueError(
                f"autoscaling.target_ongoing_requests: {target} must be less than max_ongoing_requests:"
                f" {self.max_ongoing_requests}; a full replica would never ask for another one"
            )
        if bool(self.base) != bool(self.adapter):
            raise ValueError("base: a LoRA adapter has both base and adapter")
        if self.base:
            if self.engine or self.source or self.fake or self.trust_remote_code:
                raise ValueError(
                    "base: an adapter runs on its base's engine; remove source, engine, trust_remote_code and fake"
                )
            return self
        if self.external:
            self._check_external()
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

    def _check_external(self) -> None:
        """What a server of somebody else's takes nothing of is a mistake where it is said."""
        if self.tier != "resident":
            raise ValueError("tier: an external server is always there; it is resident")
        ours = ("engine", "engine_env", "fake", "trust_remote_code", "replicas", "resources", "autoscaling")
        fields = type(self).model_fields
        given = [name for name in ours if getattr(self, name) != fields[name].get_default(call_default_factory=True)]
        if given:
            raise ValueError(f"{given[0]}: is for engines of ours, and an external server is none; remove it")

    def _check_parsers(self) -> None:
        """Without its parser vLLM answers raw tags in the text, or refuses the fields that need it."""
        if self.thinking.supported and not self.engine.get("reasoning_parser"):
            raise ValueError("engine.reasoning_parser: missing; a model with thinking.supported needs one")
        if "tools" in self.abilities and not self.engine.get("tool_call_parser"):
            raise ValueError("engine.tool_call_parser: missing; a model with the ability tools needs one")
        if {"embeddings", "score"} & set(self.abilities) and {"chat", "completions"} & set(self.abilities):
            raise ValueError("abilities: an engine makes embeddings and scores, or text; not both")

    @property
    def asleep_host_gb(self) -> float:
        """Host memory that it takes asleep."""
        if self.sleep.level == 2:
            return 0.0
        return self.memory_gb if self.sleep.host_gb is None else self.sleep.host_gb

    @property
    def least_replicas(self) -> int:
        """So many replicas are there whatever the load."""
        return self.autoscaling.min_replicas if self.autoscaling else self.replicas

    @property
    def served_name(self) -> str:
        """What the engine that answers calls the model."""
        return (self.external.model if self.external else "") or self.id

    def path(self, models_dir: str) -> str:
        """Where the engine finds the model: a directory below `models_dir` if there is one, else the hub id."""
        return located(self.source, models_dir)

    def adapter_path(self, models_dir: str) -> str:
        """Where the engine finds the adapter, likewise."""
        return located(self.adapter, models_dir)


class Pool(Strict):
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


def located(source: str, models_dir: str) -> str:
    """A path, or a directory below `models_dir` if there is one of that name, else the hub id as it is."""
    local = resolve_dir(models_dir) / source
    is_path = source.startswith(("/", "./", "../", "~")) or local.is_dir()
    return str(local.expanduser()) if is_path else source


def resolve_dir(path: str) -> Path:
    """A directory of the configuration: relative ones lie below the repository, wherever Ray runs us."""
    return REPOSITORY / Path(path).expanduser()
