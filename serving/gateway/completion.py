"""One completion from arrival to last byte: lease, send, pass the bytes on, release, account."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from starlette.types import Receive, Scope, Send

from serving.core.errors import ERROR_SHAPES, Reason, RefusedError, UpstreamError
from serving.core.lane import ANY_LANE
from serving.core.latency import RequestTimeline, inter_chunk_latencies_s
from serving.core.request import Outcome, ReplicaVerdict, RequestEnd, SchedulingRequest
from serving.core.sse import EventTooLargeError, parse_answer
from serving.gateway.errors import error_event, error_headers, error_object, refusal_reason
from serving.gateway.metrics import GatewayMetrics
from serving.gateway.openai_request import RoutedRequest
from serving.gateway.stream import StreamNotes
from serving.gateway.upstream import Upstream, UpstreamClient
from serving.scheduler.client import HeldReplica, SchedulerClient
from serving.scheduler.protocol import Granted
from serving.tracing.events import Attempt, RequestSpan
from serving.tracing.otlp import TracedSpan, Tracing, end_request
from serving.tracing.span_log import SpanLog

logger = logging.getLogger(__name__)


MAX_QUOTED_BYTES = 300


class ClientGoneError(Exception):
    """The client closed the connection before the answer was whole."""


@dataclass(frozen=True)
class Services:
    """What every completion of a gateway shares.

    Attributes:
        tracing: exports spans to a collector; None when none is set.
        logs_requests: one line in the log for each request that ends.
    """

    scheduler: SchedulerClient
    upstream: UpstreamClient
    metrics: GatewayMetrics
    spans: SpanLog = field(default_factory=SpanLog)
    tracing: Tracing | None = None
    logs_requests: bool = False


class Completion:
    """An ASGI response that runs one request. All it holds is given back when it returns or is cancelled.

    Args:
        path: `/v1/chat/completions` or `/v1/completions`.
        client_request_id: the id the client sees; the scheduling id begins with it and is unique.
        arrived_at_s: monotonic instant of arrival.
        headers: the client's, for the trace that it may be part of.
    """

    def __init__(
        self,
        services: Services,
        request: RoutedRequest,
        *,
        path: str,
        client_request_id: str,
        arrived_at_s: float,
        headers: Mapping[str, str],
    ) -> None:
        self._services = services
        self._request = request
        self._path = path
        self._client_request_id = client_request_id
        self._arrived_at_s = arrived_at_s
        self._notes = StreamNotes(strip_usage=request.strip_usage)
        self._granted: Granted | None = None
        self._status: int | None = None  # None until the response has begun
        self._engine_refusal: Reason | None = None
        self._attempts: list[Attempt] = []
        self._ended: tuple[int, Outcome, Reason | None] | None = None  # CLOCK_MONOTONIC in ns
        self._traced: TracedSpan | None = None
        if services.tracing is not None:
            self._traced = services.tracing.begin("gateway", headers, _ns(arrived_at_s))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, and stop the engine as soon as the client has gone."""
        with self._services.spans.running(self.span):
            await self._answer_and_account(receive, send)

    async def _answer_and_account(self, receive: Receive, send: Send) -> None:
        outcome: Outcome = Outcome.FAILED
        reason: Reason | None = Reason.INTERNAL
        try:
            outcome, reason = await self._answer_or_error(receive, send)
        except (ClientGoneError, OSError):
            outcome, reason = Outcome.CANCELLED, Reason.CLIENT_CLOSED
        except asyncio.CancelledError:
            outcome, reason = Outcome.CANCELLED, Reason.CLIENT_CLOSED
            raise
        finally:
            self._account(outcome, reason)

    async def _answer_or_error(self, receive: Receive, send: Send) -> tuple[Outcome, Reason | None]:
        try:
            await _unless_client_goes(self._answer(send), receive)
        except RefusedError as refusal:
            await self._send_error(send, refusal.reason, str(refusal), refusal.retry_after_s)
            return Outcome.REJECTED, refusal.reason
        except UpstreamError as error:
            replica = self._granted.replica_id if self._granted else ""
            logger.warning("request %s on %s: %s", self._request.scheduling.request_id, replica, error)
            await self._send_error(send, error.reason, str(error))
            return Outcome.FAILED, error.reason
        return self._how_it_ended()

    def _how_it_ended(self) -> tuple[Outcome, Reason | None]:
        """Of an answer that was passed on to its end."""
        if self._has_failed():
            return Outcome.FAILED, Reason.UPSTREAM_BROKE
        if self._engine_refusal is not None:
            return Outcome.REJECTED, self._engine_refusal
        return Outcome.COMPLETED, None

    def _has_failed(self) -> bool:
        return self._notes.error is not None or (self._status or 500) >= 500

    async def _answer(self, send: Send) -> None:
        """Run on a replica; if it breaks before its first byte, once more on another within the deadline."""
        request = self._request.scheduling
        try:
            await self._attempt(request, send)
        except UpstreamError as error:
            age_s = time.monotonic() - self._arrived_at_s
            if self._status is not None or self._granted is None or _is_late(request, age_s):
                raise
            logger.warning("request %s: %s; trying another replica", request.request_id, error)
            again = replace(
                request,
                request_id=f"{request.request_id}-again",
                age_s=age_s,
                avoid_replica=self._granted.replica_id,
            )
            await self._attempt_again(again, send, error)

    async def _attempt_again(self, request: SchedulingRequest, send: Send, first: UpstreamError) -> None:
        lane, outcome = self._granted.lane if self._granted else "", Outcome.FAILED
        try:
            await self._attempt(request, send)
            outcome, _ = self._how_it_ended()
        except RefusedError as refusal:
            outcome = Outcome.REJECTED
            raise UpstreamError(first.reason, f"{first}; no reroute: {refusal}") from first
        except (asyncio.CancelledError, OSError):
            outcome = Outcome.CANCELLED
            raise
        finally:
            self._services.metrics.reroutes.labels(lane=lane, outcome=outcome).inc()

    async def _attempt(self, request: SchedulingRequest, send: Send) -> None:
        # Half an event of a replica that broke must not stand before the first event of the next.
        self._notes = StreamNotes(strip_usage=self._request.strip_usage)
        self._attempts.append(Attempt(request.request_id, submitted_ns=time.monotonic_ns()))
        try:
            await self._attempt_with_lease(request, send)
        finally:
            self._note_attempt(ended_ns=time.monotonic_ns())

    def _note_attempt(self, **parts: Any) -> None:
        self._attempts[-1] = replace(self._attempts[-1], **parts)

    async def _attempt_with_lease(self, request: SchedulingRequest, send: Send) -> None:
        async with self._services.scheduler.lease(request) as held:
            self._granted = granted = held.granted
            self._note_attempt(
                granted_ns=time.monotonic_ns(), lane=granted.lane, replica_id=granted.replica_id
            )
            carried = self._traced.headers if self._traced else {}
            url = held.granted.url + self._path
            try:
                async with self._services.upstream.post(
                    url, self._request.body, request.request_id, carried
                ) as upstream:
                    self._note_attempt(first_byte_ns=time.monotonic_ns())
                    if upstream.content_type.startswith("text/event-stream"):
                        await self._pass_events(send, upstream)
                    else:
                        await self._pass_whole(send, upstream)
            except UpstreamError:
                held.end = self._end_of(held, ReplicaVerdict.FAILED)
                raise
            except (asyncio.CancelledError, OSError):
                held.end = self._end_of(held, ReplicaVerdict.UNTOLD)
                raise
            verdict = ReplicaVerdict.FAILED if self._has_failed() else ReplicaVerdict.HEALTHY
            held.end = self._end_of(held, verdict)

    def _end_of(self, held: HeldReplica, verdict: ReplicaVerdict) -> RequestEnd:
        notes = self._notes
        first_token_s = notes.chunk_at_s[0] - held.granted_at_s if notes.chunk_at_s else None
        output_tokens = notes.output_tokens
        if output_tokens is None and self._request.is_stream:
            output_tokens = len(
                notes.chunk_at_s
            )  # a stream cut short has no usage; a chunk is a token or more
        return RequestEnd(verdict, first_token_s, output_tokens)

    async def _pass_events(self, send: Send, upstream: Upstream) -> None:
        async for chunk in upstream.chunks:
            try:
                data = self._notes.feed(chunk, time.monotonic())
            except EventTooLargeError as error:
                raise UpstreamError(Reason.UPSTREAM_BROKE, str(error)) from error
            if data:
                await self._begin(send, upstream.status, upstream.content_type)
                await send({"type": "http.response.body", "body": data, "more_body": True})
            if self._notes.error is not None:
                raise UpstreamError(
                    Reason.UPSTREAM_BROKE, f"the engine reported an error: {self._notes.error}"
                )
        if not self._notes.has_ended:
            raise UpstreamError(Reason.UPSTREAM_BROKE, "the engine ended its stream before the last event")
        await send({"type": "http.response.body", "body": b""})

    async def _pass_whole(self, send: Send, upstream: Upstream) -> None:
        body = b"".join([chunk async for chunk in upstream.chunks])
        if upstream.status >= 500:
            message = (
                f"the engine answered {upstream.status}: {body[:MAX_QUOTED_BYTES].decode(errors='replace')}"
            )
            raise UpstreamError(Reason.UPSTREAM_BROKE, message)
        if upstream.status == 200:
            said = parse_answer(body)
            if said.error is not None:
                raise UpstreamError(
                    Reason.UPSTREAM_BROKE, f"the engine answered 200 with an error: {said.error}"
                )
            self._notes.prompt_tokens, self._notes.output_tokens = said.prompt_tokens, said.output_tokens
        extra = {}
        if upstream.status >= 400:
            self._engine_refusal = refusal_reason(body)
            extra = error_headers(self._engine_refusal)
        await self._begin(send, upstream.status, upstream.content_type, extra)
        await send({"type": "http.response.body", "body": body})

    async def _begin(
        self, send: Send, status: int, content_type: str, extra: dict[str, str] | None = None
    ) -> None:
        if self._status is not None:
            return
        self._status = status
        headers = {"content-type": content_type}
        if self._granted is not None:
            headers |= {"x-tandem-lane": self._granted.lane, "x-tandem-replica": self._granted.replica_id}
        headers |= extra or {}
        encoded = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": status, "headers": encoded})

    async def _send_error(
        self, send: Send, reason: Reason, message: str, retry_after_s: float | None = None
    ) -> None:
        if self._status is None:
            headers = error_headers(reason, retry_after_s)
            await self._begin(send, ERROR_SHAPES[reason].status, "application/json", headers)
            body = json.dumps(error_object(reason, message)).encode()
        else:
            body = error_event(reason, message)
        await send({"type": "http.response.body", "body": body})

    def span(self) -> RequestSpan:
        """The request as it stands."""
        ended_ns, outcome, reason = self._ended or (None, None, None)
        notes = self._notes
        return RequestSpan(
            gateway_id=self._services.spans.gateway_id,
            request_id=self._request.scheduling.request_id,
            client_request_id=self._client_request_id,
            arrived_ns=_ns(self._arrived_at_s),
            attempts=tuple(self._attempts),
            first_token_ns=_ns(notes.chunk_at_s[0]) if notes.chunk_at_s else None,
            ended_ns=ended_ns,
            outcome=outcome,
            reason=reason or "",
            prompt_tokens=notes.prompt_tokens,
            output_tokens=notes.output_tokens,
        )

    def _tell(self, outcome: Outcome, reason: Reason | None) -> None:
        """Of the end: to the log and to the collector, where they want to know."""
        self._ended = time.monotonic_ns(), outcome, reason
        span = self.span()
        if self._traced is not None:
            end_request(self._traced, span)
        if self._services.logs_requests:
            logger.info("request %s", request_line(span))

    def _account(self, outcome: Outcome, reason: Reason | None) -> None:
        self._tell(outcome, reason)
        lane, notes, metrics = (
            self._granted.lane if self._granted else "",
            self._notes,
            self._services.metrics,
        )
        tenant = self._request.scheduling.tenant
        metrics.ended(lane, outcome, reason, tenant)
        timeline = RequestTimeline(
            scheduled_at_s=self._arrived_at_s,
            sent_at_s=self._arrived_at_s,
            chunk_at_s=tuple(notes.chunk_at_s),
            finished_at_s=time.monotonic(),
            output_tokens=notes.output_tokens,
        )
        for gap_s in inter_chunk_latencies_s(timeline):
            metrics.inter_chunk.labels(lane=lane).observe(gap_s)
        if outcome is Outcome.COMPLETED:
            metrics.completed(lane, timeline, notes.prompt_tokens or 0, self._request.is_stream, tenant)
        if self._request.is_stream:
            metrics.judge(lane or self._request.scheduling.lane or ANY_LANE, outcome, reason, timeline)


