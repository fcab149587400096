"""`python -m serve_app size`: from what a person types to a report."""

from __future__ import annotations

import json

from serve_app.model_schema import located
from serve_app.sizing import report
from serve_app.sizing.accelerators import gpu_bytes
from serve_app.sizing.memory import Request
from serve_app.sizing.quantization import KV_BYTES, SizingError, chosen
from serve_app.sizing.shape import read_shape
from serve_app.sizing.source import find_config


def sized(
    model: str,
    models_dir: str,
    gpu: str,
    *,
    context: int,
    quantization: str | None,
    kv_cache: str,
    tensor_parallel: int,
    concurrency: int,
    utilization: float,
    max_num_seqs: int | None = None,
    max_num_batched_tokens: int | None = None,
) -> report.Report:
    """Size a model. Raises `SizingError` that says what is wrong with what was typed, or with the model's files."""
    try:
        size = gpu_bytes(gpu)
    except ValueError as error:
        raise SizingError(f"--gpu: {error}") from None
    kind = next((known for known in KV_BYTES if known == kv_cache), None)
    if kind is None:
        raise SizingError(f"--kv-cache-dtype: {kv_cache} is not one of {', '.join(KV_BYTES)}")
    try:
        shape = read_shape(find_config(located(model, models_dir)))
        request = Request(
            gpu_bytes=size,
            context=context,
            quantization=chosen(quantization, shape.quantization),
            kv_cache=kind,
            tensor_parallel=tensor_parallel,
            utilization=utilization,
            concurrency=concurrency,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
        )
        return report.report(model, shape, request)
    except SizingError as error:
        message = str(error)
        raise SizingError(message if message.startswith(model) else f"{model}: {message}") from None


def text(this: report.Report, *, as_json: bool) -> str:
    """A report for a person, or for a program."""
    return json.dumps(this.as_json(), indent=2) if as_json else "\n".join(report.lines(this))
