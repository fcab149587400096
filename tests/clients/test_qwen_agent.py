"""qwen-agent: its loop of tool calls, and the calls that the engine's own parser finds."""

from __future__ import annotations

from typing import Any

import json5
import pytest
from qwen_agent.agents import Assistant
from qwen_agent.llm import get_chat_model
from qwen_agent.tools.base import BaseTool

from tests.clients.conftest import SCRIPTED
from tests.e2e.conftest import QWEN
from tests.e2e.conversation import COMPACT_CALL, WEATHER
from tests.e2e.service import Service

pytestmark = [pytest.mark.e2e, pytest.mark.real_engine]

QUESTION = [{"role": "user", "content": "What is the weather in Oslo?"}]


# The agent takes these keys of a schema and no other.
PARAMETERS = {key: WEATHER["function"]["parameters"][key] for key in ("type", "properties", "required")}


class Weather(BaseTool):
    """Keeps what it was asked for, and says in its result what the scripted model is to answer then."""

    name = "get_weather"
    description = "The weather in a city."
    parameters = PARAMETERS

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []

    def call(self, params: str | dict[str, Any], **more: Any) -> str:
        self.asked.append(json5.loads(params)["city"])
        return "fake[text=It is 21 degrees in Oslo.]"


def settings(service: Service, model: str, **generate: Any) -> dict[str, Any]:
    served = {"model_type": "oai", "model_server": f"{service.base_url}/v1", "api_key": "none"}
    return {**served, "model": model, "generate_cfg": generate}


def test_the_agent_calls_its_tool_and_ends_with_what_it_made_of_the_result(service: Service) -> None:
    weather = Weather()
    agent = Assistant(llm=settings(service, SCRIPTED), function_list=[weather])
    *_, messages = agent.run(QUESTION)
    assert weather.asked == ["Oslo"]
    assert [message["role"] for message in messages] == ["assistant", "function", "assistant"]
    assert messages[0]["function_call"]["name"] == "get_weather"
    assert messages[-1]["content"] == "It is 21 degrees in Oslo."


def test_calls_that_the_engine_parses_are_the_agents_calls(service: Service) -> None:
    named = {"type": "function", "function": {"name": "get_weather"}}
    quiet = {"chat_template_kwargs": {"enable_thinking": False}, "logit_bias": COMPACT_CALL}
    llm = get_chat_model(settings(service, QWEN, use_raw_api=True, tool_choice=named, max_tokens=100, extra_body=quiet))
    functions = [{"name": "get_weather", "description": Weather.description, "parameters": PARAMETERS}]
    *_, messages = llm.chat(messages=QUESTION, functions=functions, stream=True)
    (call,) = [message["function_call"] for message in messages if message.get("function_call")]
    assert call["name"] == "get_weather"
    assert json5.loads(call["arguments"])["city"] in ("Oslo", "北京")
