"""Requests to simulate, of the load lab's own loads and traces."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from loadtest.offer.arrivals import schedule
from loadtest.offer.load import ClosedLoop, Load
from loadtest.simulate.lanes import TextMix
from serving.core.speculation.cost_model import Lengths
from serving.simulation.planned_lab import Offered

MAX_DURATION_S = 1e9  # beyond, floats tell instants apart no better than to 0.1 us, in the end not at all


def offered_by(
    load: Load,
    mix: TextMix,
    seed: int,
    *,
    prompt_tokens: int | None = None,
    output_tokens: int | None = None,
    spread: float = 0.0,
) -> list[Offered]:
    """The requests of a load, in order of time, each of a kind of text drawn by the mix.

    Args:
        prompt_tokens, output_tokens: mean lengths, where the load has none of its own: a trace has.
        spread: of the logarithm of those lengths (log-normal); 0: all alike.

    Raises:
        ValueError: the load has no arrivals, lacks lengths, or has its own.
    """
    if isinstance(load, ClosedLoop):
        raise ValueError(
            f"{load.label}: users who wait for answers have no arrivals of their own; plan for a rate or a trace"
        )
    arrivals = schedule(load, f"simulate-{seed}")
    if not arrivals:
        raise ValueError(f"{load.label}: no request falls into it; offer it longer, or at a higher rate")
    if arrivals[-1].at_s > MAX_DURATION_S:
        raise ValueError(
            f"{load.label}: its last request comes after {arrivals[-1].at_s:g} s; at most {MAX_DURATION_S:g} s can "
            "be simulated: is its time in another unit, or --speed too low?"
        )
    rng = random.Random(f"simulate-lengths-{seed}")
    kinds = rng.choices(range(len(mix.names)), mix.shares, k=len(arrivals))
    has_lengths = arrivals[0].prompt_tokens is not None
    given = {"--prompt-tokens": prompt_tokens, "--output-tokens": output_tokens}
    for option, value in given.items():
        if has_lengths and value is not None:
            raise ValueError(f"{option} {value}: the trace has lengths of its own")
        if not has_lengths and value is None:
            raise ValueError(f"{load.label}: how long its requests are is not said ({option})")
    if has_lengths:
        return [
            Offered(arrival.at_s, arrival.prompt_tokens or 1, arrival.output_tokens or 1, kind)
            for arrival, kind in zip(arrivals, kinds, strict=True)
        ]
    assert prompt_tokens is not None
    assert output_tokens is not None
    return [
        Offered(arrival.at_s, _drawn(rng, prompt_tokens, spread), _drawn(rng, output_tokens, spread), kind)
        for arrival, kind in zip(arrivals, kinds, strict=True)
    ]


def mean_lengths(offered: Sequence[Offered]) -> Lengths:
    """Means over all requests."""
    count = len(offered)
    return Lengths(
        sum(request.prompt_tokens for request in offered) / count,
        sum(request.output_tokens for request in offered) / count,
    )


def _drawn(rng: random.Random, mean: int, spread: float) -> int:
    if not spread:
        return mean
    return max(1, round(rng.lognormvariate(math.log(mean) - spread**2 / 2, spread)))
