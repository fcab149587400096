"""Whether the engines of a deployment file fit the GPUs that it is written for. Pure, given each model's config."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from serve_app.config import Config
from serve_app.model_schema import Model
from serve_app.sizing.accelerators import GB, accelerator_bytes
from serve_app.sizing.memory import UTILIZATION, Fit, PartsError, Request, fit
from serve_app.sizing.quantization import KvCacheType, SizingError, chosen
from serve_app.sizing.shape import Shape, read_shape

_KV_TYPES: Mapping[str, KvCacheType] = {
    "auto": "auto",
    "bfloat16": "auto",
    "float16": "auto",
    "fp8": "fp8",
    "fp8_e4m3": "fp8",
    "fp8_e5m2": "fp8",
}
# With these an engine's memory is split in ways that are not counted here.
_NOT_COUNTED = ("cpu_offload_gb", "kv_cache_memory_bytes", "num_gpu_blocks_override", "kv_offloading_size")


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """Something about a model's memory: `key` below the model's path. `certain` if it could never start."""

    key: str
    message: str
    certain: bool


def engine_fit(config: Config, model: Model, files: Mapping[str, Any]) -> tuple[Shape, Request, Fit] | None:
    """How an engine of a deployment file fits its GPU; None where that is not known, or there is none.

    `files` is the model's `config.json`. Raises `SizingError` for a model that cannot be counted.
    """
    args = config.engine_spec(model).args
    size = gpu_bytes_of(config, model)
    kv_cache = _KV_TYPES.get(str(args.get("kv_cache_dtype") or "auto"))
    if not size or not kv_cache or any(args.get(key) for key in _NOT_COUNTED) or args.get("dtype") == "float32":
        return None
    if int(args.get("pipeline_parallel_size") or 1) > 1 or args.get("quantization") not in (None, "fp8"):
        return None
    shape = read_shape(files)
    own = shape.quantization
    request = Request(
        gpu_bytes=size,
        context=model.context,
        quantization=chosen(None if own else args.get("quantization"), own),
        kv_cache=kv_cache,
        tensor_parallel=int(args.get("tensor_parallel_size") or 1),
        utilization=float(args.get("gpu_memory_utilization") or UTILIZATION),
        max_num_seqs=args.get("max_num_seqs"),
        max_num_batched_tokens=args.get("max_num_batched_tokens"),
        eager=bool(args.get("enforce_eager")),
    )
    return shape, request, fit(shape, request)


def gpu_bytes_of(config: Config, model: Model) -> int | None:
    """Memory of one GPU of this model's replica, as far as the file says; None without GPUs."""
    resources = model.resources if model.tier == "resident" else config.pool.resources
    stated = model.gpu_memory_gb if model.tier == "resident" else config.pool.gpu_memory_gb
    if not resources.num_gpus:
        return None
    return int(stated * GB) if stated else accelerator_bytes(resources.accelerator_type or "")


def findings(config: Config, model: Model, files: Mapping[str, Any] | None) -> list[Finding]:
    """What does not fit of one model; `files` is its `config.json`. What cannot be counted is not found fault with."""
    unbounded = _unbounded(config, model)
    try:
        found = engine_fit(config, model, files) if files else None
    except PartsError as error:
        return [*unbounded, Finding("engine.tensor_parallel_size", str(error), certain=True)]
    except SizingError:
        return unbounded
    if not found:
        return unbounded
    shape, request, fits = found
    return [*unbounded, *_too_small(model, shape, request, fits), *_asleep(config, model, fits)]


def _unbounded(config: Config, model: Model) -> list[Finding]:
    """The pool counts with `memory_gb`, but nothing tells the engine."""
    args = config.engine_spec(model).args
    told = "gpu_memory_utilization" in args or "kv_cache_memory_bytes" in args
    if model.tier == "resident" or not config.pool.resources.num_gpus or told:
        return []
    message = (
        f"{model.memory_gb:g} is not what the engine keeps to: without pool.gpu_memory_gb it takes"
        f" {UTILIZATION:g} of the GPU"
    )
    return [Finding("memory_gb", message, certain=False)]


def _too_small(model: Model, shape: Shape, request: Request, fits: Fit) -> list[Finding]:
    if fits.fits:
        return []
    key = "context" if model.tier == "resident" else "memory_gb"
    missing = fits.weight_bytes + fits.estimate_bytes + fits.request_bytes - fits.budget_bytes
    message = (
        f"{request.context} tokens need {_gb(fits.request_bytes)} of KV cache beside {_gb(fits.weight_bytes)} of"
        f" weights and about {_gb(fits.estimate_bytes)} for the forward pass and CUDA; it may take"
        f" {_gb(fits.budget_bytes)} of a {_gb(request.gpu_bytes)} GPU, {_gb(missing)} too little; see"
        f" `python -m serve_app size --gpu {request.gpu_bytes / GB:g}GB --model {model.source}"
        f" --context {request.context}`"
    )
    return [Finding(key, message, certain=fits.surely_too_small)]


def _asleep(config: Config, model: Model, fits: Fit) -> list[Finding]:
    """At level 1 the weights wait in the host's memory."""
    kept = model.sleep.host_gb
    if model.tier == "resident" or not config.sleeps(model) or model.sleep.level != 1 or kept is None:
        return []
    if kept * GB >= fits.weight_bytes:
        return []
    return [Finding("sleep.host_gb", f"{kept:g}; its weights are {_gb(fits.weight_bytes)}", certain=False)]


def _gb(count: int) -> str:
    return f"{count / GB:.1f} GB"
