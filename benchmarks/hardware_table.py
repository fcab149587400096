"""The table of docs/hardware.md, computed and not measured: `python -m benchmarks.hardware_table`."""

from __future__ import annotations

from serve_app.known_models import known_config
from serve_app.sizing.accelerators import GB
from serve_app.sizing.memory import Request, fit, longest_context
from serve_app.sizing.quantization import KvCacheType, quantization_of
from serve_app.sizing.shape import read_shape

# Card (decimal GB), GPUs of one engine, model, context, KV cache type.
ROWS: tuple[tuple[int, int, str, int, KvCacheType], ...] = (
    (16, 1, "Qwen/Qwen3-4B", 16384, "auto"),
    (16, 1, "Qwen/Qwen3-8B-AWQ", 16384, "auto"),
    (16, 1, "Qwen/Qwen3-14B-AWQ", 16384, "auto"),
    (24, 1, "Qwen/Qwen3-8B-FP8", 32768, "auto"),
    (24, 1, "Qwen/Qwen3-14B-AWQ", 16384, "auto"),
    (24, 1, "Qwen/Qwen3-14B-FP8", 16384, "auto"),
    (24, 1, "Qwen/Qwen3-14B-FP8", 16384, "fp8"),
    (24, 1, "Qwen/Qwen3-14B", 16384, "auto"),
    (24, 2, "Qwen/Qwen3-14B", 16384, "auto"),
    (48, 1, "Qwen/Qwen3-14B", 32768, "auto"),
    (48, 1, "Qwen/Qwen3-32B-FP8", 32768, "auto"),
    (80, 1, "Qwen/Qwen3-14B-FP8", 32768, "auto"),
    (80, 1, "Qwen/Qwen3-14B", 32768, "auto"),
    (80, 1, "Qwen/Qwen3-14B-FP8", 131072, "auto"),
    (80, 1, "Qwen/Qwen3-32B-FP8", 32768, "auto"),
    (80, 1, "Qwen/Qwen3-32B", 32768, "auto"),
    (80, 2, "Qwen/Qwen3-32B", 32768, "auto"),
    (80, 1, "Qwen/Qwen3-30B-A3B", 32768, "auto"),
    (80, 4, "Qwen/Qwen3-235B-A22B-FP8", 32768, "auto"),
)


def table() -> str:
    """In Markdown."""
    lines = [
        "| GPU memory | model | context | KV cache | weights, GB | estimated rest, GB | KV cache, GB | full contexts"
        " | longest context |",
        "|---|---|---:|---|---:|---:|---:|---:|---:|",
    ]
    for gigabytes, parts, model, context, kv_cache in ROWS:
        config = known_config(model) or {}
        shape = read_shape(config)
        request = Request(gigabytes * GB, context, quantization_of(shape.quantization), kv_cache, tensor_parallel=parts)
        found = fit(shape, request)
        contexts = f"{found.contexts:.1f}" if found.fits else "does not fit"
        longest = longest_context(shape, request)
        lines.append(
            f"| {parts} x {gigabytes} GB | {model} | {context:,} | {'16-bit' if kv_cache == 'auto' else 'FP8'}"
            f" | {found.weight_bytes / GB:.1f} | {found.estimate_bytes / GB:.1f} | {max(0, found.kv_bytes) / GB:.1f}"
            f" | {contexts} | {longest:,} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
