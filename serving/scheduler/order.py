"""Who is next: one short class per policy. Each ranks waiting requests; the lowest rank goes first.

`fcfs`      first come, first served
`priority`  band by band, within a band first come, first served
`sjf`       shortest predicted output first, with ageing
`edf`       earliest deadline of the first token first
`fair`      the tenant that was served least, by a virtual token counter
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol
from weakref import WeakSet

from sortedcontainers import SortedKeyList, SortedList

from serving.config import SchedulerConfig
from serving.core.request import SchedulingRequest

Rank = tuple[float, ...]
MAX_IDLE_TENANTS = 10_000  # counters kept of tenants that have nothing waiting


@dataclass(frozen=True, slots=True)
class WaitingRequest:
    """A queued request.

    Attributes:
        arrived_at_s: when it came; a rerouted request keeps the instant of its first arrival.
        give_up_at_s: when it is refused if it still waits.
        ticket: order of joining; the last word between equals.
    """

    request: SchedulingRequest
    arrived_at_s: float
    give_up_at_s: float
    ticket: int

    @property
    def deadline_at_s(self) -> float:
        """When the first token is due; infinite when the client set none."""
        wanted_s = self.request.ttft_deadline_s
        return math.inf if wanted_s is None else self.arrived_at_s + wanted_s

    def waited_s(self, now_s: float) -> float:
        """How long it has waited for a lease; what it spent on a replica that broke is no waiting."""
        return now_s - self.arrived_at_s - (self.request.age_s - self.request.waited_s)


class Subqueue(Protocol):
    """Requests that the same replicas can serve, in a policy's order."""

    def __len__(self) -> int: ...

    def join(self, waiting: WaitingRequest) -> None: ...

    def leave(self, waiting: WaitingRequest) -> None: ...

    def head(self) -> WaitingRequest: ...

    def num_before(self, newcomer: WaitingRequest) -> int:
        """How many would go before one that has not joined."""
        ...


class OrderPolicy(Protocol):
    """A policy: ranks requests, makes subqueues, and hears of what was served."""

    def rank(self, waiting: WaitingRequest) -> Rank:
        """Lowest first. May change with time for `fair` only."""
        ...

    def new_subqueue(self) -> Subqueue: ...

    def tenant_arrives(self, tenant: str) -> None:
        """A tenant without waiting requests is about to have one."""
        ...

    def dispatched(self, request: SchedulingRequest) -> None: ...

    def finished(self, request: SchedulingRequest, output_tokens: int) -> None: ...


class SortedSubqueue:
    """A subqueue whose ranks never change: a sorted list, O(log n) to join and to leave from anywhere."""

    def __init__(self, policy: OrderPolicy) -> None:
        self._policy = policy
        self._sorted: SortedKeyList = SortedKeyList(key=policy.rank)

    def __len__(self) -> int:
        return len(self._sorted)

    def join(self, waiting: WaitingRequest) -> None:
        self._sorted.add(waiting)

    def leave(self, waiting: WaitingRequest) -> None:
        self._sorted.remove(waiting)

    def head(self) -> WaitingRequest:
        first: WaitingRequest = self._sorted[0]
        return first

    def num_before(self, newcomer: WaitingRequest) -> int:
        return int(self._sorted.bisect_key_left(self._policy.rank(newcomer)))


class _StaticPolicy:
    """Base of the policies whose ranks are fixed when a request joins."""

    def rank(self, waiting: WaitingRequest) -> Rank:
        raise NotImplementedError

    def new_subqueue(self) -> Subqueue:
        return SortedSubqueue(self)

    def tenant_arrives(self, tenant: str) -> None:
        pass

    def dispatched(self, request: SchedulingRequest) -> None:
        pass

    def finished(self, request: SchedulingRequest, output_tokens: int) -> None:
        pass


class FirstComeFirstServed(_StaticPolicy):
    """`fcfs`."""

    def rank(self, waiting: WaitingRequest) -> Rank:
        return (waiting.arrived_at_s, waiting.ticket)


