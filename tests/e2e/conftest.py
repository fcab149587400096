"""The two services that most end-to-end tests share: one on real engines, one on scripted ones."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from openai import AsyncOpenAI, OpenAI

from tests.e2e.service import Service, running

CPU_ENGINE: dict[str, Any] = {
    "dtype": "bfloat16",
    "enforce_eager": True,
    "enable_prefix_caching": True,
    "max_num_seqs": 32,
}
CPU_ENV = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}

RESIDENT = "smollm2-135m"
LAZY = "smollm2-135m-lazy"
QWEN = "org/tiny-qwen3:test"


def real_models() -> list[dict[str, Any]]:
    shared = {"engine": CPU_ENGINE, "engine_env": CPU_ENV, "memory_gb": 3}
    return [
        {
            "id": RESIDENT,
            "aliases": ["smollm2", "org/SmolLM2"],
            "tier": "resident",
            "source": "smollm2-135m-instruct",
            "context": 2048,
            **shared,
        },
        {
            "id": LAZY,
            "tier": "lazy",
            "source": "smollm2-135m-instruct",
            "context": 1024,
            "idle_unload_s": 8,
            **shared,
        },
        {
            "id": QWEN,
            "tier": "lazy",
            "source": "tiny-qwen3",
            "context": 2048,
            "idle_unload_s": 300,
            "abilities": ["chat", "completions", "tools", "json"],
            "thinking": {"supported": True},
            **shared,
            "engine": {
                **CPU_ENGINE,
                "reasoning_parser": "qwen3",
                "tool_call_parser": "hermes",
                # Random weights say nothing sensible; the tests force their text, tool calls too, by a regex.
                "tool_strict_level": "auto",
            },
        },
        {
            "id": "broken",
            "tier": "lazy",
            "source": "./tests-no-such-model",
            "context": 1024,
            **shared,
        },
    ]


@pytest.fixture(scope="session")
def real() -> Iterator[Service]:
    """vLLM on this CPU: a resident chat model, the same as a lazy one, a tiny Qwen3, and one without files."""
    with running(real_models(), dashboard=True, pool={"memory_gb": 6, "min_residency_s": 1}) as service:
        yield service


def fake_models() -> list[dict[str, Any]]:
    return [
        {
            "id": "hot",
            "tier": "resident",
            "context": 4096,
            "replicas": 2,
            "max_ongoing_requests": 4,
            "queue": {"size": 0},
            "thinking": {"supported": True},
            "fake": {"tpot_s": 0.01, "kv_places": 100},
        },
        {"id": "lazy-a", "tier": "lazy", "context": 4096, "idle_unload_s": 3, "fake": {"load_s": 1.5}},
        {"id": "lazy-b", "tier": "lazy", "context": 4096, "idle_unload_s": 3, "fake": {"load_s": 0.2}},
        {
            "id": "too-slow",
            "tier": "lazy",
            "context": 4096,
            "memory_gb": 0.1,
            "load_timeout_s": 30,
            "fake": {"hang_load": True},
        },
    ]


@pytest.fixture(scope="session")
def fake() -> Iterator[Service]:
    """Scripted engines: two replicas of four places each, and two lazy models with room for one of them."""
    with running(
        fake_models(), pool={"memory_gb": 1.5, "min_residency_s": 0.5, "ageing_s": 3}, router={"hold_s": 8}
    ) as service:
        yield service


@pytest.fixture
def client(real: Service) -> OpenAI:
    return OpenAI(base_url=real.base_url + "/v1", api_key="none", max_retries=0, timeout=120)


@pytest.fixture
def async_client(real: Service) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=real.base_url + "/v1", api_key="none", max_retries=0, timeout=120)


@pytest.fixture
def fake_client(fake: Service) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=fake.base_url + "/v1", api_key="none", max_retries=0, timeout=60)


def pytest_addoption(parser: pytest.Parser) -> None:
    """How long the overload lasts: 180 for the long run."""
    parser.addoption("--overload-seconds", type=float, default=None, help="seconds of ten times the capacity")
