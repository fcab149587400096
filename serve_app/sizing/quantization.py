"""How many bytes the weights take in each of the formats that are counted here. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args

Quantization = Literal["none", "fp8", "awq", "int8", "int4"]
KvCacheType = Literal["auto", "fp8"]


class SizingError(ValueError):
    """A model cannot be sized; the message says why and, where there is one, the way out."""


# Bytes for each parameter of a linear layer. fp8: one, and a 16-bit scale for each block of 128 x 128 (Qwen's own FP8
# files). 4 bits: half, and for each group of 128 a 16-bit scale and a 4-bit zero point (AWQ and GPTQ files alike).
# int8: one, and a 16-bit scale for each group of 128.
LINEAR_BYTES: Mapping[Quantization, float] = {
    "none": 2.0,
    "fp8": 1 + 2 / 128**2,
    "awq": 0.5 + (2 + 0.5) / 128,
    "int4": 0.5 + (2 + 0.5) / 128,
    "int8": 1 + 2 / 128,
}
# Embeddings, output head, norms and gates: 16 bits in every format here.
PLAIN_BYTES = 2
# One element of the KV cache. `auto` is the model's own type, and bf16 or fp16 for every model here.
KV_BYTES: Mapping[KvCacheType, int] = {"auto": 2, "fp8": 1}


def quantization_of(config: Mapping[str, Any] | None) -> Quantization:
    """The format that a `quantization_config` stands for. Raises `SizingError` for others."""
    if not config:
        return "none"
    method = str(config.get("quant_method", "")).lower()
    if method in ("fp8", "awq"):
        return "fp8" if method == "fp8" else "awq"
    if method == "gptq":
        return _of_bits(config.get("bits"), "int", method)
    if method == "compressed-tensors":
        groups = config.get("config_groups")
        weights = [group.get("weights") or {} for group in groups.values()] if isinstance(groups, dict) else []
        found = {_of_bits(each.get("num_bits"), str(each.get("type", "int")), method) for each in weights}
        if len(found) == 1:
            return found.pop()
    raise SizingError(f"quantization_config: {method or 'no quant_method'}: a format that is not counted here")


def _of_bits(bits: object, kind: str, method: str) -> Quantization:
    known: Mapping[tuple[object, str], Quantization] = {
        (8, "float"): "fp8",
        (8, "int"): "int8",
        (4, "int"): "int4",
    }
    if (bits, kind) not in known:
        raise SizingError(f"quantization_config: {method} with {bits} bits of type {kind}: not counted here")
    return known[bits, kind]


def chosen(asked: str | None, config: Mapping[str, Any] | None) -> Quantization:
    """What the weights are in: as the files say, or as asked for of plain files. Raises `SizingError`."""
    if asked is not None and asked not in get_args(Quantization):
        raise SizingError(f"quantization: {asked} is not one of {', '.join(get_args(Quantization))}")
    if not config:
        return "none" if asked is None else _named(asked)
    own = quantization_of(config)
    if asked is not None and asked != own:
        raise SizingError(f"quantization: {asked} asked for, but these weights are {own}; name the plain model")
    return own


def _named(asked: str) -> Quantization:
    return next(name for name in get_args(Quantization) if name == asked)
