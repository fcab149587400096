"""Audit records as OpenTelemetry logs. The SDK's logs API is still underscored (1.30 and later): only here."""

from __future__ import annotations

import logging


def otlp_handler(endpoint: str) -> logging.Handler:
    """A handler that exports in batches to an OTLP/HTTP collector."""
    from opentelemetry.exporter.otlp.proto.http._log_exporter import OTLPLogExporter
    from opentelemetry.sdk._logs import LoggerProvider, LoggingHandler
    from opentelemetry.sdk._logs.export import BatchLogRecordProcessor
    from opentelemetry.sdk.resources import Resource

    class Handler(LoggingHandler):
        def close(self) -> None:
            # Sends what is batched; the SDK's own would leave it to the end of the process, which Ray kills.
            provider.shutdown()
            super().close()

    provider = LoggerProvider(resource=Resource.create({"service.name": "switchyard"}))
    provider.add_log_record_processor(BatchLogRecordProcessor(OTLPLogExporter(endpoint=endpoint)))
    return Handler(level=logging.INFO, logger_provider=provider)
