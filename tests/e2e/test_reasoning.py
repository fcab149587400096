"""Field cases of reasoning, on vLLM with Qwen3's template and parser; unit tests have more of them."""

from __future__ import annotations

from typing import Any

import pytest

from tests.e2e.conftest import QWEN, RESIDENT
from tests.e2e.conversation import (
    BEGINS_THE_THOUGHT,
    BOTH_WAYS,
    ENDS_THE_THOUGHT,
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


def thought(**fields: Any) -> dict[str, Any]:
    """A request whose thought ends after some tokens."""
    return body("Which is larger, 9.11 or 9.8?", **{**ON, **ENDS_THE_THOUGHT, "temperature": 1, "seed": 8, **fields})


@pytest.mark.case(1, 10)
@BOTH_WAYS
@pytest.mark.parametrize("model", [QWEN, RESIDENT])
def test_not_thinking_is_said_and_the_answer_is_content(real: Service, model: str, stream: bool) -> None:
    answer = ask(real, body("Say hello in Chinese.", model=model, **forced("你好")), stream=stream)
    assert (answer.content, answer.reasoning) == ("你好", None)
    assert not (answer.usage.get("completion_tokens_details") or {}).get("reasoning_tokens")


@pytest.mark.case(2)
def test_the_clients_choice_and_vllms_own_fields_survive_the_rewrite_of_the_model(real: Service) -> None:
    fields = {"top_k": 20, "min_p": 0.0, "repetition_penalty": 1.05}
    answer = ask(real, body("Prove it.", **fields, **OFF))
    assert (answer.status, answer.headers["x-router-thinking-source"]) == (200, "enable_thinking")
    # A value that only vLLM can refuse shows that it got there.
    refused = ask(real, body(repetition_penalty=-1))
    assert (refused.status, refused.error["type"]) == (400, "invalid_request_error")


@pytest.mark.case(20)
@BOTH_WAYS
def test_a_stop_string_ends_the_answer_and_not_the_thought(real: Service, stream: bool) -> None:
    answer = ask(real, thought(stop=["9.8"], max_tokens=100, **forced("9[.]11, 9[.]8 and so on")), stream=stream)
    assert answer.reasoning
    assert (answer.content, answer.finish) == ("9.11, ", "stop")


@pytest.mark.case(20)
@BOTH_WAYS
def test_a_stop_string_that_occurs_only_in_the_thought_stops_nothing(real: Service, stream: bool) -> None:
    plain = ask(real, body("Go on.", **ON), stream=stream)
    stop = (plain.reasoning or "").strip()[:3]
    assert stop
    again = ask(real, body("Go on.", stop=stop, **ON), stream=stream)
    assert (again.reasoning, again.finish) == (plain.reasoning, "length")


@pytest.mark.case(29, 62)
@BOTH_WAYS
def test_a_cut_thought_is_reasoning_and_nothing_else(real: Service, stream: bool) -> None:
    answer = ask(real, body("Explain entropy.", max_tokens=20, **ON), stream=stream)
    assert answer.reasoning
    assert not answer.content
    assert answer.finish == "length"
    assert answer.usage["completion_tokens_details"]["reasoning_tokens"] == 20


@pytest.mark.case(62)
def test_a_cut_thought_reads_the_same_streamed_or_not(real: Service) -> None:
    whole, joined = (
        ask(real, body("Explain entropy.", max_tokens=20, **ON), stream=stream) for stream in (False, True)
    )
    assert whole.reasoning == joined.reasoning


@pytest.mark.case(64)
@BOTH_WAYS
def test_a_soft_switch_leaves_no_empty_thought_behind(real: Service, stream: bool) -> None:
    answer = ask(real, body("Capital of France? /no_think", **forced("Paris")), stream=stream)
    assert (answer.content, answer.reasoning) == ("Paris", None)
    assert answer.headers["x-router-thinking-source"] == "soft_switch"
    overruled = ask(real, body("Capital of France? /think", **OFF, **forced("Paris")), stream=stream)
    assert overruled.content == "Paris"
    assert "enable_thinking overrides soft_switch" in overruled.headers["x-router-warning"]


@pytest.mark.case(65)
@pytest.mark.parametrize("effort", ["none", "minimal", "low", "medium", "high", "xhigh", "max"])
def test_effort_switches_thinking(real: Service, effort: str) -> None:
    answer = ask(real, body(reasoning_effort=effort))
    assert bool(answer.reasoning) is (effort != "none")


@pytest.mark.case(65)
def test_an_unknown_effort_is_a_400_and_the_hard_switch_wins(real: Service) -> None:
    refused = ask(real, body(reasoning_effort="turbo"))
    assert (refused.status, refused.error["param"]) == (400, "reasoning_effort")
    assert not ask(real, body(reasoning_effort="high", **OFF)).reasoning


@pytest.mark.case(32, 88)
@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_reasoning_in_the_history_is_taken_under_either_name(real: Service, name: str) -> None:
    history = [*user("Pick a number"), {"role": "assistant", name: "I choose 7", "content": "7"}, *user("Double it")]
    without = [*user("Pick a number"), {"role": "assistant", "content": "7"}, *user("Double it")]
    sizes = [
        ask(real, body(messages=messages, max_tokens=1, **OFF)).usage["prompt_tokens"]
        for messages in (history, without)
    ]
    # Qwen3's template drops thoughts before the last user turn.
    assert sizes[0] == sizes[1]


@pytest.mark.case(88)
def test_reasoning_within_a_tool_loop_is_rendered_alike_under_either_name(real: Service) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Oslo"}'}}

    def size(**thought: str) -> int:
        turn = {"role": "assistant", "content": "", "tool_calls": [call], **thought}
        messages = [*user("Weather?"), turn, {"role": "tool", "tool_call_id": "c1", "content": "rain"}]
        return int(ask(real, body(messages=messages, tools=[WEATHER], max_tokens=1)).usage["prompt_tokens"])

    assert size(reasoning="I look it up") == size(reasoning_content="I look it up") > size()


@pytest.mark.case(112)
@BOTH_WAYS
def test_tags_in_ordinary_prose_survive(real: Service, stream: bool) -> None:
    line = "use <think>draft</think> and <tool_call> tags"
    answer = ask(real, body(f"Copy this line exactly: {line}", **OFF, **forced(line)), stream=stream)
    assert answer.content == line


@pytest.mark.case(139)
@BOTH_WAYS
def test_logprobs_come_with_the_reasoning_parser_on(real: Service, stream: bool) -> None:
    answer = ask(real, body(max_tokens=12, logprobs=True, top_logprobs=2, **ON), stream=stream)
    assert len(answer.logprobs) == answer.usage["completion_tokens"]


@BOTH_WAYS
def test_a_thought_that_ends_more_than_once_leaves_no_tag_in_the_answer(real: Service, stream: bool) -> None:
    """As one does whose budget ran out: the weights would write nothing but its end."""
    answer = ask(real, body("Hi", max_tokens=6, logit_bias=leaning_to("</think>"), **ON), stream=stream)
    assert (answer.content, answer.finish) == (None, "length")


@BOTH_WAYS
def test_an_answer_holds_its_form_behind_a_thought_that_nobody_wants_to_see(real: Service, stream: bool) -> None:
    fields = {"include_reasoning": False, "thinking_token_budget": 6, "structured_outputs": {"choice": ["Oslo"]}}
    answer = ask(real, body("Hi", **{**BEGINS_THE_THOUGHT, **fields}), stream=stream)
    assert (answer.content, answer.reasoning, answer.finish) == ("Oslo", None, "stop")
    assert answer.usage["completion_tokens_details"]["reasoning_tokens"] > 0
