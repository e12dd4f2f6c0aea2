"""Where a request runs: pure, at most O(replicas), with seeded ties."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from serving.core.choice import Choice
from serving.core.lane import ReplicaInfo, Strategy
from serving.core.request import Lease, RequestEnd, SchedulingRequest
from serving.scheduler.breaker import Breaker
from serving.scheduler.ledger import Load
from serving.scheduler.queue import Eligibility


@dataclass(slots=True)
class ReplicaState:
    """A ready replica: what it said of itself, what is booked on it, and whether it can be trusted."""

    info: ReplicaInfo
    load: Load
    breaker: Breaker


def may_serve(replica: ReplicaInfo, eligibility: Eligibility) -> bool:
    """Whether such requests may run on the replica at all.

    A pinned lane is the client's word: if its engine refuses the request, the client hears the engine's reason.
    """
    if eligibility.lane is not None:
        return replica.lane == eligibility.lane
    if eligibility.needs_plain_decoding and replica.strategy is Strategy.SPECULATIVE:
        return False
    return replica.takes_unpinned and replica.model == eligibility.model


class PlacementPolicy:
    """Chooses among replicas that may serve the request and have room; there is at least one.

    What it is told beside that only some need.
    """

    def choose(self, request: SchedulingRequest, candidates: Sequence[ReplicaState]) -> ReplicaState:
        raise NotImplementedError

    def would_wait(
        self,
        request: SchedulingRequest,
        candidates: Sequence[ReplicaState],
        full: Callable[[], Sequence[ReplicaState]],
    ) -> bool:
        """Whether the request had better wait for one of those that may serve it and are full."""
        return False

    def explain(self) -> Choice | None:
        """Why the last request was placed where it is; None where no lanes were compared."""
        return None

    def join(self, info: ReplicaInfo) -> None:
        """A replica is ready, or says something else of itself than before."""

    def forget(self, replica_id: str) -> None:
        """A replica is gone. Requests on it end later."""

    def placed(self, request: SchedulingRequest, info: ReplicaInfo) -> None:
        """The request runs on the replica."""

    def adopted(self, lease: Lease) -> None:
        """A request runs that was placed by an earlier scheduler."""

    def ended(self, request_id: str, end: RequestEnd) -> None:
        """A request runs no more; one that is not known says nothing."""


class LeastOutstanding(PlacementPolicy):
    """`least_outstanding`: the replica with the fewest outstanding tokens; equals are drawn at random."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def choose(self, request: SchedulingRequest, candidates: Sequence[ReplicaState]) -> ReplicaState:
        fewest = min(candidate.load.outstanding_tokens for candidate in candidates)
        return self._rng.choice(
            [candidate for candidate in candidates if candidate.load.outstanding_tokens == fewest]
        )


class PowerOfTwo(PlacementPolicy):
    """`power_of_two`: the less loaded of two replicas drawn at random."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._least = LeastOutstanding(rng)

    def choose(self, request: SchedulingRequest, candidates: Sequence[ReplicaState]) -> ReplicaState:
        drawn = candidates if len(candidates) <= 2 else self._rng.sample(candidates, 2)
        return self._least.choose(request, drawn)


class PrefixAffinity(PlacementPolicy):
    """`prefix_affinity`: the replica that has seen most of the prompt, unless it is too busy: load beats locality.

    Args:
        gap_tokens: how many outstanding tokens a match may be above the least loaded replica.
        max_blocks: block hashes remembered per replica; the least recently used go first.
    """

    def __init__(self, rng: random.Random, gap_tokens: int, max_blocks: int = 4096) -> None:
        self._least = LeastOutstanding(rng)
        self._gap_tokens = gap_tokens
        self._max_blocks = max_blocks
        self._seen: dict[str, OrderedDict[int, None]] = {}

    def choose(self, request: SchedulingRequest, candidates: Sequence[ReplicaState]) -> ReplicaState:
        chosen = self._least.choose(request, candidates)
        matches = (
            [(self._match(request, candidate), candidate) for candidate in candidates]
            if request.prefix_blocks
            else []
        )
        longest = max((match for match, _ in matches), default=0)
        if longest > 0:
            best = self._least.choose(
                request, [candidate for match, candidate in matches if match == longest]
            )
            gap = best.load.outstanding_tokens - chosen.load.outstanding_tokens
            chosen = best if gap <= self._gap_tokens else chosen
        self._remember(request, chosen)
        return chosen

    def forget(self, replica_id: str) -> None:
        self._seen.pop(replica_id, None)

    def _match(self, request: SchedulingRequest, replica: ReplicaState) -> int:
        """Leading blocks of the prompt that the replica has seen; a block's hash covers all before it."""
        seen: Mapping[int, None] = self._seen.get(replica.info.replica_id, {})
        length = 0
        for block in request.prefix_blocks:
            if block not in seen:
                break
            length += 1
        return length

    def _remember(self, request: SchedulingRequest, replica: ReplicaState) -> None:
        seen = self._seen.setdefault(replica.info.replica_id, OrderedDict())
        for block in request.prefix_blocks:
            seen[block] = None
            seen.move_to_end(block)
        while len(seen) > self._max_blocks:
            seen.popitem(last=False)
