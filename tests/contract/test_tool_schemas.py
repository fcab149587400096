"""`serve_app.routing.tool_schemas` against the real thing: xgrammar, which holds arguments to their schemas in vLLM."""

from __future__ import annotations

import json
from typing import Any

import pytest

from serve_app.routing.tool_schemas import compiled

pytestmark = pytest.mark.real_engine
REFUSED_PATTERNS = [
    r"(?<=a)b", r"(?<!a)b", r"(a)\1", r"\k<x>", r"(?P=x)", r"^\p{L}+$", r"\P{Lu}", r"\bfoo\b", r"\B", "(", "[z-a]",
    "*a", "(?>a)", "(?#note)a", "[]", "[]a]", "{", "a{", "a{x}", "a{,3}", "a{2,1}", r"\N{BULLET}", "(?(1)a|b)",
]  # fmt: skip
TAKEN_PATTERNS = [
    "", "^$", ".*", r"^\d{4}-\d{2}\s\w+$", r"^[^\s@]+@[^\s@]+\.[^\s@]+$", r"^(?=.*[A-Z]).{8,}$", "^(?!foo).*$",
    "[一-龥]+", r"(?<year>\d{4})", r"(?P<year>\d{4})", r"\/foo\/", "a|b", "a+?", "[a-z]{2,}", r"\u4e00", r"\x41",
]  # fmt: skip


def argument(field: Any, **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": field}, **more}


REFUSED = [
    *(argument({"type": "string", "pattern": pattern}) for pattern in REFUSED_PATTERNS),
    {"type": "object", "properties": []},
    {"type": "object", "properties": None},
    {"type": None},
    argument({"$ref": "#/$defs/nowhere"}),
    *(argument({"type": name}) for name in ("STRING", "any", "dict", "float", None)),
    argument({"type": "string"}, required=None),
    argument({"type": "string"}, required="a"),
    argument({"enum": []}),
    argument({"type": "string", "enum": None}),
    {"type": "object", "additionalProperties": None},
    argument({"type": "integer", "minimum": 1, "exclusiveMinimum": True}),
    argument({"type": "integer", "minimum": "1"}),
    argument({"type": "integer", "minimum": 0.5}),
    argument({"type": "integer", "maximum": 2**64 - 1}),
    argument({"type": "integer", "minimum": 5, "maximum": 1}),
    argument({"type": "string", "maxLength": 10.0}),
    argument({"type": "array", "items": [{"type": "string"}]}),
    argument({"type": "array", "items": None}),
    argument(False),
    argument("string"),
]
TAKEN = [
    *(argument({"type": "string", "pattern": pattern}) for pattern in TAKEN_PATTERNS),
    argument({"type": "integer", "minimum": -9007199254740991, "maximum": 9007199254740991}),
    argument({"type": "integer", "maximum": 2**63 - 1}),
    argument({"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {}}),
    argument({"$ref": "#/$defs/tree"}, **{"$defs": {"tree": argument({"$ref": "#/$defs/tree"})}}),
    argument({"type": ["string", "null"], "format": "uri", "default": None}),
]


def takes(schema: dict[str, Any]) -> bool:
    """Whether xgrammar makes a grammar of it."""
    import xgrammar

    try:
        xgrammar.Grammar.from_json_schema(json.dumps(schema))
    except RuntimeError:
        return False
    return True


@pytest.mark.parametrize("schema", REFUSED, ids=json.dumps)
def test_what_no_grammar_can_be_made_of_is_made_into_what_one_can(schema: dict[str, Any]) -> None:
    assert (takes(schema), takes(compiled(schema, "place"))) == (False, True)


@pytest.mark.parametrize("schema", TAKEN, ids=json.dumps)
def test_what_a_grammar_can_be_made_of_is_left_as_it_is(schema: dict[str, Any]) -> None:
    assert takes(schema)
    assert compiled(schema, "place") is schema
