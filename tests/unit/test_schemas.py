"""serve_app.routing.schemas: schemas that no answer can satisfy are refused before a token is made."""

from typing import Any

import pytest
from catalogs import chat

from serve_app.errors import ApiError
from serve_app.routing.facts import read_facts
from serve_app.routing.schemas import endless_reference

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
