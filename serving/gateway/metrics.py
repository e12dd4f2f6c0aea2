"""What a gateway exports."""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import CollectorRegistry

from serving.core import metric_names as names
from serving.core.errors import Reason
from serving.core.latency import RequestTimeline, e2e_latency_s, tpot_s, ttft_s
from serving.core.request import Outcome
from serving.telemetry import registry as make


class GatewayMetrics:
    """The gateway's metrics, in a registry of their own; reroutes of `lanes` are exported from the start, at 0."""

    def __init__(self, lanes: Sequence[str] = ()) -> None:
        self.registry = CollectorRegistry()
        self._requests = make.counter(names.REQUESTS, self.registry)
        self._ttft = make.histogram(names.TTFT, self.registry)
        self._tpot = make.histogram(names.TPOT, self.registry)
        self.inter_chunk = make.histogram(names.INTER_CHUNK, self.registry)
        self._e2e = make.histogram(names.E2E, self.registry)
        self.reroutes = make.counter(names.REROUTES, self.registry)
        for lane in lanes:
            for outcome in (Outcome.COMPLETED, Outcome.FAILED, Outcome.REJECTED):
                self.reroutes.labels(lane=lane, outcome=outcome)
        self._prompt_tokens = make.counter(names.PROMPT_TOKENS, self.registry)
        self._output_tokens = make.counter(names.OUTPUT_TOKENS, self.registry)

    def ended(self, lane: str, outcome: Outcome, reason: Reason | None) -> None:
        """Count a request that ended; `lane` is empty when none was chosen."""
        self._requests.labels(lane=lane, outcome=outcome, reason=reason or "").inc()

    def refused(self, reason: Reason) -> None:
        """Count a request that the gateway itself turned away."""
        self.ended("", Outcome.REJECTED, reason)

    def completed(self, lane: str, timeline: RequestTimeline, prompt_tokens: int, is_stream: bool) -> None:
        """Observe a completed request's figures, by the shared definitions."""
        self._e2e.labels(lane=lane).observe(e2e_latency_s(timeline))
        self._prompt_tokens.labels(lane=lane).inc(prompt_tokens)
        self._output_tokens.labels(lane=lane).inc(timeline.output_tokens or 0)
        if is_stream and timeline.chunk_at_s:
            self._ttft.labels(lane=lane).observe(ttft_s(timeline))
            if timeline.output_tokens and (tpot := tpot_s(timeline)) is not None:
                self._tpot.labels(lane=lane).observe(tpot)
