"""Prompt sizes, counted with a model's own tokenizer and chat template, for prompts that may or may not fit.

Exact for text: what the engine will count. Media are not counted, for how many tokens one has only the engine knows.
Where no tokenizer file is at hand (a hub model that was never loaded on this node) the estimate has to do, and where
the template is not, what templates add is estimated; the engine then counts and refuses by the context.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson
from huggingface_hub import try_to_load_from_cache
from jinja2 import TemplateError
from tokenizers import Tokenizer

from serve_app.model_schema import Model
from serve_app.router.template import ChatTemplate, template_of
from serve_app.routing.excerpt import text_of

logger = logging.getLogger(__name__)

_Text = str | tuple[str, str]

# What a chat template adds around a message, at most, in tokens (Qwen3: 5; a tool preamble: about 130).
_PER_MESSAGE = 5
_TOOL_PREAMBLE = 130
# What templates write of their own in front of everything (Qwen2.5, SmolLM2: 20 to 30 tokens), with room to spare.
_PREAMBLES = 512


def most_tokens(body_bytes: int) -> int:
    """No prompt in a body of this size has more tokens: each is a byte of text at least."""
    return body_bytes + _PREAMBLES


@dataclasses.dataclass(frozen=True, slots=True)
class Reader:
    """What counts the prompts of one model. `template`: None where there is none, or it is not understood."""

    tokenizer: Tokenizer
    template: ChatTemplate | None


class TokenCounter:
    """Tokenizers by model, loaded when first needed, used in threads."""

    def __init__(self, models_dir: str) -> None:
        self._models_dir = models_dir
        self._readers: dict[str, Reader | None] = {}

    async def count(self, model: Model, body: dict[str, Any]) -> int | None:
        """Tokens of a chat's prompt, None where the tokenizer is not at hand."""
        return await asyncio.to_thread(self._count, model, body) if model.source else None

    async def longest(self, model: Model, texts: Sequence[_Text], *, special: bool = True) -> int | None:
        """Tokens of the longest of these texts, or pairs of texts, likewise.

        `special`: with those that the tokenizer adds, before the text (BOS) or between two.
        """
        if not model.source:
            return None

        def count() -> int | None:
            reader = self._reader(model)
            return None if reader is None else max(_sizes(reader.tokenizer, texts, special=special), default=0)

        return await asyncio.to_thread(count)

    def _count(self, model: Model, body: dict[str, Any]) -> int | None:
        reader = self._reader(model)
        if reader is None:
            return None
        if reader.template:
            try:
                return sum(_sizes(reader.tokenizer, [reader.template.render(body)]))
            except TemplateError:
                pass  # the engine says what is wrong, if it finds it wrong too
        messages = body["messages"]
        texts = [text_of(message.get("content")) for message in messages]
        texts += [_as_json(calls) for message in messages if (calls := message.get("tool_calls"))]
        size = _PER_MESSAGE * len(messages)
        if tools := body.get("tools"):
            texts.append("\n".join(map(_as_json, tools)))
            size += _TOOL_PREAMBLE
        return size + sum(_sizes(reader.tokenizer, texts))

    def _reader(self, model: Model) -> Reader | None:
        if model.id not in self._readers:
            self._readers[model.id] = self._load(model)
        return self._readers[model.id]

    def _load(self, model: Model) -> Reader | None:
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
        return Reader(tokenizer, self._template(model, path.parent))

    def _template(self, model: Model, directory: Path) -> ChatTemplate | None:
        configured = model.engine.get("chat_template")
        try:
            return template_of(directory, configured if isinstance(configured, str) else None)
        except (TemplateError, OSError) as error:
            logger.warning("the chat template of %s is not understood: %s", model.id, error)
            return None


def _sizes(tokenizer: Tokenizer, texts: Sequence[_Text], *, special: bool = False) -> list[int]:
    return [len(encoded.ids) for encoded in tokenizer.encode_batch(list(texts), add_special_tokens=special)]


def _as_json(value: Any) -> str:
    try:
        return orjson.dumps(value).decode()
    except orjson.JSONEncodeError:
        return ""  # nested too deeply: refused when the body is written for the engine
