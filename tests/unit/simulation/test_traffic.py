from __future__ import annotations

import pytest

from serving.simulation.traffic import RequestClass, capacity_rps, poisson_trace
from tests.unit.simulation.examples import arrival, model

CLASSES = [
    RequestClass("short", "a", 3, prompt_tokens=100, output_tokens=20, band=1, ttft_slo_s=1.5),
    RequestClass("long", "b", 1, prompt_tokens=400, output_tokens=200),
]


def test_a_seed_gives_the_same_trace_and_another_seed_another() -> None:
    first, again, other = (
        poisson_trace(CLASSES, num_requests=50, rate_rps=2, seed=seed, prediction_sigma=0.3)
        for seed in (1, 1, 2)
    )
    assert first == again
    assert first != other


def test_another_rate_gives_the_same_requests_at_scaled_times() -> None:
    slow, fast = (poisson_trace(CLASSES, num_requests=50, rate_rps=rate, seed=1) for rate in (1, 4))
    assert [one.request for one in slow] == [one.request for one in fast]
    assert [one.at_s / 4 for one in slow] == pytest.approx([one.at_s for one in fast])


def test_rate_shares_and_means_are_as_asked() -> None:
    trace = poisson_trace(CLASSES, num_requests=8000, rate_rps=5, seed=3)
    short = [one for one in trace if one.kind.name == "short"]
    assert len(trace) / trace[-1].at_s == pytest.approx(5, rel=0.05)
    assert len(short) / len(trace) == pytest.approx(0.75, rel=0.05)
    assert sum(one.output_tokens for one in short) / len(short) == pytest.approx(20, rel=0.05)
    assert len({one.output_tokens for one in short}) > 10, "lengths vary"


def test_what_the_scheduler_is_told() -> None:
    told = poisson_trace(CLASSES, num_requests=200, rate_rps=1, seed=1)
    untold = poisson_trace(CLASSES, num_requests=200, rate_rps=1, seed=1, tells_deadline=False)
    for one, same in zip(told, untold, strict=True):
        assert one.output_tokens <= one.request.max_output_tokens
        assert (one.request.tenant, one.request.band) == (one.kind.tenant, one.kind.band)
        assert one.request.ttft_deadline_s == one.kind.ttft_slo_s
        assert same.request.ttft_deadline_s is None
        assert one.request.predicted_output_tokens == one.kind.output_tokens, "no noise asked for"


def test_noise_of_the_prediction_is_around_the_class_mean() -> None:
    trace = poisson_trace(CLASSES, num_requests=4000, rate_rps=1, seed=1, prediction_sigma=0.3)
    predicted = [one.request.predicted_output_tokens for one in trace if one.kind.name == "long"]
    assert sum(predicted) / len(predicted) == pytest.approx(200, rel=0.05)
    assert min(predicted) < 150 < 250 < max(predicted)


def test_capacity_is_slots_over_the_time_that_a_request_holds_one() -> None:
    # 12 ms a step; three to the first token: 10 tokens hold a slot for 144 ms, 4 tokens for 72 ms.
    trace = [arrival(0, 0, 10), arrival(1, 0, 4)]
    assert capacity_rps(model(), num_replicas=3, trace=trace) == pytest.approx(3 * 2 / 0.108)
