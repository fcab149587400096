"""serve_app.routing.tool_schemas: one tool that no grammar can be made of takes no other tool along."""

from __future__ import annotations

import copy
from typing import Any

import orjson
import pytest
from catalogs import chat, sent
from hypothesis import given
from hypothesis import strategies as st

from serve_app.errors import ApiError
from serve_app.routing.tool_schemas import compiled

GOOD = {
    "$schema": "http://json-schema.org/draft-07/schema#",
    "type": "object",
    "properties": {
        "city": {"type": ["string", "null"], "enum": ["Oslo", None], "default": None},
        "code": {"type": "string", "pattern": r"^(?=.*[A-Z])\w{1,8}$"},
        "days": {"anyOf": [{"type": "integer", "minimum": 1, "maximum": 9007199254740991}, {"$ref": "#/$defs/day"}]},
        "more": {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {}},
        "format": {"type": "string", "format": "uri", "description": "", "x-vendor": [1]},
    },
    "$defs": {"day": {"type": "string", "minLength": 1}, "tree": {"items": {"$ref": "#/$defs/tree"}}},
    "required": ["city"],
    "additionalProperties": False,
}


def of(field: dict[str, Any]) -> Any:
    """What becomes of the schema of one argument."""
    return compiled({"type": "object", "properties": {"a": field}}, "place")["properties"]["a"]


def test_a_schema_that_can_be_compiled_arrives_as_it_is() -> None:
    assert compiled(GOOD, "place", strict=True) is GOOD


@pytest.mark.parametrize(
    ("older", "now"),
    [
        ({"type": "STRING"}, {"type": "string"}),
        ({"type": ["Integer", "NULL"]}, {"type": ["integer", "null"]}),
        ({"type": "float", "description": None}, {"type": "number"}),
        ({"type": "integer", "minimum": 1, "exclusiveMinimum": True}, {"type": "integer", "exclusiveMinimum": 1}),
        ({"type": "integer", "maximum": 9, "exclusiveMaximum": False}, {"type": "integer", "maximum": 9}),
        ({"type": "integer", "minimum": 0.5, "maximum": 9.0}, {"type": "integer", "minimum": 1, "maximum": 9}),
        ({"type": "string", "maxLength": 10.0}, {"type": "string", "maxLength": 10}),
        (
            {"type": "array", "items": [{"type": "str"}], "additionalItems": False},
            {"type": "array", "prefixItems": [{"type": "string"}], "items": False},
        ),
        ({"type": "array", "items": None}, {"type": "array"}),
        ({"type": "object", "properties": [], "required": None}, {"type": "object", "properties": {}}),
        ({"type": "object", "properties": {"b": False, "c": True}}, {"type": "object", "properties": {"c": True}}),
        ({"type": "string", "enum": None, "required": True}, {"type": "string"}),
        ({"const": None, "default": None}, {"const": None, "default": None}),
    ],
    ids=str,
)
def test_other_words_for_the_same_are_said_in_those_of_today(older: dict[str, Any], now: dict[str, Any]) -> None:
    # As JSON: 10 and 10.0 are equal.
    assert orjson.dumps(of(older), option=orjson.OPT_SORT_KEYS) == orjson.dumps(now, option=orjson.OPT_SORT_KEYS)


@pytest.mark.parametrize(
    "unheld",
    [
        *({"pattern": pattern} for pattern in ("(?<=a)b", "(?<!a)b", r"(a)\1", r"^\p{L}+$", r"\bfoo\b", "(", "(?i)a")),
        *({"pattern": pattern} for pattern in ("a{x}", "{", "[]a]", "(?>a)", r"\N{BULLET}", "(?#note)a", 7)),
        {"type": "any"},
        {"type": 7},
        {"enum": []},
        {"enum": "Oslo"},
        {"minimum": "1"},
        {"minLength": -1},
        {"minLength": 5, "maxLength": 1},
        {"$ref": "#/$defs/nowhere"},
        {"anyOf": []},
        {"required": "b"},
        {"format": ["uri"]},
    ],
    ids=str,
)
def test_what_cannot_be_held_is_left_out_and_the_rest_stays(unheld: dict[str, Any]) -> None:
    assert of({"description": "kept", **unheld}) == {"description": "kept"}


@pytest.mark.parametrize("bound", [2**64 - 1, -(2**80), 1e300])
def test_bounds_beyond_what_a_grammar_counts_are_left_out(bound: float) -> None:
    assert of({"type": "integer", "maximum": bound, "title": "n"}) == {"type": "integer", "title": "n"}


def test_a_named_group_of_javascript_is_a_pattern_like_others() -> None:
    assert of({"pattern": r"(?<year>\d{4})"}) == {"pattern": r"(?<year>\d{4})"}


def tool(parameters: Any, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": parameters, **fields}}


ODD = {"type": "object", "properties": {"name": {"type": "string", "pattern": r"^\p{L}+$"}}}
EVEN = {"type": "object", "properties": {"name": {"type": "string"}}}


def test_the_other_tools_of_a_request_are_not_touched() -> None:
    tools = sent(chat(tools=[tool(GOOD), tool(ODD), tool(None), tool([])]))["tools"]
    assert tools == [tool(GOOD), tool(EVEN), tool(None), tool({})]


def test_tools_of_the_other_apis_are_read_too() -> None:
    own = {"type": "function", "name": "f", "parameters": ODD}
    assert sent({"input": "hi", "tools": [own]}, "responses")["tools"] == [{**own, "parameters": EVEN}]
    told = {"name": "f", "input_schema": ODD}
    body = sent({**chat(tools=[told]), "max_tokens": 9}, "messages")
    assert body["tools"] == [{**told, "input_schema": EVEN}]


def test_a_client_that_wants_its_schema_held_hears_that_it_cannot_be() -> None:
    with pytest.raises(ApiError) as refused:
        sent(chat(tools=[tool(GOOD), tool(ODD, strict=True)]))
    assert (refused.value.status, refused.value.param) == (400, "tools[1].function.parameters")
    assert sent(chat(tools=[tool({"type": "STRING"}, strict=True)]))["tools"] == [tool({"type": "string"}, strict=True)]


_KEYWORDS = [
    *("type", "properties", "items", "anyOf", "required", "enum", "pattern", "format", "default", "$ref", "$defs"),
    *("minimum", "exclusiveMinimum", "maximum", "minLength", "maxLength", "additionalProperties"),
]
_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(_KEYWORDS), inner, max_size=4),
    max_leaves=20,
)


@given(st.dictionaries(st.text(max_size=4) | st.sampled_from(_KEYWORDS), _VALUES, max_size=4))
def test_any_schema_is_read_left_unchanged_and_read_only_once(schema: dict[str, Any]) -> None:
    before = copy.deepcopy(schema)
    once = compiled(schema, "place")
    assert schema == before
    assert compiled(once, "place") is once