class PriorityBands(_StaticPolicy):
    """`priority`: a lower band index always goes first."""

    def rank(self, waiting: WaitingRequest) -> Rank:
        return (waiting.request.band, waiting.arrived_at_s, waiting.ticket)


class ShortestJobFirst(_StaticPolicy):
    """`sjf`: predicted output tokens, less `ageing_tokens_per_s` for each second waited.

    Ageing moves all waiting requests alike, so the order between two of them never changes and the rank can use
    the arrival instead: a request of L tokens is overtaken by shorter ones for L / ageing_tokens_per_s at most.
    """

    def __init__(self, ageing_tokens_per_s: float) -> None:
        self._ageing_tokens_per_s = ageing_tokens_per_s

    def rank(self, waiting: WaitingRequest) -> Rank:
        aged = waiting.request.predicted_output_tokens + self._ageing_tokens_per_s * waiting.arrived_at_s
        return (aged, waiting.ticket)


class EarliestDeadlineFirst(_StaticPolicy):
    """`edf`: requests without a deadline come after all that have one, first come, first served."""

    def rank(self, waiting: WaitingRequest) -> Rank:
        return (waiting.deadline_at_s, waiting.arrived_at_s, waiting.ticket)


class FairTokens:
    """`fair`: virtual token counters, after VTC (arXiv 2401.00588).

    Each tenant's counter grows by the weighted tokens it is served: input and predicted output at dispatch, the
    difference to the real output at the end. The backlogged tenant with the lowest counter is next. A tenant that
    comes back is lifted to the lowest backlogged counter, so absence earns no credit; when nobody waits, to the
    counter of the tenant that was dispatched last, so neither does it while the lab keeps up.

    Args:
        weights: share of each tenant; 1 for those not named.
        input_weight, output_weight: cost of one token; the paper's experiments use 1 and 2.
    """

    def __init__(
        self,
        weights: Mapping[str, float] | None = None,
        *,
        input_weight: float = 1.0,
        output_weight: float = 2.0,
    ) -> None:
        self._weights = dict(weights or {})
        self._input_weight = input_weight
        self._output_weight = output_weight
        self._counters: dict[str, float] = {}
        self._last_dispatched: str | None = None
        self._subqueues: WeakSet[_TenantSubqueue] = WeakSet()  # the queue drops a subqueue when it is empty

    def counter(self, tenant: str) -> float:
        """Weighted tokens a tenant was served so far, plus what it was lifted."""
        return self._counters.get(tenant, 0.0)

    def knows(self, tenant: str) -> bool:
        """Whether a counter is kept for the tenant; else it counts as 0 until it comes back."""
        return tenant in self._counters

    def weight(self, tenant: str) -> float:
        """The tenant's share, relative to the others'."""
        return self._weights.get(tenant, 1.0)

    def rank(self, waiting: WaitingRequest) -> Rank:
        return (self.counter(waiting.request.tenant), waiting.arrived_at_s, waiting.ticket)

    def new_subqueue(self) -> Subqueue:
        subqueue = _TenantSubqueue(self)
        self._subqueues.add(subqueue)
        return subqueue

    def tenant_arrives(self, tenant: str) -> None:
        self._counters[tenant] = max(self.counter(tenant), self._floor())
        if len(self._counters) > MAX_IDLE_TENANTS + sum(subqueue.num_tenants for subqueue in self._subqueues):
            self._forget_idle(tenant)

    def dispatched(self, request: SchedulingRequest) -> None:
        self._last_dispatched = request.tenant
        input_cost = self._input_weight * request.prompt_tokens
        self._charge(request.tenant, input_cost + self._output_weight * request.predicted_output_tokens)

    def finished(self, request: SchedulingRequest, output_tokens: int) -> None:
        self._charge(request.tenant, self._output_weight * (output_tokens - request.predicted_output_tokens))

    def _charge(self, tenant: str, cost: float) -> None:
        self._counters[tenant] = self.counter(tenant) + cost / self.weight(tenant)
        for subqueue in self._subqueues:
            subqueue.rank_anew(tenant)

    def _floor(self) -> float:
        waiting = [self.counter(subqueue.head().request.tenant) for subqueue in self._subqueues if subqueue]
        if waiting or self._last_dispatched is None:
            return min(waiting, default=0.0)
        return self.counter(self._last_dispatched)

    def _forget_idle(self, newcomer: str) -> None:
        """Clients can invent names without end. The lowest counters say least: a return lifts them anyway."""
        kept = {newcomer, self._last_dispatched}.union(*(subqueue.tenants() for subqueue in self._subqueues))
        idle = sorted((tenant for tenant in self._counters if tenant not in kept), key=self.counter)
        for tenant in idle[: len(idle) // 2]:
            del self._counters[tenant]


class _TenantSubqueue:
    """A subqueue of `fair`: first come, first served within a tenant, the tenants sorted by rank of their first."""

    def __init__(self, policy: FairTokens) -> None:
        self._policy = policy
        self._by_tenant: dict[str, SortedKeyList] = {}
        self._heads: SortedList = SortedList()  # (rank, tenant)
        self._head_of: dict[str, tuple[Rank, str]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    @property
    def num_tenants(self) -> int:
        return len(self._by_tenant)

    def tenants(self) -> frozenset[str]:
        """Those that have a request here."""
        return frozenset(self._by_tenant)

    def join(self, waiting: WaitingRequest) -> None:
        tenant = waiting.request.tenant
        if tenant not in self._by_tenant:
            self._by_tenant[tenant] = SortedKeyList(key=_by_arrival)
        self._by_tenant[tenant].add(waiting)
        self._count += 1
        self.rank_anew(tenant)

    def leave(self, waiting: WaitingRequest) -> None:
        tenant = waiting.request.tenant
        self._by_tenant[tenant].remove(waiting)
        if not self._by_tenant[tenant]:
            del self._by_tenant[tenant]
        self._count -= 1
        self.rank_anew(tenant)

    def rank_anew(self, tenant: str) -> None:
        """Its counter or its first request changed: O(log n) in the number of tenants."""
        if (head := self._head_of.pop(tenant, None)) is not None:
            self._heads.remove(head)
        if tenant in self._by_tenant:
            head = self._head_of[tenant] = (self._policy.rank(self._by_tenant[tenant][0]), tenant)
            self._heads.add(head)

    def head(self) -> WaitingRequest:
        _, tenant = self._heads[0]
        first: WaitingRequest = self._by_tenant[tenant][0]
        return first

    def num_before(self, newcomer: WaitingRequest) -> int:
        """Its own tenant's earlier requests, and of each other tenant as many as get their turn meanwhile.

        An estimate: it takes requests to be of one size and counters to be level.
        """
        tenant = newcomer.request.tenant
        own = (
            self._by_tenant[tenant].bisect_key_left(_by_arrival(newcomer)) if tenant in self._by_tenant else 0
        )
        turns = (own + 1) / self._policy.weight(tenant)
        others = ((other, len(waiting)) for other, waiting in self._by_tenant.items() if other != tenant)
        return int(own) + sum(
            min(waiting, math.ceil(turns * self._policy.weight(other))) for other, waiting in others
        )


def _by_arrival(waiting: WaitingRequest) -> tuple[float, int]:
    return waiting.arrived_at_s, waiting.ticket


def order_policy(config: SchedulerConfig) -> OrderPolicy:
    """The order that the config names."""
    match config.order:
        case "fcfs":
            return FirstComeFirstServed()
        case "priority":
            return PriorityBands()
        case "sjf":
            return ShortestJobFirst(config.ageing_tokens_per_s)
        case "edf":
            return EarliestDeadlineFirst()
        case "fair":
            return FairTokens({tenant.name: tenant.weight for tenant in config.tenants})
