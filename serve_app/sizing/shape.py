"""The dimensions of a model, read from its `config.json`, and how many parameters they make. Pure.

The formulas are those of the implementations in transformers, with which `tests/contract/test_sizing.py` compares the
counts. An architecture that is not here is refused: a wrong figure is worse than none.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from serve_app.sizing.quantization import SizingError

# Decoders whose every layer is attention and an MLP or experts, by `model_type`.
_FAMILIES = ("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "phi3", "gemma3_text", "deepseek_v3")
# What makes a config one of these, and what it would take to count it.
_OTHERS = {
    "vision_config": "takes images, and its vision tower is not counted here",
    "audio_config": "takes audio, and its encoder is not counted here",
    "linear_num_value_heads": "has linear attention, whose state is no KV cache",
    "ssm_cfg": "is a state space model, which has no KV cache",
    "mamba_d_state": "has Mamba layers, whose state is no KV cache",
}


@dataclasses.dataclass(frozen=True, slots=True)
class LatentAttention:
    """DeepSeek's MLA: the cache holds one latent vector a token and layer, shared by all heads."""

    kv_rank: int
    query_rank: int | None
    nope_dim: int
    rope_dim: int
    value_dim: int


@dataclasses.dataclass(frozen=True, slots=True)
class Experts:
    """The mixture in a layer: routed experts of this width, and shared ones that every token passes."""

    count: int
    width: int
    shared_width: int
    layers: int


@dataclasses.dataclass(frozen=True, slots=True)
class Shape:
    """What memory depends on. Sizes in elements; `window_layers` keep only the last `window` tokens."""

    family: str
    layers: int
    hidden: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    tied: bool
    attention_bias: bool
    latent: LatentAttention | None
    experts: Experts | None
    window: int | None
    window_layers: int
    context: int | None
    quantization: Mapping[str, Any] | None


@dataclasses.dataclass(frozen=True, slots=True)
class Parameters:
    """`linear` are those that quantization makes smaller; embeddings and output head stay as they are, as norms do."""

    embedding: int
    linear: int
    other: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.embedding + self.linear + self.other


