"""The load of the study: it rises from a fifth of capacity to above all of it, in steps, and falls again. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from loadtest.offer.load import OpenLoop, RateSegment

LEVELS = (0.2, 0.4, 0.6, 0.8, 1.0, 1.15, 1.3)  # of capacity
KINDS = ("copy", "story")  # alike often
# Before a step that is offered by itself: the level before, so that the lanes are as full as they were then.
LEAD_S = 2.0


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


def step_names() -> tuple[str, ...]:
    """What the loads of `offered_step` are called."""
    return tuple(
        f"step {number + 1:02}: {level:g} of capacity" for number, level in enumerate(rise_and_fall())
    )


def offered_step(step: int, capacity_rps: float, step_s: float) -> OpenLoop:
    """One step of `offered_load` by itself, after `LEAD_S` of the one before it.

    Args:
        step: from 0; before the first it is offered itself.
    """
    levels = rise_and_fall()
    before, now = (level * capacity_rps for level in (levels[max(0, step - 1)], levels[step]))
    return OpenLoop(
        (RateSegment(LEAD_S, before, before), RateSegment(step_s, now, now)), name=step_names()[step]
    )


def step_of(due_s: npt.NDArray[np.float64], step_s: float) -> npt.NDArray[np.int64]:
    """The step, from 0, that requests fall into by when they were due, in seconds since the load began."""
    return np.minimum(due_s // step_s, len(rise_and_fall()) - 1).astype(np.int64)
