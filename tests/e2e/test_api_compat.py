"""Field cases of what clients of OpenAI's API send and expect, on vLLM; unit tests have more of them."""

from __future__ import annotations

import gzip
import json
import socket
import threading
from typing import Any

import pytest

from tests.e2e.conftest import QWEN, RESIDENT
from tests.e2e.conversation import BOTH_WAYS, OFF, ask, body, forced, user
from tests.e2e.service import Service

pytestmark = [pytest.mark.e2e, pytest.mark.real_engine]


@pytest.mark.case(49, 50)
@pytest.mark.parametrize("model", [QWEN, RESIDENT])
def test_system_messages_anywhere_and_developer_are_taken_by_every_model(real: Service, model: str) -> None:
    for messages in (
        [
            {"role": "system", "content": "Be brief."},
            *user("Hi"),
            {"role": "system", "content": "In French."},
            *user("?"),
        ],
        [{"role": "developer", "content": "Answer with one word."}, *user("Capital of France?")],
    ):
        assert ask(real, body(model=model, messages=messages, max_tokens=4)).status == 200


@pytest.mark.case(50)
def test_a_developer_message_is_a_system_message(real: Service) -> None:
    sizes = {
        ask(
            real, body(messages=[{"role": role, "content": "One word."}, *user("Capital?")], max_tokens=1, **OFF)
        ).usage["prompt_tokens"]
        for role in ("developer", "system")
    }
    assert len(sizes) == 1


@pytest.mark.case(46)
def test_what_servers_emit_is_taken_back(real: Service) -> None:
    emitted = {"role": "assistant", "content": "hello", "tool_calls": [], "function_call": None, "refusal": None}
    emitted |= {"audio": None, "annotations": []}
    assert ask(real, body(messages=[*user("hi"), emitted, *user("again")], max_tokens=2)).status == 200


@pytest.mark.case(52)
def test_an_image_for_a_text_model_is_a_400_and_no_url_is_fetched(real: Service) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(1)
        visits: list[Any] = []
        watch = threading.Thread(target=lambda: visits.append(_visit(listener)))
        watch.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/cat.png"
        part = {"type": "image_url", "image_url": {"url": url}}
        messages = [{"role": "user", "content": [{"type": "text", "text": "What is this?"}, part]}]
        for model in (QWEN, "auto"):
            refused = ask(real, body(model=model, messages=messages))
            assert (refused.status, refused.error["code"]) == (400, "unsupported_content")
        watch.join()
    assert visits == [None]


def _visit(listener: socket.socket) -> Any:
    try:
        return listener.accept()
    except TimeoutError:
        return None


@pytest.mark.case(97, 98)
def test_no_tools_is_no_tools_however_it_is_said(real: Service) -> None:
    for fields in ({"tool_choice": "none"}, {"tools": None, "tool_choice": "auto"}, {"tools": []}):
        assert ask(real, body("poem", max_tokens=2, **fields)).status == 200
    assert ask(real, body("poem", tool_choice="required")).status == 400


@pytest.mark.case(109)
def test_an_explicit_max_tokens_is_not_capped(real: Service) -> None:
    answer = ask(real, body("Count.", max_tokens=700, ignore_eos=True, **OFF))
    assert answer.usage["completion_tokens"] == 700


@pytest.mark.case(110)
def test_what_does_not_fit_is_a_400_with_the_numbers_and_without_a_limit_the_rest_is_used(real: Service) -> None:
    long = "word " * 1900
    refused = ask(real, body(long, max_tokens=4000, **OFF))
    assert (refused.status, refused.error["code"]) == (400, "context_length_exceeded")
    assert "2048" in refused.error["message"]
    asked = body(long, ignore_eos=True, **OFF)
    del asked["max_tokens"]
    rest = ask(real, asked)
    assert rest.usage["total_tokens"] == 2048


@pytest.mark.case(113)
def test_logprobs_without_alternatives(real: Service) -> None:
    answer = ask(real, body("hi", logprobs=True, max_tokens=3, ignore_eos=True, **OFF))
    assert [entry["top_logprobs"] for entry in answer.logprobs] == [[], [], []]
    assert ask(real, body("hi", top_logprobs=2, max_tokens=3)).status == 400


@pytest.mark.case(118)
def test_only_listed_headers_go_on_and_a_compressed_body_is_refused(real: Service) -> None:
    odd = {"accept-encoding": "br", "connection": "close", "x-odd": "1"}
    assert ask(real, body("hi", max_tokens=2), headers=odd).status == 200
    packed = gzip.compress(json.dumps(body("hi")).encode())
    status, _, refused = real.request("/v1/chat/completions", data=packed, headers={"content-encoding": "gzip"})
    assert (status, refused["error"]["code"]) == (415, "unsupported_media_type")


@pytest.mark.case(119)
def test_two_fields_are_enough(real: Service) -> None:
    fields = {"model": RESIDENT, "messages": user("What is the capital of France?")}
    status, _, whole = real.request("/v1/chat/completions", fields)
    assert status == 200
    assert "Paris" in whole["choices"][0]["message"]["content"]


@pytest.mark.case(106)
@BOTH_WAYS
def test_characters_of_several_tokens_arrive_whole(real: Service, stream: bool) -> None:
    line = "🧑‍🚀 汉字 ༼ つ ◕_◕ ༽つ 𠮷野家"
    answer = ask(real, body("Repeat it.", max_tokens=100, **OFF, **forced(line)), stream=stream)
    assert (answer.content, answer.finish) == (line, "stop")
    if stream:
        assert "\ufffd" not in json.dumps(answer.raw, ensure_ascii=False)


def test_several_answers_without_randomness_are_the_one_that_there_is(real: Service) -> None:
    one, three = (ask(real, body("2+2?", n=n, top_p=0, **OFF)) for n in (1, 3))
    assert [choice["message"]["content"] for choice in three.raw["choices"]] == [one.content] * 3
