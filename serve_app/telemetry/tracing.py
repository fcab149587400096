"""OpenTelemetry spans: one a request, child of the client's, parent of the engine's. Off unless configured."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, MutableMapping

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.datastructures import Headers

from serve_app.routing.decision import Decision

Carrier = MutableMapping[str, str]

# Not the one that is set globally, which passes on whatever a client writes into `baggage` too.
_TRACE_CONTEXT = TraceContextTextMapPropagator()


def tracer_to(endpoint: str) -> Tracer:
    """A tracer that sends its spans to an OTLP/HTTP collector, in the background."""
    provider = TracerProvider(resource=Resource.create({"service.name": "switchyard-router"}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
    return provider.get_tracer("switchyard")


class Tracing:
    """Makes spans. Without a tracer it costs nothing and passes the client's trace headers on as they came."""

    def __init__(self, tracer: Tracer | None) -> None:
        self._tracer = tracer

    @contextlib.contextmanager
    def request(self, name: str, headers: Headers, passed: Carrier) -> Iterator[Span | None]:
        """A span for a request; `passed` gets the trace headers for the engine."""
        if self._tracer is None:
            passed.update({field: headers[field] for field in ("traceparent", "tracestate") if field in headers})
            yield None
            return
        context = _TRACE_CONTEXT.extract(dict(headers))
        with self._tracer.start_as_current_span(name, context=context, kind=SpanKind.SERVER) as span:
            _TRACE_CONTEXT.inject(passed)
            yield span


def describe(span: Span | None, decision: Decision) -> None:
    """Put a decision's attributes on a span."""
    if span is None or not span.is_recording():
        return
    attributes: dict[str, str | bool | int | float] = {
        "gen_ai.request.model": decision.model_id,
        "switchyard.model_source": decision.model_source,
        "switchyard.thinking": decision.thinking,
        "switchyard.thinking_source": decision.thinking_source,
    }
    if decision.budget is not None:
        attributes["switchyard.budget"] = decision.budget
    if decision.rule:
        attributes["switchyard.rule"] = decision.rule
    if decision.score:
        attributes["switchyard.score"] = decision.score.think
        attributes["switchyard.scorer"] = decision.score.kind
    if decision.fallback:
        attributes["switchyard.fallback"] = decision.fallback
    span.set_attributes(attributes)
