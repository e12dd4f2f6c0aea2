"""Ratios that are concluded from: intervals over several levels at once, and the smallest one a design can settle.

A stage is one draw of what the machine did meanwhile, however many requests it holds: requests of one stage share
its batches, its clock speed and its neighbours. So the interval of a ratio between two stages comes from repeats of
both, never from the requests within them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import StrEnum
from statistics import fmean

from loadtest.judge.estimate import Estimate, is_settled
from loadtest.judge.intervals import CONFIDENCE, student_t

# What the logarithm of a ratio is taken to vary by where nothing was repeated: standard deviation between two runs
# of the same stage on a shared 2-core machine, times the square root of 2 for the two stages of a ratio.
ASSUMED_STAGE_SD = 0.05
ASSUMED_DEGREES = 1_000


class Standing(StrEnum):
    """How a ratio stands to 1."""

    ABOVE = "above"
    BELOW = "below"
    OPEN = "cannot be told apart"  # its interval holds 1
    UNKNOWN = "not measured"


def standing(ratio: Estimate | None) -> Standing:
    """What the interval of a ratio says; one without an interval says nothing."""
    if ratio is None:
        return Standing.UNKNOWN
    if not is_settled(ratio):
        return Standing.OPEN
    return Standing.ABOVE if ratio.value > 1 else Standing.BELOW


def ratios_by_level(levels: Sequence[Sequence[float]]) -> tuple[Estimate | None, ...]:
    """A ratio and its interval at each level, from the ratio of each repeat there; None where there is none.

    The intervals hold together: with no difference at any level, one of them leaves 1 out in at most 5 percent of
    runs. What repeats vary by is taken to be the same at all levels, on the logarithm, so that few repeats at
    each of several levels say more than they would alone.

    Args:
        levels: ratios above 0.

    Source: one-way analysis of variance on logarithms, with Bonferroni's correction for the number of levels.
    """
    logs = [[math.log(ratio) for ratio in ratios] for ratios in levels]
    means = [fmean(each) if each else None for each in logs]
    deviation, degrees = _spread(logs)
    num_levels = max(1, sum(mean is not None for mean in means))
    quantile = student_t(degrees, 1 - (1 - CONFIDENCE) / num_levels)
    estimates: list[Estimate | None] = []
    for mean, each in zip(means, logs, strict=True):
        if mean is None:
            estimates.append(None)
            continue
        half = quantile * deviation / math.sqrt(len(each))
        estimates.append(Estimate(math.exp(mean), math.exp(mean - half), math.exp(mean + half)))
    return tuple(estimates)


def smallest_settled(ratios: Sequence[Estimate | None]) -> float | None:
    """The smallest ratio above 1 that the repeats behind these can settle at their best level; None without any."""
    # On the logarithm an interval is as wide at any ratio: the end must be as far from 1 as it is from the middle.
    reach = [ratio.high / ratio.value for ratio in ratios if ratio is not None and ratio.high is not None]
    return min((each for each in reach if each > 1), default=None)


def with_stage_noise(ratio: Estimate | None) -> Estimate | None:
    """An interval from the requests of two single stages, widened by what two runs of a stage may differ by."""
    if ratio is None or ratio.low is None or ratio.high is None or min(ratio.low, ratio.value) <= 0:
        return ratio
    noise = student_t(ASSUMED_DEGREES) * math.sqrt(2) * ASSUMED_STAGE_SD
    down = math.hypot(math.log(ratio.value / ratio.low), noise)
    up = math.hypot(math.log(ratio.high / ratio.value), noise)
    return Estimate(ratio.value, ratio.value * math.exp(-down), ratio.value * math.exp(up))


def _spread(logs: Sequence[Sequence[float]]) -> tuple[float, int]:
    """What repeats vary by, pooled over the levels, and its degrees of freedom; the assumed one without repeats."""
    degrees = sum(len(each) - 1 for each in logs if each)
    if not degrees:
        return math.sqrt(2) * ASSUMED_STAGE_SD, ASSUMED_DEGREES
    squares = sum((value - fmean(each)) ** 2 for each in logs if each for value in each)
    return math.sqrt(squares / degrees), degrees
