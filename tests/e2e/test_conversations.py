"""History kept by the router: on the real engine, through `serve run` and the openai client; two Routers, one Redis."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from openai import BadRequestError, NotFoundError, OpenAI

from tests.e2e.conftest import QWEN, RESIDENT, real_models
from tests.e2e.service import Service, running, wait_until
from tests.unit.redis_server import RedisServer, redis_server

pytestmark = [pytest.mark.e2e, pytest.mark.real_engine]

NAME = "Bartholomew"
HELLO = f"My name is {NAME}. Please remember it."
QUESTION = "What is my name?"
HEADER = "x-router-conversation"


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with redis_server() as running_redis:
        yield running_redis


@pytest.fixture(scope="module")
def service(server: RedisServer) -> Iterator[Service]:
    """Two Routers on one port: which of them a new connection reaches is the kernel's choice."""
    models = [model for model in real_models() if model["id"] in (RESIDENT, QWEN)]
    with running(
        models,
        router={"replicas": 2},
        pool={"memory_gb": 4},
        conversations={"enabled": True, "redis_url": server.url},
    ) as started:
        yield started


@pytest.fixture
def client(service: Service) -> Iterator[OpenAI]:
    """A connection for each request, so that both Routers get some."""
    with httpx.Client(limits=httpx.Limits(max_keepalive_connections=0), trust_env=False) as connections:
        yield OpenAI(
            base_url=service.base_url + "/v1", api_key="none", max_retries=0, timeout=120, http_client=connections
        )


def chat(client: OpenAI, text: str, session: str, *, stream: bool = False, **fields: Any) -> tuple[str, str]:
    """The answer, and what the router says of the conversation."""
    raw = client.chat.completions.with_raw_response.create(
        model=RESIDENT,
        messages=[{"role": "user", "content": text}],
        temperature=0,
        max_tokens=40,
        stream=stream,
        extra_headers={"x-session-id": session},
        **fields,
    )
    if not stream:
        return raw.parse().choices[0].message.content or "", raw.headers[HEADER]
    return "".join(chunk.choices[0].delta.content or "" for chunk in raw.parse()), raw.headers[HEADER]


@pytest.mark.parametrize("stream", [False, True])
def test_the_model_remembers_a_name_in_a_second_turn(client: OpenAI, stream: bool) -> None:
    session = f"name-{stream}"
    _, state = chat(client, HELLO, session, stream=stream)
    assert state == "new"
    answer, state = chat(client, QUESTION, session, stream=stream)
    assert state == "kept"
    assert NAME in answer
    answer, state = chat(client, QUESTION, f"another-{stream}")
    assert state == "new"
    assert NAME not in answer


def test_a_conversation_is_read_and_deleted(service: Service, client: OpenAI) -> None:
    answer, _ = chat(client, HELLO, "read")
    path, headers = "/v1/router/conversations/read", {"authorization": "Bearer none"}
    status, _, body = service.request(path, headers=headers)
    assert status == 200
    assert body["messages"] == [{"role": "user", "content": HELLO}, {"role": "assistant", "content": answer}]
    assert service.request(path, method="DELETE", headers=headers)[0] == 200
    assert service.request(path, headers=headers)[0] == 404
    assert chat(client, QUESTION, "read")[1] == "new"


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_goes_on_from_the_one_before_it(client: OpenAI, stream: bool) -> None:
    asked: dict[str, Any] = {"model": RESIDENT, "temperature": 0, "max_output_tokens": 40}
    if stream:
        events = list(client.responses.create(input=HELLO, stream=True, **asked))
        assert [event.sequence_number for event in events] == list(range(len(events)))
        first = events[-1].response
        with client.responses.stream(input=QUESTION, previous_response_id=first.id, **asked) as streamed:
            text = "".join(event.delta for event in streamed if event.type == "response.output_text.delta")
            second = streamed.get_final_response()
        assert text == second.output_text
    else:
        first = client.responses.create(input=HELLO, **asked)
        second = client.responses.create(input=QUESTION, previous_response_id=first.id, **asked)
        assert (second.previous_response_id, second.store) == (first.id, True)
    assert NAME in second.output_text
    alone = client.responses.create(input=QUESTION, store=False, **asked)
    assert NAME not in alone.output_text
    kept = client.responses.retrieve(second.id)
    assert (kept.output_text, kept.previous_response_id) == (second.output_text, first.id)
    with pytest.raises(NotFoundError):
        client.responses.retrieve(alone.id)
    client.responses.delete(first.id)
    with pytest.raises(BadRequestError, match="previous response"):
        client.responses.create(input=QUESTION, previous_response_id=first.id, **asked)
    # It holds all that led to it.
    third = client.responses.create(input=QUESTION, previous_response_id=second.id, **asked)
    assert NAME in third.output_text


@pytest.mark.parametrize(("effort", "thinks"), [("high", True), ("none", False)])
def test_reasoning_effort_is_the_templates_switch(client: OpenAI, effort: str, thinks: bool) -> None:
    raw = client.responses.with_raw_response.create(
        model=QWEN,
        input=[{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "2+2?"}],
        instructions="Be kind.",
        reasoning={"effort": effort},  # type: ignore[typeddict-item]
        max_output_tokens=16,
        extra_body={"ignore_eos": True},
    )
    assert raw.headers["x-router-thinking"] == ("on" if thinks else "off")
    assert raw.headers["x-router-thinking-source"] == "reasoning_effort"
    # The model's weights are random, so it never ends a thought.
    assert {item.type for item in raw.parse().output} == {"reasoning" if thinks else "message"}


def test_a_tools_answer_is_all_that_a_client_need_send(client: OpenAI) -> None:
    function = {"name": "get_weather", "parameters": {"type": "object", "properties": {}}}
    first = client.responses.create(
        model=QWEN,
        input="Weather?",
        tools=[{"type": "function", "strict": True, **function}],  # type: ignore[list-item]
        tool_choice={"type": "function", "name": "get_weather"},
        reasoning={"effort": "none"},
        max_output_tokens=100,
    )
    call = next(item for item in first.output if item.type == "function_call")
    second = client.responses.create(
        model=QWEN,
        input=[{"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}],
        previous_response_id=first.id,
        reasoning={"effort": "none"},
        max_output_tokens=8,
    )
    assert second.status in ("completed", "incomplete")
    assert second.usage
    assert first.usage
    assert second.usage.input_tokens > 0


def test_a_redis_that_is_lost_fails_no_chat_and_is_used_again_when_it_is_back(
    server: RedisServer, client: OpenAI
) -> None:
    assert chat(client, HELLO, "lost")[1] == "new"
    server.kill()
    try:
        answer, state = chat(client, QUESTION, "lost")
        assert state == "unavailable"
        assert NAME not in answer
        assert chat(client, QUESTION, "lost", stream=True)[1] == "unavailable"
    finally:
        server.start()
    wait_until(lambda: chat(client, HELLO, "back")[1] != "unavailable", 10, "Redis is used again")
    wait_until(lambda: NAME in chat(client, QUESTION, "back")[0], 10, "and remembers")
