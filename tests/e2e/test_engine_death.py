"""`kill -9` of the real engine: the client gets an error, /ready tells the truth, the service heals itself."""

from __future__ import annotations

import time

import openai
import psutil
import pytest
from openai import OpenAI

from tests.e2e.conftest import LAZY, RESIDENT
from tests.e2e.service import Service, wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.real_engine]
PARIS = [{"role": "user", "content": "What is the capital of France?"}]
HEAL_DEADLINE_S = 90


def _engine_core(host: psutil.Process) -> psutil.Process:
    """The process in which vLLM computes: the host's child."""
    return next(child for child in host.children() if "EngineCore" in " ".join(child.cmdline()))


@pytest.mark.parametrize("victim", ["host", "engine core"])
def test_killed_while_streaming_is_an_error_event_and_heals(real: Service, client: OpenAI, victim: str) -> None:
    (host,) = real.engine_processes("Resident-" + RESIDENT)
    stream = client.chat.completions.create(
        model=RESIDENT, messages=PARIS, max_tokens=1900, stream=True, extra_body={"ignore_eos": True}
    )
    chunks = iter(stream)
    for _ in range(5):
        next(chunks)
    (host if victim == "host" else _engine_core(host)).kill()
    with pytest.raises(openai.APIError) as raised:
        list(chunks)
    assert raised.value.body["message"]
    wait_until(lambda: not real.ready(), 5, "/ready says that the engine is gone")
    wait_until(real.ready, HEAL_DEADLINE_S, "the service is back")
    answer = client.chat.completions.create(model=RESIDENT, messages=PARIS, temperature=0)
    assert "Paris" in (answer.choices[0].message.content or "")


def test_killed_while_idle_is_a_503_that_says_when_to_come_back_and_heals(real: Service) -> None:
    (host,) = real.engine_processes("Resident-" + RESIDENT)
    host.kill()
    host.wait(5)
    assert not real.ready()
    status, headers, answer = real.request("/v1/chat/completions", {"messages": PARIS})
    assert status == 503
    assert int(headers["retry-after"]) >= 1
    assert answer["error"]["type"] == "server_error"
    wait_until(real.ready, HEAL_DEADLINE_S, "the service is back")
    assert real.request("/v1/chat/completions", {"messages": PARIS, "max_tokens": 2})[0] == 200


@pytest.mark.case(115)
def test_a_killed_lazy_engine_is_loaded_again_by_the_next_request(real: Service) -> None:
    body = {"model": LAZY, "messages": PARIS, "max_tokens": 2}
    assert real.request("/v1/chat/completions", body)[0] == 200
    for host in real.engine_processes("LazyPool"):
        host.kill()
        host.wait(5)  # a request that reaches it while it dies is told so, rightly
    began = time.monotonic()
    status, _, answer = real.request("/v1/chat/completions", body)
    assert status == 200, answer
    assert time.monotonic() - began < HEAL_DEADLINE_S
    assert real.ready()
