"""serve_app.telemetry: what a request and a model's life become in metrics, and how numbers reach the sink."""

import threading
import time
from typing import Any

import pytest
from judging import judged, rule, score, talk
from starlette.datastructures import Headers
from starlette.types import Message

from serve_app.models.replicas import PublishedModel
from serve_app.residency.events import Transition
from serve_app.router.auth import Caller
from serve_app.router.record import Asked, audit_record
from serve_app.router.reply import Reply
from serve_app.router.tally import Tally
from serve_app.routing.decision import Decision
from serve_app.service_schema import Anonymous
from serve_app.telemetry import metric_table as table
from serve_app.telemetry.meters import Flusher, Labels, Meters
from serve_app.telemetry.metric_table import METRICS, Metric
from serve_app.telemetry.replica_metrics import Memory, ReplicaMetrics
from serve_app.telemetry.request_metrics import RouterMetrics, count_request

CHAT = "/v1/chat/completions"
NOBODY = ""


class Kept:
    """A sink that keeps what it is given, by the metric's name and its labels."""

    def __init__(self) -> None:
        self.counts: dict[tuple[str, Labels], float] = {}
        self.values: dict[tuple[str, Labels], list[float]] = {}
        self.gauges: dict[tuple[str, Labels], float] = {}
        self.threads: set[str] = set()

    def add(self, metric: Metric, labels: Labels, number: float) -> None:
        self.threads.add(threading.current_thread().name)
        assert metric.kind == "counter"
        assert len(labels) == len(metric.labels)
        self.counts[metric.name, labels] = self.counts.get((metric.name, labels), 0) + number

    def observe(self, metric: Metric, labels: Labels, value: float) -> None:
        assert metric.kind == "histogram"
        assert len(labels) == len(metric.labels)
        self.values.setdefault((metric.name, labels), []).append(value)

    def set(self, metric: Metric, labels: Labels, value: float) -> None:
        assert metric.kind == "gauge"
        assert len(labels) == len(metric.labels)
        self.gauges[metric.name, labels] = value

    def count(self, metric: Metric, *labels: str) -> float:
        return self.counts.get((metric.name, labels), 0)

    def observed(self, metric: Metric, *labels: str) -> list[float]:
        return self.values.get((metric.name, labels), [])

    def gauge(self, metric: Metric, *labels: str) -> float | None:
        return self.gauges.get((metric.name, labels))


async def nowhere(message: Message) -> None:
    """Nobody listens."""


def record(
    decision: Decision | None = None,
    *,
    key: str = "team",
    status: int = 200,
    fault: str = "",
    total_s: float = 0.0,
    **asked: Any,
) -> dict[str, Any]:
    """The audit record of a request that began `total_s` ago."""
    made = Asked(Headers({}), Caller(key, Anonymous()), time.monotonic() - total_s, decision=decision, **asked)
    reply = Reply(nowhere, stream=False)
    reply.status, reply.fault = status, fault
    return audit_record(CHAT, made, reply)


def counted(*records: dict[str, Any]) -> Kept:
    """What the sink gets for these records."""
    meters, kept = Meters(), Kept()
    for one in records:
        count_request(one, meters)
    meters.flush(kept)
    return kept


# Requests


def test_request_is_counted_by_path_model_and_status() -> None:
    kept = counted(
        record(judged(talk("hello"))), record(judged(talk("hello"))), record(status=401, fault="no_key", key=NOBODY)
    )
    assert kept.count(table.REQUESTS, CHAT, "large", "200") == 2
    assert kept.count(table.REQUESTS, CHAT, "", "401") == 1


def test_refusal_is_counted_by_its_code() -> None:
    kept = counted(
        record(status=429, fault="rate_limit_exceeded"),
        record(judged(talk("hello")), status=200, fault="engine_died"),
        record(status=0, fault="client_left"),
    )
    assert kept.count(table.REFUSALS, "", "rate_limit_exceeded") == 1
    assert kept.count(table.REFUSALS, "large", "engine_died") == 1
    assert kept.count(table.REFUSALS, "", "client_left") == 1


