"""serve_app.telemetry.tracing: a request's spans, between the client's and the engine's; off, headers pass."""

import re
import socket
import time
from typing import Any

import pytest
from asgi_call import Call
from front import body, event, front
from judging import judged, rule, score, talk
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from opentelemetry.trace import SpanKind
from scripted_upstream import DONE, answer, stream
from starlette.datastructures import Headers
from starlette.types import Message

from serve_app.router.auth import Caller
from serve_app.router.record import Asked, audit_record
from serve_app.router.reply import Reply
from serve_app.routing.decision import Decision
from serve_app.service_schema import Anonymous, Telemetry
from serve_app.telemetry.tracing import Trace, Tracing, passed_on, tracing_of

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
CLIENT = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "vendor=1"}
CHAT = "/v1/chat/completions"


async def nowhere(message: Message) -> None:
    """Nobody listens."""


class Collector:
    """Tracing whose spans stay in memory."""

    def __init__(self, **provider: Any) -> None:
        self._exporter = InMemorySpanExporter()
        made = TracerProvider(**provider)
        made.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.tracing = Tracing(made.get_tracer("test"))

    @property
    def spans(self) -> tuple[ReadableSpan, ...]:
        return self._exporter.get_finished_spans()

    @property
    def request(self) -> ReadableSpan:
        (found,) = (span for span in self.spans if span.kind is SpanKind.SERVER)
        return found

    def named(self, name: str) -> list[ReadableSpan]:
        return [span for span in self.spans if span.name == name]

    def traced(self, headers: dict[str, str], decision: Decision | None = None, **asked: Any) -> dict[str, str]:
        """The headers that the engine gets of a request that was answered."""
        trace = self.tracing.begin(CHAT, Headers(headers))
        assert trace
        passed: dict[str, str] = {}
        trace.sent(passed)
        finish(trace, headers, decision, **asked)
        return passed


def finish(
    trace: Trace,
    headers: dict[str, str],
    decision: Decision | None = None,
    status: int = 200,
    fault: str = "",
    **more: Any,
) -> None:
    asked = Asked(Headers(headers), Caller("team", Anonymous()), time.monotonic(), decision=decision, **more)
    reply = Reply(nowhere, stream=False)
    reply.status, reply.fault = status, fault
    trace.end(audit_record(CHAT, asked, reply), asked.steps)


def is_sampled(passed: dict[str, str]) -> bool:
    return bool(int(passed["traceparent"].rpartition("-")[2], 16) & 1)


# Off


def test_without_a_collector_there_is_no_trace() -> None:
    assert tracing_of(Telemetry()).begin(CHAT, Headers(CLIENT)) is None


def test_without_a_tracer_the_clients_headers_pass_as_they_came() -> None:
    odd = {"traceparent": "no trace at all", "tracestate": "x"}
    assert passed_on(Headers(CLIENT)) == CLIENT
    assert passed_on(Headers(odd)) == odd
    assert passed_on(Headers({"x-other": "1", "authorization": "Bearer sk"})) == {}


# On


def test_span_is_a_child_of_the_clients() -> None:
    collector = Collector()
    collector.traced(CLIENT)
    span = collector.request
    assert span.parent
    assert (f"{span.parent.trace_id:032x}", f"{span.parent.span_id:016x}") == (TRACE, PARENT)
    assert span.name == CHAT


def test_engine_gets_the_relay_as_its_parent_which_is_the_requests_child() -> None:
    collector = Collector()
    passed = collector.traced(CLIENT)
    (relay,) = collector.named("relay")
    assert relay.parent
    assert relay.parent.span_id == collector.request.context.span_id
    assert passed["traceparent"] == f"00-{TRACE}-{relay.context.span_id:016x}-01"
    assert passed["tracestate"] == "vendor=1"


def test_each_try_is_a_relay_of_its_own_and_the_last_one_counts() -> None:
    collector = Collector()
    trace = collector.tracing.begin(CHAT, Headers(CLIENT))
    assert trace
    passed: dict[str, str] = {}
    trace.sent(passed)
    first = passed["traceparent"]
    trace.sent(passed)
    finish(trace, CLIENT)
    assert [span.status.is_ok for span in collector.named("relay")] == [False, True]
    assert passed["traceparent"] != first


