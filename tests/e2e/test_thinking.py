"""Every way of asking for thinking reaches a real Qwen3 template, parser and engine as the hard switch."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai import OpenAI

from tests.e2e.conftest import QWEN, RESIDENT
from tests.e2e.service import Service

pytestmark = [pytest.mark.e2e, pytest.mark.real_engine]

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}

# The model's weights are random, so it never ends a thought: all it says is in one field or the other.
ON: list[dict[str, Any]] = [
    {"chat_template_kwargs": {"enable_thinking": True}},
    {"thinking_token_budget": 8},
    {"reasoning_effort": "high"},
    {"text": "2+2? /think"},
    {"text": "<think>\n2+2?"},
    {"mode": "thinking"},
    {"model": QWEN + ":think"},
    {"chat_template_kwargs": {"enable_thinking": True}, "reasoning_effort": "none"},
    {"extra_body": {"chat_template_kwargs": {"enable_thinking": True}}},
]
OFF: list[dict[str, Any]] = [
    {},
    {"chat_template_kwargs": {"enable_thinking": False}},
    {"thinking_token_budget": 0},
    {"reasoning_effort": "none"},
    {"text": "2+2? /no_think"},
    {"mode": "non_thinking"},
    {"model": QWEN + ":fast"},
    {"chat_template_kwargs": {"enable_thinking": False}, "reasoning_effort": "high"},
]


def _body(form: dict[str, Any], **more: Any) -> dict[str, Any]:
    form = dict(form)
    text = form.pop("text", "2+2?")
    base = {
        "model": QWEN,
        "messages": [{"role": "user", "content": text}],
        "max_tokens": 24,
        "temperature": 0,
    }
    return {**base, "ignore_eos": True, **form, **more}


@pytest.mark.case(65)
@pytest.mark.parametrize("form", ON, ids=str)
def test_thinking_on_puts_the_text_into_reasoning(real: Service, form: dict[str, Any]) -> None:
    status, headers, answer = real.request("/v1/chat/completions", _body(form), timeout_s=120)
    assert status == 200
    message = answer["choices"][0]["message"]
    assert message["reasoning"]
    assert answer["choices"][0]["finish_reason"] == "length"
    assert headers["x-router-thinking"] == "on"
    if "thinking_token_budget" not in form and "reasoning_effort" not in form:
        assert not message["content"]


@pytest.mark.parametrize("form", OFF, ids=str)
def test_thinking_off_puts_the_text_into_content(real: Service, form: dict[str, Any]) -> None:
    status, headers, answer = real.request("/v1/chat/completions", _body(form), timeout_s=120)
    assert status == 200
    message = answer["choices"][0]["message"]
    assert message["content"]
    assert not message["reasoning"]
    assert headers["x-router-thinking"] == "off"


@pytest.mark.case(10, 62)
@pytest.mark.parametrize("thinking", [True, False])
def test_a_stream_says_the_same_in_the_same_fields(real: Service, thinking: bool) -> None:
    form = {"chat_template_kwargs": {"enable_thinking": thinking}}
    _, _, whole = real.request("/v1/chat/completions", _body(form), timeout_s=120)
    client = OpenAI(base_url=real.base_url + "/v1", api_key="none")
    body = _body(form)
    extra = {key: body.pop(key) for key in ("chat_template_kwargs", "ignore_eos")}
    deltas = [chunk.choices[0].delta for chunk in client.chat.completions.create(**body, extra_body=extra, stream=True)]
    message = whole["choices"][0]["message"]
    assert "".join(delta.content or "" for delta in deltas) == (message["content"] or "")
    joined = "".join(getattr(delta, "reasoning", None) or "" for delta in deltas)
    assert joined == (message["reasoning"] or "")


def test_a_budget_ends_the_thinking(real: Service) -> None:
    body = _body({"thinking_token_budget": 8}, max_tokens=40)
    # The budget counts from `<think>`, which these weights would never say by themselves.
    body["messages"].append({"role": "assistant", "content": "<think>"})
    body |= {"add_generation_prompt": False, "continue_final_message": True, "temperature": 1, "seed": 1}
    _, headers, answer = real.request("/v1/chat/completions", body, timeout_s=120)
    assert headers["x-router-budget"] == "8"
    details = answer["usage"]["completion_tokens_details"]
    assert 0 < details["reasoning_tokens"] <= 12
    assert answer["choices"][0]["message"]["content"]


def test_a_model_that_cannot_think_answers_and_says_so(real: Service) -> None:
    body = {"model": RESIDENT, "messages": [{"role": "user", "content": "2+2?"}], "reasoning_effort": "high"}
    status, headers, _ = real.request("/v1/chat/completions", {**body, "max_tokens": 3})
    assert status == 200
    assert "cannot think" in headers["x-router-warning"]


@pytest.mark.case(16)
def test_a_tool_call_comes_through_the_real_parser_streaming_or_not(real: Service) -> None:
    call = r'<tool_call>\n\{"name": "get_weather", "arguments": \{"city": "北京"\}\}\n</tool_call>'
    body = {
        "model": QWEN,
        "messages": [{"role": "user", "content": "Weather in Beijing?"}],
        "tools": [WEATHER],
        "max_tokens": 100,
    }
    client = OpenAI(base_url=real.base_url + "/v1", api_key="none", timeout=120)
    forced = {"structured_outputs": {"regex": call}}
    whole = client.chat.completions.create(**body, extra_body=forced).choices[0]
    assert whole.finish_reason == "tool_calls"
    assert not whole.message.content
    (called,) = whole.message.tool_calls or []
    assert called.function.name == "get_weather"
    assert json.loads(called.function.arguments) == {"city": "北京"}
    chunks = list(client.chat.completions.create(**body, extra_body=forced, stream=True))
    deltas = [tool for chunk in chunks for tool in chunk.choices[0].delta.tool_calls or []]
    assert deltas[0].id
    assert deltas[0].function.name == "get_weather"
    assert json.loads("".join(delta.function.arguments or "" for delta in deltas)) == {"city": "北京"}
    assert not "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


def test_a_choice_and_a_schema_hold(real: Service) -> None:
    client = OpenAI(base_url=real.base_url + "/v1", api_key="none", timeout=120)
    question = {"model": QWEN, "messages": [{"role": "user", "content": "Oslo or Rome?"}], "max_tokens": 40}
    chosen = client.chat.completions.create(**question, extra_body={"structured_outputs": {"choice": ["Oslo", "Rome"]}})
    assert chosen.choices[0].message.content in ("Oslo", "Rome")
    schema = {"type": "string", "enum": ["Oslo", "Rome"]}
    held = client.chat.completions.create(
        **question,
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "city", "strict": True, "schema": schema},
        },
    )
    assert json.loads(held.choices[0].message.content or "") in ("Oslo", "Rome")
