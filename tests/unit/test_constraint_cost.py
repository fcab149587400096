"""serve_app.routing.constraint_cost: what would hold an engine up for seconds is refused before it is sent."""

from __future__ import annotations

from typing import Any

import pytest
from catalogs import chat

from serve_app.errors import ApiError
from serve_app.routing.constraint_cost import MOST_ALTERNATIVES, MOST_PATTERNS
from serve_app.routing.facts import read_facts


def patterns(count: int) -> dict[str, Any]:
    return {"type": "object", "properties": {f"p{i}": {"type": "string", "pattern": "a{1,500}"} for i in range(count)}}


def enum(count: int) -> dict[str, Any]:
    return {"type": "string", "enum": [f"c{i}" for i in range(count)]}


def wrapped(schema: dict[str, Any]) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}


def tool(schema: dict[str, Any]) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": {"name": "f", "parameters": schema}}]}


def choices(count: int) -> list[str]:
    return [f"c{i}" for i in range(count)]


FORMS = {
    "patterns": (lambda extra: wrapped(patterns(MOST_PATTERNS + extra)), "response_format"),
    "enum": (lambda extra: wrapped(enum(MOST_ALTERNATIVES + extra)), "response_format"),
    "choice": (
        lambda extra: {"structured_outputs": {"choice": ["c"] * (MOST_ALTERNATIVES + extra)}},
        "structured_outputs",
    ),
    "json": (lambda extra: {"structured_outputs": {"json": patterns(MOST_PATTERNS + extra)}}, "structured_outputs"),
    "guided": (lambda extra: {"guided_choice": choices(MOST_ALTERNATIVES + extra)}, "guided_choice"),
    "tool": (lambda extra: tool(patterns(MOST_PATTERNS + extra)), "tools"),
}


@pytest.mark.parametrize("form", FORMS)
def test_more_than_can_be_compiled_quickly_is_a_400_and_the_limit_is_exact(form: str) -> None:
    build, field = FORMS[form]
    read_facts(chat(**build(0)), "chat")
    with pytest.raises(ApiError) as refused:
        read_facts(chat(**build(1)), "chat")
    assert (refused.value.status, refused.value.param, refused.value.code) == (400, field, "constraint_too_large")


def test_properties_by_those_names_are_no_patterns() -> None:
    named = {"type": "object", "properties": {"pattern": {"type": "string"}, "enum": {"type": "string"}}}
    read_facts(chat(**wrapped({"type": "array", "items": named, "maxItems": 100})), "chat")
