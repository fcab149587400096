"""Whether the engines that share a GPU fit on it together, as the configuration says it. Pure.

Ray's `num_gpus` keeps count and no memory; vLLM's `gpu_memory_utilization` takes memory and keeps no count. Two engines
on one card whose figures disagree end in one of them running out of memory, perhaps the one that was there first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from serve_app.model_schema import Model, Pool

# Figures with a few digits need not divide exactly.
_ROUNDING = 1.005


def share_problems(models: Sequence[Model], pool: Pool) -> Iterator[str]:
    """What is wrong, as `KEY: reason`."""
    engines = [
        (f"models[{index}]", model)
        for index, model in enumerate(models)
        if not (model.fake or model.base or model.external)
    ]
    for where, model in engines:
        if model.tier == "resident":
            yield from _fraction(where, model, model.resources.num_gpus)
    lazy = [(where, model) for where, model in engines if model.tier == "lazy"]
    size, fraction = pool.gpu_memory_gb, pool.resources.num_gpus
    if size is None:
        for where, model in lazy:
            yield from _fraction(where, model, fraction)
        return
    if 0 < fraction < 1 and pool.memory_gb > fraction * size * _ROUNDING:
        yield (
            f"pool.memory_gb: {pool.memory_gb:g} is more than its share of the GPU: resources.num_gpus: {fraction:g}"
            f" of gpu_memory_gb: {size:g}"
        )
    for where, model in lazy:
        share = model.engine.get("gpu_memory_utilization")
        if isinstance(share, int | float) and share * size > model.memory_gb * _ROUNDING:
            yield (
                f"{where}.engine.gpu_memory_utilization: {share:g} of gpu_memory_gb: {size:g} is {share * size:g}, more"
                f" than memory_gb: {model.memory_gb:g}; leave it out, or raise memory_gb"
            )


def _fraction(where: str, model: Model, num_gpus: float) -> Iterator[str]:
    share = model.engine.get("gpu_memory_utilization")
    if 0 < num_gpus < 1 and not (isinstance(share, int | float) and share <= num_gpus):
        yield (
            f"{where}.engine.gpu_memory_utilization: {share or 'missing'}; a replica with num_gpus: {num_gpus:g}"
            " may take at most that share of its GPU"
        )
