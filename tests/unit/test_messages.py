"""serve_app.routing.messages: Anthropic's bodies are decided as chats, and reach the engine with the hard switch."""

from __future__ import annotations

from typing import Any

import pytest
from catalogs import CATALOG, decided, sent

from serve_app.errors import ApiError
from serve_app.routing.facts import read_facts
from serve_app.routing.outgoing import stops_of
from serve_app.routing.policy import policy_of
from serve_app.routing_schema import RoutingSettings

Body = dict[str, Any]

TOOL = {"name": "get_weather", "input_schema": {"type": "object"}}
CALL = {"type": "tool_use", "id": "t1", "name": "get_weather", "input": {"city": "Oslo"}}
RESULT = {"type": "tool_result", "tool_use_id": "t1", "content": "21 degrees"}
REMINDER = {"type": "text", "text": "<system-reminder>be safe</system-reminder>\n"}


def said(role: str, content: Any = "hi") -> Body:
    return {"role": role, "content": content}


def asked(*messages: Body, **fields: Any) -> Body:
    return {"max_tokens": 100, "messages": list(messages) or [said("user")], **fields}


# What it says


def test_what_is_asked_is_read_from_text_blocks_and_the_system_prompt() -> None:
    blocks = [{"type": "text", "text": "prove it", "cache_control": {"type": "ephemeral"}}]
    facts = read_facts(asked(said("user", blocks), system=[{"type": "text", "text": "be kind"}]), "messages")
    assert facts.excerpt
    assert (facts.last_user_text, facts.excerpt.system, facts.max_tokens) == ("prove it", "be kind", 100)


@pytest.mark.parametrize("beside", [[], [REMINDER]], ids=["alone", "with a reminder of Claude Code's"])
def test_what_a_tool_answered_is_no_turn_of_the_users(beside: list[Body]) -> None:
    body = asked(said("user", "weather?"), said("assistant", [CALL]), said("user", [RESULT, *beside]), tools=[TOOL])
    excerpt = read_facts(body, "messages").excerpt
    assert excerpt
    assert (excerpt.in_tool_loop, excerpt.turns, excerpt.ask) == (True, 1, "weather?")
    assert excerpt.tool_names == ("get_weather",)


def test_what_the_user_says_beside_a_tools_answer_is_a_turn() -> None:
    told = said("user", [RESULT, {"type": "text", "text": "and in Rome?"}])
    excerpt = read_facts(asked(said("user", "weather?"), said("assistant", [CALL]), told), "messages").excerpt
    assert excerpt
    assert (excerpt.in_tool_loop, excerpt.turns, excerpt.ask) == (False, 2, "and in Rome?")


def test_images_and_forms_are_seen() -> None:
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
    form = {"format": {"type": "json_schema", "schema": {"type": "object"}}}
    facts = read_facts(asked(said("user", [image]), output_config=form), "messages")
    assert (facts.has_images, facts.json_schema) == (True, True)
    assert not read_facts(asked(output_config={"effort": "low"}), "messages").json_schema


def test_a_schema_that_no_value_fits_is_refused() -> None:
    form = {"format": {"type": "json_schema", "schema": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}}}
    with pytest.raises(ApiError, match="refers to itself"):
        read_facts(asked(output_config=form), "messages")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": [said("user")]}, "max_tokens"),
        (asked(max_tokens=0), "max_tokens"),
        ({"max_tokens": 9}, "messages"),
        ({"max_tokens": 9, "messages": []}, "messages"),
        (asked(said("tool")), "messages[0]"),
        (asked({"role": ["user"], "content": "x"}), "messages[0]"),
        (asked(said("user", None)), "messages[0].content"),
        (asked(said("user"), said("user", [{"text": "no type"}])), "messages[1].content"),
        (asked(said("user", [{"type": "text", "text": 3}])), "messages[0].content"),
        (asked(system=3), "system"),
        (asked(stop_sequences="end"), "stop_sequences"),
        (asked(thinking="on"), "thinking"),
        (asked(thinking={"type": "wild"}), "thinking"),
        (asked(thinking={"type": "enabled"}), "thinking.budget_tokens"),
        (asked(thinking={"type": "enabled", "budget_tokens": 0}), "thinking.budget_tokens"),
        (asked(thinking={"type": "enabled", "budget_tokens": True}), "thinking.budget_tokens"),
        (asked(output_config="high"), "output_config"),
        (asked(output_config={"effort": "wild"}), "output_config.effort"),
        (asked(output_config={"effort": ["low"]}), "output_config.effort"),
        (asked(output_config={"format": "json"}), "output_config.format"),
        (asked(tools={}), "tools"),
        (asked(tools=[{"type": "web_search_20250305", "name": "web_search"}]), "tools[0].input_schema"),
        (asked(tools=[{"input_schema": {}}]), "tools[0]"),
        (asked(tools=[TOOL], tool_choice="auto"), "tool_choice"),
        (asked(tools=[TOOL], tool_choice={"type": "tool"}), "tool_choice"),
        (asked(tools=[TOOL], tool_choice={"type": ["any"]}), "tool_choice"),
    ],
    ids=str,
)
def test_what_is_wrong_is_named(body: Body, param: str) -> None:
    with pytest.raises(ApiError) as caught:
        decided(body, "messages")
    assert (caught.value.status, caught.value.param) == (400, param)


