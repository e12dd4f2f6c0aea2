"""The load of the study: it rises from a fifth of capacity to above all of it, in steps, and falls again. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from loadtest.offer.load import OpenLoop, RateSegment

LEVELS = (0.2, 0.4, 0.6, 0.8, 1.0, 1.15, 1.3)  # of capacity
KINDS = ("copy", "story")  # alike often


def rise_and_fall(levels: Sequence[float] = LEVELS) -> tuple[float, ...]:
    """The levels in the order they are offered: each twice, but for the highest."""
    return (*levels, *levels[-2::-1])


def offered_load(capacity_rps: float, step_s: float) -> OpenLoop:
    """Poisson arrivals, each level of `rise_and_fall` for so many seconds."""
    steps = tuple(
        RateSegment(step_s, level * capacity_rps, level * capacity_rps) for level in rise_and_fall()
    )
    return OpenLoop(
        steps,
        name=f"rise and fall {LEVELS[0]:g} to {LEVELS[-1]:g} of {capacity_rps:.3g} req/s, {step_s:g} s each",
    )


def step_of(due_s: npt.NDArray[np.float64], step_s: float) -> npt.NDArray[np.int64]:
    """The step, from 0, that requests fall into by when they were due, in seconds since the load began."""
    return np.minimum(due_s // step_s, len(rise_and_fall()) - 1).astype(np.int64)
