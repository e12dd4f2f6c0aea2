"""An objective over simulated requests: the definitions of `loadtest.judge.slo`, for a million of them at once."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from loadtest.judge.slo import FAILED, ROUNDING, Limit, Slo
from serving.simulation.planned_lab import Floats, PlannedRun, Watch

METRICS = ("ttft", "tpot", "e2e")


@dataclass(frozen=True, slots=True)
class Verdict:
    """How a run kept its objective.

    Attributes:
        attainment: share of all requests, refused ones included, that met every limit.
        misses: requests that broke each limit, by its text; `failed` for those that were refused.
        binding: the limit broken most often; None when nothing was missed.
    """

    holds: bool
    attainment: float
    misses: dict[str, int]
    binding: str | None


def refuse_unknown_metrics(slo: Slo) -> None:
    """Raises: ValueError: the objective has a limit that a simulation knows nothing of."""
    for limit in slo.limits:
        if limit.metric not in METRICS:
            raise ValueError(
                f"slo {slo.text!r}: {limit.text!r}: a simulation knows {', '.join(METRICS)}; chunks it has not"
            )


def judge(slo: Slo, run: PlannedRun) -> Verdict:
    """The verdict over the requests that ended; those of a run that was given up are its first ones."""
    values = {"ttft": run.ttft_s[run.ended], "tpot": run.tpot_s[run.ended], "e2e": run.e2e_s[run.ended]}
    failed = np.isinf(values["e2e"])
    met = ~failed
    misses = {FAILED: int(failed.sum())} if failed.any() else {}
    holds = True
    for limit in slo.limits:
        kept = values[limit.metric] < limit.limit_s
        if num_broken := int(np.count_nonzero(~kept & ~failed)):
            misses[limit.text] = num_broken
        if limit.text in slo.each_request:
            met &= kept
        if limit.share is not None:
            holds = holds and percentile(values[limit.metric], limit.share) < limit.limit_s
    attainment = float(met.mean())
    holds = holds and attainment >= slo.attainment - ROUNDING and not run.was_given_up
    return Verdict(holds, attainment, misses, max(misses, key=lambda miss: misses[miss], default=None))


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
