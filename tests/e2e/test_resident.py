"""The main job: the resident model answers on the real engine, through `serve run` and OpenAI's client."""

from __future__ import annotations

import json
import socket
import time

import openai
import pytest
from openai import OpenAI

from tests.e2e.conftest import LAZY, RESIDENT
from tests.e2e.service import Service, wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.real_engine]
PARIS = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.mark.case(53, 55)
def test_the_capital_of_france_is_paris_and_the_stream_joins_to_the_same_text(client: OpenAI) -> None:
    whole = client.chat.completions.create(model=RESIDENT, messages=PARIS, temperature=0)
    stream = client.chat.completions.create(
        model=RESIDENT, messages=PARIS, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    joined = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert "Paris" in (whole.choices[0].message.content or "")
    assert joined == whole.choices[0].message.content
    assert len({(chunk.id, chunk.created, chunk.model) for chunk in chunks}) == 1
    assert chunks[0].model == RESIDENT
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [index for index, chunk in enumerate(chunks) if not chunk.choices] == [len(chunks) - 1]
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].usage == whole.usage


@pytest.mark.case(14)
@pytest.mark.parametrize("model", ["auto", None, "", RESIDENT, "smollm2", "org/SmolLM2"])
def test_every_name_of_the_resident_model_answers(real: Service, model: str | None) -> None:
    body = {"messages": PARIS, "max_tokens": 3}
    if model != "":
        body["model"] = model
    status, headers, answer = real.request("/v1/chat/completions", body)
    assert status == 200
    assert answer["model"] == headers["x-router-model"] == RESIDENT
    assert headers["x-router-model-source"] == {
        "smollm2": "alias",
        "org/SmolLM2": "alias",
        RESIDENT: "explicit",
    }.get(model or "", "default")


def test_text_completions_work(client: OpenAI) -> None:
    answer = client.completions.create(model=RESIDENT, prompt="The capital of France is", max_tokens=4, temperature=0)
    assert "Paris" in answer.choices[0].text


@pytest.mark.case(28)
def test_optional_fields_sent_as_null_are_as_if_left_out(real: Service) -> None:
    nothing = dict.fromkeys(
        [
            "stop",
            "max_tokens",
            "temperature",
            "tools",
            "tool_choice",
            "response_format",
            "n",
            "seed",
            "logit_bias",
            "user",
        ]
    )
    status, _, answer = real.request("/v1/chat/completions", {"messages": PARIS, **nothing})
    assert status == 200
    assert (
        answer["choices"][0]["message"]
        == real.request("/v1/chat/completions", {"messages": PARIS})[2]["choices"][0]["message"]
    )


@pytest.mark.case(67, 116)
def test_models_lists_all_of_them_without_loading_any(client: OpenAI, real: Service) -> None:
    listed = {model.id for model in client.models.list()}
    assert {RESIDENT, LAZY, "org/tiny-qwen3:test", "broken"} <= listed
    assert real.request("/v1/models/org/tiny-qwen3:test")[2]["id"] == "org/tiny-qwen3:test"
    assert real.model("smollm2")["id"] == RESIDENT
    assert real.model("broken")["state"] in ("stopped", "failed")


def test_serves_ingress_answers_with_the_same_app(real: Service) -> None:
    through_serve = Service.__new__(Service)
    through_serve.base_url = f"http://127.0.0.1:{real.serve_port}"
    status, headers, answer = through_serve.request("/v1/chat/completions", {"messages": PARIS, "max_tokens": 2})
    assert status == 200
    assert headers["x-router-model"] == RESIDENT
    assert answer["usage"]["completion_tokens"] == 2


@pytest.mark.case(110)
def test_too_long_a_prompt_is_a_400_with_the_numbers_streaming_or_not(real: Service) -> None:
    for stream in (False, True):
        body = {"messages": [{"role": "user", "content": "tea " * 5000}], "stream": stream}
        status, _, answer = real.request("/v1/chat/completions", body)
        assert status == 400
        assert answer["error"]["code"] == "context_length_exceeded"
        assert "2048" in answer["error"]["message"]
        assert "tea tea" not in answer["error"]["message"]


def test_what_only_the_engine_can_refuse_is_a_400_in_our_shape(real: Service) -> None:
    body = {"messages": PARIS, "logit_bias": {"abc": 5}}
    status, _, answer = real.request("/v1/chat/completions", body)
    assert status == 400
    assert set(answer["error"]) == {"message", "type", "param", "code"}
    assert isinstance(answer["error"]["code"], str)
    with pytest.raises(openai.BadRequestError):
        OpenAI(base_url=real.base_url + "/v1", api_key="none").chat.completions.create(
            model=RESIDENT,
            messages=PARIS,
            extra_body={"structured_outputs": {"regex": "("}},
        )
    assert real.ready()


@pytest.mark.case(59, 107)
@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_stops_the_engine_within_a_second(real: Service, stream: bool) -> None:
    body = {"messages": PARIS, "max_tokens": 1900, "ignore_eos": True, "stream": stream}
    raw = json.dumps(body).encode()
    with socket.create_connection(("127.0.0.1", real.port)) as connection:
        connection.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            b"content-length: " + str(len(raw)).encode() + b"\r\n\r\n" + raw
        )
        if stream:
            assert connection.recv(1000).startswith(b"HTTP/1.1 200")
        wait_until(lambda: real.model(RESIDENT)["in_flight"] == 1, 10, "the request runs")
    left = time.monotonic()
    wait_until(lambda: real.model(RESIDENT)["in_flight"] == 0, 10, "the request was dropped")
    # The engine drops it at once; what is published about it is up to a second old.
    assert time.monotonic() - left < 2.5


def test_tokens_of_a_text_are_those_of_the_models_own_tokenizer_and_back(real: Service) -> None:
    text = "The capital of France is Paris."
    status, headers, there = real.request("/tokenize", {"model": RESIDENT, "prompt": text})
    assert (status, headers["x-router-model"]) == (200, RESIDENT)
    assert there["count"] == len(there["tokens"]) > 3
    status, _, back = real.request("/detokenize", {"model": RESIDENT, "tokens": there["tokens"]})
    assert (status, back["prompt"]) == (200, text)


def test_a_model_without_scores_says_so(real: Service) -> None:
    for path, body in (
        ("/v1/score", {"text_1": "a", "text_2": "b"}),
        ("/v1/rerank", {"query": "a", "documents": ["b"]}),
    ):
        status, _, answer = real.request(path, {"model": RESIDENT, **body})
        assert (status, answer["error"]["code"]) == (400, "unsupported_model")
