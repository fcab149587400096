"""What a client's text holds of a chat template's own words: markers that would end a message and begin another. Pure.

A template writes roles as control tokens, and a tokenizer reads them back wherever they stand, in the text of a user or
in what a tool found on the web as well. Here they are kept from being read as such. Known are the forms of Qwen,
Llama 3, GLM, Phi, SmolLM2 and gpt-oss (`<|word|>`), of DeepSeek (the same with U+FF5C), and of Gemma. `<think>` and
`<tool_call>` are ordinary words to a tokenizer, and stay.
"""

from __future__ import annotations

import re
from typing import Any

from serve_app.errors import bad_request
from serve_app.model_schema import Model
from serve_app.routing.facts import Endpoint

_MARKER = re.compile(r"<(?=[|\uff5c][^<>|\uff5c\s]{1,64}[|\uff5c]>|(?:start|end)_of_turn>)")
# A sign that is seen: one that is not would be copied into somebody's code.
_APART = "< "
# Deeper bodies cannot be written for an engine, and are refused then (orjson: 254).
_DEEPEST = 256
# What a template renders, by endpoint. A completion's prompt is not: whoever sends one writes the template.
_RENDERED: dict[Endpoint, tuple[str, ...]] = {
    "chat": ("messages", "tools", "documents", "chat_template_kwargs"),
    "responses": ("input", "instructions", "tools", "chat_template_kwargs"),
    "messages": ("messages", "system", "tools", "chat_template_kwargs"),
    "count_tokens": ("messages", "system", "tools", "chat_template_kwargs"),
    "tokenize": ("messages", "tools", "chat_template_kwargs"),
}


def without_markers(body: dict[str, Any], endpoint: Endpoint, model: Model) -> dict[str, Any]:
    """The body as the model's `control_tokens` wants it; the same object where it holds no marker.

    Raises `ApiError` (400) where they are refused.
    """
    if model.control_tokens == "pass":
        return body
    changed = {}
    for field in _RENDERED.get(endpoint, ()):
        given = body.get(field)
        if given and _holds_marker(given):
            changed[field] = cleaned(given)
    if changed and model.control_tokens == "refuse":
        field = next(iter(changed))
        raise bad_request(f"`{field}` holds a control token of a chat template.", field, "control_token")
    return {**body, **changed} if changed else body


def _holds_marker(value: Any, depth: int = 0) -> bool:
    if isinstance(value, str):
        return "<" in value and _MARKER.search(value) is not None
    if depth == _DEEPEST:
        return False
    if isinstance(value, list):
        for item in value:
            if _holds_marker(item, depth + 1):
                return True
    elif isinstance(value, dict):
        for key, item in value.items():
            if _holds_marker(key) or _holds_marker(item, depth + 1):
                return True
    return False


def cleaned(value: Any, depth: int = 0) -> Any:
    """The value with every marker broken in two."""
    if isinstance(value, str):
        return _MARKER.sub(_APART, value)
    if depth == _DEEPEST:
        return value
    if isinstance(value, list):
        return [cleaned(item, depth + 1) for item in value]
    if isinstance(value, dict):
        return {cleaned(key): cleaned(item, depth + 1) for key, item in value.items()}
    return value