def request_line(span: RequestSpan) -> str:
    """A request that ended, in a line: who, how, where, how long. Never what it said."""
    last = span.attempts[-1] if span.attempts else None
    parts: dict[str, object] = {"outcome": span.outcome, "reason": span.reason or None}
    if last is not None:
        parts |= {"replica": last.replica_id or None, "attempts": len(span.attempts)}
        parts["queue_s"] = _seconds(last.submitted_ns, last.granted_ns)
    parts["ttft_s"] = _seconds(span.arrived_ns, span.first_token_ns)
    parts["e2e_s"] = _seconds(span.arrived_ns, span.ended_ns)
    parts |= {"prompt_tokens": span.prompt_tokens, "output_tokens": span.output_tokens}
    shown = [f"{name}={value}" for name, value in parts.items() if value is not None]
    return " ".join([span.request_id, *shown])


def _seconds(from_ns: int, to_ns: int | None) -> str | None:
    return None if to_ns is None else f"{(to_ns - from_ns) / 1e9:.4f}"


def _ns(instant_s: float) -> int:
    return round(instant_s * 1e9)


def _is_late(request: SchedulingRequest, age_s: float) -> bool:
    return request.ttft_deadline_s is not None and age_s >= request.ttft_deadline_s


async def _unless_client_goes(work: Coroutine[Any, Any, None], receive: Receive) -> None:
    """Run `work` to its end, or cancel it when the client closes the connection.

    Raises:
        ClientGoneError: it did.
    """
    answer = asyncio.ensure_future(work)
    goodbye = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait({answer, goodbye}, return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            raise ClientGoneError
        answer.result()
    finally:
        goodbye.cancel()
        answer.cancel()
        # Wait for the lease and the connection to be given back before the request counts as ended.
        await asyncio.gather(answer, goodbye, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
