"""The waiting queue: subqueues in a policy's order, which anyone may leave at once from anywhere."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from sortedcontainers import SortedKeyList

from serving.core.request import SchedulingRequest
from serving.scheduler.order import OrderPolicy, Subqueue, WaitingRequest

Key = TypeVar("Key")


@dataclass(frozen=True, slots=True)
class Eligibility:
    """What decides which replicas may serve a request, and how full they may be for it.

    Requests that agree in it wait in one subqueue, so a full lane never blocks another.
    """

    lane: str | None
    needs_plain_decoding: bool
    band: int
    avoid_replica: str | None = None
    num_sequences: int = 1
    model: str = ""
    is_patient: bool = True  # it may wait for a better lane: its client set no limit to its waiting

    @classmethod
    def of(cls, request: SchedulingRequest) -> Eligibility:
        return cls(
            request.lane,
            request.needs_plain_decoding,
            request.band,
            request.avoid_replica,
            request.num_sequences,
            request.model,
            request.is_patient,
        )


class GroupKey(NamedTuple):
    """Waiting requests that people tell apart; `lane` is None where the choice is left to the scheduler."""

    lane: str | None
    band: int
    tenant: str


@dataclass(slots=True)
class Backlog:
    """What a group, a tenant, a lane, or all of them have waiting."""

    requests: int = 0
    tokens: int = 0

    def add(self, sign: int, tokens: int) -> None:
        """One request more, or one less, of so many tokens."""
        self.requests += sign
        self.tokens += sign * tokens


class WaitingQueue:
    """Joining and leaving are O(log n) in its length; the head is found over the subqueues, which are few."""

    def __init__(self, policy: OrderPolicy) -> None:
        self._policy = policy
        self._subqueues: dict[Eligibility, Subqueue] = {}
        self._waiting: dict[str, WaitingRequest] = {}
        self._by_patience: SortedKeyList = SortedKeyList(
            key=lambda waiting: (waiting.give_up_at_s, waiting.ticket)
        )
        self._next_ticket = 0
        self.total = Backlog()
        self.by_tenant: dict[str, Backlog] = {}
        # By pinned lane; by model, behind None, where the choice is the scheduler's.
        self.by_choice: dict[tuple[str | None, str], Backlog] = {}
        self.by_group: dict[GroupKey, Backlog] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._waiting

    def __iter__(self) -> Iterator[WaitingRequest]:
        """All waiting requests, in order of joining."""
        return iter(sorted(self._waiting.values(), key=lambda waiting: waiting.ticket))

    def join(self, request: SchedulingRequest, arrived_at_s: float, give_up_at_s: float) -> WaitingRequest:
        """Queue a request; ids of waiting requests are unique."""
        waiting = WaitingRequest(request, arrived_at_s, give_up_at_s, self._next_ticket)
        self._next_ticket += 1
        if request.tenant not in self.by_tenant:
            self._policy.tenant_arrives(request.tenant)
        self._count(request, 1)
        self._waiting[request.request_id] = waiting
        self._by_patience.add(waiting)
        eligibility = Eligibility.of(request)
        subqueue = self._subqueues.get(eligibility)
        if subqueue is None:
            subqueue = self._subqueues[eligibility] = self._policy.new_subqueue()
        subqueue.join(waiting)
        return waiting

    def leave(self, request_id: str) -> WaitingRequest | None:
        """Take a request out, wherever it stands; None when it is not here."""
        waiting = self._waiting.pop(request_id, None)
        if waiting is None:
            return None
        eligibility = Eligibility.of(waiting.request)
        subqueue = self._subqueues[eligibility]
        subqueue.leave(waiting)
        if not subqueue:
            del self._subqueues[eligibility]
        self._by_patience.remove(waiting)
        self._count(waiting.request, -1)
        return waiting

    def head(self, has_room: Callable[[Eligibility], bool]) -> WaitingRequest | None:
        """The next request of all that have room, by the policy's order."""
        heads = [
            subqueue.head() for eligibility, subqueue in self._subqueues.items() if has_room(eligibility)
        ]
        return min(heads, key=self._policy.rank, default=None)

    def has_any(self, has_room: Callable[[Eligibility], bool]) -> bool:
        """Whether anyone waits whom there is room for."""
        return any(has_room(eligibility) for eligibility in self._subqueues)

    def num_ahead(
        self, request: SchedulingRequest, arrived_at_s: float, shares_room: Callable[[Eligibility], bool]
    ) -> int:
        """How many of those that compete with it would go before a request that has not joined."""
        newcomer = WaitingRequest(request, arrived_at_s, math.inf, self._next_ticket)
        return sum(
            subqueue.num_before(newcomer)
            for eligibility, subqueue in self._subqueues.items()
            if shares_room(eligibility)
        )

    def out_of_patience(self, now_s: float) -> list[WaitingRequest]:
        """Requests whose `give_up_at_s` has come, the most overdue first; they stay queued."""
        overdue = []
        for waiting in self._by_patience:
            if waiting.give_up_at_s > now_s:
                break
            overdue.append(waiting)
        return overdue

    def count_by_lane(self) -> dict[str | None, int]:
        """Waiting requests by pinned lane; None for those that leave the choice to the scheduler."""
        counts: Counter[str | None] = Counter()
        for (lane, _), backlog in self.by_choice.items():
            counts[lane] += backlog.requests
        return dict(counts)

    def count_by_band(self) -> dict[int, int]:
        """Waiting requests by band index."""
        counts: Counter[int] = Counter()
        for eligibility, subqueue in self._subqueues.items():
            counts[eligibility.band] += len(subqueue)
        return dict(counts)

    def _count(self, request: SchedulingRequest, sign: int) -> None:
        tokens = request.reserved_tokens
        self.total.add(sign, tokens)
        _add(self.by_tenant, request.tenant, sign, tokens)
        _add(self.by_choice, (request.lane, request.model), sign, tokens)
        _add(self.by_group, GroupKey(request.lane, request.band, request.tenant), sign, tokens)


def _add(books: dict[Key, Backlog], key: Key, sign: int, tokens: int) -> None:
    backlog = books.get(key)
    if backlog is None:
        backlog = books[key] = Backlog()
    backlog.add(sign, tokens)
    if backlog.requests == 0:
        del books[key]
