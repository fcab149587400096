"""What operators see of a running service: every documented metric, vLLM's own, and one trace from client to engine."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from collections.abc import Iterator
from typing import Any

import pytest
from openai import AsyncOpenAI, OpenAI
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from prometheus_client.parser import text_string_to_metric_families

from serve_app.telemetry.metric_table import METRICS
from tests.e2e.collector import Collector, collecting
from tests.e2e.conftest import CPU_ENGINE, CPU_ENV
from tests.e2e.service import Service, running, wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.real_engine]
CHAT = "/v1/chat/completions"
TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
TINY = "org/tiny-qwen3:test"


def models(outside: str) -> list[dict[str, Any]]:
    thinks = {"context": 2048, "abilities": ["chat", "completions", "tools", "json"], "thinking": {"supported": True}}
    return [
        {"id": "hot", "tier": "resident", "max_ongoing_requests": 1, **thinks, "fake": {"tpot_s": 0.01}},
        {"id": "outside", "tier": "resident", "context": 2048, "external": {"urls": [f"{outside}/v1"]}},
        {"id": "lazy", "tier": "lazy", "context": 2048, "idle_sleep_s": 0.5, "fake": {"load_s": 0.5, "wake_s": 0.2}},
        {
            "id": TINY,
            "tier": "lazy",
            "source": "tiny-qwen3",
            "memory_gb": 3,
            "sleep": {"level": 0},
            **thinks,
            "engine": {**CPU_ENGINE, "reasoning_parser": "qwen3", "tool_call_parser": "hermes"},
            "engine_env": CPU_ENV,
        },
    ]


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with collecting() as started:
        yield started


@pytest.fixture(scope="module")
def service(collector: Collector, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with running(
        models(collector.url),
        dashboard=True,
        pool={"memory_gb": 6, "host_memory_gb": 16, "min_residency_s": 0.1},
        batches={"directory": str(tmp_path_factory.mktemp("batches"))},
        telemetry={"otlp_endpoint": f"{collector.url}/v1/traces"},
        routing={"rules": [{"name": "rust", "when": {"text": r"\bcargo\b"}, "then": {"model": TINY}}]},
    ) as started:
        yield started


def talk(text: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], **fields}


def test_auto_request_that_loads_a_model_is_one_trace_from_client_to_engine(
    service: Service, collector: Collector
) -> None:
    status, headers, _ = service.request(
        CHAT,
        talk("how do I use cargo", max_tokens=4),
        headers={"traceparent": f"00-{TRACE}-{PARENT}-01", "prefer": "wait=100"},
        timeout_s=120,
    )
    assert (status, headers["x-router-model"], headers["x-router-model-source"]) == (200, TINY, "rule")
    both = {"switchyard-router", "switchyard-engine"}
    wait_until(lambda: both <= {name for name, _ in collector.of_trace(TRACE)}, 60, "spans of both")
    spans = collector.of_trace(TRACE)
    ours = {span.name: span for service_name, span in spans if service_name == "switchyard-router"}
    request = ours[CHAT]
    assert request.parent_span_id.hex() == PARENT
    for name in ("admit", "decide", "hold", "relay"):
        assert ours[name].parent_span_id == request.span_id
        assert request.start_time_unix_nano <= ours[name].end_time_unix_nano <= request.end_time_unix_nano
    # It loaded: most of the time was spent there, and the engine's part lies within what we relayed.
    assert seconds(ours["hold"]) > seconds(request) / 2
    (engine,) = (span for name, span in spans if name == "switchyard-engine")
    assert engine.parent_span_id == ours["relay"].span_id
    found = {entry.key: entry.value for entry in request.attributes}
    assert found["gen_ai.request.model"].string_value == TINY
    assert found["gen_ai.usage.output_tokens"].int_value == 4
    assert found["switchyard.rule"].string_value == "rust"
    assert "cargo" not in str(spans)


def seconds(span: Span) -> float:
    return float(span.end_time_unix_nano - span.start_time_unix_nano) / 1e9


def test_scrape_has_every_documented_metric_after_a_day_in_brief(service: Service) -> None:
    asyncio.run(_queue_up(service))
    _load_sleep_and_wake(service)
    _run_a_batch(service)
    assert service.request(CHAT, {"model": "nobody", **talk("hi")})[0] == 404
    _lose_an_audit_record(service)
    expected = {name for metric in METRICS for name in metric.series}
    found: set[str] = set()

    def all_there() -> bool:
        nonlocal found
        names = set(re.findall(r"^(ray_switchyard_\w+)[{ ]", service.metrics(), re.MULTILINE))
        found |= {name for name in names if not name.endswith("_created")}
        return expected <= found

    try:
        wait_until(all_there, 40, "every metric")
    except AssertionError:
        assert expected - found == set()
    assert found - expected == set()


@pytest.mark.case(134)
def test_labels_are_those_documented_and_name_nothing_that_a_client_made_up(service: Service) -> None:
    service.request(CHAT, {"model": "made-up-4711", **talk("made-up-4711")}, headers={"x-request-id": "made-up-4711"})
    page = wait_until(lambda: (text := service.metrics()) and "switchyard_refusals" in text and text, 40, "a page")
    assert "made-up-4711" not in page
    # Ray's own, on every metric.
    ray = {"Component", "NodeAddress", "SessionName", "Version", "WorkerId", "JobId"}
    labels = {metric.exported: set(metric.labels) for metric in METRICS}
    seen = 0
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            name = re.sub(r"_(bucket|sum|count|created)$", "", sample.name)
            if name in labels:
                seen += 1
                own = {label for label in sample.labels if not label.startswith("otel_scope_")}
                assert own - ray - {"le"} == labels[name]
    assert seen > len(METRICS)


@pytest.mark.case(134)
def test_engines_own_metrics_are_one_page_with_model_and_replica(service: Service) -> None:
    service.request(CHAT, {"model": TINY, **talk("hi", max_tokens=2)}, timeout_s=120)
    status, headers, page = service.request("/v1/router/metrics")
    assert (status, headers["content-type"]) == (200, "text/plain; version=0.0.4; charset=utf-8")
    families = {family.name: family for family in text_string_to_metric_families(page)}
    (counted,) = (s for s in families["vllm:generation_tokens"].samples if s.name == "vllm:generation_tokens_total")
    assert counted.labels["model"] == TINY
    assert counted.labels["replica"]
    assert counted.value >= 2


def test_records_name_the_trace(service: Service) -> None:
    service.request(CHAT, {"model": "hot", **talk("hi")}, headers={"traceparent": f"00-{'a' * 32}-{PARENT}-01"})
    wait_until(lambda: any(f'"trace":"{"a" * 32}"' in text for text in _records(service)), 10, "a record")


def _records(service: Service) -> Iterator[str]:
    return (path.read_text() for path in (service.scratch / "audit").glob("*.jsonl"))


async def _queue_up(service: Service) -> None:
    """Three streams before one place, of more than a second each; `auto` goes elsewhere meanwhile."""
    client = AsyncOpenAI(base_url=f"{service.base_url}/v1", api_key="none", max_retries=0, timeout=60)

    runs = asyncio.Event()

    async def one() -> None:
        stream = await client.chat.completions.create(
            model="hot",
            messages=[{"role": "user", "content": "fake[tokens=160]"}],
            stream=True,
            stream_options={"include_usage": True},
        )
        async for _ in stream:
            runs.set()

    streams = asyncio.gather(*(one() for _ in range(3)))
    await runs.wait()
    _, headers, _ = await asyncio.to_thread(service.request, CHAT, talk("hi"))
    assert headers["x-router-degraded"] == "hot is full: outside answers"
    await streams


def _load_sleep_and_wake(service: Service) -> None:
    for _ in range(2):
        assert service.request(CHAT, {"model": "lazy", **talk("fake[tokens=2]")})[0] == 200
        service.in_state("lazy", "asleep")


def _run_a_batch(service: Service) -> None:
    client = OpenAI(base_url=f"{service.base_url}/v1", api_key="none", max_retries=2, timeout=60)
    line = {"custom_id": "one", "method": "POST", "url": CHAT, "body": {"model": "hot", **talk("hi")}}
    file = client.files.create(file=("lines.jsonl", json.dumps(line).encode()), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
    wait_until(lambda: client.batches.retrieve(batch.id).status == "completed", 40, "the batch is complete")


def _lose_an_audit_record(service: Service) -> None:
    """Its directory is gone, and cannot be made again."""
    directory = service.scratch / "audit"
    shutil.rmtree(directory)
    directory.write_text("in the way")
    try:
        assert service.request(CHAT, {"model": "hot", **talk("hi")})[0] == 200
        wait_until(lambda: "audit records could not be written" in service.log.read_text(), 10, "it says so")
    finally:
        directory.unlink()
        directory.mkdir()
