"""The scorer `self` on the real engine: the judgement's prefill is the answer's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.conftest import CPU_ENGINE, CPU_ENV
from tests.e2e.conversation import ask
from tests.e2e.service import Service, running

pytestmark = [pytest.mark.e2e, pytest.mark.real_engine]

# vLLM's prefix cache works in blocks of this many tokens on a CPU.
BLOCK = 128


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    model = {
        "id": "judge",
        "tier": "resident",
        "source": "smollm2-135m-instruct",
        "context": 2048,
        "memory_gb": 2,
        "thinking": {"supported": True},
        "engine": {**CPU_ENGINE, "reasoning_parser": "qwen3", "enable_prompt_tokens_details": True},
        "engine_env": CPU_ENV,
    }
    # No deadline that a busy test machine could miss.
    with running(
        [model], routing={"min_answer_tokens": 1, "scorer": {"kind": "self", "deadline_ms": 60_000}}
    ) as started:
        yield started


def request(number: int) -> dict[str, Any]:
    text = f"Number {number}. " + "The rota of the allotment changed and nobody told us which beds are ours. " * 24
    return {"model": "auto", "messages": [{"role": "user", "content": text + "Who waters them?"}], "max_tokens": 2}


def test_the_judgement_shares_its_prefill_with_the_answer(service: Service) -> None:
    judged = ask(service, request(1))
    assert judged.headers["x-router-scorer"] == "self"
    assert 0 <= float(judged.headers["x-router-score"]) <= 1
    cached = judged.usage["prompt_tokens_details"]["cached_tokens"]
    # All full blocks but the last, which holds the end of the answer's prompt.
    assert cached >= (judged.usage["prompt_tokens"] // BLOCK - 1) * BLOCK > 0
    # Without a judgement before it the same kind of prompt is computed in full.
    explicit = request(2) | {"chat_template_kwargs": {"enable_thinking": False}}
    assert not (ask(service, explicit).usage["prompt_tokens_details"] or {}).get("cached_tokens")
