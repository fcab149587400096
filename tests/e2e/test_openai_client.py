"""What OpenAI's client for Python does beyond sending a chat: tools, `parse`, its own streams; blocking and not."""

from __future__ import annotations

import json
from typing import Any, Literal

import pytest
from openai import AsyncOpenAI, LengthFinishReasonError, OpenAI, pydantic_function_tool
from pydantic import BaseModel

from tests.e2e.conftest import QWEN, RESIDENT
from tests.e2e.conversation import COMPACT_CALL, NAMED, WEATHER

pytestmark = [pytest.mark.e2e, pytest.mark.real_engine]

PARIS: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
WEATHER_TOOL: Any = WEATHER
NOT_THINKING = {"chat_template_kwargs": {"enable_thinking": False}}
CITIES = ("Oslo", "北京")
# A random model would fill what the grammar leaves open with white space.
FORCED: dict[str, dict[str, Any]] = {
    "named": {"tool_choice": NAMED, "logit_bias": COMPACT_CALL},
    "required": {"tool_choice": "required", "logit_bias": COMPACT_CALL, "parallel_tool_calls": False},
}


class City(BaseModel):
    """A city."""

    city: Literal["Oslo", "北京"]


def asked(**fields: Any) -> dict[str, Any]:
    return {"model": QWEN, "messages": PARIS, "max_tokens": 100, "extra_body": NOT_THINKING, **fields}


async def test_a_stream_that_does_not_block_joins_to_the_plain_answer(async_client: AsyncOpenAI) -> None:
    fields: dict[str, Any] = {"model": RESIDENT, "messages": PARIS, "temperature": 0, "max_tokens": 30}
    whole = await async_client.chat.completions.create(**fields)
    async with async_client.chat.completions.stream(**fields) as stream:
        joined = "".join([event.delta async for event in stream if event.type == "content.delta"])
    assert "Paris" in joined
    assert joined == whole.choices[0].message.content


@pytest.mark.parametrize("choice", FORCED)
def test_a_tool_is_called_and_its_result_answered(client: OpenAI, choice: str) -> None:
    called = client.chat.completions.create(**asked(tools=[WEATHER_TOOL], **FORCED[choice])).choices[0].message
    assert called.tool_calls
    (call,) = called.tool_calls
    assert call.type == "function"
    assert json.loads(call.function.arguments)["city"] in CITIES
    told = [*PARIS, called, {"role": "tool", "tool_call_id": call.id, "content": "21 degrees"}]
    last = client.chat.completions.create(**asked(messages=told, tools=[WEATHER_TOOL], tool_choice="none"))
    assert last.choices[0].message.content
    assert not last.choices[0].message.tool_calls


@pytest.mark.parametrize("choice", FORCED)
async def test_the_clients_own_stream_puts_a_call_together(async_client: AsyncOpenAI, choice: str) -> None:
    async with async_client.chat.completions.stream(**asked(tools=[WEATHER_TOOL], **FORCED[choice])) as stream:
        done = [event async for event in stream if event.type == "tool_calls.function.arguments.done"]
        final = (await stream.get_final_completion()).choices[0].message
    (event,) = done
    assert event.name == "get_weather"
    assert json.loads(event.arguments)["city"] in CITIES
    assert final.tool_calls
    assert final.tool_calls[0].function.arguments == event.arguments


def test_parse_gives_an_object_of_the_class(client: OpenAI) -> None:
    parsed = client.chat.completions.parse(**asked(response_format=City)).choices[0].message.parsed
    assert isinstance(parsed, City)
    with pytest.raises(LengthFinishReasonError):
        client.chat.completions.parse(**{**asked(response_format=City), "max_tokens": 2})


def test_parse_reads_the_arguments_of_a_call(client: OpenAI) -> None:
    tool = pydantic_function_tool(City, name="get_weather")
    message = client.chat.completions.parse(**asked(tools=[tool], **FORCED["named"])).choices[0].message
    assert message.tool_calls
    assert isinstance(message.tool_calls[0].function.parsed_arguments, City)


async def test_parse_of_a_stream_that_does_not_block(async_client: AsyncOpenAI) -> None:
    async with async_client.chat.completions.stream(**asked(response_format=City)) as stream:
        final = await stream.get_final_completion()
    assert isinstance(final.choices[0].message.parsed, City)


def test_responses_parse_gives_an_object_of_the_class(client: OpenAI) -> None:
    fields: dict[str, Any] = {"model": QWEN, "input": "Which city?", "max_output_tokens": 100, "store": False}
    response = client.responses.parse(**fields, text_format=City, extra_body=NOT_THINKING)
    assert isinstance(response.output_parsed, City)
