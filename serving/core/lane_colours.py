"""The colour of a lane: one in all pictures, so that a reader has to learn it only once."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import cycle

# Told apart on white and on near-black, and by people who see no red or no green.
LANE_COLOURS = ("#2a86c8", "#d9601a", "#0d9970", "#a640ff", "#2e6573", "#989350", "#d916b2")
KNOWN_LANES = ("sequential", "batched", "speculative", "adaptive", "iterative")


def lane_colours(lanes: Iterable[str]) -> dict[str, str]:
    """Each lane's colour as `#rrggbb`.

    A known lane has its own wherever it is. Others take, in their order, those that no known lane has,
    then those of known lanes that are not there.
    """
    names = list(dict.fromkeys(lanes))
    known = dict(zip(KNOWN_LANES, LANE_COLOURS, strict=False))
    absent = [colour for lane, colour in known.items() if lane not in names]
    free = cycle([*LANE_COLOURS[len(KNOWN_LANES) :], *absent])
    return {name: known[name] if name in known else next(free) for name in names}