@pytest.mark.parametrize("strange", ["Bearer sk-1234", "x" * 100, "4711", "a b"])
def test_what_is_no_code_becomes_no_label(strange: str) -> None:
    kept = counted(record(status=400, fault=strange))
    assert kept.count(table.REFUSALS, "", "other") == 1
    assert strange not in str(kept.counts)


def test_tokens_are_counted_by_key_and_kind() -> None:
    tally = Tally(prompt=10, completion=5, reasoning=2, cached=8)
    kept = counted(record(judged(talk("hello")), key="team-a", tally=tally))
    found = {
        kind: kept.count(table.TOKENS, "team-a", "large", kind)
        for kind in ("prompt", "completion", "reasoning", "cached")
    }
    assert found == {"prompt": 10, "completion": 5, "reasoning": 2, "cached": 8}


def test_decision_is_counted_by_both_choices_and_their_sources() -> None:
    kept = counted(
        record(judged(talk("hello"), score=score(0.9), small_model="small"), decision_s=0.004),
        record(judged(talk("hello"), rules=[rule("off", thinking=False)])),
    )
    assert kept.count(table.DECISIONS, "large", "scorer", "on", "scorer", "", "test") == 1
    assert any(name == table.DECISIONS.name and labels[4] == "off" for name, labels in kept.counts)
    assert 0.004 in kept.observed(table.DECISION, "scorer")


def test_nothing_of_the_request_becomes_a_label() -> None:
    decision = judged(talk("patient-4711 e", user="patient-4711"), rules=[rule(thinking=True)], shipped_rules=True)
    kept = counted(record(decision))
    assert "patient" not in f"{kept.counts}{kept.values}{kept.gauges}"


def test_times_of_a_stream() -> None:
    began = time.monotonic() - 2
    tally = Tally(completion=11, first_at=began + 1)
    kept = counted(record(judged(talk("hello")), stream=True, total_s=2, queued_s=0.25, held_s=0.5, tally=tally))
    assert kept.observed(table.TTFT, "large") == pytest.approx([1], abs=0.1)
    assert kept.observed(table.TPOT, "large") == pytest.approx([0.1], abs=0.01)
    assert kept.observed(table.REQUEST, "large") == pytest.approx([2], abs=0.1)
    assert kept.observed(table.QUEUE, "large") == [0.25]
    assert kept.observed(table.HOLD, "large") == [0.5]


def test_what_did_not_happen_is_not_observed() -> None:
    kept = counted(record(judged(talk("hello")), status=503, fault="model_loading"))
    assert {name for name, _ in kept.values} == {table.DECISION.name}


def test_stream_that_broke_says_nothing_of_how_long_answers_take() -> None:
    tally = Tally(completion=11, first_at=time.monotonic())
    kept = counted(record(judged(talk("hello")), stream=True, fault="engine_died", tally=tally))
    assert kept.observed(table.TTFT, "large")
    assert not kept.observed(table.REQUEST, "large")
    assert not kept.observed(table.TPOT, "large")


def test_lines_of_batches_are_counted_apart() -> None:
    decision = judged(talk("hello"))
    kept = counted(
        record(decision, batch=True), record(decision, batch=True, status=503, fault="full"), record(decision)
    )
    assert kept.count(table.BATCH_LINES, "large", "completed") == 1
    assert kept.count(table.BATCH_LINES, "large", "failed") == 1


def test_degraded_requests_are_counted() -> None:
    assert counted(record(judged(talk("hello")), degraded="thinks less")).count(table.DEGRADED, "large") == 1


def test_lost_audit_records_are_counted() -> None:
    metrics, meters, kept = RouterMetrics(), Meters(), Kept()
    for _ in range(3):
        metrics.lost()
    metrics.collect(meters)
    metrics.collect(meters)
    meters.flush(kept)
    assert kept.count(table.AUDIT_DROPPED) == 3


# Models


