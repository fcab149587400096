"""serve_app.telemetry.tracing: a span a request, between the client's and the engine's; off, headers pass."""

import re
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

from serve_app.telemetry.tracing import Tracing, describe

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
CLIENT = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "vendor=1"}
OFF = Tracing(None)


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
    def span(self) -> ReadableSpan:
        (found,) = self.spans
        return found


def traced(tracing: Tracing, headers: dict[str, str], decision: Any = None) -> dict[str, str]:
    """The headers that the engine gets of a request."""
    passed: dict[str, str] = {}
    with tracing.request("/v1/chat/completions", Headers(headers), passed) as span:
        if decision:
            describe(span, decision)
    return passed


def is_sampled(passed: dict[str, str]) -> bool:
    return bool(int(passed["traceparent"].rpartition("-")[2], 16) & 1)


# Off


def test_without_a_tracer_the_clients_headers_pass_as_they_came() -> None:
    odd = {"traceparent": "no trace at all", "tracestate": "x"}
    assert traced(OFF, CLIENT) == CLIENT
    assert traced(OFF, odd) == odd


def test_without_a_tracer_nothing_is_added() -> None:
    assert traced(OFF, {"x-other": "1", "authorization": "Bearer sk"}) == {}


def test_without_a_tracer_there_is_nothing_to_describe() -> None:
    assert traced(OFF, {}, judged(talk("hello"))) == {}


# On


def test_span_is_a_child_of_the_clients() -> None:
    collector = Collector()
    traced(collector.tracing, CLIENT)
    span = collector.span
    assert span.parent
    assert (f"{span.parent.trace_id:032x}", f"{span.parent.span_id:016x}") == (TRACE, PARENT)
    assert (span.name, span.kind) == ("/v1/chat/completions", SpanKind.SERVER)


def test_engine_gets_the_span_as_its_parent() -> None:
    collector = Collector()
    passed = traced(collector.tracing, CLIENT)
    assert passed["traceparent"] == f"00-{TRACE}-{collector.span.context.span_id:016x}-01"
    assert passed["tracestate"] == "vendor=1"


def test_engine_gets_the_trace_and_nothing_else_that_a_client_would_spread() -> None:
    spread = {"baggage": "user=4711", "b3": "1", "uber-trace-id": "x", "x-cloud-trace-context": "x", "cookie": "c"}
    assert set(traced(Collector().tracing, CLIENT | spread)) == {"traceparent", "tracestate"}
    assert set(traced(OFF, CLIENT | spread)) == {"traceparent", "tracestate"}


def test_request_without_a_trace_begins_one() -> None:
    collector = Collector()
    passed = traced(collector.tracing, {})
    assert collector.span.parent is None
    assert re.fullmatch(r"00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}", passed["traceparent"])
    assert is_sampled(passed)


def test_broken_trace_header_begins_a_trace_of_its_own() -> None:
    collector = Collector()
    passed = traced(collector.tracing, {"traceparent": "00-zz-zz-01", "tracestate": "vendor=1"})
    assert collector.span.parent is None
    assert f"{collector.span.context.trace_id:032x}" in passed["traceparent"]
    # W3C: the state of a trace that cannot be read is not passed on, it belongs to another one.
    assert "tracestate" not in passed


def test_clients_wish_not_to_be_sampled_is_passed_on() -> None:
    collector = Collector()
    passed = traced(collector.tracing, {"traceparent": f"00-{TRACE}-{PARENT}-00"}, judged(talk("hello")))
    assert passed["traceparent"].startswith(f"00-{TRACE}-")
    assert not is_sampled(passed)
    assert collector.spans == ()


def test_two_requests_are_two_spans() -> None:
    collector = Collector()
    one, other = traced(collector.tracing, {}), traced(collector.tracing, {})
    assert one["traceparent"] != other["traceparent"]


def test_request_that_fails_ends_its_span() -> None:
    collector = Collector()
    with pytest.raises(RuntimeError), collector.tracing.request("x", Headers({}), {}):
        raise RuntimeError("the engine died")
    assert collector.span.end_time
    assert not collector.span.status.is_ok


def test_span_has_the_decision() -> None:
    collector = Collector()
    decision = judged(
        talk("hello", max_tokens=1000), score=score(0.9), rules=[rule("picks", model="coder")], awake=["large"]
    )
    traced(collector.tracing, {}, decision)
    assert dict(collector.span.attributes or {}) == {
        "gen_ai.request.model": "large",
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
    traced(collector.tracing, {}, judged(talk("hello"), rules=[rule("on", thinking=True)]))
    assert (collector.span.attributes or {})["switchyard.rule"] == "on"


def test_what_was_not_decided_is_no_attribute() -> None:
    collector = Collector()
    traced(collector.tracing, {}, judged(talk("hello", mode="non_thinking")))
    assert set(collector.span.attributes or {}) == {
        "gen_ai.request.model",
        "switchyard.model_source",
        "switchyard.thinking",
        "switchyard.thinking_source",
    }


def test_no_attribute_holds_the_prompt() -> None:
    collector = Collector()
    traced(
        collector.tracing, {"authorization": "Bearer sk-1"}, judged(talk("patient-4711 e"), rules=[rule(thinking=True)])
    )
    shown = collector.span.to_json()
    assert "patient" not in shown
    assert "sk-1" not in shown


def test_span_that_is_not_recorded_costs_no_attributes() -> None:
    collector = Collector(sampler=ALWAYS_OFF)
    assert not is_sampled(traced(collector.tracing, {}, judged(talk("hello"))))
    assert collector.spans == ()


# Over a whole request


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Collector:
    made = Collector()
    monkeypatch.setattr("serve_app.router.app.tracer_to", lambda endpoint: made.tracing._tracer)
    return made


EXPORTED = {"telemetry": {"otlp_endpoint": "http://collector"}}
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
    assert (trace, f"{collector.span.context.trace_id:032x}", f"{collector.span.context.span_id:016x}") == (
        TRACE,
        TRACE,
        parent,
    )
    assert collector.span.status.is_ok


@pytest.mark.case(83)
async def test_span_of_a_stream_lasts_to_its_last_byte(collector: Collector) -> None:
    async with front(stream(*WORDS, end="stall"), **EXPORTED) as (app, _):
        call = Call(app, body(stream=True), headers=CLIENT)
        await call.until(lambda call: WORDS[-1] in call.body)
        assert collector.spans == ()
        call.disconnect()
        await call.done()
        assert collector.span.end_time


@pytest.mark.case(83)
async def test_span_of_a_client_that_left_says_so(collector: Collector) -> None:
    async with front(stream(*WORDS, end="stall"), **EXPORTED) as (app, _):
        call = Call(app, body(stream=True), headers=CLIENT)
        await call.until(lambda call: WORDS[-1] in call.body)
        call.disconnect()
        await call.done()
    assert not collector.span.status.is_ok
    assert "ClientGone" in str(collector.span.status.description)


@pytest.mark.case(83)
@pytest.mark.parametrize(
    "header", ["", "00-zz-1-01", f"00-{'0' * 32}-{PARENT}-01", "x" * 5000, f"ff-{TRACE}-{PARENT}-01"]
)
async def test_malformed_trace_header_begins_a_new_trace_and_is_no_fault(collector: Collector, header: str) -> None:
    async with front(answer(200, {"choices": []}), **EXPORTED) as (app, (upstream,)):
        assert (await Call(app, body(), headers={"traceparent": header}).done()).status == 200
        assert upstream.seen[0].headers["traceparent"] != header
    assert collector.span.parent is None
    assert f"{collector.span.context.trace_id:032x}" != TRACE
