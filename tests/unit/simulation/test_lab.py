"""Whole simulated runs: what must hold of any of them."""

from __future__ import annotations

from collections import Counter

import pytest

from serving.config import ORDERS, SchedulerConfig
from serving.core.errors import Reason
from serving.core.request import Outcome
from serving.simulation.lab import SimulatedLab
from serving.simulation.results import (
    SimulatedRequest,
    SimulatedRun,
    refusals,
    shares,
    slo_attainment,
    ttft_summary,
)
from serving.simulation.traffic import Arrival, RequestClass, capacity_rps, poisson_trace
from tests.unit.simulation.examples import KIND, arrival, model, run

CLASSES = [
    RequestClass("short", "a", 4, prompt_tokens=50, output_tokens=10, band=0, ttft_slo_s=0.2),
    RequestClass("long", "b", 1, prompt_tokens=200, output_tokens=80, band=2, ttft_slo_s=1.0),
]


def trace_at(
    load: float, seed: int = 1, tells_deadline: bool = True, num_requests: int = 300
) -> list[Arrival]:
    """A trace for two replicas of the example model."""
    capacity = capacity_rps(model(), 2, poisson_trace(CLASSES, num_requests=300, rate_rps=1, seed=seed))
    return poisson_trace(
        CLASSES,
        num_requests=num_requests,
        rate_rps=load * capacity,
        seed=seed,
        prediction_sigma=0.3,
        tells_deadline=tells_deadline,
    )


def instants(run: SimulatedRun) -> list[tuple[object, ...]]:
    return [(one.granted_at_s, one.first_token_at_s, one.finished_at_s, one.reason) for one in run.requests]


@pytest.mark.parametrize("order", ORDERS)
def test_every_arrival_ends_in_exactly_one_outcome(order: str) -> None:
    trace = trace_at(1.5)
    lab = SimulatedLab(
        SchedulerConfig.model_validate({"order": order, "max_waiting_requests": 5}), model(), 2, trace
    )
    requests = lab.run().requests
    assert [one.arrival for one in requests] == trace
    outcomes = Counter(one.outcome for one in requests)
    assert set(outcomes) == {Outcome.COMPLETED, Outcome.REJECTED}, "overload and a short queue show both"
    for one in requests:
        is_completed = one.outcome is Outcome.COMPLETED
        assert is_completed == (one.reason is None) == (one.finished_at_s is not None)
        if one.granted_at_s is not None:
            assert one.first_token_at_s is not None
            assert one.finished_at_s is not None
            assert one.arrival.at_s <= one.granted_at_s < one.first_token_at_s <= one.finished_at_s
    assert (lab.core.num_waiting, lab.core.num_leases) == (0, 0)


def test_an_outcome_is_given_once() -> None:
    one = SimulatedRequest(arrival(0, 0.0, 1))
    one.end(Outcome.COMPLETED)
    with pytest.raises(RuntimeError, match="q0: rejected after completed"):
        one.end(Outcome.REJECTED, Reason.QUEUE_FULL)


@pytest.mark.parametrize("order", ORDERS)
def test_the_same_seed_gives_the_same_run(order: str) -> None:
    first, again, other = (run(trace_at(1.1, seed), model(), 2, order=order) for seed in (1, 1, 2))
    assert instants(first) == instants(again)
    assert instants(first) != instants(other)


def test_seeded_ties_are_the_scheduler_s_own() -> None:
    grants = []
    for seed in (1, 2):
        lab = SimulatedLab(SchedulerConfig(seed=seed), model(), 8, [arrival(0, 0.0, 50)])
        lab.loop.at(0.1, lambda lab=lab: grants.append([one.load.running for one in lab.core.replicas()]))  # type: ignore[misc]
        lab.run()
    assert grants[0] != grants[1]


