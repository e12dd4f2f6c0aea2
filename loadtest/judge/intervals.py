"""95 percent intervals of percentiles, shares, means of repeats, and ratios of percentiles.

All of them take their samples for independent. Requests that queue behind each other are not quite:
where a server is near its limit, the intervals of percentiles and shares are too narrow. Repeats are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from statistics import NormalDist, fmean, stdev

import numpy as np
from numpy.typing import NDArray

from loadtest.judge.estimate import Estimate
from serving.core.latency import percentile

CONFIDENCE = 0.95
RESAMPLES = 2000

_Z = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)


def percentile_estimate(values: Sequence[float], q: float) -> Estimate | None:
    """A percentile between two order statistics; None when empty.

    The interval is free of any assumption on the distribution. It is missing where the sample is too small
    to bound the percentile on both sides: a 95th percentile needs 72 values, a 99th 368.

    Args:
        q: in (0, 100).

    Source: Hahn and Meeker, Statistical Intervals (1991), section 5.2.
    """
    value = percentile(values, q)
    if value is None:
        return None
    ranks = order_statistics(len(values), q / 100)
    if ranks is None:
        return Estimate(value)
    ordered = sorted(values)
    low, high = ranks
    return Estimate(value, ordered[low - 1], ordered[high - 1])


def order_statistics(n: int, share: float) -> tuple[int, int] | None:
    """Ranks, from 1, between which a quantile lies with at least 95 percent, at most 2.5 on either side.

    None where the sample has no such ranks. Args: share in (0, 1).
    """
    below = np.cumsum(_binomial(n, share))  # below[k] = P(at most k values are under the quantile)
    tail = (1 - CONFIDENCE) / 2
    low = int(np.searchsorted(below, tail, side="right"))  # P(at most low - 1) <= tail
    high = int(np.searchsorted(below, 1 - tail)) + 1  # P(at most high - 1) >= 1 - tail
    return (low, high) if low >= 1 and high <= n else None


def wilson(successes: int, total: int) -> Estimate:
    """A share, 0 to 1.

    Raises:
        ValueError: total is 0, or fewer than the successes.

    Source: Wilson, JASA 22 (1927); recommended by Brown, Cai and DasGupta, Statistical Science 16 (2001).
    """
    if not 0 <= successes <= total or total == 0:
        raise ValueError(f"{successes} of {total} is no share")
    share = successes / total
    scale = 1 + _Z**2 / total
    middle = (share + _Z**2 / (2 * total)) / scale
    half = _Z / scale * math.sqrt(share * (1 - share) / total + _Z**2 / (4 * total**2))
    # At 0 and 1 the formula's end is the share itself, but for rounding.
    return Estimate(share, max(0.0, min(share, middle - half)), min(1.0, max(share, middle + half)))


def mean_of_repeats(values: Sequence[float]) -> Estimate | None:
    """Mean with Student's t; no interval for a single repeat, None for none.

    Source: Student, Biometrika 6 (1908).
    """
    if not values:
        return None
    mean = fmean(values)
    if len(values) == 1:
        return Estimate(mean)
    half = student_t(len(values) - 1) * stdev(values) / math.sqrt(len(values))
    return Estimate(mean, mean - half, mean + half)


def mean_of_rates(values: Sequence[float]) -> Estimate | None:
    """The same for what cannot be below 0."""
    estimate = mean_of_repeats(values)
    if estimate is None or estimate.low is None:
        return estimate
    return Estimate(estimate.value, max(0.0, estimate.low), estimate.high)


def geometric_mean_of_repeats(values: Sequence[float]) -> Estimate | None:
    """The same on the logarithms, for what varies by factors, such as a rate found by halving; values above 0."""
    log_mean = mean_of_repeats([math.log(value) for value in values])
    if log_mean is None:
        return None
    low, high = log_mean.low, log_mean.high
    return Estimate(
        math.exp(log_mean.value),
        None if low is None else math.exp(low),
        None if high is None else math.exp(high),
    )


@cache
def student_t(degrees: int, confidence: float = CONFIDENCE) -> float:
    """The t that the magnitude of Student's t stays below with this probability.

    Args:
        confidence: in (0, 1).
    """
    low, high = 0.0, 1.0
    while _within(high, degrees) < confidence:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _within(middle, degrees) < confidence else (low, middle)
    return high


def _within(t: float, degrees: int) -> float:
    """The probability that the magnitude of Student's t is below `t`.

    Source: Abramowitz and Stegun, Handbook of Mathematical Functions, 26.7.3 and 26.7.4.
    """
    angle = math.atan(t / math.sqrt(degrees))
    is_odd = degrees % 2
    term = math.cos(angle) if is_odd else 1.0
    total = 0.0
    for step in range(degrees // 2):
        total += term
        upper, lower = (2 * step + 2, 2 * step + 3) if is_odd else (2 * step + 1, 2 * step + 2)
        term *= math.cos(angle) ** 2 * upper / lower
    if is_odd:
        return (angle + math.sin(angle) * total) * 2 / math.pi
    return math.sin(angle) * total


def percentile_ratio(
    above: Sequence[float], below: Sequence[float], q: float, seed: int = 0
) -> Estimate | None:
    """Percentile of `above` / the same percentile of `below`, two independent samples of positive values.

    None when one is empty; no interval when one has a single value.

    Source: the percentile bootstrap, Efron and Tibshirani, An Introduction to the Bootstrap (1993), chapter 13.
    """
    upper, lower = percentile(above, q), percentile(below, q)
    if upper is None or not lower:
        return None
    if min(len(above), len(below)) < 2:
        return Estimate(upper / lower)
    rng = np.random.default_rng(seed)
    ratios = _resampled(rng, above, q) / _resampled(rng, below, q)
    tail = 100 * (1 - CONFIDENCE) / 2
    low, high = np.percentile(ratios, (tail, 100 - tail))
    return Estimate(upper / lower, float(low), float(high))


def _resampled(rng: np.random.Generator, values: Sequence[float], q: float) -> NDArray[np.float64]:
    """The percentile of each of `RESAMPLES` samples drawn with replacement; shape (RESAMPLES,)."""
    sample = np.asarray(values, dtype=np.float64)
    # One at a time: all of them at once would take RESAMPLES x n x 8 bytes.
    return np.array([np.percentile(rng.choice(sample, sample.size), q) for _ in range(RESAMPLES)])


def _binomial(n: int, share: float) -> NDArray[np.float64]:
    """P(k of n), k = 0..n, from the ratios of neighbours; in logarithms, so that nothing underflows."""
    k = np.arange(n)
    steps = np.log((n - k) / (k + 1)) + math.log(share / (1 - share))
    logs = np.concatenate(([0.0], np.cumsum(steps)))
    weights = np.exp(logs - logs.max())
    return np.asarray(weights / weights.sum(), dtype=np.float64)
