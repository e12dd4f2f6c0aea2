"""Where speculation stops paying: speculative lanes against the batched lane, level by level."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise

from loadtest.analysis.summary import Crossing, Crossover, SpeedUp, StageSummary, Verdict
from loadtest.judge.estimate import Estimate
from loadtest.offer.load import ClosedLoop, Load, OpenLoop
from serving.core.lane import Strategy


def find_crossovers(stages: Sequence[StageSummary], strategies: Mapping[str, str]) -> tuple[Crossover, ...]:
    """Each speculative lane against the first batched lane, by workload and kind of load; where both ran.

    Lanes are compared at equal load. A trace has no levels, so it has no crossover.

    Args:
        strategies: decoding strategy by lane, in the order of the lanes.
    """
    baseline = next((lane for lane, strategy in strategies.items() if strategy == Strategy.BATCHED), None)
    if baseline is None:
        return ()
    theirs = {(stage.workload, stage.load.label): stage for stage in stages if stage.lane == baseline}
    pairs: dict[tuple[str, str, str], dict[float, tuple[StageSummary, StageSummary]]] = {}
    for stage in stages:
        level = _level(stage.load)
        same = theirs.get((stage.workload, stage.load.label))
        if strategies.get(stage.lane) == Strategy.SPECULATIVE and same is not None and level is not None:
            value, unit = level
            pairs.setdefault((stage.lane, stage.workload, unit), {})[value] = (stage, same)
    return tuple(
        _compare(workload, lane, baseline, unit, dict(sorted(by_level.items())))
        for (lane, workload, unit), by_level in pairs.items()
    )


def _level(load: Load) -> tuple[float, str] | None:
    """How high a load is, and in which unit; loads of one unit make one curve."""
    match load:
        case ClosedLoop():
            think = f", {load.think_time_s:g} s think time" if load.think_time_s else ""
            return load.users, f"users{think}"
        case OpenLoop():
            return load.rate_per_s, f"requests/s, {load.process}"
    return None


def find_crossing(ratios: Sequence[tuple[float, float | None]]) -> Crossing:
    """Where a ratio, given by rising level, crosses 1. Exactly 1 counts as not paying."""
    known = [(level, ratio) for level, ratio in ratios if ratio is not None]
    if not known:
        return Crossing(Verdict.UNKNOWN, ())
    crossings = tuple(_interpolate(a, b) for a, b in pairwise(known) if (a[1] > 1) != (b[1] > 1))
    pays_first = known[0][1] > 1
    if not crossings:
        return Crossing(Verdict.ALWAYS if pays_first else Verdict.NEVER, ())
    if len(crossings) > 1:
        return Crossing(Verdict.MIXED, crossings)
    return Crossing(Verdict.UP_TO if pays_first else Verdict.FROM, crossings)


def _compare(
    workload: str,
    lane: str,
    baseline: str,
    unit: str,
    pairs: Mapping[float, tuple[StageSummary, StageSummary]],
) -> Crossover:
    speed_ups = tuple(
        SpeedUp(
            level=level,
            tpot=_ratio(theirs.tpot_s.p50, ours.tpot_s.p50),
            throughput=_ratio(ours.output_tokens_per_s, theirs.output_tokens_per_s),
        )
        for level, (ours, theirs) in pairs.items()
    )
    return Crossover(
        workload=workload,
        lane=lane,
        baseline=baseline,
        unit=unit,
        speed_ups=speed_ups,
        tpot=find_crossing([(each.level, each.tpot) for each in speed_ups]),
        throughput=find_crossing([(each.level, each.throughput) for each in speed_ups]),
    )


def _ratio(above: Estimate | None, below: Estimate | None) -> float | None:
    return above.value / below.value if above is not None and below is not None and below.value else None


def _interpolate(low: tuple[float, float], high: tuple[float, float]) -> float:
    """The level at which the ratio is 1: linear in the logarithm of the level, as the charts' axes are."""
    (low_level, low_ratio), (high_level, high_ratio) = low, high
    share = (1 - low_ratio) / (high_ratio - low_ratio)
    return math.exp(math.log(low_level) + share * (math.log(high_level) - math.log(low_level)))
