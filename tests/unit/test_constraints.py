"""serve_app.routing.constraints: what holds an answer to a form is obeyed or refused, in whatever words it is said."""

from __future__ import annotations

from typing import Any

import pytest
from catalogs import chat, sent

from serve_app.errors import ApiError
from serve_app.routing.facts import read_facts

SCHEMA = {"type": "string", "enum": ["Oslo", "Rome"]}


@pytest.mark.case(31)
@pytest.mark.parametrize(
    ("older", "now"),
    [
        ({"guided_json": SCHEMA}, {"json": SCHEMA}),
        ({"guided_json": '{"type": "string"}'}, {"json": '{"type": "string"}'}),
        ({"guided_regex": "Oslo|Rome"}, {"regex": "Oslo|Rome"}),
        ({"guided_choice": ["Oslo", "Rome"]}, {"choice": ["Oslo", "Rome"]}),
        ({"guided_grammar": 'root ::= "Oslo"'}, {"grammar": 'root ::= "Oslo"'}),
        ({"guided_json_object": True}, {"json_object": True}),
    ],
)
def test_older_words_for_a_constraint_reach_the_engine_in_its_own(older: dict[str, Any], now: dict[str, Any]) -> None:
    body = sent(chat(**older))
    assert body["structured_outputs"] == now
    assert not [field for field in body if field.startswith("guided_")]


@pytest.mark.parametrize(
    "said",
    [
        {"type": "json_object", "schema": SCHEMA},
        {"type": "json_schema", "schema": SCHEMA},
        {"type": "json_schema", "name": "schema", "schema": SCHEMA},
        {"type": "json_schema", "json_schema": {"schema": SCHEMA}},
        {"type": "json_schema", "json_schema": {"name": "schema", "schema": {**SCHEMA, "type": "STRING"}}},
    ],
    ids=str,
)
def test_a_schema_holds_wherever_it_stands(said: dict[str, Any]) -> None:
    wanted = sent(chat(response_format=said))["response_format"]
    assert wanted == {"type": "json_schema", "json_schema": {"name": "schema", "schema": SCHEMA}}


@pytest.mark.parametrize(
    "wanted",
    [
        {},
        {"type": "yaml"},
        {"type": None},
        {"type": "object", "properties": {}},
        {"type": ["json_object"]},
        {"type": "json_schema"},
        {"type": "json_schema", "json_schema": {}},
        {"type": "json_schema", "json_schema": {"name": "secret"}},
        {"type": "json_schema", "json_schema": {"name": "x", "schema": '{"type": "secret"}'}},
        {"type": "json_schema", "json_schema": "secret"},
    ],
    ids=str,
)
def test_a_form_that_is_none_is_refused_before_a_model_is_woken(wanted: dict[str, Any]) -> None:
    with pytest.raises(ApiError) as refused:
        sent(chat(response_format=wanted))
    assert (refused.value.status, refused.value.param) == (400, "response_format")
    assert "secret" not in refused.value.message


def test_of_an_answers_schema_nothing_is_left_out() -> None:
    schema = {"type": "string", "pattern": r"^\p{L}+$"}
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    assert sent(chat(response_format=wanted))["response_format"] == wanted


def test_how_white_space_is_written_is_no_second_form() -> None:
    fields = {"structured_outputs": {"disable_any_whitespace": True}, "response_format": {"type": "json_object"}}
    assert {field: sent(chat(**fields))[field] for field in fields} == fields


@pytest.mark.case(31)
@pytest.mark.parametrize(
    "fields",
    [
        {"functions": [{"name": "f", "parameters": {}}]},
        {"functions": [{"name": "f"}], "function_call": {"name": "f"}},
        {"format": "json"},
        {"format": SCHEMA},
        {"grammar": 'root ::= "Oslo"'},
        {"json_schema": SCHEMA},
        {"regex": "Oslo"},
        {"ebnf": 'root ::= "Oslo"'},
    ],
    ids=lambda fields: "+".join(fields),
)
@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_a_constraint_that_no_engine_here_knows_is_refused_and_not_ignored(
    fields: dict[str, Any], endpoint: Any
) -> None:
    with pytest.raises(ApiError) as refused:
        sent(chat(prompt="hi", **fields), endpoint)
    assert (refused.value.status, refused.value.code) == (400, "unsupported_field")
    assert refused.value.param in fields


@pytest.mark.parametrize(
    "fields",
    [
        {"guided_json": SCHEMA, "guided_regex": "a"},
        {"guided_json": SCHEMA, "structured_outputs": {"regex": "a"}},
        {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
        {"response_format": {"type": "json_object"}, "guided_choice": ["a"]},
    ],
)
def test_two_constraints_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ApiError) as refused:
        sent(chat(**fields))
    assert refused.value.status == 400


def test_a_constraint_that_nothing_fits_is_found_in_older_words_too() -> None:
    endless = {"type": "object", "properties": {"a": {"$ref": "#/properties/a"}}}
    with pytest.raises(ApiError) as refused:
        read_facts(chat(guided_json=endless), "chat")
    assert refused.value.code == "invalid_schema"


@pytest.mark.parametrize(
    "nothing",
    [
        {"guided_json": None},
        {"functions": None, "function_call": None},
        {"functions": [], "function_call": "none"},
        {"format": None, "grammar": ""},
    ],
)
def test_no_constraint_is_none_however_it_is_said(nothing: dict[str, Any]) -> None:
    assert sent(chat(**nothing)) == sent(chat())


def test_what_generates_nothing_keeps_fields_of_these_names() -> None:
    assert sent({"input": "hi", "format": "x", "model": "embedder"}, "embeddings")["format"] == "x"
