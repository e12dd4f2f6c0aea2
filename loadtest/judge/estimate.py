"""A figure that is not known exactly, and the ratio of two."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Estimate:
    """A figure and its interval; `low` and `high` are None where too little was measured for one."""

    value: float
    low: float | None = None
    high: float | None = None


def ratio_of_estimates(below: Estimate, above: Estimate) -> Estimate:
    """`above` / `below`, independent of each other; no interval where one has none, or one that reaches 0.

    Source: Zou and Donner, Statistics in Medicine 27 (2008): the interval of a difference from the
    intervals of its terms, here of the logarithms.
    """
    value = above.value / below.value
    if below.low is None or below.high is None or above.low is None or above.high is None:
        return Estimate(value)
    if min(below.low, above.low) <= 0:
        return Estimate(value)
    down = math.hypot(math.log(above.value / above.low), math.log(below.high / below.value))
    up = math.hypot(math.log(above.high / above.value), math.log(below.value / below.low))
    return Estimate(value, value * math.exp(-down), value * math.exp(up))


def is_settled(ratio: Estimate) -> bool | None:
    """Whether the interval leaves 1 out; None without an interval."""
    if ratio.low is None or ratio.high is None:
        return None
    return not ratio.low <= 1 <= ratio.high
