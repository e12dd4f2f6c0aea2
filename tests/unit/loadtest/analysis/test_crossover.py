from __future__ import annotations

from dataclasses import replace

import pytest

from loadtest.analysis.crossover import find_crossing, find_crossovers
from loadtest.analysis.stage_summary import make_repeat, summarize_stage
from loadtest.analysis.summary import StageSummary, Verdict
from loadtest.judge.estimate import Estimate
from loadtest.offer.load import ClosedLoop, Load, TraceReplay, constant_rate
from tests.unit.loadtest.runs import STRATEGIES, record, stage_run


def settled(ratio: float | None) -> Estimate | None:
    """A ratio known within a percent."""
    return None if ratio is None else Estimate(ratio, ratio / 1.01, ratio * 1.01)


@pytest.mark.parametrize(
    ("ratios", "verdict", "levels"),
    [
        ([(1, 2.0), (4, 1.5), (8, 1.1)], Verdict.ALWAYS, []),
        ([(1, 0.9), (4, 0.8)], Verdict.NEVER, []),
        ([(1, 1.0), (4, 1.005)], Verdict.OPEN, []),  # the interval holds 1
        ([(1, 1.5), (4, 0.5)], Verdict.UP_TO, [2.0]),  # half-way on a log axis
        ([(1, 0.5), (4, 1.5)], Verdict.FROM, [2.0]),
        ([(1, 1.5), (4, 1.0), (16, 0.5)], Verdict.UP_TO, [4.0]),  # one that is not settled is bridged
        ([(1, 1.5), (4, 0.5), (16, 1.5)], Verdict.MIXED, [2.0, 8.0]),
        ([(1, 1.5), (4, None), (16, 0.5)], Verdict.UP_TO, [4.0]),  # a gap too
        ([(1, 1.5), (4, 1.0)], Verdict.PARTLY, []),
        ([(1, None)], Verdict.UNKNOWN, []),
        ([], Verdict.UNKNOWN, []),
    ],
)
def test_crossing(ratios: list[tuple[int, float | None]], verdict: Verdict, levels: list[float]) -> None:
    crossing = find_crossing([(level, settled(ratio)) for level, ratio in ratios])
    assert crossing.verdict is verdict
    assert crossing.levels == pytest.approx(levels)


def test_each_level_stands_where_its_interval_does() -> None:
    crossing = find_crossing([(1, settled(2.0)), (4, settled(1.0)), (8, settled(0.5)), (16, None)])
    assert (crossing.pays, crossing.open, crossing.costs) == ((1,), (4,), (8,))


def at(lane: str, load: Load, tpot_s: float) -> StageSummary:
    records = [record(lane, gap_s=tpot_s)]
    return replace(summarize_stage([make_repeat(stage_run(records), records)]), load=load)


def test_lanes_are_compared_at_equal_load_and_kinds_of_load_apart() -> None:
    rates, users = (constant_rate(2.0, 10), constant_rate(8.0, 10)), (ClosedLoop(1), ClosedLoop(4))
    stages = [at("batched", load, 0.02) for load in (*rates, *users, constant_rate(99.0, 10))]
    stages += [at("speculative", rates[0], 0.01), at("speculative", rates[1], 0.04)]
    stages += [at("speculative", users[1], 0.01), at("speculative", users[0], 0.01)]
    by_rate, by_users = find_crossovers(stages, STRATEGIES)
    assert (by_rate.unit, by_users.unit) == ("requests/s, poisson", "users")
    assert (by_rate.workload, by_rate.lane, by_rate.baseline) == ("copy", "speculative", "batched")
    assert [each.level for each in by_rate.speed_ups] == [2.0, 8.0]
    assert by_rate.tpot.verdict is Verdict.UP_TO
    assert 2 < by_rate.tpot.levels[0] < 8
    assert [each.level for each in by_users.speed_ups] == [1, 4]
    assert by_users.tpot.verdict is Verdict.ALWAYS


def test_an_iterative_lane_is_compared_as_a_speculative_one_is() -> None:
    stages = [at(lane, ClosedLoop(users), 0.02) for lane in ("batched", "iterative") for users in (1, 4)]
    (found,) = find_crossovers(stages, STRATEGIES | {"iterative": "iterative"})
    assert (found.lane, found.baseline) == ("iterative", "batched")


def test_a_trace_has_no_levels_to_cross() -> None:
    stages = [at(lane, TraceReplay("a.csv"), 0.02) for lane in ("batched", "speculative")]
    assert find_crossovers(stages, STRATEGIES) == ()


def test_a_level_that_may_not_be_used_or_was_cut_is_left_out() -> None:
    users = (ClosedLoop(1), ClosedLoop(4), ClosedLoop(8))
    batched = [at("batched", load, 0.02) for load in users]
    speculative = [at("speculative", load, 0.01) for load in users]
    speculative[1] = replace(speculative[1], invalid=("the client was late",))
    batched[2] = replace(batched[2], cut=True)
    (crossover,) = find_crossovers([*batched, *speculative], STRATEGIES)
    assert crossover.left_out == (4, 8)
    assert [each.level for each in crossover.speed_ups] == [1]


def test_repeats_decide_and_not_the_requests_within_them() -> None:
    """Three repeats that differ by a tenth settle nothing of a twentieth, however many requests each holds."""
    ours = replace(
        at("speculative", ClosedLoop(1), 0.01),
        repeat_tpot_p50_s=(0.0190, 0.0171, 0.0209),
        repeat_tokens_per_s=(105.0, 95.0, 115.0),
    )
    theirs = replace(
        at("batched", ClosedLoop(1), 0.01),
        repeat_tpot_p50_s=(0.02, 0.02, 0.02),
        repeat_tokens_per_s=(100.0, 100.0, 100.0),
    )
    (crossover,) = find_crossovers([ours, theirs], STRATEGIES)
    assert crossover.tpot.verdict is Verdict.OPEN
    assert crossover.repeats == 3
    assert crossover.smallest_tpot is not None
    assert crossover.smallest_tpot > 1.2
    assert crossover.throughput.verdict is Verdict.OPEN
    assert crossover.smallest_throughput is not None
    assert crossover.smallest_throughput > 1.2
    cut_short = replace(theirs, repeat_tpot_p50_s=(0.02, 0.02))
    assert find_crossovers([ours, cut_short], STRATEGIES)[0].repeats == 2
    nothing = replace(theirs, repeat_tpot_p50_s=(None, None, None))
    assert find_crossovers([ours, nothing], STRATEGIES)[0].repeats == 0
