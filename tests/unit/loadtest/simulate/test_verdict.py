from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.client.record import RequestRecord
from loadtest.judge.slo import evaluate, parse_slo
from loadtest.simulate.verdict import SloWatch, judge, percentile, refuse_unknown_metrics
from serving.core.latency import percentile as defined
from serving.simulation.planned_lab import PlannedRun
from tests.unit.loadtest.runs import record

SLOS = (
    "ttft<1s",
    "ttft_p95<1s,tpot_p95<100ms",
    "tpot_p50<100ms",
    "ttft_p50<1s,e2e<3s@80",
    "ttft_p95<1s,tpot_p99<100ms@50",
)
Times = tuple[float, float]  # ttft and tpot; infinite where refused

times = st.lists(
    st.one_of(
        st.tuples(st.sampled_from([0.1, 0.5, 0.9, 1.1, 2.0]), st.sampled_from([0.02, 0.09, 0.11, 0.3])),
        st.just((math.inf, math.inf)),
    ),
    min_size=1,
    max_size=40,
)


def run(values: Sequence[Times], ended: int | None = None) -> PlannedRun:
    ttft_s, tpot_s = (np.array(column, dtype=np.float64) for column in zip(*values, strict=True))
    is_ended = np.arange(len(values)) < (len(values) if ended is None else ended)
    tokens = np.full(len(values), 11)
    refused = int(np.isinf(ttft_s).sum())
    nobody = np.full(len(values), -1)
    at_s, e2e_s = np.zeros(len(values)), ttft_s + 10 * tpot_s
    return PlannedRun(
        at_s, ttft_s, tpot_s, e2e_s, tokens, is_ended, nobody, refused, 1.0, ended is not None, ()
    )


def as_record(ttft_s: float, tpot_s: float) -> RequestRecord:
    if math.isinf(ttft_s):
        return record("batched", reason="queue_full", chunks=0)
    return record("batched", ttft_s=ttft_s, gap_s=tpot_s)


@given(times, st.sampled_from(SLOS))
def test_the_verdict_is_that_of_measured_requests(values: list[Times], text: str) -> None:
    slo = parse_slo(text)
    measured = evaluate(slo, [as_record(*each) for each in values], 1.0)
    simulated = judge(slo, run(values))
    assert simulated.holds == measured.holds
    assert simulated.attainment == measured.attainment
    assert simulated.misses == measured.misses


@given(times, st.sampled_from(SLOS))
def test_a_run_is_given_up_only_when_it_is_lost(values: list[Times], text: str) -> None:
    slo = parse_slo(text)
    watch = SloWatch(slo, len(values))
    for ttft_s, tpot_s in values:
        watch.ended(ttft_s, tpot_s, ttft_s + 10 * tpot_s)
    if watch.is_lost():
        assert not judge(slo, run(values)).holds
    # Of those that all fail nobody waits for the last.
    hopeless = SloWatch(slo, 100)
    for _ in range(60):
        hopeless.ended(math.inf, math.inf, math.inf)
    assert hopeless.is_lost()


def test_a_run_goes_on_as_long_as_it_can_hold() -> None:
    watch = SloWatch(parse_slo("ttft_p95<1s"), 100)
    for _ in range(5):
        watch.ended(2.0, 0.01, 3.0)
    assert not watch.is_lost()
    watch.ended(2.0, 0.01, 3.0)
    assert watch.is_lost()
    median = SloWatch(parse_slo("tpot_p50<10ms"), 100)
    for _ in range(51):
        median.ended(0.1, 0.02, 3.0)
    assert not median.is_lost()
    median.ended(0.1, 0.02, 3.0)
    assert median.is_lost()


@pytest.mark.parametrize(
    ("text", "num_late", "num_requests", "holds", "is_settled"),
    [
        ("ttft<1s", 0, 60, True, False),  # all of 60, of which 94.0 percent is the interval's low end
        ("ttft<1s", 0, 100, True, True),
        ("ttft<1s", 3, 60, True, False),
        ("ttft<1s", 4, 60, False, False),
        ("ttft<1s", 12, 60, False, True),
        ("ttft<1s", 20, 1000, True, True),
        ("ttft<1s", 40, 1000, True, False),
        ("ttft_p50<1s,e2e<9s", 45, 100, True, False),  # the median binds itself alone
        ("ttft_p50<1s,e2e<9s", 20, 100, True, True),
        ("ttft_p50<1s,e2e<9s", 50, 60, False, True),
    ],
)
def test_few_requests_settle_a_verdict_only_far_from_its_bound(
    text: str, num_late: int, num_requests: int, *, holds: bool, is_settled: bool
) -> None:
    values = [(2.0 if number < num_late else 0.1, 0.02) for number in range(num_requests)]
    verdict = judge(parse_slo(text), run(values))
    assert (verdict.holds, verdict.is_settled) == (holds, is_settled)


def test_what_was_given_up_holds_nothing() -> None:
    assert judge(parse_slo("ttft<1s"), run([(0.1, 0.02)] * 10)).holds
    assert not judge(parse_slo("ttft<1s"), run([(0.1, 0.02)] * 10, ended=8)).holds


@given(st.lists(st.floats(0, 10), min_size=1), st.floats(0, 1))
def test_percentiles_are_the_defined_ones(values: list[float], share: float) -> None:
    expected = defined(values, 100 * share)
    assert expected is not None
    assert percentile(np.array(values), share) == pytest.approx(expected, abs=1e-9)


def test_refused_requests_stand_last_in_percentiles() -> None:
    refused = np.array([math.inf, 1.0, math.inf, math.inf])
    assert percentile(refused, 0.9) == math.inf
    assert percentile(refused, 0.1) == math.inf
    assert percentile(refused, 0.0) == 1.0


def test_requests_without_chunks_have_no_gaps_between_them() -> None:
    with pytest.raises(
        ValueError, match="no chunks, so it does not know icl, only ttft, tpot, e2e"
    ) as refused:
        refuse_unknown_metrics(parse_slo("icl_p95<1s"))
    assert str(refused.value).count("icl_p95<1s") == 1
    refuse_unknown_metrics(parse_slo("ttft<1s,tpot<1s,e2e<2s"))
