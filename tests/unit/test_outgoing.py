"""serve_app.routing.outgoing: the body for the engine is the client's, in one form for every model."""

import copy
from typing import Any

import pytest
from catalogs import CATALOG, PLAIN, chat, sent
from judging import TOOLS

from serve_app.routing.decide import decide
from serve_app.routing.decision import Setting
from serve_app.routing.facts import read_facts
from serve_app.routing.outgoing import stops_of, uniform_messages

Message = dict[str, Any]
THINKING = {"mode": "thinking"}


def said(role: str, content: Any = "x", **fields: Any) -> Message:
    return {"role": role, "content": content, **fields}


def messages_for(*messages: Message, **fields: Any) -> list[Message]:
    """The messages that an engine would get."""
    out: list[Message] = sent({"messages": list(messages), **fields})["messages"]
    return out


def stops(body: dict[str, Any]) -> list[str]:
    """The stop strings that the router itself applies."""
    facts = read_facts(body, "chat")
    return list(stops_of(facts, decide(facts, PLAIN, Setting({}))))


# System prompts


def test_developer_is_system() -> None:
    assert messages_for(said("developer", "be kind"), said("user")) == [said("system", "be kind"), said("user")]


@pytest.mark.case(49)
def test_several_system_messages_are_one_at_the_head_in_their_order() -> None:
    given = [
        said("system", "one"),
        said("user", "a"),
        said("developer", "two"),
        said("system", "three"),
        said("user", "b"),
    ]
    assert messages_for(*given) == [said("system", "one\n\ntwo\n\nthree"), said("user", "a"), said("user", "b")]


@pytest.mark.case(49)
def test_system_message_that_comes_late_goes_to_the_head() -> None:
    assert messages_for(said("user"), said("system", "be kind")) == [said("system", "be kind"), said("user")]


def test_merged_system_messages_may_be_texts_or_parts() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "more"}]
    merged = messages_for(said("system", parts), said("developer", "two"), said("user"))
    assert merged[0] == said("system", "one\nmore\n\ntwo")


def test_empty_system_messages_add_no_gap() -> None:
    given = [said("system", ""), said("system", "one"), said("system", None), said("user")]
    assert messages_for(*given)[0]["content"] == "one"


def test_one_system_message_at_the_head_passes_as_it_is() -> None:
    parts = [{"type": "text", "text": "one", "cache_control": {"type": "ephemeral"}}]
    given = [said("system", parts, name="ops"), said("user")]
    assert messages_for(*given) == given


def test_other_fields_of_the_first_system_message_are_kept() -> None:
    assert messages_for(said("developer", "one", name="ops"), said("user"))[0] == said("system", "one", name="ops")


# Fields of messages


@pytest.mark.case(46)
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tool_calls", []),
        ("tool_calls", None),
        ("function_call", None),
        ("refusal", None),
        ("refusal", ""),
        ("audio", None),
        ("annotations", []),
        ("annotations", None),
    ],
)
def test_empty_field_that_servers_emit_is_not_sent_back(field: str, value: object) -> None:
    assert messages_for(said("user"), said("assistant", "y", **{field: value}), said("user")) == [
        said("user"),
        said("assistant", "y"),
        said("user"),
    ]


