"""Where a request runs: pure, with seeded ties; O(log replicas) in a large fleet, unless a prefix is to match."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import overload

from sortedcontainers import SortedList

from serving.core.choice import Choice
from serving.core.lane import DRAFTING, ReplicaInfo
from serving.core.request import Lease, RequestEnd, SchedulingRequest
from serving.scheduler.breaker import Breaker
from serving.scheduler.ledger import Ledger, Load
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
    if eligibility.needs_plain_decoding and replica.strategy in DRAFTING:
        return False
    return replica.takes_unpinned and replica.model == eligibility.model


class Openings(Sequence[ReplicaState]):
    """Those of some replicas that have room, in their order, and sorted by outstanding tokens.

    A view that `follow` brings up to date, O(log replicas) for each that changed. It does not know breakers.

    Args:
        fullest: for each, how many sequences it may hold to have room.
    """

    def __init__(self, replicas: Sequence[ReplicaState], fullest: Sequence[int], ledger: Ledger) -> None:
        self._replicas = replicas
        self._fullest = fullest
        self._ledger = ledger
        self._place_of = {replica.info.replica_id: place for place, replica in enumerate(replicas)}
        self._tokens: list[int | None] = [None] * len(replicas)  # as sorted; None: no room
        self._by_tokens: SortedList = SortedList()  # (tokens, place)
        self._places: SortedList = SortedList()
        self._num_changes = ledger.num_changes
        for place in range(len(replicas)):
            self._sort(place)

    def follow(self) -> Openings:
        """See what the ledger has booked meanwhile."""
        if self._num_changes != self._ledger.num_changes:
            for replica_id in self._ledger.changed_since(self._num_changes):
                place = self._place_of.get(replica_id)
                if place is not None:
                    self._sort(place)
            self._num_changes = self._ledger.num_changes
        return self

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[ReplicaState]:
        return map(self._replicas.__getitem__, self._places)

    @overload
    def __getitem__(self, index: int) -> ReplicaState: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[ReplicaState]: ...
    def __getitem__(self, index: int | slice) -> ReplicaState | Sequence[ReplicaState]:
        if isinstance(index, slice):
            return [self._replicas[place] for place in self._places[index]]
        place: int = self._places[index]
        return self._replicas[place]

    def draw_least_loaded(self, rng: random.Random) -> ReplicaState:
        """One of those with the fewest outstanding tokens.

        Raises:
            IndexError: there is none.
        """
        # Those with as many lie together, in their order.
        num_equal = self._by_tokens.bisect_left((self._by_tokens[0][0] + 1,))
        place: int = self._by_tokens[rng.choice(range(num_equal))][1]
        return self._replicas[place]

    def _sort(self, place: int) -> None:
        load = self._replicas[place].load
        tokens = load.outstanding_tokens if load.sequences <= self._fullest[place] else None
        before = self._tokens[place]
        if tokens == before:
            return
        if before is None:
            self._places.add(place)
        else:
            self._by_tokens.remove((before, place))
        if tokens is None:
            self._places.remove(place)
        else:
            self._by_tokens.add((tokens, place))
        self._tokens[place] = tokens


class PlacementPolicy:
    """Chooses among replicas that may serve the request and have room; there is at least one.

    What it is told beside that only some need.
    """

    def choose(self, request: SchedulingRequest, candidates: Sequence[ReplicaState]) -> ReplicaState:
        raise NotImplementedError

    def awaited(
        self,
        request: SchedulingRequest,
        candidates: Sequence[ReplicaState],
        full: Callable[[], Sequence[ReplicaState]],
    ) -> Sequence[ReplicaState]:
        """Those of the full that may serve the request for which it had better wait; none: it takes a candidate."""
        return ()

    def explain(self) -> Choice | None:
        """Why the last request was placed where it is; None where no lanes were compared."""
        return None

    def join(self, info: ReplicaInfo) -> None:
        """A replica is ready, or says something else of itself than before."""

    def forget(self, replica_id: str) -> None:
        """A replica is gone. Requests on it end later."""

    def placed(self, request: SchedulingRequest, info: ReplicaInfo, now_s: float) -> None:
        """The request runs on the replica."""

    def adopted(self, lease: Lease) -> None:
        """A request runs that was placed by an earlier scheduler."""

    def ended(self, request_id: str, end: RequestEnd, now_s: float) -> None:
        """A request runs no more; one that is not known says nothing."""


class LeastOutstanding(PlacementPolicy):
    """`least_outstanding`: the replica with the fewest outstanding tokens; equals are drawn at random."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def choose(self, request: SchedulingRequest, candidates: Sequence[ReplicaState]) -> ReplicaState:
        if isinstance(candidates, Openings):
            return candidates.draw_least_loaded(self._rng)
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