def test_littles_law_between_the_scheduler_s_counts_and_the_requests_instants() -> None:
    # Two independent views: the core's counts, sampled, and the sojourn times in the results.
    trace = trace_at(0.9, tells_deadline=False, num_requests=1500)
    lab = SimulatedLab(SchedulerConfig(max_waiting_requests=10_000), model(), 2, trace)
    counts: list[int] = []
    gap_s, until_s = 0.05, trace[-1].at_s

    def sample() -> None:
        counts.append(lab.core.num_waiting + lab.core.num_leases)
        if lab.loop.now_s + gap_s < until_s:
            lab.loop.at(lab.loop.now_s + gap_s, sample)

    lab.loop.at(0.0, sample)
    requests = lab.run().requests
    sojourns_s = [one.finished_at_s - one.arrival.at_s for one in requests if one.finished_at_s is not None]
    assert len(sojourns_s) == len(trace)
    mean_in_system = sum(counts) / len(counts)
    assert mean_in_system > 2, "a lab with next to nobody in it shows nothing"
    assert mean_in_system == pytest.approx(len(trace) / until_s * sum(sojourns_s) / len(sojourns_s), rel=0.05)


def test_in_overload_the_lab_completes_what_capacity_says() -> None:
    trace = trace_at(3, tells_deadline=False, num_requests=1000)
    requests = run(trace, model(), 2, max_waiting_requests=10_000).requests
    finished_at_s = sorted(one.finished_at_s for one in requests if one.finished_at_s is not None)
    middle = finished_at_s[100:900]  # neither the start, with free slots, nor the end
    assert len(middle) / (middle[-1] - middle[0]) == pytest.approx(capacity_rps(model(), 2, trace), rel=0.1)


def test_a_request_that_waits_beyond_its_deadline_expires() -> None:
    # One slot, held for 1 s; nothing has ended yet, so no estimate refuses the second at arrival.
    trace = [arrival(0, 0.0, 98), arrival(1, 0.0, 1, RequestClass("hasty", "a", 1, 100, 10, ttft_slo_s=0.5))]
    requests = run(trace, model(max_num_seqs=1)).requests
    assert [one.outcome for one in requests] == [Outcome.COMPLETED, Outcome.REJECTED]
    assert refusals(requests) == {"queue_timeout": 1}


def test_attainment_counts_refused_expired_and_late_as_misses() -> None:
    def request(first_token_at_s: float | None, reason: Reason | None = None) -> SimulatedRequest:
        one = SimulatedRequest(arrival(0, 10.0, 1, KIND), first_token_at_s=first_token_at_s)
        one.end(Outcome.COMPLETED if reason is None else Outcome.REJECTED, reason)
        return one

    requests = [
        request(11.0),
        request(11.1),
        request(None, Reason.DEADLINE_UNREACHABLE),
        request(None, Reason.QUEUE_TIMEOUT),
    ]
    assert slo_attainment(requests) == 0.25, "the SLO is 1 s"
    assert slo_attainment([]) is None
    assert refusals(requests) == {"deadline_unreachable": 1, "queue_timeout": 1}
    summary = ttft_summary(requests)
    assert summary.served == 2
    assert summary.p50_s == pytest.approx(1.05)


def test_served_tokens_are_counted_only_while_all_tenants_wait() -> None:
    # One slot. q0 (a) runs to 50 ms with nobody of `a` waiting, so nothing counts. Then q1 (b) runs while
    # q2 (a) and q3 (b) wait: its 100 prompt tokens and 3 output tokens count, but the step in which it ends
    # leaves q2 and q3 waiting too. q2 then runs while only `b` waits.
    b = RequestClass("any", "b", 1, prompt_tokens=100, output_tokens=10)
    a = RequestClass("any", "a", 1, prompt_tokens=100, output_tokens=10)
    trace = [
        arrival(0, 0.0, 3, a),
        arrival(1, 0.001, 3, b),
        arrival(2, 0.051, 3, a),
        arrival(3, 0.052, 1, b),
    ]
    served = run(trace, model(max_num_seqs=1)).served_while_all_wait
    assert served == {"a": 0, "b": 103}
    assert shares(served) == {"a": 0.0, "b": 1.0}
    assert shares({"a": 0, "b": 0}) is None
