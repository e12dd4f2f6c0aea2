"""How many replicas are enough: a search over simulated runs. Pure."""

from __future__ import annotations

from collections.abc import Callable


def least_replicas(holds: Callable[[int], bool], first: int, most: int) -> int | None:
    """The fewest replicas that hold; None where not even `most` do.

    More replicas are taken to hold whatever fewer do. From the first guess the search doubles or halves, then
    bisects; no number is asked for twice.

    Args:
        holds: whether so many replicas do; asked in 1..most.
        first: a guess; the nearer, the fewer runs.
    """
    guess = min(max(first, 1), most)
    too_few, enough = 0, guess
    if holds(guess):
        while enough - too_few > 1 and too_few == 0:
            half = enough // 2
            if holds(half):
                enough = half
            else:
                too_few = half
    else:
        while True:
            too_few = enough
            if too_few == most:
                return None
            enough = min(2 * too_few, most)
            if holds(enough):
                break
    while enough - too_few > 1:
        middle = (too_few + enough) // 2
        if holds(middle):
            enough = middle
        else:
            too_few = middle
    return enough