# What is decided and sent

ENABLED = {"type": "enabled", "budget_tokens": 64}


@pytest.mark.parametrize(
    ("fields", "thinks", "source", "budget"),
    [
        ({"thinking": ENABLED}, True, "thinking", 64),
        ({"thinking": {**ENABLED, "budget_tokens": 5000}}, True, "thinking", 75),
        ({"thinking": {"type": "disabled"}}, False, "thinking", None),
        ({"thinking": {"type": "disabled"}, "output_config": {"effort": "max"}}, False, "thinking", None),
        ({"thinking": {"type": "adaptive"}}, False, "default", None),
        ({"thinking": None}, False, "default", None),
        ({"thinking": ENABLED, "chat_template_kwargs": {"enable_thinking": False}}, False, "enable_thinking", None),
        ({"output_config": {"effort": "low"}}, True, "reasoning_effort", 75),
        ({"output_config": {"effort": "low"}, "max_tokens": 9000}, True, "reasoning_effort", 1024),
        ({"model": "thinker:think"}, True, "profile", None),
        ({"messages": [said("user", "2+2? /think")]}, True, "soft_switch", None),
        ({}, False, "default", None),
    ],
    ids=str,
)
def test_thinking_is_chosen_in_every_form_and_sent_as_the_hard_switch_and_a_budget(
    fields: Body, thinks: bool, source: str, budget: int | None
) -> None:
    body = asked(**{"model": "thinker", **fields})
    decision = decided(body, "messages")
    assert (decision.thinking, decision.thinking_source, decision.budget) == (thinks, source, budget)
    outgoing = sent(body, "messages")
    assert outgoing["chat_template_kwargs"] == {"enable_thinking": thinks}
    assert not outgoing.keys() & {"thinking", "output_config", "reasoning_effort"}
    assert outgoing.get("thinking_token_budget") == budget
    assert outgoing["temperature"] == (0.6 if thinks else 0.7)


THINKS = policy_of(CATALOG, RoutingSettings.model_validate({"shipped_rules": False, "rules": [
    {"name": "all", "when": {"text": "."}, "then": {"thinking": True, "budget": 3000}}
]}))  # fmt: skip


@pytest.mark.parametrize(("effort", "budget"), [(None, 3000), ("low", 1024), ("high", 3000), ("max", 3000)], ids=str)
def test_adaptive_leaves_it_to_the_router_and_its_effort_is_a_bound(effort: str | None, budget: int) -> None:
    body = asked(model="thinker", max_tokens=9000, thinking={"type": "adaptive"}, output_config={"effort": effort})
    decision = decided(body, "messages", THINKS)
    assert (decision.thinking, decision.thinking_source, decision.budget) == (True, "rule", budget)


def test_form_stays_where_the_effort_goes() -> None:
    form = {"type": "json_schema", "schema": {"type": "object"}}
    outgoing = sent(asked(output_config={"effort": "low", "format": form}), "messages")
    assert outgoing["output_config"] == {"format": form}


def test_everything_else_passes_as_it_came() -> None:
    body = asked(
        said("user", [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}]),
        model="thinker",
        system="be kind",
        metadata={"user_id": "u"},
        stop_sequences=["END"],
        tools=[TOOL],
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
        stream=True,
        top_k=3,
        seed=7,
        presence_penalty=0.5,
    )
    outgoing = sent(body, "messages")
    assert {name: outgoing[name] for name in body} == body
    assert "stream_options" not in outgoing


@pytest.mark.parametrize("choice", [{"type": "auto"}, {"type": "none"}])
def test_no_tools_is_no_tools(choice: Body) -> None:
    assert not sent(asked(tools=[], tool_choice=choice), "messages").keys() & {"tools", "tool_choice"}


def test_stop_sequences_are_the_routers_to_apply_where_the_model_thinks() -> None:
    body = asked(model="thinker", stop_sequences=["END"], thinking=ENABLED)
    facts = read_facts(body, "messages")
    assert stops_of(facts, decided(body, "messages")) == ("END",)
    assert "stop_sequences" not in sent(body, "messages")


def test_a_model_that_does_not_chat_answers_no_message_and_counts_none() -> None:
    for endpoint in ("messages", "count_tokens"):
        with pytest.raises(ApiError) as caught:
            decided(asked(model="embedder"), endpoint)
        assert caught.value.code == "unsupported_model"


def test_counting_needs_no_limit_and_says_nothing_of_thinking() -> None:
    body = {"messages": [said("user")], "model": "thinker", "thinking": ENABLED, "system": "be kind"}
    assert sent(body, "count_tokens") == {"messages": [said("user")], "model": "thinker", "system": "be kind"}
