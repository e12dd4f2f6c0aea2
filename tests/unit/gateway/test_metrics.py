"""What a gateway exports: streams that met the objective or missed it, and tenants."""

from __future__ import annotations

import pytest

from serving.config import SloConfig
from serving.core.errors import Reason
from serving.core.latency import RequestTimeline
from serving.core.request import Outcome
from serving.gateway.metrics import GatewayMetrics

SLO = SloConfig(ttft_s=1, tpot_s=0.1)


def timeline(ttft_s: float = 0.5, tpot_s: float = 0.05, output_tokens: int | None = 11) -> RequestTimeline:
    tokens_after_first = (output_tokens or 11) - 1
    end_s = ttft_s + tpot_s * tokens_after_first
    return RequestTimeline(0.0, 0.0, (ttft_s, end_s), end_s, output_tokens)


def verdict(outcome: Outcome, reason: Reason | None, stamps: RequestTimeline) -> tuple[float, float]:
    metrics = GatewayMetrics(["a"], SLO)
    metrics.judge("a", outcome, reason, stamps)
    met, missed = (
        metrics.registry.get_sample_value("tandem_slo_requests_total", {"lane": "a", "result": result})
        for result in ("met", "missed")
    )
    assert met is not None
    assert missed is not None
    return met, missed


@pytest.mark.parametrize(
    ("stamps", "expected"),
    [
        (timeline(), (1, 0)),
        (timeline(ttft_s=1.0), (0, 1)),
        (timeline(tpot_s=0.101), (0, 1)),
        (timeline(tpot_s=0.101, output_tokens=None), (1, 0)),
        (RequestTimeline(0.0, 0.0, (), 0.1, 5), (1, 0)),  # nothing that could be late
        # Two choices at once, each a token in 0.15 s; pooled, one in 0.05 s.
        (RequestTimeline(0.0, 0.0, (0.5, 0.5, 0.65, 0.65), 0.65, 4, (0, 1, 0, 1)), (0, 1)),
    ],
    ids=["both kept", "first token at the limit", "tokens too slow", "no usage", "no text", "two choices"],
)
def test_a_completed_stream_is_judged_by_both_limits(
    stamps: RequestTimeline, expected: tuple[float, float]
) -> None:
    assert verdict(Outcome.COMPLETED, None, stamps) == expected


@pytest.mark.parametrize("reason", [Reason.QUEUE_FULL, Reason.NO_REPLICA_READY, Reason.UPSTREAM_BROKE])
def test_what_the_lab_did_not_serve_is_a_miss(reason: Reason) -> None:
    assert verdict(Outcome.REJECTED, reason, timeline()) == (0, 1)


@pytest.mark.parametrize("reason", [Reason.BAD_REQUEST, Reason.REQUEST_TOO_LONG, Reason.CLIENT_CLOSED])
def test_what_the_client_did_wrong_or_left_is_not_judged(reason: Reason) -> None:
    assert verdict(Outcome.REJECTED, reason, timeline()) == (0, 0)


def test_tenants_are_counted_by_outcome_and_tokens() -> None:
    metrics = GatewayMetrics(["a"], SLO, ["gold"])
    metrics.ended("a", Outcome.COMPLETED, None, "gold")
    metrics.completed("a", timeline(), 3, is_stream=True, tenant="gold")
    read = metrics.registry.get_sample_value
    assert read("tandem_tenant_requests_total", {"tenant": "gold", "outcome": "completed"}) == 1
    assert read("tandem_tenant_output_tokens_total", {"tenant": "gold"}) == 11
