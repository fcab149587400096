"""Exact prompt sizes, counted with a model's own tokenizer, for prompts that may or may not fit.

Only asked near a limit. Where no tokenizer file is at hand (a hub model that was never loaded on this node) the
estimate has to do; the engine then counts and refuses.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import orjson
from huggingface_hub import try_to_load_from_cache
from tokenizers import Tokenizer

from serve_app.model_schema import Model
from serve_app.routing.excerpt import text_of

logger = logging.getLogger(__name__)

# What a chat template adds around a message, at most, in tokens (Qwen3: 5; a tool preamble: about 130).
_PER_MESSAGE = 5
_TOOL_PREAMBLE = 130


def _as_json(value: Any) -> str:
    try:
        return orjson.dumps(value).decode()
    except orjson.JSONEncodeError:
        return ""  # nested too deeply: refused when the body is written for the engine


class TokenCounter:
    """Tokenizers by model, loaded when first needed, used in threads."""

    def __init__(self, models_dir: str) -> None:
        self._models_dir = models_dir
        self._tokenizers: dict[str, Tokenizer | None] = {}

    async def count(self, model: Model, body: dict[str, Any]) -> int | None:
        """Tokens of the prompt, None where the tokenizer is not at hand."""
        if not model.source:
            return None
        return await asyncio.to_thread(self._count, model, body)

    def _count(self, model: Model, body: dict[str, Any]) -> int | None:
        if model.id not in self._tokenizers:
            self._tokenizers[model.id] = self._load(model)
        tokenizer = self._tokenizers[model.id]
        if tokenizer is None:
            return None
        messages = body["messages"]
        texts = [text_of(message.get("content")) for message in messages]
        texts += [_as_json(calls) for message in messages if (calls := message.get("tool_calls"))]
        size = _PER_MESSAGE * len(messages)
        if tools := body.get("tools"):
            texts.append("\n".join(map(_as_json, tools)))
            size += _TOOL_PREAMBLE
        return size + sum(len(encoded.ids) for encoded in tokenizer.encode_batch(texts, add_special_tokens=False))

    def _load(self, model: Model) -> Tokenizer | None:
        path = Path(model.path(self._models_dir)) / "tokenizer.json"
        if not path.is_file():
            try:
                cached = try_to_load_from_cache(model.source, "tokenizer.json")
            except ValueError:  # a path, and no hub id
                cached = None
            if not isinstance(cached, str):
                logger.info("no tokenizer of %s at hand; prompt sizes are estimated", model.id)
                return None
            path = Path(cached)
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises its own bare Exception
            logger.warning("the tokenizer of %s does not load: %s", model.id, error)
            return None
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return tokenizer