@pytest.mark.parametrize(
    "fields",
    [
        {"tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}]},
        {"refusal": "no"},
        {"reasoning": "so"},
        {"reasoning_content": "so"},
        {"reasoning": None},
        {"vendor": []},
        {"content": None},
        {"content": ""},
        {"content": []},
        {"prefix": True},
    ],
)
def test_any_other_field_of_an_assistant_message_is_kept(fields: dict[str, Any]) -> None:
    given = [said("user"), {"role": "assistant", "content": "y", **fields}, said("user")]
    assert messages_for(*given) == given


@pytest.mark.parametrize("role", ["user", "tool"])
def test_messages_of_others_are_not_touched(role: str) -> None:
    given = [said("user"), said(role, "y", tool_calls=[], refusal=None, vendor={"a": None}), said("user")]
    assert messages_for(*given) == given


# Stop strings


@pytest.mark.parametrize("stop", ["END", ["END"], ["a", "b", "c", "d"]])
def test_stop_strings_are_the_routers_while_the_model_thinks(stop: str | list[str]) -> None:
    body = chat(stop=stop, **THINKING)
    assert "stop" not in sent(body)
    assert stops(body) == ([stop] if isinstance(stop, str) else stop)


@pytest.mark.parametrize("stop", ["END", ["END"]])
def test_stop_strings_are_the_engines_while_it_does_not_think(stop: str | list[str]) -> None:
    body = chat(stop=stop)
    assert sent(body)["stop"] == stop
    assert stops(body) == []


def test_empty_stop_strings_are_none() -> None:
    assert stops(chat(stop=["", "END"], **THINKING)) == ["END"]
    assert stops(chat(stop=[""], **THINKING)) == []
    assert sent(chat(stop=["", "END"]))["stop"] == ["END"]
    assert [form for form in ([], "", [""]) if "stop" in sent(chat(stop=form))] == []


def test_stop_of_a_completion_is_the_engines() -> None:
    assert sent({"prompt": "x", "stop": "END", "model": "thinker"}, "completions")["stop"] == "END"


def test_stop_token_ids_are_the_engines_always() -> None:
    assert sent(chat(stop_token_ids=[7], **THINKING))["stop_token_ids"] == [7]


# Tools


def test_empty_list_of_tools_is_no_tools() -> None:
    body = sent(chat(tools=[], tool_choice="auto"))
    assert "tools" not in body
    assert "tool_choice" not in body


def test_choice_without_tools_is_left_to_the_engine_to_refuse() -> None:
    assert sent(chat(tool_choice="required"))["tool_choice"] == "required"
    assert "tool_choice" not in sent(chat(tool_choice="none"))


@pytest.mark.parametrize("choice", ["auto", "none", "required", {"type": "function", "function": {"name": "look_up"}}])
def test_tools_and_their_choice_pass_as_they_came(choice: object) -> None:
    body = sent(chat(tools=TOOLS, tool_choice=choice))
    assert (body["tools"], body["tool_choice"]) == (TOOLS, choice)


@pytest.mark.parametrize("given", [{}, {"bad_words": ["no"]}], ids=str)
def test_no_call_can_be_written_where_none_may_be(given: dict[str, Any]) -> None:
    body = sent(chat(tools=TOOLS, tool_choice="none", **given))
    assert body["tools"] == TOOLS
    assert body["bad_words"] == [*given.get("bad_words", []), "<tool_call>"]
    anthropic = {"name": "look_up", "input_schema": {"type": "object"}}
    fields = {"max_tokens": 9, "tools": [anthropic], "tool_choice": {"type": "none"}, **given}
    assert sent(chat(**fields), "messages")["bad_words"] == body["bad_words"]


@pytest.mark.parametrize(
    "fields", [{"tools": TOOLS}, {"tools": TOOLS, "tool_choice": "auto"}, {"tool_choice": "none"}], ids=str
)
def test_where_a_call_may_be_written_no_word_is_forbidden(fields: dict[str, Any]) -> None:
    assert "bad_words" not in sent(chat(**fields))


def test_words_of_a_parser_that_is_not_known_are_not_forbidden() -> None:
    body = sent(chat(model="org/plain:1b", tools=TOOLS, tool_choice="none"))
    assert "bad_words" not in body


# Sampling


def test_several_answers_without_randomness_are_the_likeliest_each() -> None:
    body = sent(chat(n=3, temperature=0))
    assert (body["n"], body["top_k"]) == (3, 1)
    assert body["temperature"] > 0
    assert sent(chat(n=1, temperature=0))["temperature"] == 0
    assert sent(chat(n=3, temperature=0, use_beam_search=True))["temperature"] == 0


def test_the_smallest_top_p_of_openais_is_the_smallest_of_the_engines() -> None:
    assert 0 < sent(chat(top_p=0))["top_p"] < 0.001
    assert sent(chat(top_p=0.1))["top_p"] == 0.1


# The rest

UNKNOWN: dict[str, Any] = {
    "vendor": {"deep": [None, {"x": 1.5}]},
    "vendor_form": None,
    "include_stop_str_in_output": True,
    "logit_bias": {"7": -100},
    "metadata": {"a": "b"},
    "n": 2,
    "stream": True,
    "stream_options": {"include_usage": True},
    "user": "bob",
    "seed": 2**40,
}


@pytest.mark.case(2, 32)
@pytest.mark.parametrize("mode", [{}, THINKING])
def test_nothing_but_what_the_router_means_is_changed(mode: dict[str, str]) -> None:
    given = {**chat("hello", model="big"), **UNKNOWN, "chat_template_kwargs": {"custom": 1}}
    body = sent({**given, **mode})
    changed = {"model": "thinker", "chat_template_kwargs": {"custom": 1, "enable_thinking": bool(mode)}}
    sampling = {"temperature", "top_p", "top_k"}
    assert {key: value for key, value in body.items() if key not in sampling} == {**given, **changed}


@pytest.mark.parametrize("field", ["mode", "reasoning_effort", "thinking_token_budget", "conversation"])
def test_words_for_the_router_are_not_sent(field: str) -> None:
    value = {"mode": "non_thinking", "reasoning_effort": "none", "thinking_token_budget": 0, "conversation": "c"}[field]
    assert field not in sent(chat(**{field: value}))


def test_body_of_the_client_is_never_changed() -> None:
    given = {
        "messages": [
            said("developer", [{"type": "text", "text": "one"}]),
            said("user", "hello"),
            said("assistant", "y", tool_calls=[], refusal=None),
            said("system", "two"),
            said("user", "prove it"),
        ],
        "tools": [],
        "tool_choice": "auto",
        "stop": ["END"],
        "chat_template_kwargs": {"enable_thinking": True},
        "extra_body": {"top_k": 5, "mode": "thinking"},
        "temperature": None,
    }
    before = copy.deepcopy(given)
    body = sent(given)
    body["messages"][0]["content"] = "changed"
    body["chat_template_kwargs"]["enable_thinking"] = False
    assert given == before


def test_model_that_cannot_think_gets_no_switch() -> None:
    body = sent(chat(model="org/plain:1b", chat_template_kwargs={"custom": 1}, **THINKING))
    assert body["chat_template_kwargs"] == {"custom": 1}
    assert not CATALOG.models["org/plain:1b"].thinking.supported


def test_embeddings_get_no_sampling() -> None:
    assert sent({"input": "x", "model": "embedder"}, "embeddings") == {"input": "x", "model": "embedder"}


def test_uniform_messages_are_uniform_already() -> None:
    given = [said("developer", "a"), said("user"), said("assistant", "y", tool_calls=[]), said("system", "b")]
    once = uniform_messages(given)
    assert uniform_messages(once) == once
