"""How a request is accounted: its instants, attempts and tokens while it runs, and one outcome when it ends."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from serving.core.errors import Reason, UpstreamError
from serving.core.lane import ANY_LANE
from serving.core.latency import RequestTimeline, choices_of, inter_chunk_latencies_s
from serving.core.request import Outcome, ReplicaVerdict, RequestEnd
from serving.gateway.metrics import GatewayMetrics
from serving.gateway.openai_request import RoutedRequest
from serving.gateway.stream import StreamNotes
from serving.scheduler.client import HeldReplica
from serving.tracing.events import Attempt, RequestSpan
from serving.tracing.otlp import TracedSpan, end_request

logger = logging.getLogger(__name__)


class Ending(NamedTuple):
    """How a request ended; `reason` is None when it completed."""

    outcome: Outcome
    reason: Reason | None = None


CLIENT_LEFT = Ending(Outcome.CANCELLED, Reason.CLIENT_CLOSED)
CLIENT_STALLED = Ending(Outcome.CANCELLED, Reason.CLIENT_STALLED)


class RequestAccount:
    """What is known of one request. It decides nothing and moves no byte.

    Args:
        client_request_id: the id the client sees; the scheduling id begins with it and is unique.
        arrived_at_s: monotonic instant of arrival.
        traced: the request's span for a collector; None when none is set.
        logs_requests: one line in the log when it ends.

    Attributes:
        notes: what passed through the stream of the attempt that runs, or ran last; each attempt has its own.
    """

    def __init__(
        self,
        request: RoutedRequest,
        metrics: GatewayMetrics,
        *,
        gateway_id: str,
        client_request_id: str,
        arrived_at_s: float,
        traced: TracedSpan | None,
        logs_requests: bool,
    ) -> None:
        self.notes = StreamNotes(strip_usage=request.strip_usage)
        self._request = request
        self._metrics = metrics
        self._gateway_id = gateway_id
        self._client_request_id = client_request_id
        self._arrived_at_s = arrived_at_s
        self._traced = traced
        self._logs_requests = logs_requests
        self._attempts: list[Attempt] = []
        self._held: HeldReplica | None = None
        self._ended: tuple[int, Ending] | None = None  # CLOCK_MONOTONIC in ns

    @property
    def age_s(self) -> float:
        return time.monotonic() - self._arrived_at_s

    @property
    def queued_s(self) -> float:
        """How long it waited for the leases that it got."""
        waits_ns = [a.granted_ns - a.submitted_ns for a in self._attempts if a.granted_ns is not None]
        return sum(waits_ns) / 1e9

    @property
    def lane(self) -> str:
        """Where it runs, or ran last; empty when no replica was granted."""
        return self._held.granted.lane if self._held else ""

    @property
    def replica_id(self) -> str:
        return self._held.granted.replica_id if self._held else ""

    @property
    def trace_headers(self) -> dict[str, str]:
        """What carries the trace to the replica."""
        return self._traced.headers if self._traced else {}

    # The parts of an attempt, in order

    @contextmanager
    def attempt(self, request_id: str) -> Iterator[None]:
        """One try on a replica, from the wish for a lease to the lease given back."""
        # Half an event of a replica that broke must not stand before the first event of the next.
        self.notes = StreamNotes(strip_usage=self._request.strip_usage)
        attempt = Attempt(request_id, submitted_ns=time.monotonic_ns())
        self._attempts.append(attempt)
        try:
            yield
        finally:
            attempt.ended_ns = time.monotonic_ns()

    @contextmanager
    def running_on(self, held: HeldReplica) -> Iterator[None]:
        """The lease was granted. At the end of the block it is noted what the release says of the replica."""
        self._held = held
        attempt = self._attempts[-1]
        attempt.granted_ns = time.monotonic_ns()
        attempt.lane, attempt.replica_id = self.lane, self.replica_id
        attempt.placement = str(held.granted.choice or "")
        verdict = ReplicaVerdict.UNTOLD
        try:
            yield
            verdict = ReplicaVerdict.HEALTHY
        except UpstreamError as error:
            verdict = _verdict(error)
            raise
        finally:
            held.end = RequestEnd(
                verdict, self._first_token_s(held), self._tokens_so_far(), self._num_steps()
            )

    def first_byte(self) -> None:
        """The replica's answer begins."""
        self._attempts[-1].first_byte_ns = time.monotonic_ns()

    def _first_token_s(self, held: HeldReplica) -> float | None:
        return self.notes.chunk_at_s[0] - held.granted_at_s if self.notes.chunk_at_s else None

    def _tokens_so_far(self) -> int | None:
        """The engine's count; of a stream cut short its chunks, for each is a token or more."""
        if self.notes.usage.output_tokens is None and self._request.is_stream:
            return len(self.notes.chunk_at_s)
        return self.notes.usage.output_tokens

    def _num_steps(self) -> int | None:
        """Of a stream that the engine counted: each chunk with text is a step's, unless some came as one."""
        is_counted = self._request.is_stream and self.notes.usage.output_tokens is not None
        return len(self.notes.chunk_at_s) or None if is_counted else None

    # The end, and the request as others see it

    def client_left(self) -> Ending:
        """How a request ended whose client closed the connection; many do so at `[DONE]`, not at the end."""
        return Ending(Outcome.COMPLETED) if self.notes.has_ended else CLIENT_LEFT

    def close(self, ending: Ending) -> None:
        """The request ended: tell the log, the collector and the metrics."""
        self._ended = time.monotonic_ns(), ending
        if self._traced is not None:
            end_request(self._traced, self.span())
        if self._logs_requests:
            logger.info("request %s", request_line(self.span()))
        self._count(ending)

    def _count(self, ending: Ending) -> None:
        metrics, notes, tenant = self._metrics, self.notes, self._request.scheduling.tenant
        metrics.ended(self.lane, ending.outcome, ending.reason, tenant)
        timeline = RequestTimeline(
            scheduled_at_s=self._arrived_at_s,
            sent_at_s=self._arrived_at_s,
            chunk_at_s=tuple(notes.chunk_at_s),
            chunk_choice=choices_of(notes.chunk_choice),
            finished_at_s=time.monotonic(),
            output_tokens=notes.usage.output_tokens,
        )
        metrics.inter_chunk.observe(self.lane, inter_chunk_latencies_s(timeline))
        if ending.outcome is Outcome.COMPLETED:
            metrics.completed(
                self.lane, timeline, notes.usage.prompt_tokens or 0, self._request.is_stream, tenant
            )
        if self._request.is_stream:
            lane = self.lane or self._request.scheduling.lane or ANY_LANE
            metrics.judge(lane, ending.outcome, ending.reason, timeline)

    def span(self) -> RequestSpan:
        """The request as it stands."""
        ended_ns, ending = self._ended or (None, None)
        notes = self.notes
        return RequestSpan(
            gateway_id=self._gateway_id,
            request_id=self._request.scheduling.request_id,
            client_request_id=self._client_request_id,
            arrived_ns=round(self._arrived_at_s * 1e9),
            attempts=tuple(self._attempts),
            first_token_ns=round(notes.chunk_at_s[0] * 1e9) if notes.chunk_at_s else None,
            ended_ns=ended_ns,
            outcome=ending.outcome if ending else None,
            reason=(ending.reason if ending else None) or "",
            prompt_tokens=notes.usage.prompt_tokens,
            output_tokens=notes.usage.output_tokens,
        )


def _verdict(error: UpstreamError) -> ReplicaVerdict:
    if error.reason is Reason.ENGINE_DIED:
        return ReplicaVerdict.DIED
    return ReplicaVerdict.FAILED if error.blames_replica else ReplicaVerdict.UNTOLD


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
