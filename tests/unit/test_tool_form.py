"""serve_app.routing.tool_form: a choice of tools arrives in vLLM's words, and a tool that is none is named."""

from __future__ import annotations

from typing import Any

import pytest
from catalogs import chat, sent

from serve_app.errors import ApiError

LOOK, SEND = ({"type": "function", "function": {"name": name}} for name in ("look", "send"))
NAMED = {"type": "function", "function": {"name": "send"}}


@pytest.mark.parametrize(
    ("said", "arrives"),
    [
        ({"type": "auto"}, "auto"),
        ({"type": "none"}, "none"),
        ({"type": "any"}, "required"),
        ("any", "required"),
        ({"type": "function", "name": "send"}, NAMED),
        ({"type": "tool", "name": "send"}, NAMED),
        (NAMED, NAMED),
        ({"function": {"name": "send"}}, {"function": {"name": "send"}}),
        ("required", "required"),
    ],
    ids=str,
)
def test_a_choice_in_the_words_of_other_apis_is_the_same_choice(said: Any, arrives: Any) -> None:
    body = sent(chat(tools=[LOOK, SEND], tool_choice=said))
    assert (body["tool_choice"], body["tools"]) == (arrives, [LOOK, SEND])


@pytest.mark.parametrize("mode", ["auto", "required"])
@pytest.mark.parametrize("reference", [SEND, {"type": "function", "name": "send"}], ids=str)
@pytest.mark.parametrize("nested", [True, False])
def test_of_allowed_tools_only_those_are_offered(mode: str, reference: dict[str, Any], nested: bool) -> None:
    allowed = {"mode": mode, "tools": [reference]}
    choice = {"type": "allowed_tools", **({"allowed_tools": allowed} if nested else allowed)}
    body = sent(chat(tools=[LOOK, SEND], tool_choice=choice))
    assert (body["tool_choice"], body["tools"]) == (mode, [SEND])


@pytest.mark.parametrize(
    "choice",
    [
        "send",
        True,
        {},
        [],
        {"type": "function"},
        {"type": "function", "function": {"name": "secret"}},
        {"type": "function", "function": "send"},
        {"type": "allowed_tools"},
        {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}},
        {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [{"function": {"name": "secret"}}]}},
        {"type": "allowed_tools", "allowed_tools": {"mode": "secret", "tools": [SEND]}},
        {"type": "custom", "custom": {"name": "send"}},
    ],
    ids=str,
)
def test_a_choice_that_is_none_is_a_400(choice: Any) -> None:
    error = refused(tools=[LOOK, SEND], tool_choice=choice)
    assert error.param == "tool_choice"
    assert "secret" not in error.message


@pytest.mark.parametrize("choice", ["auto", NAMED], ids=str)
@pytest.mark.parametrize(
    ("tool", "param"),
    [
        ({"type": "function", "name": "send", "parameters": {}}, "tools[1].function"),
        ({"type": "function", "function": {"description": "secret"}}, "tools[1].function"),
        ({"type": "function", "function": {"name": ""}}, "tools[1].function"),
        ({"type": "function", "function": "send"}, "tools[1].function"),
        ({"type": "custom", "custom": {"name": "send"}}, "tools[1]"),
        ({"type": "web_search"}, "tools[1]"),
        ({"type": None, "function": {"name": "send"}}, "tools[1]"),
        ({"function": {"name": "send", "parameters": "secret"}}, "tools[1].function.parameters"),
        ({"function": {"name": "send", "description": 7}}, "tools[1].function.description"),
        (5, "tools[1]"),
        (None, "tools[1]"),
    ],
    ids=str,
)
def test_a_tool_that_is_none_is_a_400_that_names_it(tool: Any, param: str, choice: Any) -> None:
    error = refused(tools=[SEND, tool], tool_choice=choice)
    assert error.param == param
    assert "secret" not in error.message


def refused(**fields: Any) -> ApiError:
    with pytest.raises(ApiError) as error:
        sent(chat(**fields))
    assert error.value.status == 400
    return error.value
