"""Field cases of tool calls, on vLLM with its hermes parser; unit tests have more of them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.e2e.conftest import QWEN
from tests.e2e.conversation import (
    BOTH_WAYS,
    COMPACT_CALL,
    LOOSE,
    NAMED,
    OFF,
    ON,
    WEATHER,
    ask,
    body,
    forced,
    leaning_to,
    user,
)
from tests.e2e.service import Service

pytestmark = [pytest.mark.e2e, pytest.mark.real_engine]

CALL = r'<tool_call>\n\{"name": "get_weather", "arguments": \{"city": "Oslo"\}\}\n</tool_call>'


def tool_for(choice: Any) -> dict[str, Any]:
    """Forced by a regex where the choice is `auto`, by its own schema else."""
    return LOOSE if choice == "auto" else WEATHER


@pytest.mark.case(16)
@BOTH_WAYS
def test_a_call_is_no_text_with_thinking_off(real: Service, stream: bool) -> None:
    answer = ask(real, body("Weather in Oslo?", tools=[LOOSE], max_tokens=80, **OFF, **forced(CALL)), stream=stream)
    (call,) = answer.calls
    assert json.loads(call["arguments"]) == {"city": "Oslo"}
    assert (answer.content, answer.finish) == (None, "tool_calls")


@pytest.mark.case(40)
@BOTH_WAYS
@pytest.mark.parametrize("max_tokens", [1, 4, 8, 14])
@pytest.mark.parametrize("choice", ["auto", "required", NAMED], ids=["auto", "required", "named"])
def test_a_call_that_was_cut_is_a_length_and_no_markup(
    real: Service, choice: Any, max_tokens: int, stream: bool
) -> None:
    fields = forced(CALL) if choice == "auto" else {}
    answer = ask(
        real,
        body(
            "Hi",
            tools=[LOOSE if choice == "auto" else WEATHER],
            tool_choice=choice,
            max_tokens=max_tokens,
            **OFF,
            **fields,
        ),
        stream=stream,
    )
    assert answer.finish == "length"
    assert not answer.calls or stream
    assert "tool_call" not in (answer.content or "")


@pytest.mark.case(40)
def test_calls_that_were_complete_before_the_cut_are_kept_streamed_or_not(real: Service) -> None:
    three = body("Hi", tools=[LOOSE], max_tokens=60, **OFF, **forced(f"{CALL}\n{CALL}\n{CALL}"))
    whole, joined = (ask(real, three, stream=stream) for stream in (False, True))
    assert whole.finish == joined.finish == "length"
    assert whole.calls
    for answer in (whole, joined):
        assert answer.calls[0]["name"] == "get_weather"
        assert json.loads(answer.calls[0]["arguments"]) == {"city": "Oslo"}


@pytest.mark.case(41)
@pytest.mark.parametrize(("choice", "finish"), [("auto", "tool_calls"), ("required", "tool_calls"), (NAMED, "stop")])
def test_the_finish_reason_of_a_call_is_the_same_streamed_or_not(real: Service, choice: Any, finish: str) -> None:
    # `required` lets a random model call again and again; one call at a time ends it.
    fields = forced(CALL) if choice == "auto" else {"parallel_tool_calls": False, "logit_bias": COMPACT_CALL}
    asked = body("Hi", tools=[tool_for(choice)], tool_choice=choice, max_tokens=300, **OFF, **fields)
    assert {ask(real, asked, stream=stream).finish for stream in (False, True)} == {finish}


@pytest.mark.case(43)
def test_braces_and_chinese_in_arguments_survive_the_stream(real: Service) -> None:
    city = "{北京, a}b{"
    parameters = {"type": "object", "properties": {"city": {"enum": [city]}}, "required": ["city"]}
    function = {"name": "get_weather", "strict": True, "parameters": {**parameters, "additionalProperties": False}}
    call = r'<tool_call>\n\{"name": "get_weather", "arguments": \{"city": "\{北京, a\}b\{"\}\}\n</tool_call>'
    bias = {**COMPACT_CALL, **leaning_to(city, f'"{city}"', f'{{"city": "{city}"}}')}
    asked = body("Call it", tools=[{"type": "function", "function": function}], max_tokens=120, logit_bias=bias)
    for stream in (False, True):
        answer = ask(real, {**asked, **OFF, **forced(call)}, stream=stream)
        assert json.loads(answer.calls[0]["arguments"]) == {"city": city}


@pytest.mark.case(92)
@BOTH_WAYS
@pytest.mark.parametrize(("parallel", "calls"), [(False, 1), (True, 2), (None, 2)])
def test_parallel_calls_can_be_switched_off(real: Service, parallel: bool | None, calls: int, stream: bool) -> None:
    asked = body("Both", tools=[LOOSE], max_tokens=120, **OFF, **forced(f"{CALL}\n{CALL}"))
    if parallel is not None:
        asked["parallel_tool_calls"] = parallel
    answer = ask(real, asked, stream=stream)
    assert len(answer.calls) == calls
    assert len({call["id"] for call in answer.calls}) == calls


@pytest.mark.case(44)
def test_each_of_several_streamed_choices_is_whole_and_ends_once(real: Service) -> None:
    asked = body("Weather?", tools=[LOOSE], n=3, max_tokens=80, **OFF, **forced(CALL), temperature=1, seed=3)
    answer = ask(real, asked, stream=True)
    choices = [choice for chunk in answer.raw for choice in chunk["choices"]]
    assert sorted(choice["index"] for choice in choices if choice["finish_reason"]) == [0, 1, 2]
    for index in range(3):
        own = [choice for choice in choices if choice["index"] == index]
        assert own[-1]["finish_reason"] == "tool_calls"
        pieces = [call for choice in own for call in choice["delta"].get("tool_calls") or ()]
        assert {piece["index"] for piece in pieces} == {0}
        assert json.loads("".join(piece["function"]["arguments"] for piece in pieces)) == {"city": "Oslo"}
        assert not "".join(choice["delta"].get("content") or "" for choice in own)
    # One call takes a dozen tokens at least; how many depends on how it was cut into them.
    assert answer.usage["completion_tokens"] > 3 * 12


@pytest.mark.case(44)
def test_each_of_several_streamed_choices_has_its_own_thought(real: Service) -> None:
    asked = body("Go on.", n=3, max_tokens=12, **{**ON, "temperature": 1, "seed": 3})
    answer = ask(real, asked, stream=True)
    choices = [choice for chunk in answer.raw for choice in chunk["choices"]]
    thoughts = {
        index: "".join(choice["delta"].get("reasoning") or "" for choice in choices if choice["index"] == index)
        for index in range(3)
    }
    assert all(thoughts.values())
    assert sorted(choice["index"] for choice in choices if choice["finish_reason"] == "length") == [0, 1, 2]
    assert answer.usage["completion_tokens"] == 36


@pytest.mark.case(94)
@BOTH_WAYS
def test_a_call_begun_in_the_thought_and_never_finished_comes_to_light(real: Service, stream: bool) -> None:
    """Random text with a `<tool_call>` in its thought. No parser can read it, and the client must hear of it."""
    likely = {**leaning_to("<tool_call>", likely=10), **leaning_to("<|im_end|>", likely=9.5)}
    wild = {"temperature": 1, "top_k": -1, "top_p": 1, "min_tokens": 40, "max_tokens": 160, "logit_bias": likely}
    ends = []
    for seed in range(15):
        asked = body("Think, then call it.", tools=[LOOSE], seed=seed, stream=stream, **{**ON, **wild})
        status, _, said = real.request("/v1/chat/completions", asked, timeout_s=200)
        if "invalid_tool_call" in str(said):
            assert status == (200 if stream else 503)
            ends.append("error")
            continue
        events = [json.loads(event[6:]) for event in said.split("\n\n")[:-2]] if stream else [said]
        choices = [choice for event in events for choice in event["choices"]]
        messages = [choice["delta" if stream else "message"] for choice in choices]
        ends.append(choices[-1]["finish_reason"])
        text = "".join(message.get("content") or "" for message in messages)
        assert ends[-1] == "length" or text or any(message.get("tool_calls") for message in messages)
        assert "<tool_call>" not in text
    assert set(ends) & {"stop", "error"}


@pytest.mark.case(95)
def test_a_call_without_content_in_the_history_reads_the_same_however_it_is_written(real: Service) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city":"Oslo"}'}}
    result = {"role": "tool", "tool_call_id": "c1", "content": "rain"}
    forms = [{"content": None}, {"content": ""}, {}]
    sizes = [
        ask(
            real,
            body(
                messages=[*user("Weather?"), {"role": "assistant", "tool_calls": [call], **form}, result],
                tools=[WEATHER],
                max_tokens=1,
            ),
        ).usage["prompt_tokens"]
        for form in forms
    ]
    assert len(set(sizes)) == 1


@pytest.mark.case(95)
@pytest.mark.parametrize("form", [{"content": None}, {"content": ""}, {}], ids=str)
def test_a_call_without_content_puts_no_none_into_the_prompt(real: Service, form: dict[str, Any]) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city":"Oslo"}'}}
    messages = [*user("Weather?"), {"role": "assistant", "tool_calls": [call], **form}]
    messages.append({"role": "tool", "tool_call_id": "c1", "content": "rain"})
    _, _, tokens = real.request("/tokenize", {"model": QWEN, "messages": messages, "tools": [WEATHER]})
    _, _, prompt = real.request("/detokenize", {"model": QWEN, "tokens": tokens["tokens"]})
    assert "get_weather" in prompt["prompt"]
    assert "None" not in prompt["prompt"]


@pytest.mark.case(137)
def test_forty_tools_are_taken_or_refused_for_their_length(real: Service) -> None:
    def tools(count: int) -> list[dict[str, Any]]:
        nested = {"type": "object", "properties": {"a": {"type": "object", "properties": {"b": {"type": "string"}}}}}
        return [
            {"type": "function", "function": {"name": f"tool_{n}", "description": "d " * 500, "parameters": nested}}
            for n in range(count)
        ]

    assert ask(real, body("hi", tools=tools(1), max_tokens=4, **OFF)).status == 200
    many = [{"type": "function", "function": {"name": f"tool_{n}"}} for n in range(40)]
    assert ask(real, body("hi", tools=many, max_tokens=4, **OFF)).status == 200
    refused = ask(real, body("hi", tools=tools(40), max_tokens=4, **OFF))
    assert (refused.status, refused.error["code"]) == (400, "context_length_exceeded")


@BOTH_WAYS
def test_a_call_without_arguments_has_an_empty_object(real: Service, stream: bool) -> None:
    tool = {"type": "function", "function": {"name": "now"}}
    call = r'<tool_call>\n\{"name": "now", "arguments": \{\}\}\n</tool_call>'
    answer = ask(real, body("What time?", tools=[tool], max_tokens=60, **OFF, **forced(call)), stream=stream)
    assert [call["arguments"] for call in answer.calls] == ["{}"]


@pytest.mark.parametrize("arguments", ['{"city": ', "", '["Oslo"]', {"city": "Oslo"}, None], ids=str)
def test_a_call_that_a_model_wrote_wrong_does_not_end_the_conversation(real: Service, arguments: Any) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": arguments}}
    result = {"role": "tool", "tool_call_id": "c1", "content": None}
    messages = [*user("Weather?"), {"role": "assistant", "tool_calls": [call]}, result, *user("Go on.")]
    assert ask(real, body(messages=messages, tools=[WEATHER], max_tokens=2, **OFF)).status == 200


@pytest.mark.case(142)
@BOTH_WAYS
def test_integer_arguments_arrive_as_integers(real: Service, stream: bool) -> None:
    properties = {"first_int": {"type": "integer"}, "second_int": {"type": "integer"}}
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    tool = {"type": "function", "function": {"name": "multiply", "parameters": schema}}
    call = r'<tool_call>\n\{"name": "multiply", "arguments": \{"first_int": 5, "second_int": 42\}\}\n</tool_call>'
    answer = ask(real, body("5 times forty two?", tools=[tool], max_tokens=100, **OFF, **forced(call)), stream=stream)
    assert json.loads(answer.calls[0]["arguments"]) == {"first_int": 5, "second_int": 42}


@BOTH_WAYS
def test_no_call_is_written_where_none_may_be(real: Service, stream: bool) -> None:
    """The weights would write nothing but the word that begins one."""
    eager = leaning_to("<tool_call>")
    answer = ask(real, body("Hi", tools=[WEATHER], tool_choice="none", logit_bias=eager, **OFF), stream=stream)
    assert (answer.calls, answer.finish) == ([], "length")
    assert answer.content
