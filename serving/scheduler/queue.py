"""The waiting queue: lines of requests in a policy's order, which anyone may leave at once from anywhere."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from sortedcontainers import SortedKeyList

from serving.core.request import SchedulingRequest
from serving.scheduler.order import OrderPolicy, Waiting, WaitingLine

Key = TypeVar("Key")


@dataclass(frozen=True, slots=True)
class Line:
    """Requests that the same room can serve wait in one line, so a full lane never blocks another."""

    lane: str | None
    needs_plain_decoding: bool
    band: int
    avoid_replica: str | None = None

    @classmethod
    def of(cls, request: SchedulingRequest) -> Line:
        return cls(request.lane, request.needs_plain_decoding, request.band, request.avoid_replica)


class Group(NamedTuple):
    """Waiting requests that people tell apart; `lane` is None where the choice is left to the scheduler."""

    lane: str | None
    band: int
    tenant: str


@dataclass(slots=True)
class Backlog:
    """What a group, a tenant, a lane, or all of them have waiting."""

    requests: int = 0
    tokens: int = 0

    def add(self, request: SchedulingRequest, sign: int) -> None:
        self.requests += sign
        self.tokens += sign * request.reserved_tokens


class WaitingQueue:
    """Joining and leaving are O(log n) in the queue's length; the head is found over the lines, which are few."""

    def __init__(self, policy: OrderPolicy) -> None:
        self._policy = policy
        self._lines: dict[Line, WaitingLine] = {}
        self._waiting: dict[str, Waiting] = {}
        self._by_patience: SortedKeyList = SortedKeyList(
            key=lambda waiting: (waiting.give_up_at_s, waiting.ticket)
        )
        self._next_ticket = 0
        self.total = Backlog()
        self.by_tenant: dict[str, Backlog] = {}
        self.by_lane: dict[str | None, Backlog] = {}
        self.by_group: dict[Group, Backlog] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._waiting

    def __iter__(self) -> Iterator[Waiting]:
        """All waiting requests, in order of joining."""
        return iter(sorted(self._waiting.values(), key=lambda waiting: waiting.ticket))

    def join(self, request: SchedulingRequest, arrived_at_s: float, give_up_at_s: float) -> Waiting:
        """Queue a request; ids of waiting requests are unique."""
        waiting = Waiting(request, arrived_at_s, give_up_at_s, self._next_ticket)
        self._next_ticket += 1
        if request.tenant not in self.by_tenant:
            self._policy.tenant_arrives(request.tenant)
        self._count(request, 1)
        self._waiting[request.request_id] = waiting
        self._by_patience.add(waiting)
        line = Line.of(request)
        if line not in self._lines:
            self._lines[line] = self._policy.new_line()
        self._lines[line].join(waiting)
        return waiting

    def leave(self, request_id: str) -> Waiting | None:
        """Take a request out, wherever it stands; None when it is not here."""
        waiting = self._waiting.pop(request_id, None)
        if waiting is None:
            return None
        line = Line.of(waiting.request)
        self._lines[line].leave(waiting)
        if not self._lines[line]:
            del self._lines[line]
        self._by_patience.remove(waiting)
        self._count(waiting.request, -1)
        return waiting

    def head(self, has_room: Callable[[Line], bool]) -> Waiting | None:
        """The next request of all lines that have room, by the policy's order."""
        heads = [line.head() for key, line in self._lines.items() if has_room(key)]
        return min(heads, key=self._policy.rank, default=None)

    def has_any(self, has_room: Callable[[Line], bool]) -> bool:
        """Whether anyone waits in a line that has room."""
        return any(has_room(key) for key in self._lines)

    def num_ahead(
        self, request: SchedulingRequest, arrived_at_s: float, shares_room: Callable[[Line], bool]
    ) -> int:
        """How many of the lines that compete with it would go before a request that has not joined."""
        newcomer = Waiting(request, arrived_at_s, math.inf, self._next_ticket)
        return sum(line.num_before(newcomer) for key, line in self._lines.items() if shares_room(key))

    def out_of_patience(self, now_s: float) -> list[Waiting]:
        """Requests whose `give_up_at_s` has come, the most overdue first; they stay queued."""
        found = []
        for waiting in self._by_patience:
            if waiting.give_up_at_s > now_s:
                break
            found.append(waiting)
        return found

    def count_by_lane(self) -> dict[str | None, int]:
        """Waiting requests by pinned lane; None for those that leave the choice to the scheduler."""
        return {lane: backlog.requests for lane, backlog in self.by_lane.items()}

    def count_by_band(self) -> dict[int, int]:
        """Waiting requests by band index."""
        counts: Counter[int] = Counter()
        for line, waiting in self._lines.items():
            counts[line.band] += len(waiting)
        return dict(counts)

    def _count(self, request: SchedulingRequest, sign: int) -> None:
        self.total.add(request, sign)
        _add(self.by_tenant, request.tenant, request, sign)
        _add(self.by_lane, request.lane, request, sign)
        _add(self.by_group, Group(request.lane, request.band, request.tenant), request, sign)


def _add(books: dict[Key, Backlog], key: Key, request: SchedulingRequest, sign: int) -> None:
    backlog = books.setdefault(key, Backlog())
    backlog.add(request, sign)
    if backlog.requests == 0:
        del books[key]
