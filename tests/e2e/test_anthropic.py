"""`/v1/messages` on the real engine, through Anthropic's own client: routing, tools and thinking as for chats."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from anthropic import Anthropic, AsyncAnthropic

from tests.e2e.conftest import LAZY, QWEN, RESIDENT
from tests.e2e.conversation import BEGINS_THE_THOUGHT, COMPACT_CALL, WEATHER
from tests.e2e.service import Service, wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.real_engine]

PARIS: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
# The client has no word for it since its own models take none.
GREEDY: dict[str, Any] = {"extra_body": {"temperature": 0}}
TOOL: dict[str, Any] = {"name": "get_weather", "strict": True, "input_schema": WEATHER["function"]["parameters"]}
NAMED: dict[str, Any] = {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "get_weather"}}
# A random model would fill what the grammar leaves open with white space.
COMPACT: dict[str, Any] = {"extra_body": {"logit_bias": COMPACT_CALL}}
CITIES = ("Oslo", "北京")


@pytest.fixture
def claude(real: Service) -> Iterator[Anthropic]:
    with Anthropic(base_url=real.base_url, api_key="none", max_retries=0, timeout=120) as client:
        yield client


def thought(message: Any) -> str:
    return "".join(block.thinking for block in message.content if block.type == "thinking")


def text(message: Any) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


def test_the_capital_of_france_is_paris_and_the_stream_joins_to_the_same(claude: Anthropic) -> None:
    asked: dict[str, Any] = {"model": RESIDENT, "messages": PARIS, "max_tokens": 30, **GREEDY}
    whole = claude.messages.create(**asked)
    assert "Paris" in text(whole)
    assert (whole.role, whole.model, whole.stop_reason) == ("assistant", RESIDENT, "end_turn")
    assert whole.usage.input_tokens > 5 < whole.usage.output_tokens
    with claude.messages.stream(**asked) as stream:
        kinds = [event.type for event in stream]
        joined = stream.get_final_message()
    assert (text(joined), joined.stop_reason, joined.usage) == (text(whole), "end_turn", whole.usage)
    assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")


async def test_the_client_that_does_not_block_streams_too(real: Service) -> None:
    client = AsyncAnthropic(base_url=real.base_url, api_key="none", max_retries=0)
    async with client.messages.stream(model="smollm2", messages=PARIS, max_tokens=30, **GREEDY) as stream:
        assert "Paris" in "".join([piece async for piece in stream.text_stream])


def test_the_router_chooses_for_auto_and_says_why(claude: Anthropic) -> None:
    answer = claude.messages.with_raw_response.create(model="auto", messages=PARIS, max_tokens=4, system="Be brief.")
    said = answer.headers
    assert (said["x-router-model"], said["x-router-model-source"]) == (RESIDENT, "default")
    assert said["request-id"] == said["x-request-id"] == answer.parse()._request_id


def test_a_cold_model_is_loaded_for_a_stream(real: Service, claude: Anthropic) -> None:
    real.unload(LAZY)
    with claude.messages.stream(model=LAZY, messages=PARIS, max_tokens=30, **GREEDY) as stream:
        assert "Paris" in "".join(stream.text_stream)
        assert int(stream.response.headers.get("x-router-cold-start-ms", 0)) >= 0
    assert real.model(LAZY)["loads"] >= 1


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_tool_is_called_and_its_result_answered(claude: Anthropic, stream: bool) -> None:
    asked: dict[str, Any] = {"model": QWEN, "messages": [{"role": "user", "content": "天气?"}], "max_tokens": 100}

    def ask(**more: Any) -> Any:
        if not stream:
            return claude.messages.create(**asked, **more)
        with claude.messages.stream(**asked, **more) as events:
            return events.get_final_message()

    called = ask(**NAMED, **COMPACT, thinking={"type": "disabled"})
    assert called.stop_reason == "tool_use"
    (call,) = called.content
    assert (call.type, call.name) == ("tool_use", "get_weather")
    assert call.input["city"] in CITIES
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "21 degrees"}
    asked["messages"] += [{"role": "assistant", "content": called.content}, {"role": "user", "content": [result]}]
    answered = ask(tools=[TOOL], tool_choice={"type": "none"}, thinking={"type": "disabled"})
    assert text(answered)
    assert answered.stop_reason in ("end_turn", "max_tokens")


def test_a_call_that_the_limit_cuts_is_no_error_and_must_not_run(claude: Anthropic) -> None:
    asked: dict[str, Any] = {"model": QWEN, "messages": PARIS, "thinking": {"type": "disabled"}}
    cut = claude.messages.create(**asked, **NAMED, max_tokens=2)
    assert cut.stop_reason == "max_tokens"
    assert all(block.input == {} for block in cut.content if block.type == "tool_use")


BUDGET = 16
THOUGHTFUL: dict[str, Any] = {"model": QWEN, "messages": PARIS, "max_tokens": 80}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_thinking_ends_at_its_budget_and_leaves_room_for_the_answer(claude: Anthropic, stream: bool) -> None:
    asked = {**THOUGHTFUL, "thinking": {"type": "enabled", "budget_tokens": BUDGET}, "extra_body": BEGINS_THE_THOUGHT}
    if stream:
        with claude.messages.stream(**asked) as events:
            message = events.get_final_message()
        said = events.response.headers
    else:
        answer = claude.messages.with_raw_response.create(**asked)
        message, said = answer.parse(), answer.headers
    assert (said["x-router-thinking"], said["x-router-thinking-source"]) == ("on", "thinking")
    assert said["x-router-budget"] == str(BUDGET)
    assert [block.type for block in message.content] == ["thinking", "text"]
    assert thought(message)
    assert text(message)


def test_thinking_without_a_budget_takes_all_there_is_of_random_weights(claude: Anthropic) -> None:
    """So that what ends the thought above is the budget."""
    kwargs = {"chat_template_kwargs": {"enable_thinking": True}}
    message = claude.messages.create(**THOUGHTFUL, extra_body={**BEGINS_THE_THOUGHT, **kwargs})
    assert thought(message)
    assert not text(message)


@pytest.mark.parametrize(
    "fields",
    [{"thinking": {"type": "disabled"}}, {"model": QWEN + ":fast"}, {}],
    ids=["disabled", "profile", "the router's choice"],
)
def test_not_thinking_is_said_to_the_engine_as_the_hard_switch(claude: Anthropic, fields: dict[str, Any]) -> None:
    asked: dict[str, Any] = {"model": QWEN, "messages": PARIS, "max_tokens": 12, **fields}
    answer = claude.messages.with_raw_response.create(**asked)
    assert answer.headers["x-router-thinking"] == "off"
    assert not thought(answer.parse())
    assert text(answer.parse())


def test_an_answer_is_held_to_a_schema(claude: Anthropic) -> None:
    schema = {"type": "object", "properties": {"city": {"enum": list(CITIES)}}, "required": ["city"]}
    form: Any = {"format": {"type": "json_schema", "schema": {**schema, "additionalProperties": False}}}
    asked: dict[str, Any] = {"model": QWEN, "messages": PARIS, "max_tokens": 60, "thinking": {"type": "disabled"}}
    assert text(claude.messages.create(**asked, output_config=form)) in ('{"city":"Oslo"}', '{"city":"北京"}')


def test_tokens_are_counted_as_the_engine_would_count_them(claude: Anthropic) -> None:
    counted = claude.messages.count_tokens(model=RESIDENT, messages=PARIS)
    answered = claude.messages.create(model=RESIDENT, messages=PARIS, max_tokens=1)
    assert counted.input_tokens == answered.usage.input_tokens


@pytest.mark.parametrize(
    ("fields", "error", "kind"),
    [
        ({"model": "no-such"}, anthropic.NotFoundError, "not_found_error"),
        ({"max_tokens": 5000}, anthropic.BadRequestError, "invalid_request_error"),
        (
            {"messages": [{"role": "user", "content": "tea " * 5000}]},
            anthropic.BadRequestError,
            "invalid_request_error",
        ),
        # What only vLLM knows.
        (
            {"messages": [{"role": "user", "content": [{"type": "document", "source": {"type": "text"}}]}]},
            anthropic.BadRequestError,
            "invalid_request_error",
        ),
    ],
    ids=["model", "max_tokens", "context", "block"],
)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_errors_are_those_that_the_client_knows(
    claude: Anthropic, fields: dict[str, Any], error: type[anthropic.APIStatusError], kind: str, stream: bool
) -> None:
    asked: dict[str, Any] = {"model": RESIDENT, "messages": PARIS, "max_tokens": 5, "stream": stream, **fields}
    with pytest.raises(error) as raised:
        claude.messages.create(**asked)
    body: Any = raised.value.body
    assert (body["type"], body["error"]["type"]) == ("error", kind)
    assert set(body["error"]) == {"type", "message"}
    assert "tea tea" not in body["error"]["message"]


def test_a_client_that_leaves_stops_the_engine(real: Service, claude: Anthropic) -> None:
    asked: dict[str, Any] = {"model": QWEN, "messages": PARIS, "max_tokens": 1900}
    with claude.messages.stream(**asked) as stream:
        next(iter(stream))
    wait_until(lambda: real.model(QWEN)["in_flight"] == 0, 5, "the request was dropped")
