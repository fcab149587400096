"""Facts about models that cannot be read on a machine without their files.

From the `config.json` of each repository on the Hugging Face hub.
"""

from __future__ import annotations

import json
from pathlib import Path

# max_position_embeddings: the most tokens of prompt and answer without rope scaling.
_CONTEXT = {
    "Qwen/Qwen3-0.6B": 40960,
    "Qwen/Qwen3-1.7B": 40960,
    "Qwen/Qwen3-4B": 40960,
    "Qwen/Qwen3-8B": 40960,
    "Qwen/Qwen3-14B": 40960,
    "Qwen/Qwen3-32B": 40960,
    "Qwen/Qwen3-Embedding-0.6B": 32768,
    "Qwen/Qwen3-Embedding-4B": 40960,
    "Qwen/Qwen3-Reranker-0.6B": 40960,
}
_QUANTIZED = ("-FP8", "-AWQ", "-GPTQ-Int4", "-GPTQ-Int8")


def native_context(source: str) -> int | None:
    """Tokens that a model takes without rope scaling: from its files if they are here, else if it is known."""
    config = Path(source) / "config.json"
    if config.is_file():
        value = json.loads(config.read_text()).get("max_position_embeddings")
        return int(value) if value else None
    for suffix in _QUANTIZED:
        source = source.removesuffix(suffix)
    return _CONTEXT.get(source)
