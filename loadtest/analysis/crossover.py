"""Where speculation stops paying: speculative lanes against the batched lane, level by level.

What is said of a level rests on the interval of its ratio (`judge/settled.py`), never on the ratio alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise

from loadtest.analysis.summary import Crossing, Crossover, SpeedUp, StageSummary, Verdict
from loadtest.judge.estimate import Estimate, is_settled
from loadtest.judge.settled import Standing, ratios_by_level, smallest_settled, standing
from loadtest.offer.load import ClosedLoop, Load, OpenLoop
from serving.core.lane import DRAFTING, Strategy

Pairs = Mapping[float, tuple[StageSummary, StageSummary]]
"""The speculative lane's stage and the baseline's, by level, rising."""


def find_crossovers(stages: Sequence[StageSummary], strategies: Mapping[str, str]) -> tuple[Crossover, ...]:
    """Each speculative lane against the first batched lane, by workload and kind of load; where both ran.

    Lanes are compared at equal load. A trace has no levels, so it has no crossover. A level with a stage that may
    not be used, or was cut, is left out.

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
        if strategies.get(stage.lane) in DRAFTING and same is not None and level is not None:
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


def find_crossing(ratios: Sequence[tuple[float, Estimate | None]]) -> Crossing:
    """What may be said of ratios by rising level: where they are above 1, below it, and not told apart from it."""
    by_standing = {
        wanted: tuple(level for level, ratio in ratios if standing(ratio) is wanted) for wanted in Standing
    }
    settled = [(level, ratio) for level, ratio in ratios if ratio and is_settled(ratio)]
    brackets = [(a, b) for a, b in pairwise(settled) if (a[1].value > 1) != (b[1].value > 1)]
    return Crossing(
        verdict=_verdict(by_standing, settled, len(brackets)),
        pays=by_standing[Standing.ABOVE],
        costs=by_standing[Standing.BELOW],
        open=by_standing[Standing.OPEN],
        levels=tuple(_interpolate(a, b) for a, b in brackets),
    )


def _verdict(
    by_standing: Mapping[Standing, Sequence[float]],
    settled: Sequence[tuple[float, Estimate]],
    num_crossings: int,
) -> Verdict:
    if not settled:
        return Verdict.OPEN if by_standing[Standing.OPEN] else Verdict.UNKNOWN
    pays_first = settled[0][1].value > 1
    if num_crossings > 1:
        return Verdict.MIXED
    if num_crossings == 1:
        return Verdict.UP_TO if pays_first else Verdict.FROM
    if by_standing[Standing.OPEN]:
        return Verdict.PARTLY
    return Verdict.ALWAYS if pays_first else Verdict.NEVER


def _compare(workload: str, lane: str, baseline: str, unit: str, pairs: Pairs) -> Crossover:
    usable = {level: pair for level, pair in pairs.items() if all(map(_is_usable, pair))}
    repeats = [_ratios(theirs.repeat_tpot_p50_s, ours.repeat_tpot_p50_s) for ours, theirs in usable.values()]
    tpots = ratios_by_level(repeats)
    rates = ratios_by_level(
        [_ratios(ours.repeat_tokens_per_s, theirs.repeat_tokens_per_s) for ours, theirs in usable.values()]
    )
    return Crossover(
        workload=workload,
        lane=lane,
        baseline=baseline,
        unit=unit,
        speed_ups=tuple(map(SpeedUp, usable, tpots, rates)),
        tpot=find_crossing(list(zip(usable, tpots, strict=True))),
        throughput=find_crossing(list(zip(usable, rates, strict=True))),
        left_out=tuple(level for level in pairs if level not in usable),
        smallest_tpot=smallest_settled(tpots),
        smallest_throughput=smallest_settled(rates),
        repeats=min((len(ratios) for ratios in repeats if ratios), default=0),
    )


def _is_usable(stage: StageSummary) -> bool:
    return not stage.invalid and not stage.cut


def _ratios(above: Sequence[float | None], below: Sequence[float | None]) -> list[float]:
    """Repeat by repeat, for lanes take turns: what the machine did to one it did to the other."""
    return [a / b for a, b in zip(above, below, strict=False) if a and b]


def _interpolate(low: tuple[float, Estimate], high: tuple[float, Estimate]) -> float:
    """The level at which the ratio is 1: linear in the logarithm of the level, as the charts' axes are."""
    (low_level, low_ratio), (high_level, high_ratio) = low, high
    share = (1 - low_ratio.value) / (high_ratio.value - low_ratio.value)
    return math.exp(math.log(low_level) + share * (math.log(high_level) - math.log(low_level)))
