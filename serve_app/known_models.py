"""Facts about models that cannot be read on a machine without their files.

From the `config.json` of each repository on the Hugging Face hub.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# hidden_size, intermediate_size (of an expert in the mixtures), num_hidden_layers, num_attention_heads,
# num_key_value_heads, vocab_size, tie_word_embeddings, and max_position_embeddings: the most tokens of prompt and
# answer without rope scaling. head_dim is 128 in all of them.
_QWEN3: Mapping[str, tuple[int, int, int, int, int, int, bool, int]] = {
    "Qwen/Qwen3-0.6B": (1024, 3072, 28, 16, 8, 151936, True, 40960),
    "Qwen/Qwen3-1.7B": (2048, 6144, 28, 16, 8, 151936, True, 40960),
    "Qwen/Qwen3-4B": (2560, 9728, 36, 32, 8, 151936, True, 40960),
    "Qwen/Qwen3-8B": (4096, 12288, 36, 32, 8, 151936, False, 40960),
    "Qwen/Qwen3-14B": (5120, 17408, 40, 40, 8, 151936, False, 40960),
    "Qwen/Qwen3-32B": (5120, 25600, 64, 64, 8, 151936, False, 40960),
    "Qwen/Qwen3-30B-A3B": (2048, 768, 48, 32, 4, 151936, False, 40960),
    "Qwen/Qwen3-235B-A22B": (4096, 1536, 94, 64, 4, 151936, False, 40960),
    "Qwen/Qwen3-Embedding-0.6B": (1024, 3072, 28, 16, 8, 151669, True, 32768),
    "Qwen/Qwen3-Embedding-4B": (2560, 9728, 36, 32, 8, 151665, True, 40960),
    "Qwen/Qwen3-Reranker-0.6B": (1024, 3072, 28, 16, 8, 151669, True, 40960),
}
_QUANTIZED: Mapping[str, Mapping[str, Any]] = {
    "-FP8": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    "-AWQ": {"quant_method": "awq", "bits": 4, "group_size": 128},
    "-GPTQ-Int4": {"quant_method": "gptq", "bits": 4, "group_size": 128},
    "-GPTQ-Int8": {"quant_method": "gptq", "bits": 8, "group_size": 128},
}
# Which of them Qwen publishes in which format (its organisation's list on the hub).
_PUBLISHED: Mapping[str, str] = {
    "fp8": "-FP8 of 0.6B 1.7B 4B 8B 14B 32B 30B-A3B 235B-A22B",
    "awq": "-AWQ of 4B 8B 14B 32B",
}


def known_config(source: str) -> Mapping[str, Any] | None:
    """What `config.json` says of a model's dimensions, where they are known."""
    suffix = next((suffix for suffix in _QUANTIZED if source.endswith(suffix)), "")
    base = source.removesuffix(suffix)
    if (facts := _QWEN3.get(base)) is None:
        return None
    hidden, width, layers, heads, kv_heads, vocabulary, tied, context = facts
    config: dict[str, Any] = {
        "model_type": "qwen3",
        "hidden_size": hidden,
        "intermediate_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 128,
        "vocab_size": vocabulary,
        "tie_word_embeddings": tied,
        "max_position_embeddings": context,
    }
    if "-A" in base:
        # Both mixtures have 128 experts; intermediate_size is of no layer.
        config |= {"model_type": "qwen3_moe", "moe_intermediate_size": width, "num_experts": 128}
    if suffix:
        config["quantization_config"] = _QUANTIZED[suffix]
    return config


def published_as(source: str, quantization: str) -> str | None:
    """The repository with the same weights in this format, where its maker has published one."""
    suffix, _, sizes = _PUBLISHED.get(quantization, "").partition(" of ")
    size = source.removeprefix("Qwen/Qwen3-")
    return source + suffix if source in _QWEN3 and size in sizes.split() else None


def native_context(source: str) -> int | None:
    """Tokens that a model takes without rope scaling: from its files if they are here, else if it is known."""
    file = Path(source) / "config.json"
    config = json.loads(file.read_text()) if file.is_file() else known_config(source) or {}
    value = config.get("max_position_embeddings")
    return int(value) if value else None
