"""Simulated traffic: seeded Poisson arrivals of request classes."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from serving.core.request import SchedulingRequest
from serving.simulation.replica import ReplicaModel

LENGTH_SIGMA = 0.4  # of the logarithm of prompt and output lengths within a class
MAX_LENGTH_RATIO = 4  # longest output a class allows, over its mean


@dataclass(frozen=True, slots=True)
class RequestClass:
    """Requests of one kind from one tenant.

    Attributes:
        share: part of all arrivals, relative to the other classes.
        prompt_tokens, output_tokens: means; lengths are log-normal around them.
        ttft_slo_s: within this the first token is wanted; None: no matter.
    """

    name: str
    tenant: str
    share: float
    prompt_tokens: int
    output_tokens: int
    band: int = 0
    ttft_slo_s: float | None = None

    @property
    def max_output_tokens(self) -> int:
        return MAX_LENGTH_RATIO * self.output_tokens


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of a trace. `output_tokens` is what the answer will hold, which the scheduler does not know."""

    at_s: float
    kind: RequestClass
    request: SchedulingRequest
    output_tokens: int


def poisson_trace(
    classes: Sequence[RequestClass],
    *,
    num_requests: int,
    rate_rps: float,
    seed: int,
    prediction_sigma: float = 0.0,
    tells_deadline: bool = True,
) -> list[Arrival]:
    """Seeded arrivals. Another rate with the same seed gives the same requests, closer together or further apart.

    Args:
        prediction_sigma: noise of the predicted output, which is the class's mean times a log-normal factor.
        tells_deadline: whether the scheduler hears of the SLO as the request's deadline.
    """
    rng = random.Random(seed)
    shares = [kind.share for kind in classes]
    arrivals = []
    at_s = 0.0
    for number in range(num_requests):
        at_s += rng.expovariate(1.0) / rate_rps
        (kind,) = rng.choices(classes, shares)
        prompt_tokens = _length(rng, kind.prompt_tokens, LENGTH_SIGMA, MAX_LENGTH_RATIO * kind.prompt_tokens)
        output_tokens = _length(rng, kind.output_tokens, LENGTH_SIGMA, kind.max_output_tokens)
        predicted = _length(rng, kind.output_tokens, prediction_sigma, kind.max_output_tokens)
        request = SchedulingRequest(
            request_id=f"simulated-{number}",
            lane=None,
            prompt_tokens=prompt_tokens,
            max_output_tokens=kind.max_output_tokens,
            tenant=kind.tenant,
            band=kind.band,
            ttft_deadline_s=kind.ttft_slo_s if tells_deadline else None,
            predicted_output_tokens=predicted,
        )
        arrivals.append(Arrival(at_s, kind, request, output_tokens))
    return arrivals


def capacity_rps(model: ReplicaModel, num_replicas: int, trace: Sequence[Arrival]) -> float:
    """Requests like the trace's that the replicas complete per second when every slot is always taken.

    Little's law over the slots: their number over the mean time that a request holds one.
    """
    held_s = [
        model.held_when_full_s(arrival.request.prompt_tokens, arrival.output_tokens) for arrival in trace
    ]
    return num_replicas * model.max_num_seqs / (sum(held_s) / len(held_s))


def _length(rng: random.Random, mean: int, sigma: float, longest: int) -> int:
    drawn = rng.lognormvariate(math.log(mean) - sigma**2 / 2, sigma)
    return max(1, min(longest, round(drawn)))
