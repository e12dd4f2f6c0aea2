"""What a gateway exports."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Counter, Histogram

from serving.config import SloConfig
from serving.core.errors import ERROR_SHAPES, Reason
from serving.core.latency import RequestTimeline, e2e_latency_s, tpot_s, ttft_s
from serving.core.request import Outcome
from serving.metrics import names
from serving.metrics import registry as make
from serving.metrics.lane_histogram import LaneHistogram
from serving.metrics.tenant_label import TenantLabels

MET, MISSED = "met", "missed"  # label `result`
TOO_MANY_REQUESTS = 429
DEFAULT_SLO = SloConfig()


class _LaneCollectors(NamedTuple):
    """What a completed request of one lane is observed in."""

    ttft: Histogram
    tpot: Histogram
    e2e: Histogram
    prompt_tokens: Counter
    output_tokens: Counter


class GatewayMetrics:
    """The gateway's metrics, in a registry of their own.

    A collector that is public is fed directly; the others by methods, each for something that befell a request.

    Args:
        lanes: those whose judged streams and reroutes are there from the start, at 0.
        slo: what streams are judged by.
        tenants: those with a name of their own in the metrics; others are in groups, the same at every gateway.
    """

    def __init__(
        self, lanes: Sequence[str] = (), slo: SloConfig = DEFAULT_SLO, tenants: Sequence[str] = ()
    ) -> None:
        self.registry = CollectorRegistry()
        self._slo = slo
        self._tenants = TenantLabels(tenants)
        self._requests = make.counter(names.REQUESTS, self.registry)
        self._ttft = make.histogram(names.TTFT, self.registry)
        self._tpot = make.histogram(names.TPOT, self.registry)
        self.inter_chunk = LaneHistogram(names.INTER_CHUNK, self.registry)
        self._e2e = make.histogram(names.E2E, self.registry)
        self.reroutes = make.counter(names.REROUTES, self.registry)
        self._slo_requests = make.counter(names.SLO_REQUESTS, self.registry)
        limits = make.gauge(names.SLO_LIMIT, self.registry)
        limits.labels(figure="ttft").set(slo.ttft_s)
        limits.labels(figure="tpot").set(slo.tpot_s)
        make.gauge(names.SLO_OBJECTIVE, self.registry).set(slo.objective)
        self._tenant_requests = make.counter(names.TENANT_REQUESTS, self.registry)
        self._tenant_tokens = make.counter(names.TENANT_OUTPUT_TOKENS, self.registry)
        for lane in lanes:
            for result in (MET, MISSED):
                self._slo_requests.labels(lane=lane, result=result)
            for outcome in (Outcome.COMPLETED, Outcome.FAILED, Outcome.REJECTED):
                self.reroutes.labels(lane=lane, outcome=outcome)
        self._prompt_tokens = make.counter(names.PROMPT_TOKENS, self.registry)
        self._output_tokens = make.counter(names.OUTPUT_TOKENS, self.registry)
        # Finding a label's child costs more than counting in it, and a request counts in ten.
        self._request_count = cache(self._requests.labels)
        self._tenant_count = cache(self._tenant_requests.labels)
        self._tenant_token_count = cache(self._tenant_tokens.labels)
        self._slo_count = cache(self._slo_requests.labels)
        self._of_lane = cache(self._lane_collectors)

    def _lane_collectors(self, lane: str) -> _LaneCollectors:
        return _LaneCollectors(
            self._ttft.labels(lane),
            self._tpot.labels(lane),
            self._e2e.labels(lane),
            self._prompt_tokens.labels(lane),
            self._output_tokens.labels(lane),
        )

    def ended(self, lane: str, outcome: Outcome, reason: Reason | None, tenant: str | None = None) -> None:
        """Count a request that ended; `lane` is empty when none was chosen, `tenant` None where it is not known."""
        self._request_count(lane, outcome, reason or "").inc()
        if tenant is not None:
            self._tenant_count(self._tenants.label(tenant), outcome).inc()

    def refused(self, reason: Reason) -> None:
        """Count a request that the gateway itself turned away."""
        self.ended("", Outcome.REJECTED, reason)

    def judge(self, lane: str, outcome: Outcome, reason: Reason | None, timeline: RequestTimeline) -> None:
        """Count a stream as one that met the objective or missed it.

        Failures and refusals are misses. A client's own mistake is neither, nor is a stream that it left.
        """
        if outcome is Outcome.COMPLETED:
            result = MET if self._is_met_by(timeline) else MISSED
        elif reason is not None and (
            ERROR_SHAPES[reason].status >= 500 or ERROR_SHAPES[reason].status == TOO_MANY_REQUESTS
        ):
            result = MISSED
        else:
            return
        self._slo_count(lane, result).inc()

    def _is_met_by(self, timeline: RequestTimeline) -> bool:
        # An answer without text has no first token to miss.
        if timeline.chunk_at_s and ttft_s(timeline) >= self._slo.ttft_s:
            return False
        # Without the engine's usage there is no time per token to miss.
        tpot = tpot_s(timeline) if timeline.output_tokens is not None else None
        return tpot is None or tpot < self._slo.tpot_s

    def completed(
        self,
        lane: str,
        timeline: RequestTimeline,
        prompt_tokens: int,
        is_stream: bool,
        tenant: str | None = None,
    ) -> None:
        """Observe a completed request's figures, by the shared definitions."""
        if tenant is not None:
            tokens = timeline.output_tokens or 0
            self._tenant_token_count(self._tenants.label(tenant)).inc(tokens)
        of_lane = self._of_lane(lane)
        of_lane.e2e.observe(e2e_latency_s(timeline))
        of_lane.prompt_tokens.inc(prompt_tokens)
        of_lane.output_tokens.inc(timeline.output_tokens or 0)
        if is_stream and timeline.chunk_at_s:
            of_lane.ttft.observe(ttft_s(timeline))
            if timeline.output_tokens and (tpot := tpot_s(timeline)) is not None:
                of_lane.tpot.observe(tpot)
