"""Field cases of structured outputs, on vLLM."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.e2e.conversation import BOTH_WAYS, OFF, ask, body, forced
from tests.e2e.service import Service

pytestmark = [pytest.mark.e2e, pytest.mark.real_engine]

BAD_SCHEMAS: list[dict[str, Any]] = [
    {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "not-a-type"}}}},
    {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "x", "schema": {"type": "object", "properties": {"a": {"$ref": "#/properties/a"}}}},
        }
    },
    {"response_format": {"type": "json_schema", "json_schema": {}}},
    {"response_format": {"type": "yaml"}},
    forced("("),
    {"structured_outputs": {"choice": []}},
    {"structured_outputs": {"regex": "a", "choice": ["b"]}},
]


@pytest.mark.case(25, 31)
@BOTH_WAYS
@pytest.mark.parametrize("fields", BAD_SCHEMAS, ids=str)
def test_a_bad_constraint_is_a_400_and_the_engine_lives_on(real: Service, fields: dict[str, Any], stream: bool) -> None:
    refused = ask(real, body("Reply in JSON.", **OFF, **fields), stream=stream)
    assert refused.status == 400, refused
    assert refused.error["message"]
    assert ask(real, body("hi", max_tokens=2, **OFF)).status == 200


@pytest.mark.case(31)
@BOTH_WAYS
def test_openais_wrapper_of_a_schema_json_mode_and_text_work(real: Service, stream: bool) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "enum": ["Oslo"]}, "population": {"type": "integer", "enum": [7]}},
        "required": ["city", "population"],
        "additionalProperties": False,
    }
    wrapped = {"type": "json_schema", "json_schema": {"name": "city_fact", "strict": True, "schema": schema}}
    answer = ask(real, body("City?", response_format=wrapped, max_tokens=60, **OFF), stream=stream)
    assert json.loads(answer.content or "") == {"city": "Oslo", "population": 7}
    older = ask(real, body("City?", guided_json=schema, max_tokens=60, **OFF), stream=stream)
    assert json.loads(older.content or "") == {"city": "Oslo", "population": 7}
    assert ask(real, body("City?", response_format={"type": "text"}, **OFF), stream=stream).content
    assert ask(real, body("City?", structured_outputs={"choice": ["a", "b"]}, **OFF), stream=stream).content in (
        "a",
        "b",
    )


@pytest.mark.case(101)
@BOTH_WAYS
def test_json_mode_does_not_run_into_white_space(real: Service, stream: bool) -> None:
    asked = body("Reply in JSON.", response_format={"type": "json_object"}, max_tokens=60, temperature=1, seed=5, **OFF)
    answer = ask(real, asked, stream=stream)
    assert "\n\n" not in (answer.content or "")
    assert "   " not in (answer.content or "")
    if answer.finish == "stop":
        json.loads(answer.content or "")


@pytest.mark.case(100)
@pytest.mark.parametrize("form", ["uri", "date-time", "email"])
def test_a_format_in_a_tools_schema_works_or_is_named(real: Service, form: str) -> None:
    schema = {"type": "object", "properties": {"x": {"type": "string", "format": form}}, "required": ["x"]}
    tool = {"type": "function", "function": {"name": "visit", "parameters": schema}}
    answer = ask(real, body("Go", tools=[tool], tool_choice="required", max_tokens=60, **OFF))
    assert answer.status == 200 or (answer.status == 400 and "format" in answer.error["message"])
