"""serve_app.routing.message_form: histories of other servers and libraries arrive in the one form that vLLM takes."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from catalogs import sent

from serve_app.errors import ApiError


def arrived(*messages: dict[str, Any]) -> list[dict[str, Any]]:
    """The messages as the engine gets them, behind one of the user's."""
    found: list[dict[str, Any]] = sent({"messages": [{"role": "user", "content": "hi"}, *messages]})["messages"][1:]
    return found


def refused(*messages: dict[str, Any]) -> ApiError:
    with pytest.raises(ApiError) as error:
        arrived(*messages)
    assert error.value.status == 400
    return error.value


def called(arguments: Any, **call: Any) -> dict[str, Any]:
    function = {"name": "f", "arguments": arguments}
    return {"role": "assistant", "tool_calls": [{"id": "c", "type": "function", "function": function, **call}]}


@pytest.mark.parametrize(
    ("given", "text"), [({"city": "Zürich"}, '{"city":"Zürich"}'), ({}, "{}"), (None, "{}"), ([1], "[1]")]
)
def test_arguments_that_are_no_text_become_one(given: Any, text: str) -> None:
    (message,) = arrived(called(given))
    assert message["tool_calls"][0]["function"] == {"name": "f", "arguments": text}


@pytest.mark.parametrize("text", ['{"city": "Oslo"}', "", '{"city": ', '"Oslo"'])
def test_arguments_that_are_a_text_arrive_as_they_are(text: str) -> None:
    assert arrived(called(text)) == [called(text)]


def test_calls_without_id_and_type_get_them() -> None:
    calls = [{"function": {"name": "f", "arguments": "{}"}} for _ in range(2)]
    (message,) = arrived({"role": "assistant", "content": "", "tool_calls": calls})
    assert [(call["id"], call["type"]) for call in message["tool_calls"]] == [
        ("call_0", "function"),
        ("call_1", "function"),
    ]


@pytest.mark.parametrize("role", ["user", "assistant", "tool", "system"])
def test_a_name_that_is_null_is_none(role: str) -> None:
    assert arrived({"role": role, "content": "x", "name": None}) == arrived({"role": role, "content": "x"})


def test_nulls_in_a_call_are_what_a_call_without_them_has() -> None:
    assert arrived(called("{}", id=None, type=None)) == arrived(called("{}", id="call_0", type="function"))


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "user", "content": "secret", "name": 7}, "messages[1].name"),
        ({"role": "tool", "content": "secret", "tool_call_id": 7}, "messages[1].tool_call_id"),
        (called("{}", id=7), "messages[1].tool_calls[0].id"),
    ],
    ids=str,
)
def test_what_a_validator_would_say_of_every_role_is_said_of_the_field(message: dict[str, Any], param: str) -> None:
    error = refused(message)
    assert error.param == param
    assert "secret" not in error.message


@pytest.mark.parametrize("role", ["user", "tool"])
def test_no_content_is_an_empty_one_and_a_reply_may_have_none(role: str) -> None:
    assert arrived({"role": role, "content": None})[0]["content"] == ""
    assert arrived({"role": "assistant", "content": None})[0]["content"] is None


def test_parts_of_the_responses_api_are_text_parts() -> None:
    parts = [{"type": "input_text", "text": "a"}, {"type": "text", "text": "b"}, {"type": "output_text", "text": "c"}]
    (message,) = arrived({"role": "user", "content": parts})
    assert [part["type"] for part in message["content"]] == ["text"] * 3


def test_what_is_in_form_already_is_not_touched() -> None:
    parts = [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}, {"type": "odd", "odd": None}]
    message = {"role": "user", "content": parts, "vendor": None}
    assert arrived(message) == [message]


@pytest.mark.parametrize("role", ["function", "human", "", "User"])
def test_a_message_that_templates_pass_over_is_refused_and_not_lost(role: str) -> None:
    assert refused({"role": role, "content": "secret"}).param == "messages[1].role"


def test_a_call_in_the_words_of_before_tools_is_refused_and_not_lost() -> None:
    error = refused({"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}})
    assert error.param == "messages[1].function_call"


def test_arguments_that_cannot_be_written_are_a_400() -> None:
    deep = orjson.loads(b"[" * 900 + b"]" * 900)
    assert refused(called(deep)).param == "messages"
