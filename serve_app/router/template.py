"""A model's chat template: messages as the text that its engine will read.

Rendered as Hugging Face's tokenizers do it (the environment and the names are theirs), without importing transformers,
which would bring PyTorch into the Router.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import orjson
from jinja2 import Template, TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from serve_app.routing.excerpt import text_of

_CONFIG = "tokenizer_config.json"
_FILE = "chat_template.jinja"


class ChatTemplate:
    """Renders chat bodies. `special` are the tokenizer's own tokens by name, which templates write out."""

    def __init__(self, source: str, special: Mapping[str, str]) -> None:
        """Raises `TemplateError` for one that is not understood."""
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.filters["tojson"] = _as_json
        environment.globals |= {"raise_exception": _refuse, "strftime_now": lambda form: datetime.now().strftime(form)}
        self._template: Template = environment.from_string(source)
        self._special = special

    def render(self, body: Mapping[str, Any]) -> str:
        """The prompt of a chat body. Raises `TemplateError` where the template refuses it, as the engine will."""
        given = body.get("chat_template_kwargs")
        try:
            return self._template.render(
                {
                    **self._special,
                    "messages": [_as_templates_take_it(message) for message in body["messages"]],
                    "tools": body.get("tools") or None,
                    "documents": body.get("documents"),
                    "add_generation_prompt": body.get("add_generation_prompt", True),
                    **(given if isinstance(given, dict) else {}),
                }
            )
        except (TypeError, ValueError, KeyError, AttributeError, RecursionError) as error:
            raise TemplateError(type(error).__name__) from None


def template_of(directory: Path, configured: str | None) -> ChatTemplate | None:
    """The template beside a tokenizer, or the one that the engine is configured with: a file, or the text itself.

    None where there is none, or more than one and no word which.
    """
    config = _object_in(directory / _CONFIG)
    source = config.get("chat_template")
    if (directory / _FILE).is_file():
        source = (directory / _FILE).read_text()
    if configured:
        source = Path(configured).read_text() if "\n" not in configured and Path(configured).is_file() else configured
    if not isinstance(source, str):
        return None
    special = {}
    for name, value in config.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            special[name] = text
    return ChatTemplate(source, special)


def _object_in(path: Path) -> dict[str, Any]:
    try:
        found = orjson.loads(path.read_bytes())
    except (OSError, orjson.JSONDecodeError):
        return {}
    return found if isinstance(found, dict) else {}


def _as_templates_take_it(message: Mapping[str, Any]) -> dict[str, Any]:
    """As vLLM gives it to them: one text, and the arguments of calls as objects."""
    taken = {**message, "content": text_of(message.get("content"))}
    if calls := message.get("tool_calls"):
        taken["tool_calls"] = [_with_object(call) for call in calls]
    return taken


def _with_object(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        return {**call, "function": {**function, "arguments": orjson.loads(function["arguments"] or "{}")}}
    except orjson.JSONDecodeError:
        return call


def _as_json(value: Any, ensure_ascii: bool = False, **layout: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **layout)


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)
