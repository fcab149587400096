"""A small OTLP/HTTP collector, that is also a server which is not ours: it lists one model."""

from __future__ import annotations

import contextlib
import gzip
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span


class Collector:
    """Keeps every span that it is sent, with the name of the service that made it."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._spans: list[tuple[str, Span]] = []

    def take(self, body: bytes) -> None:
        for batch in ExportTraceServiceRequest.FromString(body).resource_spans:
            names = {found.key: found.value.string_value for found in batch.resource.attributes}
            for scope in batch.scope_spans:
                self._spans += [(names.get("service.name", ""), span) for span in scope.spans]

    def of_trace(self, trace_id: str) -> list[tuple[str, Span]]:
        return [(service, span) for service, span in self._spans if span.trace_id.hex() == trace_id]


@contextlib.contextmanager
def collecting() -> Iterator[Collector]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:  # http.server's name
            if self.path != "/v1/traces":
                self.send_error(404)
                return
            body = self.rfile.read(int(self.headers["content-length"]))
            collector.take(gzip.decompress(body) if self.headers.get("content-encoding") == "gzip" else body)
            self._answer("application/x-protobuf", b"")

        def do_GET(self) -> None:  # http.server's name
            self._answer("application/json", b'{"object":"list","data":[{"id":"outside","object":"model"}]}')

        def _answer(self, kind: str, body: bytes) -> None:
            self.send_response(200)
            self.send_header("content-type", kind)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    collector = Collector(server.server_port)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield collector
    finally:
        server.shutdown()
        server.server_close()
