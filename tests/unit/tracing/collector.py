"""A collector of OpenTelemetry spans on the loopback: keeps what it is sent."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


@dataclass
class Collector:
    url: str
    paths: list[str] = field(default_factory=list)
    spans: list[tuple[str, Any]] = field(default_factory=list)  # service, span

    def by_name(self, name: str) -> list[Any]:
        return [span for _, span in self.spans if span.name == name]

    def take(self, path: str, body: bytes) -> None:
        self.paths.append(path)
        for group in ExportTraceServiceRequest.FromString(body).resource_spans:
            named = {one.key: one.value.string_value for one in group.resource.attributes}
            for scope in group.scope_spans:
                self.spans += [(named["service.name"], span) for span in scope.spans]


def attributes(span: Any) -> dict[str, str | int]:
    return {one.key: one.value.string_value or one.value.int_value for one in span.attributes}


@contextlib.contextmanager
def collector() -> Iterator[Collector]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            found.take(self.path, self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        found = Collector(f"http://127.0.0.1:{server.server_port}")
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield found
        finally:
            server.shutdown()
            thread.join()
