"""serve_app.routing.schemas: schemas that no answer can satisfy are refused before a token is made."""

from typing import Any

import pytest
from catalogs import chat

from serve_app.errors import ApiError
from serve_app.routing.facts import read_facts
from serve_app.routing.schemas import endless_reference, unheld_keyword

TREE = {
    "$defs": {
        "node": {"type": "object", "properties": {"left": {"$ref": "#/$defs/node"}, "value": {"type": "integer"}}}
    },
    "$ref": "#/$defs/node",
}
ITSELF = {"type": "object", "properties": {"a": {"$ref": "#/properties/a"}}}
EACH_OTHER = {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "items": [{"$ref": "#/$defs/a"}]}


@pytest.mark.parametrize("schema", [ITSELF, EACH_OTHER, {"$ref": "#"}])
def test_a_reference_that_leads_only_to_itself_is_found(schema: dict[str, Any]) -> None:
    assert endless_reference(schema)


@pytest.mark.parametrize(
    "schema", [TREE, {}, None, 7, {"$ref": "#/gone"}, {"$ref": 3}, {"$ref": "https://example.org/schema"}]
)
def test_recursion_with_an_end_and_odd_schemas_are_left_to_the_engine(schema: Any) -> None:
    assert endless_reference(schema) is None


def test_a_deep_or_wide_schema_is_read_in_no_time() -> None:
    deep: dict[str, Any] = {}
    for _ in range(100_000):
        deep = {"properties": {"a": deep}}
    assert endless_reference(deep) is None


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": ITSELF}}},
        {"structured_outputs": {"json": ITSELF}},
    ],
)
def test_such_a_schema_is_a_400_that_names_the_field(fields: dict[str, Any]) -> None:
    with pytest.raises(ApiError) as refused:
        read_facts(chat("hi", **fields), "chat")
    assert refused.value.status == 400
    assert refused.value.param in fields


def test_a_tools_schema_that_nothing_fits_is_a_400_too() -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": ITSELF}}]
    with pytest.raises(ApiError) as refused:
        read_facts(chat("hi", tools=tools), "chat")
    assert (refused.value.status, refused.value.param) == (400, "tools[0].function.parameters")


@pytest.mark.parametrize(
    ("schema", "keyword"),
    [
        ({"not": {"type": "string"}}, "not"),
        ({"type": "object", "properties": {"a": {"anyOf": [{"type": "string"}, {"not": {}}]}}}, "not"),
        ({"$defs": {"a": {"if": {"type": "string"}, "then": {"const": "a"}}}, "$ref": "#/$defs/a"}, "if"),
        ({"type": "array", "items": {"$ref": "https://example.org/s.json"}}, "$ref"),
    ],
)
@pytest.mark.case(31)
def test_what_an_answer_would_not_be_held_to_is_a_400_that_names_it(schema: dict[str, Any], keyword: str) -> None:
    for fields in (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}},
        {"response_format": {"type": "json_object", "schema": schema}},
        {"structured_outputs": {"json": schema}},
        {"guided_json": schema},
    ):
        with pytest.raises(ApiError) as refused:
            read_facts(chat("hi", **fields), "chat")
        assert (refused.value.status, refused.value.code) == (400, "unsupported_schema")
        assert f"`{keyword}`" in refused.value.message


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"not": {"type": "string"}, "if": {"type": "string"}}},
        {"enum": [{"not": 1}, {"$ref": "https://example.org"}]},
        {"type": "object", "properties": {"a": {"default": {"if": 1}}}, "required": ["not"]},
        {"patternProperties": {"if": {"type": "string"}}},
        TREE,
        None,
        [],
    ],
)
def test_words_that_only_look_like_such_keywords_are_none(schema: Any) -> None:
    assert unheld_keyword(schema) is None


def test_a_tool_may_say_what_is_not_held() -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "not": {}}}}]
    assert read_facts(chat("hi", tools=tools), "chat").body["tools"] == tools