def test_load_and_wake_are_timed_and_a_failed_load_is_not() -> None:
    metrics, meters, kept = ReplicaMetrics("r1"), Meters(), Kept()
    metrics.went(Transition("m", "stopped", "loading", 9))
    metrics.went(Transition("m", "loading", "awake", 4))
    metrics.went(Transition("m", "waking", "awake", 0.5))
    metrics.went(Transition("m", "loading", "failed", 7))
    metrics.collect(meters)
    meters.flush(kept)
    assert kept.observed(table.LOAD, "m") == [4]
    assert kept.observed(table.WAKE, "m") == [0.5]
    assert kept.count(table.TRANSITIONS, "m", "loading", "failed") == 1


def test_model_is_in_one_state_at_a_time() -> None:
    metrics, meters, kept = ReplicaMetrics("r1"), Meters(), Kept()
    for state in ("loading", "awake"):
        metrics.publish({"m": PublishedModel(state, kv_cache=0.5)}, moving=True, memory=Memory(1, 2, 3, 4))
        metrics.collect(meters)
        meters.flush(kept)
    assert kept.gauge(table.STATE, "m", "r1", "awake") == 1
    assert kept.gauge(table.STATE, "m", "r1", "loading") == 0
    assert kept.gauge(table.KV_CACHE, "m", "r1") == 0.5
    assert kept.gauge(table.POOL_USED, "r1") == 1
    assert kept.gauge(table.HOST_LIMIT, "r1") == 4


# On their way


def test_gauges_of_several_apps_add_up_and_vanish_to_zero() -> None:
    metrics, meters, kept = RouterMetrics(), Meters(), Kept()
    open_requests = [2, 3]
    for place in range(2):
        metrics.watch(lambda meters, place=place: meters.gauge(table.OPEN, (), open_requests[place]))
    metrics.watch(lambda meters: meters.gauge(table.QUEUED, ("m",), 1) if open_requests[0] else None)
    for _ in range(2):
        metrics.collect(meters)
        meters.flush(kept)
        first, open_requests = (kept.gauge(table.OPEN), kept.gauge(table.QUEUED, "m")), [0, 0]
    assert first == (0, 0)


def test_what_was_handed_on_is_not_handed_on_again() -> None:
    meters, kept = Meters(), Kept()
    meters.add(table.DEGRADED, ("m",))
    meters.observe(table.TTFT, ("m",), 1)
    meters.flush(kept)
    meters.flush(kept)
    assert kept.count(table.DEGRADED, "m") == 1
    assert kept.observed(table.TTFT, "m") == [1]


def test_thread_of_its_own_hands_on_and_the_end_loses_nothing() -> None:
    metrics, kept = RouterMetrics(), Kept()
    flusher = Flusher([metrics.collect], kept)
    flusher.start()
    metrics.take(record(judged(talk("hello"))))
    flusher.close()
    assert kept.count(table.REQUESTS, CHAT, "large", "200") == 1
    assert kept.threads == {"metrics"}


def test_sink_that_fails_ends_nothing() -> None:
    class Failing(Kept):
        def add(self, metric: Metric, labels: Labels, number: float) -> None:
            if not self.counts:
                self.counts[metric.name, labels] = 0
                raise RuntimeError("Ray is away")
            super().add(metric, labels, number)

    metrics, kept = RouterMetrics(), Failing()
    flusher = Flusher([metrics.collect], kept)
    for _ in range(2):
        metrics.take(record(status=401, fault="missing_api_key"))
        flusher.flush()
    assert kept.count(table.REQUESTS, CHAT, "", "401") == 1


# The table


def test_names_are_unique_and_units_are_in_them() -> None:
    names = [metric.name for metric in METRICS]
    assert len(names) == len(set(names))
    for metric in METRICS:
        assert (metric.kind == "histogram") == bool(metric.bounds)
        if metric.unit in ("seconds", "bytes"):
            assert metric.name.endswith(f"_{metric.unit}")
        assert list(metric.bounds) == sorted(set(metric.bounds))
        assert metric.meaning.endswith(".")


def test_names_as_prometheus_finds_them() -> None:
    assert table.REQUESTS.exported == "ray_switchyard_requests_total"
    assert table.TTFT.series == {f"ray_switchyard_ttft_seconds_{part}" for part in ("bucket", "sum", "count")}
    assert table.OPEN.series == {"ray_switchyard_open_requests"}