def read_shape(config: Mapping[str, Any]) -> Shape:
    """Read a `config.json`. Raises `SizingError` for what is no such thing or cannot be counted here."""
    family = config.get("model_type")
    for key, why in _OTHERS.items():
        if config.get(key) is not None:
            raise SizingError(f"model_type {family}: {why}")
    if config.get("is_encoder_decoder"):
        raise SizingError(f"model_type {family}: an encoder-decoder, which has caches of two kinds")
    if family not in _FAMILIES:
        raise SizingError(f"model_type {family}: not one of those counted here: {', '.join(_FAMILIES)}")
    layers, heads, hidden = (_count(config, key) for key in ("num_hidden_layers", "num_attention_heads", "hidden_size"))
    window, window_layers = _windows(config, str(family), layers)
    return Shape(
        family=str(family),
        layers=layers,
        hidden=hidden,
        width=_count(config, "intermediate_size"),
        heads=heads,
        kv_heads=_count(config, "num_key_value_heads", heads),
        head_dim=_count(config, "head_dim", hidden // heads),
        vocabulary=_count(config, "vocab_size"),
        tied=bool(config.get("tie_word_embeddings", family == "gemma3_text")),
        attention_bias=bool(config.get("attention_bias", False)),
        latent=_latent(config) if family == "deepseek_v3" else None,
        experts=_experts(config, str(family), layers),
        window=window,
        window_layers=window_layers,
        context=_count(config, "max_position_embeddings", 0) or None,
        quantization=config.get("quantization_config"),
    )


def _count(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = config.get(key)
    if value is None and default is not None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise SizingError(f"config.json: {key}: {'missing' if value is None else 'must be a whole number above 0'}")
    return value


def _latent(config: Mapping[str, Any]) -> LatentAttention:
    return LatentAttention(
        kv_rank=_count(config, "kv_lora_rank"),
        query_rank=_count(config, "q_lora_rank", 0) or None,
        nope_dim=_count(config, "qk_nope_head_dim"),
        rope_dim=_count(config, "qk_rope_head_dim"),
        value_dim=_count(config, "v_head_dim"),
    )


def _experts(config: Mapping[str, Any], family: str, layers: int) -> Experts | None:
    if family == "mixtral":
        return Experts(_count(config, "num_local_experts"), _count(config, "intermediate_size"), 0, layers)
    if family == "qwen3_moe":
        step, dense = _count(config, "decoder_sparse_step", 1), set(config.get("mlp_only_layers") or ())
        sparse = sum((layer + 1) % step == 0 and layer not in dense for layer in range(layers))
        return Experts(_count(config, "num_experts"), _count(config, "moe_intermediate_size"), 0, sparse)
    if family == "deepseek_v3":
        width = _count(config, "moe_intermediate_size")
        shared = width * _count(config, "n_shared_experts", 0)
        dense_layers = _count(config, "first_k_dense_replace", 0) if config.get("first_k_dense_replace") else 0
        return Experts(_count(config, "n_routed_experts"), width, shared, layers - dense_layers)
    return None


def _windows(config: Mapping[str, Any], family: str, layers: int) -> tuple[int | None, int]:
    """The sliding window and how many layers have it: by `layer_types`, or by the family's rule in older files."""
    window = config.get("sliding_window")
    if not window or config.get("use_sliding_window") is False:
        return None, 0
    window = _count(config, "sliding_window")
    types = config.get("layer_types")
    if types is not None:
        if not isinstance(types, Sequence) or set(types) - {"full_attention", "sliding_attention"}:
            raise SizingError("config.json: layer_types: other than full_attention and sliding_attention")
        return window, sum(kind == "sliding_attention" for kind in types)
    if family == "gemma3_text":
        pattern = _count(config, "sliding_window_pattern", 6)
        return window, layers - layers // pattern
    # Qwen2 and Qwen3 slide from max_window_layers on, where they do at all; all layers of the others do.
    full = _count(config, "max_window_layers", 0) if family in ("qwen2", "qwen3") else 0
    return (window, max(0, layers - full)) if family in ("mistral", "mixtral", "phi3") or full else (None, 0)


def parameters(shape: Shape) -> Parameters:
    """Count them, as the weights that are loaded (without a drafter such as DeepSeek's MTP)."""
    embedding = shape.vocabulary * shape.hidden * (1 if shape.tied else 2)
    attention, attention_other = _attention(shape)
    norms = (4 if shape.family == "gemma3_text" else 2) * shape.hidden
    linear, other = shape.layers * attention, shape.layers * (attention_other + norms) + shape.hidden
    experts = shape.experts
    sparse = experts.layers if experts else 0
    linear += (shape.layers - sparse) * 3 * shape.hidden * shape.width
    if experts:
        linear += sparse * 3 * shape.hidden * (experts.count * experts.width + experts.shared_width)
        other += sparse * experts.count * shape.hidden  # the gates, which no quantization touches
    return Parameters(embedding, linear, other)


def _attention(shape: Shape) -> tuple[int, int]:
    """Of one layer: its matrices, and its biases and norms."""
    if latent := shape.latent:
        query = shape.heads * (latent.nope_dim + latent.rope_dim)
        rank = latent.query_rank
        linear = (shape.hidden * rank + rank * query) if rank else shape.hidden * query
        linear += shape.hidden * (latent.kv_rank + latent.rope_dim)
        linear += latent.kv_rank * shape.heads * (latent.nope_dim + latent.value_dim)
        linear += shape.heads * latent.value_dim * shape.hidden
        return linear, latent.kv_rank + (rank or 0)
    query, cached = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    linear = 2 * shape.hidden * query + 2 * shape.hidden * cached
    other = 0
    if shape.family == "qwen2" or shape.attention_bias:
        other += query + 2 * cached
    if shape.attention_bias and shape.family != "qwen2":
        other += shape.hidden
    if shape.family in ("qwen3", "qwen3_moe", "gemma3_text"):
        other += 2 * shape.head_dim
    return linear, other
