"""Where a request may run, and where it does: pure, with seeded ties."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from serving.core.lane import ReplicaInfo, Strategy
from serving.scheduler.queue import Line


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """A replica and what is booked on it now."""

    info: ReplicaInfo
    running: int
    outstanding_tokens: int

    @property
    def has_room(self) -> bool:
        return self.running < self.info.max_running


def may_serve(replica: ReplicaInfo, line: Line) -> bool:
    """Whether requests of that line may run on the replica at all.

    A pinned lane is the client's word: if its engine refuses the request, the client hears the engine's reason.
    """
    if line.lane is not None:
        return replica.lane == line.lane
    if line.needs_plain_decoding and replica.strategy is Strategy.SPECULATIVE:
        return False
    return replica.takes_unpinned


def least_outstanding(candidates: Sequence[ReplicaLoad], rng: random.Random) -> ReplicaLoad:
    """The replica with the fewest outstanding tokens; equals are drawn at random, so none is favoured.

    Raises:
        ValueError: there is no candidate.
    """
    fewest = min(load.outstanding_tokens for load in candidates)
    return rng.choice([load for load in candidates if load.outstanding_tokens == fewest])
