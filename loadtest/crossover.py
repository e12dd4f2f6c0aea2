"""Where speculation stops paying: speculative lanes against the batched lane, level by level."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from typing import Protocol

from serving.core.lane import Strategy


class _Percentiles(Protocol):
    @property
    def p50(self) -> float | None: ...


class StageFigures(Protocol):
    """The figures of a stage that are compared."""

    @property
    def lane(self) -> str: ...
    @property
    def workload(self) -> str: ...
    @property
    def concurrency(self) -> int: ...
    @property
    def output_tokens_per_s(self) -> float | None: ...
    @property
    def tpot_s(self) -> _Percentiles: ...


class Verdict(StrEnum):
    """What the ratios say about the levels measured."""

    ALWAYS = "pays at every level measured"
    NEVER = "pays at no level measured"
    UP_TO = "pays at low concurrency, then no longer"
    FROM = "pays at high concurrency only"
    MIXED = "crosses more than once"
    UNKNOWN = "not measured"


@dataclass(frozen=True, slots=True)
class SpeedUp:
    """Speculative against baseline at one level; above 1 speculation pays. None: not measured on both.

    Attributes:
        tpot: baseline TPOT p50 / speculative TPOT p50.
        throughput: speculative tokens/s / baseline tokens/s.
    """

    concurrency: int
    tpot: float | None
    throughput: float | None


@dataclass(frozen=True, slots=True)
class Crossing:
    """Where one of the two ratios crosses 1.

    Attributes:
        concurrency: levels at which it does, interpolated on a log scale; empty when it never does.
    """

    verdict: Verdict
    concurrency: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Crossover:
    """A speculative lane against the baseline lane on one workload."""

    workload: str
    lane: str
    baseline: str
    speed_ups: tuple[SpeedUp, ...]
    tpot: Crossing
    throughput: Crossing


def find_crossovers(stages: Sequence[StageFigures], strategies: Mapping[str, str]) -> tuple[Crossover, ...]:
    """Each speculative lane against the first batched lane, by workload; empty where either is missing.

    Args:
        strategies: decoding strategy by lane, in the order of the lanes.
    """
    baseline = next((lane for lane, strategy in strategies.items() if strategy == Strategy.BATCHED), None)
    if baseline is None:
        return ()
    figures = {(stage.lane, stage.workload, stage.concurrency): stage for stage in stages}
    workloads = dict.fromkeys(stage.workload for stage in stages)
    found = []
    for lane in (lane for lane, strategy in strategies.items() if strategy == Strategy.SPECULATIVE):
        for workload in workloads:
            levels = sorted(
                level
                for (name, work, level) in figures
                if (name, work) == (lane, workload) and (baseline, workload, level) in figures
            )
            if levels:
                pairs = [(figures[lane, workload, n], figures[baseline, workload, n]) for n in levels]
                found.append(_compare(workload, lane, baseline, pairs))
    return tuple(found)


def find_crossing(ratios: Sequence[tuple[int, float | None]]) -> Crossing:
    """Where a ratio, given by rising concurrency, crosses 1. Exactly 1 counts as not paying."""
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
    workload: str, lane: str, baseline: str, pairs: Sequence[tuple[StageFigures, StageFigures]]
) -> Crossover:
    speed_ups = tuple(
        SpeedUp(
            concurrency=ours.concurrency,
            tpot=_ratio(theirs.tpot_s.p50, ours.tpot_s.p50),
            throughput=_ratio(ours.output_tokens_per_s, theirs.output_tokens_per_s),
        )
        for ours, theirs in pairs
    )
    return Crossover(
        workload=workload,
        lane=lane,
        baseline=baseline,
        speed_ups=speed_ups,
        tpot=find_crossing([(each.concurrency, each.tpot) for each in speed_ups]),
        throughput=find_crossing([(each.concurrency, each.throughput) for each in speed_ups]),
    )


def _ratio(above: float | None, below: float | None) -> float | None:
    return above / below if above is not None and below else None


def _interpolate(low: tuple[int, float], high: tuple[int, float]) -> float:
    """The level at which the ratio is 1: linear in the logarithm of the level, as the figures' axes are."""
    (low_level, low_ratio), (high_level, high_ratio) = low, high
    share = (1 - low_ratio) / (high_ratio - low_ratio)
    return math.exp(math.log(low_level) + share * (math.log(high_level) - math.log(low_level)))
