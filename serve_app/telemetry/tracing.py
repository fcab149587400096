"""OpenTelemetry spans of a request: child of the client's, parent of the engine's. Off unless configured.

While a request runs there are two live spans at most: its own, and `relay`, whose ids the engine needs. All others are
made of the noted times when it is over, and only where the trace is sampled; a thread of the SDK's sends them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping, MutableMapping
from typing import Any

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import Span, SpanKind, StatusCode, Tracer, format_trace_id, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.datastructures import Headers

from serve_app.service_schema import Telemetry
from serve_app.telemetry.traffic import Step

Carrier = MutableMapping[str, str]

# Not the one that is set globally, which passes on whatever a client writes into `baggage` too.
_TRACE_CONTEXT = TraceContextTextMapPropagator()
_CLOSE_S = 5.0
# https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-spans/
_OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/messages": "chat",
    "/v1/responses": "chat",
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
}
_NAMES = {
    "model": "gen_ai.request.model",
    "prompt_tokens": "gen_ai.usage.input_tokens",
    "completion_tokens": "gen_ai.usage.output_tokens",
    "cached_tokens": "gen_ai.usage.cache_read.input_tokens",
    "reasoning_tokens": "gen_ai.usage.reasoning.output_tokens",
    "status": "http.response.status_code",
    "error": "error.type",
    "request": "switchyard.request_id",
    "key": "switchyard.key",
    "model_source": "switchyard.model_source",
    "thinking": "switchyard.thinking",
    "thinking_source": "switchyard.thinking_source",
    "budget": "switchyard.budget",
    "rule": "switchyard.rule",
    "score": "switchyard.score",
    "scorer": "switchyard.scorer",
    "fallback": "switchyard.fallback",
    "degraded": "switchyard.degraded",
}


def tracing_of(settings: Telemetry) -> Tracing:
    """As configured. Spans go to an OTLP/HTTP collector, in the background; a client's own choice to sample holds."""
    if not settings.otlp_endpoint:
        return Tracing(None)
    provider = TracerProvider(
        resource=Resource.create({"service.name": "switchyard-router"}),
        sampler=ParentBased(TraceIdRatioBased(settings.sample_ratio)),
    )
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=settings.otlp_endpoint)))
    return Tracing(provider.get_tracer("switchyard"), provider)


class Tracing:
    """Begins traces. Without a tracer it costs nothing, and passes the client's trace headers on as they came."""

    def __init__(self, tracer: Tracer | None, provider: TracerProvider | None = None) -> None:
        self._tracer = tracer
        self._provider = provider

    def begin(self, name: str, headers: Headers) -> Trace | None:
        """The trace of a request that has just come; None without a tracer."""
        return Trace(self._tracer, name, headers) if self._tracer else None

    def close(self) -> None:
        """Send what is batched; a collector that does not take it within seconds holds up no shutdown."""
        if self._provider:
            closing = threading.Thread(target=self._provider.shutdown, name="traces", daemon=True)
            closing.start()
            closing.join(_CLOSE_S)


def passed_on(headers: Headers) -> dict[str, str]:
    """The client's trace headers as they came, for an engine of a Router that does not trace."""
    return {field: headers[field] for field in ("traceparent", "tracestate") if field in headers}


class Trace:
    """The spans of one request."""

    def __init__(self, tracer: Tracer, name: str, headers: Headers) -> None:
        self._tracer = tracer
        self._offset_ns = time.time_ns() - time.monotonic_ns()
        parent = _TRACE_CONTEXT.extract(dict(headers))
        self._span = tracer.start_span(name, context=parent, kind=SpanKind.SERVER)
        self._context: Context = set_span_in_context(self._span)
        self._operation = _OPERATIONS.get(name)
        self._relay: Span | None = None

    @property
    def id(self) -> str:
        """32 hex digits."""
        return format_trace_id(self._span.get_span_context().trace_id)

    def sent(self, passed: Carrier) -> None:
        """An engine gets the request now: the headers that it is given."""
        if self._relay:
            self._relay.set_status(StatusCode.ERROR, "not served")
            self._relay.end()
        self._relay = self._tracer.start_span("relay", context=self._context, kind=SpanKind.CLIENT)
        _TRACE_CONTEXT.inject(passed, set_span_in_context(self._relay))

    def end(self, record: Mapping[str, Any], steps: Iterable[Step]) -> None:
        """The request is over, as its audit record says."""
        for span in (self._relay, self._span):
            if span and span.is_recording() and record["error"]:
                span.set_status(StatusCode.ERROR, record["error"])
        if self._relay:
            if self._relay.is_recording() and record["replica"]:
                self._relay.set_attribute("switchyard.replica", record["replica"])
            self._relay.end()
        if self._span.is_recording():
            self._span.set_attributes(attributes(record, self._operation))
            for name, began, ended in steps:
                step = self._tracer.start_span(name, context=self._context, start_time=self._at(began))
                step.end(self._at(ended))
        self._span.end()

    def _at(self, moment: float) -> int:
        return int(moment * 1e9) + self._offset_ns


def attributes(record: Mapping[str, Any], operation: str | None) -> dict[str, Any]:
    """What a span says of its request: what the audit does, in the words of the field. Pure."""
    found: dict[str, Any] = {
        name: value for field, name in _NAMES.items() if (value := record.get(field)) is not None and value != ""
    }
    if operation:
        found |= {"gen_ai.operation.name": operation, "gen_ai.provider.name": "vllm"}
    if record["finish"]:
        found["gen_ai.response.finish_reasons"] = (record["finish"],)
    if record["ttft_ms"] is not None:
        found["gen_ai.response.time_to_first_chunk"] = record["ttft_ms"] / 1000
    return found
