"""An objective over simulated requests: the definitions of `loadtest.judge.slo`, for a million of them at once."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from loadtest.judge.estimate import Estimate
from loadtest.judge.intervals import wilson
from loadtest.judge.slo import FAILED, ROUNDING, Limit, Slo
from serving.simulation.planned_lab import Floats, PlannedRun, Watch

Mask = npt.NDArray[np.bool_]

METRICS = ("ttft", "tpot", "e2e")


@dataclass(frozen=True, slots=True)
class Verdict:
    """How a run kept its objective.

    Attributes:
        attainment: share of all requests, refused ones included, that met every limit; the interval takes them for
            independent of each other.
        misses: requests that broke each limit, by its text; `failed` for those that were refused.
        binding: the limit broken most often; None when nothing was missed.
        is_settled: whether so many requests settle `holds`: the interval of each share that must be kept is above
            what it must be, or that of one is below.
    """

    holds: bool
    attainment: Estimate
    misses: dict[str, int]
    binding: str | None
    is_settled: bool


def refuse_unknown_metrics(slo: Slo) -> None:
    """Raises: ValueError: the objective has a limit that a simulation knows nothing of."""
    for limit in slo.limits:
        if limit.metric not in METRICS:
            raise ValueError(
                f"slo {slo.text!r}: a simulation has no chunks, so it does not know {limit.metric}, only "
                f"{', '.join(METRICS)}"
            )


def judge(slo: Slo, run: PlannedRun) -> Verdict:
    """The verdict over the requests that ended; those of a run that was given up are its first ones."""
    ended = _Ended(run.ttft_s[run.ended], run.tpot_s[run.ended], run.e2e_s[run.ended])
    broken = broken_limits(slo, ended)
    misses = {text: int(mask.sum()) for text, mask in broken.items() if mask.any()}
    holds = all(
        percentile(_of(limit.metric, ended), limit.share) < limit.limit_s
        for limit in slo.limits
        if limit.share is not None
    )
    num_requests = len(ended.e2e_s)
    num_met = int(met_by(slo, broken, num_requests).sum())
    attainment = wilson(num_met, num_requests)
    holds = holds and attainment.value >= slo.attainment - ROUNDING and not run.was_given_up
    kept = [(attainment, slo.attainment)] + [
        (wilson(int((~(broken[limit.text] | broken[FAILED])).sum()), num_requests), limit.share)
        for limit in slo.limits
        if limit.share is not None
    ]
    return Verdict(
        holds,
        attainment,
        misses,
        max(misses, key=lambda miss: misses[miss], default=None),
        _is_settled(kept, holds=holds),
    )


def _is_settled(kept: Sequence[tuple[Estimate, float]], *, holds: bool) -> bool:
    """Whether the intervals of the shares say the same as the verdict.

    Args:
        kept: the share of requests that kept what has to hold, and the share that must.
    """
    if holds:
        return all(share.low is not None and share.low >= least for share, least in kept)
    return any(share.high is not None and share.high < least for share, least in kept)


class Latencies(Protocol):
    """Of requests that ended, shape (requests,) each; infinite for those that were refused or failed."""

    @property
    def ttft_s(self) -> Floats: ...

    @property
    def tpot_s(self) -> Floats: ...

    @property
    def e2e_s(self) -> Floats: ...


@dataclass(frozen=True, slots=True)
class _Ended:
    ttft_s: Floats
    tpot_s: Floats
    e2e_s: Floats


def broken_limits(slo: Slo, latencies: Latencies) -> dict[str, Mask]:
    """Which requests broke each limit, by its text; `failed`: those that did not complete, which broke no other."""
    failed = np.isinf(latencies.e2e_s)
    return {FAILED: failed} | {
        limit.text: ~(_of(limit.metric, latencies) < limit.limit_s) & ~failed for limit in slo.limits
    }


def met_by(slo: Slo, broken: Mapping[str, Mask], num_requests: int) -> Mask:
    """Which requests met the objective, by what `broken_limits` says."""
    met = np.ones(num_requests, dtype=np.bool_)
    for text, mask in broken.items():
        if text == FAILED or text in slo.each_request:
            met &= ~mask
    return met


def _of(metric: str, latencies: Latencies) -> Floats:
    return {"ttft": latencies.ttft_s, "tpot": latencies.tpot_s, "e2e": latencies.e2e_s}[metric]


def percentile(values: Floats, share: float) -> float:
    """As `serving.core.latency.percentile`, but infinite values are in order after all others."""
    rank = (len(values) - 1) * share
    low = int(rank)
    high = min(low + 1, len(values) - 1)
    ordered = np.partition(values, (low, high))
    below, above = float(ordered[low]), float(ordered[high])
    # The difference of two that are infinite is no number.
    return below if below == above or rank == low else below + (above - below) * (rank - low)


class SloWatch(Watch):
    """Gives a run up once so many requests are late that the objective cannot hold, whatever still comes.

    Args:
        num_requests: of the whole run.
    """

    def __init__(self, slo: Slo, num_requests: int) -> None:
        each = [limit for limit in slo.limits if limit.text in slo.each_request]
        self._each = tuple(self._lowest(each, metric) for metric in METRICS)
        self._may_miss = (1 - slo.attainment) * num_requests + ROUNDING
        self._num_missed = 0
        # A percentile below the attainment binds only itself: its limit, and how many may be above it.
        self._own = [
            (METRICS.index(limit.metric), limit.limit_s, (1 - limit.share) * num_requests + 1)
            for limit in slo.limits
            if limit.share is not None
        ]
        self._num_above = [0] * len(self._own)

    def ended(self, ttft_s: float, tpot_s: float, e2e_s: float) -> None:
        ttft_limit_s, tpot_limit_s, e2e_limit_s = self._each
        # A request that was refused is late in all, even where no limit binds each request.
        if ttft_s >= ttft_limit_s or tpot_s >= tpot_limit_s or e2e_s >= e2e_limit_s:
            self._num_missed += 1
        values = (ttft_s, tpot_s, e2e_s)
        for place, (metric, limit_s, _) in enumerate(self._own):
            if values[metric] >= limit_s:
                self._num_above[place] += 1

    def is_lost(self) -> bool:
        return self._num_missed > self._may_miss or any(
            above > most for above, (_, _, most) in zip(self._num_above, self._own, strict=True)
        )

    @staticmethod
    def _lowest(limits: list[Limit], metric: str) -> float:
        return min((limit.limit_s for limit in limits if limit.metric == metric), default=math.inf)
