"""What `python -m serve_app size` prints: the figures, whether they fit, and what to write into a deployment file."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from serve_app.known_models import published_as
from serve_app.sizing.accelerators import GB
from serve_app.sizing.memory import Fit, Request, fit, longest_context, ways_to_fit
from serve_app.sizing.shape import Shape, parameters

_NAMES = {"none": "16-bit", "fp8": "FP8", "awq": "AWQ 4-bit", "int4": "4-bit", "int8": "INT8"}
# With more at once the queue is in the engine instead of in front of it, where it is fair.
_MOST_SEQUENCES = 256


@dataclasses.dataclass(frozen=True, slots=True)
class Report:
    """One model on one kind of GPU."""

    source: str
    shape: Shape
    request: Request
    fit: Fit

    def as_json(self) -> dict[str, Any]:
        """The figures for another program, in bytes."""
        return {
            "model": self.source,
            "parameters": parameters(self.shape).total,
            **dataclasses.asdict(self.request),
            **dataclasses.asdict(self.fit),
            "kv_bytes": self.fit.kv_bytes,
            "kv_tokens": self.fit.tokens,
            "contexts": round(self.fit.contexts, 2),
            "fits": self.fit.fits,
            "longest_context": longest_context(self.shape, self.request),
            "engine": engine_arguments(self),
            "memory_gb": memory_gb(self),
        }


def report(source: str, shape: Shape, request: Request) -> Report:
    """Size a model. Raises `SizingError` where it cannot be cut into so many parts."""
    return Report(source, shape, request, fit(shape, request))


def engine_arguments(this: Report) -> dict[str, Any]:
    """Suggested `engine:` of a deployment file."""
    args: dict[str, Any] = {"gpu_memory_utilization": this.request.utilization}
    if this.request.tensor_parallel > 1:
        args["tensor_parallel_size"] = this.request.tensor_parallel
    if this.request.kv_cache != "auto":
        args["kv_cache_dtype"] = this.request.kv_cache
    # A request uses a quarter of its context more often than all of it; vLLM preempts where that was wrong.
    sequences = this.request.max_num_seqs or min(_MOST_SEQUENCES, max(1, math.floor(4 * this.fit.contexts)))
    args["max_num_seqs"] = sequences
    return args


def memory_gb(this: Report) -> float:
    """`memory_gb` of a lazy model that holds as many full contexts as were asked for; of each of its GPUs."""
    needed = this.fit.weight_bytes + this.fit.estimate_bytes + this.request.concurrency * this.fit.request_bytes
    return math.ceil(2 * needed / GB) / 2


def lines(this: Report) -> list[str]:
    """For a person."""
    shape, request, found = this.shape, this.request, this.fit
    attention = (
        f"a latent of {shape.latent.kv_rank}" if shape.latent else f"{shape.kv_heads} KV heads of {shape.head_dim}"
    )
    each = f" on each of {request.tensor_parallel} GPUs" if request.tensor_parallel > 1 else ""
    text = [
        f"{this.source}: {parameters(shape).total / 1e9:.2f} billion parameters, {shape.layers} layers, {attention}",
        f"{_gb(request.gpu_bytes)} of GPU memory{each}, {request.utilization:.0%} of it for the engine:"
        f" {_gb(found.budget_bytes)}",
        "",
        f"  weights, {_NAMES[request.quantization]:<20} {_gb(found.weight_bytes):>9}",
        f"  forward pass, graphs, CUDA    {_gb(found.estimate_bytes):>8}  (estimated; vLLM measures it)",
        f"  left for the KV cache         {_gb(max(0, found.kv_bytes)):>8}  {_kv(this)}",
        "",
    ]
    return text + (_fitting(this) if found.fits else _not_fitting(this))


def _kv(this: Report) -> str:
    found, shape = this.fit, this.shape
    if shape.window_layers:
        return (
            f"({_gb(found.request_bytes)} for a full context; {shape.window_layers} layers keep {shape.window} tokens)"
        )
    return f"({found.kv_bytes_per_token:,} bytes a token: {found.tokens:,} tokens)"


def _fitting(this: Report) -> list[str]:
    request, found = this.request, this.fit
    args = ", ".join(f"{key}: {value}" for key, value in engine_arguments(this).items())
    text = [
        f"It fits: {found.contexts:.1f} requests of {request.context:,} tokens at once, or more shorter ones.",
        "",
        f"  source: {_source(this.source, this.shape, request)}",
        f"  context: {request.context}",
        f"  engine: {{{args}}}",
        f"  memory_gb: {memory_gb(this):g}  # as a lazy model, with {request.concurrency} full context(s)",
    ]
    if this.shape.context and request.context > this.shape.context:
        text.append(f"  # more than its {this.shape.context:,} tokens: needs rope scaling (docs/hardware.md)")
    return text


def _not_fitting(this: Report) -> list[str]:
    request, found = this.request, this.fit
    missing = found.weight_bytes + found.estimate_bytes + request.concurrency * found.request_bytes - found.budget_bytes
    text = [f"It does not fit: {request.concurrency} x {request.context:,} tokens miss {_gb(missing)}."]
    if longest := longest_context(this.shape, request):
        text.append(f"  the longest context here is {longest:,} tokens")
    ways = ways_to_fit(this.shape, request)[:4]
    text += ["", "What would:"] if ways else ["  nothing that is known here makes it fit on eight such GPUs"]
    for way in ways:
        options = [f"--quantization {way.quantization}"] if way.quantization != "none" else []
        options += [f"--kv-cache-dtype {way.kv_cache}"] if way.kv_cache != "auto" else []
        options += [f"--tensor-parallel {way.tensor_parallel}"] if way.tensor_parallel > 1 else []
        fits = fit(this.shape, way)
        text.append(f"  {' '.join(options):<62} {fits.contexts:.1f} contexts")
    return text


def _source(source: str, shape: Shape, request: Request) -> str:
    """The weights in the format that was asked for."""
    if request.quantization == "none" or shape.quantization:
        return source
    if published := published_as(source, request.quantization):
        return published
    return f"<what `python -m serve_app quantize {source} --scheme {request.quantization}` writes>"


def _gb(count: int) -> str:
    return f"{count / GB:.1f} GB"
