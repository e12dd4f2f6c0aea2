"""The load of the study: it rises from a fifth of capacity to above all of it, in steps, and falls again. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from loadtest.offer.load import OpenLoop, RateSegment

LEVELS = (0.2, 0.4, 0.6, 0.8, 1.0, 1.15, 1.3)  # of capacity
KINDS = ("copy", "story")  # alike often
# Steps that an arm is offered in one piece, first and end: up to capacity, above it, and down again. So short that
# arms change places within a minute.
PARTS = ((0, 4), (4, 9), (9, 13))
# Around each part the step before and the one after it, for as long as a request takes: lanes are as full as they
# would have been, and stay so until the last request of the part has its answer.
AROUND_S = 6.0


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


def offered_part(part: int, capacity_rps: float, step_s: float) -> OpenLoop:
    """One of `PARTS` of `offered_load` by itself, between `AROUND_S` of the step before it and of the one after.

    Args:
        part: from 0; before the first comes its own first step, after the last its own last.
    """
    levels = rise_and_fall()
    first, end = PARTS[part]
    steps = (
        (AROUND_S, levels[max(0, first - 1)]),
        *((step_s, level) for level in levels[first:end]),
        (AROUND_S, levels[min(end, len(levels) - 1)]),
    )
    of_capacity = ", ".join(f"{level:g}" for level in levels[first:end])
    return OpenLoop(
        tuple(RateSegment(lasts_s, level * capacity_rps, level * capacity_rps) for lasts_s, level in steps),
        name=f"{_part_name(part)}{of_capacity} of {capacity_rps:.3g} req/s, {step_s:g} s each",
    )


def part_of(load: str) -> int | None:
    """Which part a load of that name is; None where it is none."""
    return next((part for part in range(len(PARTS)) if load.startswith(_part_name(part))), None)


def _part_name(part: int) -> str:
    return f"part {part + 1} of {len(PARTS)}: "


def step_of(due_s: npt.NDArray[np.float64], step_s: float) -> npt.NDArray[np.int64]:
    """The step, from 0, that requests fall into by when they were due, in seconds since the first began."""
    return (due_s // step_s).astype(np.int64)