def test_steps_are_children_with_their_own_times() -> None:
    collector = Collector()
    now = time.monotonic()
    collector.traced({}, steps=[("decide", now - 0.5, now - 0.4), ("hold", now - 0.4, now - 0.1)])
    for name, seconds in (("decide", 0.1), ("hold", 0.3)):
        (span,) = collector.named(name)
        assert span.parent
        assert span.parent.span_id == collector.request.context.span_id
        assert span.start_time
        assert span.end_time
        assert abs((span.end_time - span.start_time) / 1e9 - seconds) < 0.001
        assert abs(span.end_time / 1e9 - time.time()) < 60


def test_engine_gets_the_trace_and_nothing_else_that_a_client_would_spread() -> None:
    spread = {"baggage": "user=4711", "b3": "1", "uber-trace-id": "x", "x-cloud-trace-context": "x", "cookie": "c"}
    assert set(Collector().traced(CLIENT | spread)) == {"traceparent", "tracestate"}
    assert set(passed_on(Headers(CLIENT | spread))) == {"traceparent", "tracestate"}


def test_request_without_a_trace_begins_one() -> None:
    collector = Collector()
    passed = collector.traced({})
    assert collector.request.parent is None
    assert re.fullmatch(r"00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}", passed["traceparent"])
    assert is_sampled(passed)


def test_broken_trace_header_begins_a_trace_of_its_own() -> None:
    collector = Collector()
    passed = collector.traced({"traceparent": "00-zz-zz-01", "tracestate": "vendor=1"})
    assert collector.request.parent is None
    assert f"{collector.request.context.trace_id:032x}" in passed["traceparent"]
    # W3C: the state of a trace that cannot be read is not passed on, it belongs to another one.
    assert "tracestate" not in passed


def test_clients_wish_not_to_be_sampled_is_passed_on() -> None:
    collector = Collector()
    passed = collector.traced({"traceparent": f"00-{TRACE}-{PARENT}-00"}, judged(talk("hello")))
    assert passed["traceparent"].startswith(f"00-{TRACE}-")
    assert not is_sampled(passed)
    assert collector.spans == ()


def test_ratio_of_nothing_samples_what_its_client_sampled_only() -> None:
    tracing = tracing_of(Telemetry(otlp_endpoint="http://127.0.0.1:9/v1/traces", sample_ratio=0))
    for headers, expected in ((CLIENT, True), ({}, False)):
        trace = tracing.begin(CHAT, Headers(headers))
        assert trace
        passed: dict[str, str] = {}
        trace.sent(passed)
        assert is_sampled(passed) is expected


def test_collector_that_hangs_does_not_hold_up_a_shutdown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serve_app.telemetry.tracing._CLOSE_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        tracing = tracing_of(Telemetry(otlp_endpoint=f"http://127.0.0.1:{port}/v1/traces"))
        trace = tracing.begin(CHAT, Headers({}))
        assert trace
        finish(trace, {})
        began = time.monotonic()
        tracing.close()
        assert time.monotonic() - began < 5


def test_two_requests_are_two_traces() -> None:
    collector = Collector()
    one, other = collector.traced({}), collector.traced({})
    assert one["traceparent"] != other["traceparent"]


def test_request_that_fails_says_why() -> None:
    collector = Collector()
    collector.traced({}, status=503, fault="engine_died")
    assert not collector.request.status.is_ok
    assert (collector.request.attributes or {})["error.type"] == "engine_died"


