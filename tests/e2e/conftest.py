"""The two services that most end-to-end tests share, one on real engines, one on scripted ones; and how the tests of
two pytest workers go side by side: those of one service together, and those that measure time with nobody beside them.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI, OpenAI
from xdist.scheduler import LoadScopeScheduling

from tests.cores import ENGINE_CORES
from tests.e2e.machine import Machine
from tests.e2e.service import Service, running

_machine = Machine()
# By service: the modules whose tests use it.
_SHARED = {
    "real": {
        *("test_anthropic", "test_api_compat", "test_engine_death", "test_grid", "test_hostile", "test_lazy"),
        *("test_openai_client", "test_reasoning", "test_resident", "test_structured", "test_thinking", "test_tools"),
    },
    "fake": {"test_errors", "test_limits_and_faults"},
}
_FIRST = ["real", "test_residency", "fake"]
# A test that wants to be alone may have to wait for the longest one of the other worker.
_ALONE_TIMEOUT_S = 900


CPU_ENGINE: dict[str, Any] = {
    "dtype": "bfloat16",
    "enforce_eager": True,
    "enable_prefix_caching": True,
    "max_num_seqs": 32,
}
CPU_ENV = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", **ENGINE_CORES}

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
            # Sampled as its authors say, an answer without a limit is now and then as long as the context.
            "sampling": {"plain": {"temperature": 0}},
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


@pytest.fixture
def alone() -> Iterator[None]:
    """For what measures time, and has its service up by now: no other pytest worker does anything meanwhile."""
    with _machine.alone():
        yield


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol() -> Generator[None, object, object]:
    with _machine.shared():
        return (yield)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest groups come first: none is left for the end."""
    for item in items:
        if isinstance(item, pytest.Function):
            for service in _SHARED.keys() & set(item.fixturenames):
                assert _group(item.path) == service, f"{item.path.name}: add it to _SHARED[{service!r}]"
            if "alone" in item.fixturenames:
                item.add_marker(pytest.mark.timeout(_ALONE_TIMEOUT_S))
    items.sort(key=lambda item: _FIRST.index(group) if (group := _group(item.path)) in _FIRST else len(_FIRST))


def _group(module: Path) -> str:
    return next((service for service, modules in _SHARED.items() if module.stem in modules), module.stem)


class _ByService(LoadScopeScheduling):
    """Gives all tests of a service to one worker. (xdist 3.8's own groups by mark are none under pytest 9.2.)"""

    def _split_scope(self, nodeid: str) -> str:
        return _group(Path(nodeid.split("::")[0]))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling | None:
    return _ByService(config, log) if config.getoption("dist") == "loadfile" else None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A test that failed shows what its services logged."""
    report = yield
    if report.failed and isinstance(item, pytest.Function):
        for service in (value for value in item.funcargs.values() if isinstance(value, Service)):
            report.sections.append((f"log of {service.base_url}", service.last_words()))
    return report
