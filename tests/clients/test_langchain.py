"""LangChain's `ChatOpenAI`: chats, streams, tools and structured output."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import pytest
from langchain_core.messages import AIMessageChunk, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

from tests.e2e.conftest import QWEN, RESIDENT
from tests.e2e.conversation import COMPACT_CALL
from tests.e2e.service import Service

pytestmark = [pytest.mark.e2e, pytest.mark.real_engine]

PARIS = "What is the capital of France?"
CITIES = ("Oslo", "北京")
NOT_THINKING = {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}}
# A random model would fill what the grammar leaves open with white space.
CALLING: dict[str, Any] = {**NOT_THINKING, "logit_bias": COMPACT_CALL}


@tool
def get_weather(city: Literal["Oslo", "北京"]) -> str:
    """The weather in a city."""
    return f"21 degrees in {city}"


class City(BaseModel):
    """A city."""

    city: Literal["Oslo", "北京"]


def model(service: Service, name: str, **fields: Any) -> ChatOpenAI:
    given: dict[str, Any] = {"max_retries": 0, "timeout": 120, "temperature": 0, "max_tokens": 60, **fields}
    return ChatOpenAI(base_url=f"{service.base_url}/v1", api_key="none", model=name, **given)


def test_a_chat_is_answered_and_its_stream_joins_to_the_same(service: Service) -> None:
    chat = model(service, RESIDENT, stream_usage=True)
    whole = chat.invoke(PARIS)
    assert "Paris" in whole.text
    joined = AIMessageChunk(content="")
    for chunk in chat.stream(PARIS):
        joined += chunk
    assert joined.text == whole.text
    assert whole.usage_metadata
    assert joined.usage_metadata == whole.usage_metadata
    assert whole.response_metadata["finish_reason"] == joined.response_metadata["finish_reason"] == "stop"


async def test_several_at_once_without_blocking(service: Service) -> None:
    chat = model(service, RESIDENT)
    answers = await asyncio.gather(*(chat.ainvoke(PARIS) for _ in range(4)))
    assert all("Paris" in answer.text for answer in answers)
    assert "Paris" in "".join([chunk.text async for chunk in chat.astream(PARIS)])


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_tool_is_called_and_its_result_answered(service: Service, stream: bool) -> None:
    chat = model(service, QWEN, **NOT_THINKING)
    calling = model(service, QWEN, **CALLING).bind_tools([get_weather], tool_choice="get_weather")
    asked: list[Any] = [HumanMessage("Weather?")]
    called: Any = calling.invoke(asked)
    if stream:
        called = AIMessageChunk(content="")
        for chunk in calling.stream(asked):
            called += chunk
    (call,) = called.tool_calls
    assert call["name"] == "get_weather"
    assert call["args"]["city"] in CITIES
    result = get_weather.invoke(call)
    assert isinstance(result, ToolMessage)
    answered = chat.bind_tools([get_weather], tool_choice="none").invoke([*asked, called, result])
    assert answered.text
    assert not answered.tool_calls


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_output_has_the_structure_that_was_asked_for(service: Service, method: Any) -> None:
    found = model(service, QWEN, **CALLING).with_structured_output(City, method=method).invoke("Which city?")
    assert isinstance(found, City)