def test_span_has_the_decision_and_the_cost_in_the_words_of_the_field() -> None:
    collector = Collector()
    decision = judged(
        talk("hello", max_tokens=1000), score=score(0.9), rules=[rule("picks", model="coder")], awake=["large"]
    )
    collector.traced({}, decision)
    found = dict(collector.request.attributes or {})
    assert found == found | {
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": "large",
        "gen_ai.usage.input_tokens": 0,
        "http.response.status_code": 200,
        "switchyard.model_source": "fallback",
        "switchyard.thinking": True,
        "switchyard.thinking_source": "scorer",
        "switchyard.budget": 750,
        "switchyard.score": 0.9,
        "switchyard.scorer": "test",
        "switchyard.fallback": "coder is not awake; large answers",
    }


def test_span_names_the_rule() -> None:
    collector = Collector()
    collector.traced({}, judged(talk("hello"), rules=[rule("on", thinking=True)]))
    assert (collector.request.attributes or {})["switchyard.rule"] == "on"


def test_no_attribute_holds_the_prompt() -> None:
    collector = Collector()
    collector.traced({"authorization": "Bearer sk-1"}, judged(talk("patient-4711 e"), rules=[rule(thinking=True)]))
    shown = collector.request.to_json()
    assert "patient" not in shown
    assert "sk-1" not in shown


def test_request_that_is_not_sampled_makes_no_span() -> None:
    collector = Collector(sampler=ALWAYS_OFF)
    assert not is_sampled(collector.traced({}, judged(talk("hello")), steps=[("decide", 0.0, 1.0)]))
    assert collector.spans == ()


# Over a whole request


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Collector:
    made = Collector()
    monkeypatch.setattr("serve_app.router.app.tracing_of", lambda settings: made.tracing)
    return made


EXPORTED = {"telemetry": {"otlp_endpoint": "http://collector:4318/v1/traces"}}
WORDS = [event("a"), event("b")]


@pytest.mark.case(83)
@pytest.mark.parametrize("streaming", [False, True])
async def test_one_trace_leads_from_the_client_over_the_router_to_the_engine(
    collector: Collector, streaming: bool
) -> None:
    script = stream(*WORDS, DONE) if streaming else answer(200, {"choices": []})
    async with front(script, **EXPORTED) as (app, (upstream,)):
        await Call(app, body(stream=streaming), headers=CLIENT).done()
        _, trace, parent, _ = upstream.seen[0].headers["traceparent"].split("-")
    (relay,) = collector.named("relay")
    assert (trace, f"{collector.request.context.trace_id:032x}", f"{relay.context.span_id:016x}") == (
        TRACE,
        TRACE,
        parent,
    )
    assert {span.name for span in collector.spans} == {CHAT, "admit", "decide", "relay"}
    assert collector.request.status.is_ok


@pytest.mark.case(83)
async def test_span_of_a_stream_lasts_to_its_last_byte(collector: Collector) -> None:
    async with front(stream(*WORDS, end="stall"), **EXPORTED) as (app, _):
        call = Call(app, body(stream=True), headers=CLIENT)
        await call.until(lambda call: WORDS[-1] in call.body)
        assert collector.spans == ()
        call.disconnect()
        await call.done()
        assert collector.request.end_time


@pytest.mark.case(83)
async def test_span_of_a_client_that_left_says_so(collector: Collector) -> None:
    async with front(stream(*WORDS, end="stall"), **EXPORTED) as (app, _):
        call = Call(app, body(stream=True), headers=CLIENT)
        await call.until(lambda call: WORDS[-1] in call.body)
        call.disconnect()
        await call.done()
    assert not collector.request.status.is_ok
    assert collector.request.status.description == "client_left"


@pytest.mark.case(83)
@pytest.mark.parametrize(
    "header", ["", "00-zz-1-01", f"00-{'0' * 32}-{PARENT}-01", "x" * 5000, f"ff-{TRACE}-{PARENT}-01"]
)
async def test_malformed_trace_header_begins_a_new_trace_and_is_no_fault(collector: Collector, header: str) -> None:
    async with front(answer(200, {"choices": []}), **EXPORTED) as (app, (upstream,)):
        assert (await Call(app, body(), headers={"traceparent": header}).done()).status == 200
        assert upstream.seen[0].headers["traceparent"] != header
    assert collector.request.parent is None
    assert f"{collector.request.context.trace_id:032x}" != TRACE
