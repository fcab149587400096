"""Lazy models on the real engine: loaded once, on request, visibly, and gone after their idle time."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest
from openai import AsyncOpenAI, OpenAI

from tests.e2e.conftest import LAZY, RESIDENT
from tests.e2e.service import Service

pytestmark = [pytest.mark.e2e, pytest.mark.real_engine]
PARIS = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.mark.case(11)
async def test_twenty_first_requests_share_one_load_and_the_states_show(
    real: Service, async_client: AsyncOpenAI
) -> None:
    before = real.unload(LAZY)["loads"]
    seen: list[str] = ["stopped"]
    over = threading.Event()

    def watch() -> None:
        while True:
            last = over.wait(0.05)
            state = real.model(LAZY)["state"]
            if state != seen[-1]:
                seen.append(state)
            if last:
                return

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        answers = await asyncio.gather(
            *(
                async_client.chat.completions.create(model=LAZY, messages=PARIS, temperature=0, max_tokens=20)
                for _ in range(20)
            )
        )
        await asyncio.to_thread(real.in_state, LAZY, "stopped", 60)
    finally:
        over.set()
        watcher.join()
    assert all("Paris" in (answer.choices[0].message.content or "") for answer in answers)
    assert real.model(LAZY)["loads"] == before + 1
    assert [state for state in seen if state != "unloading"] == ["stopped", "loading", "awake", "stopped"]


@pytest.mark.case(37)
@pytest.mark.usefixtures("alone")
def test_a_stream_hears_that_its_model_loads_and_answers_within_the_load_time_and_two_seconds(
    real: Service,
) -> None:
    real.unload(LAZY)
    began = time.monotonic()
    status, headers, text = real.request(
        "/v1/chat/completions", {"model": LAZY, "messages": PARIS, "stream": True, "temperature": 0}
    )
    took = time.monotonic() - began
    assert status == 200
    assert headers["content-type"].startswith("text/event-stream")
    assert f": loading {LAZY} " in text
    assert "Paris" in text
    assert text.endswith("data: [DONE]\n\n")
    assert took < real.in_state(LAZY, "awake")["load_s"] + 2


def test_openais_client_reads_a_stream_that_waited_for_a_load(real: Service, client: OpenAI) -> None:
    real.unload(LAZY)
    stream = client.chat.completions.create(model=LAZY, messages=PARIS, temperature=0, stream=True)
    assert "Paris" in "".join(chunk.choices[0].delta.content or "" for chunk in stream)


def test_a_broken_lazy_model_says_why_and_hinders_nobody(real: Service) -> None:
    status, headers, answer = real.request("/v1/chat/completions", {"model": "broken", "messages": PARIS})
    assert status == 503
    assert int(headers["retry-after"]) >= 1
    assert answer["error"]["code"] == "load_failed"
    assert real.in_state("broken", "failed")["failure"]
    assert real.ready()
    for model in (RESIDENT, LAZY):
        status, _, _ = real.request("/v1/chat/completions", {"model": model, "messages": PARIS, "max_tokens": 2})
        assert status == 200
