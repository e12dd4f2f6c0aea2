from __future__ import annotations

from dataclasses import replace

import pytest

from loadtest.analysis.crossover import find_crossing, find_crossovers
from loadtest.analysis.stage_summary import Repeat, summarize_stage
from loadtest.analysis.summary import StageSummary, Verdict
from loadtest.offer.load import ClosedLoop, Load, TraceReplay, constant_rate
from tests.unit.loadtest.runs import STRATEGIES, record, stage_run


@pytest.mark.parametrize(
    ("ratios", "verdict", "levels"),
    [
        ([(1, 2.0), (4, 1.5), (8, 1.1)], Verdict.ALWAYS, []),
        ([(1, 0.9), (4, 0.8)], Verdict.NEVER, []),
        ([(1, 1.0), (4, 1.0)], Verdict.NEVER, []),  # a tie does not pay
        ([(1, 1.5), (4, 0.5)], Verdict.UP_TO, [2.0]),  # half-way on a log axis
        ([(1, 0.5), (4, 1.5)], Verdict.FROM, [2.0]),
        ([(1, 2.0), (4, 1.0), (8, 0.5)], Verdict.UP_TO, [4.0]),  # measured exactly at 1
        ([(1, 1.5), (4, 0.5), (16, 1.5)], Verdict.MIXED, [2.0, 8.0]),
        ([(1, 1.5), (4, None), (16, 0.5)], Verdict.UP_TO, [4.0]),  # a gap is bridged
        ([(1, None)], Verdict.UNKNOWN, []),
        ([], Verdict.UNKNOWN, []),
    ],
)
def test_crossing(ratios: list[tuple[int, float | None]], verdict: Verdict, levels: list[float]) -> None:
    crossing = find_crossing(ratios)
    assert crossing.verdict is verdict
    assert crossing.levels == pytest.approx(levels)


def at(lane: str, load: Load, tpot_s: float) -> StageSummary:
    records = [record(lane, gap_s=tpot_s)]
    return replace(summarize_stage([Repeat(stage_run(records), tuple(records))]), load=load)


def test_lanes_are_compared_at_equal_load_and_kinds_of_load_apart() -> None:
    rates, users = (constant_rate(2.0, 10), constant_rate(8.0, 10)), (ClosedLoop(1), ClosedLoop(4))
    stages = [at("batched", load, 0.02) for load in (*rates, *users, constant_rate(99.0, 10))]
    stages += [at("speculative", rates[0], 0.01), at("speculative", rates[1], 0.04)]
    stages += [at("speculative", users[1], 0.01), at("speculative", users[0], 0.01)]
    by_rate, by_users = find_crossovers(stages, STRATEGIES)
    assert (by_rate.unit, by_users.unit) == ("requests/s, poisson", "users")
    assert [each.level for each in by_rate.speed_ups] == [2.0, 8.0]
    assert by_rate.tpot.verdict is Verdict.UP_TO
    assert 2 < by_rate.tpot.levels[0] < 8
    assert [each.level for each in by_users.speed_ups] == [1, 4]
    assert by_users.tpot.verdict is Verdict.ALWAYS


def test_a_trace_has_no_levels_to_cross() -> None:
    stages = [at(lane, TraceReplay("a.csv"), 0.02) for lane in ("batched", "speculative")]
    assert find_crossovers(stages, STRATEGIES) == ()
