"""Spans for OpenTelemetry, over OTLP/HTTP. Nothing of it is loaded unless an endpoint is set.

The gateway exports `gateway`, `queue wait` and `dispatch`, a replica `engine`, below the client's `traceparent`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any, Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serving.tracing.events import RequestSpan

VARIABLES: Final = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
TRACES_PATH: Final = "/v1/traces"
CARRIED: Final = ("traceparent", "tracestate")


class Tracing:
    """Exports the spans of one process, in batches, in a thread of its own.

    Args:
        endpoint: base URL of the collector; None: as OpenTelemetry's environment variables say.
        attributes: what tells this process from others, such as lane and replica.
    """

    def __init__(self, endpoint: str | None, role: str, attributes: Mapping[str, str]) -> None:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        url = endpoint.rstrip("/") + TRACES_PATH if endpoint else None
        resource = Resource.create({"service.name": f"tandem-{role}", **attributes})
        self._provider = TracerProvider(resource=resource)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=url)))
        self._tracer = self._provider.get_tracer("tandem")
        self._propagator = TraceContextTextMapPropagator()
        # OpenTelemetry counts from the epoch, Tandem on the monotonic clock.
        self._realtime_offset_ns = time.time_ns() - time.monotonic_ns()

    def begin(self, name: str, headers: Mapping[str, str], started_ns: int) -> TracedSpan:
        """A span below the one that the headers name, if they do."""
        parent = self._propagator.extract({name: headers[name] for name in CARRIED if name in headers})
        return TracedSpan(self, self._tracer, parent, name, started_ns, self._realtime_offset_ns)

    def headers(self, context: Any) -> dict[str, str]:
        """What carries a context to another process."""
        carried: dict[str, str] = {}
        self._propagator.inject(carried, context)
        return carried

    def close(self) -> None:
        """Export what is left; waits for the collector, within OpenTelemetry's own limits."""
        self._provider.shutdown()


class TracedSpan:
    """A span that goes on. All instants are CLOCK_MONOTONIC in nanoseconds."""

    def __init__(
        self, tracing: Tracing, tracer: Any, parent: Any, name: str, started_ns: int, offset_ns: int
    ) -> None:
        from opentelemetry.trace import set_span_in_context

        self._tracer = tracer
        self._offset_ns = offset_ns
        self._span = tracer.start_span(name, context=parent, start_time=started_ns + offset_ns)
        self._context = set_span_in_context(self._span, parent)
        self.headers = tracing.headers(self._context)

    def child(self, name: str, started_ns: int, ended_ns: int, attributes: Mapping[str, str]) -> None:
        """A part of it that is over."""
        span = self._tracer.start_span(
            name, self._context, attributes=attributes, start_time=started_ns + self._offset_ns
        )
        span.end(ended_ns + self._offset_ns)

    def end(self, ended_ns: int, attributes: Mapping[str, str | int], fault: str = "") -> None:
        """It is over; `fault` says what went wrong, if something did."""
        from opentelemetry.trace import Status, StatusCode

        self._span.set_attributes(dict(attributes))
        if fault:
            self._span.set_status(Status(StatusCode.ERROR, fault))
        self._span.end(ended_ns + self._offset_ns)


def is_wanted(endpoint: str | None) -> bool:
    """Whether the config or OpenTelemetry's environment variables name a collector."""
    return bool(endpoint) or any(os.environ.get(name) for name in VARIABLES)


def end_request(traced: TracedSpan, span: RequestSpan) -> None:
    """A request ended: its parts, and itself."""
    ended_ns = span.ended_ns or time.monotonic_ns()
    for attempt in span.attempts:
        over_ns = attempt.ended_ns or ended_ns
        labels = {"tandem.lane": attempt.lane, "tandem.replica": attempt.replica_id}
        traced.child("queue wait", attempt.submitted_ns, attempt.granted_ns or over_ns, labels)
        if attempt.granted_ns is not None:
            traced.child("dispatch", attempt.granted_ns, attempt.first_byte_ns or over_ns, labels)
    attributes: dict[str, str | int] = {
        "tandem.request_id": span.request_id,
        "tandem.outcome": span.outcome or "",
        "tandem.reason": span.reason,
    }
    if span.attempts and (placement := span.attempts[-1].placement):
        attributes["tandem.placement"] = placement
    for name, tokens in (("prompt", span.prompt_tokens), ("output", span.output_tokens)):
        if tokens is not None:
            attributes[f"tandem.{name}_tokens"] = tokens
    traced.end(ended_ns, attributes, span.reason if span.outcome == "failed" else "")


def with_engine_span(app: ASGIApp, tracing: Tracing) -> ASGIApp:
    """An engine's application, with a span `engine` around each completion."""

    async def wrapped(scope: Scope, receive: Receive, send: Send) -> Any:
        if scope["type"] != "http" or not scope["path"].endswith("/completions"):
            return await app(scope, receive, send)
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        traced = tracing.begin("engine", headers, time.monotonic_ns())
        status = 0

        async def noting(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        try:
            return await app(scope, receive, noting)
        finally:
            attributes = {
                "tandem.request_id": headers.get("x-request-id", ""),
                "http.response.status_code": status,
            }
            fault = f"status {status}" if status >= 500 else ""
            traced.end(time.monotonic_ns(), attributes, fault)

    return wrapped
