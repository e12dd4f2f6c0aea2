"""The scheduler's decisions as a state machine: events in, decisions out. No asyncio, no clock, no I/O.

Every request that is submitted ends in exactly one of: granted (then released), refused, expired, withdrawn.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import dataclass

from serving.core.errors import LeaseError, Reason
from serving.core.lane import ReplicaInfo
from serving.core.request import SchedulingRequest
from serving.scheduler.admission import DrainRate, Refusal, admit
from serving.scheduler.ledger import Lease, Ledger
from serving.scheduler.policy import ReplicaLoad, least_outstanding, may_serve
from serving.scheduler.queue import Line, Waiting, WaitingQueue


@dataclass(frozen=True, slots=True)
class Grant:
    """A lease, the replica it is on, and how long the request waited for it."""

    lease: Lease
    replica: ReplicaInfo
    waited_s: float


class SchedulerCore:
    """Admission, order and placement over replicas that come and go.

    Args:
        max_waiting_requests: bound of the waiting queue, >= 0.
        max_queue_wait_s: a request that waited this long is refused.
        seed: of the choice between equally loaded replicas.
        settled_at_s: until then gateways and replicas of an earlier scheduler may be on their way back:
            requests wait and nothing is placed, so no placement overlooks a lease that is still held.
    """

    def __init__(
        self,
        *,
        max_waiting_requests: int,
        max_queue_wait_s: float,
        seed: int,
        settled_at_s: float = -math.inf,
    ) -> None:
        self._settled_at_s = settled_at_s
        self._max_waiting_requests = max_waiting_requests
        self._max_queue_wait_s = max_queue_wait_s
        self._rng = random.Random(seed)
        self._queue = WaitingQueue()
        self._ledger = Ledger()
        self._replicas: dict[str, ReplicaInfo] = {}
        self._drain_rate = DrainRate()
        self.is_draining = False
        self.refusals: Counter[Reason] = Counter()

    # Replicas

    def replica_ready(self, info: ReplicaInfo) -> None:
        """A replica may take requests from now on."""
        self._replicas[info.replica_id] = info

    def replica_gone(self, replica_id: str) -> None:
        """A replica takes no more requests. Leases on it live on until their holders release them."""
        self._replicas.pop(replica_id, None)

    # Requests

    def submit(self, request: SchedulingRequest, now_s: float) -> Refusal | None:
        """Queue a request, or say why not. Call `dispatch` afterwards to place what can be placed.

        Raises:
            LeaseError: a request of that id is waiting or running.
        """
        if request.request_id in self._queue or request.request_id in self._ledger:
            raise LeaseError(f"request {request.request_id!r} is already waiting or running")
        eligible = self._eligible(Line.of(request))
        refusal = admit(
            is_draining=self.is_draining,
            is_settling=now_s < self._settled_at_s,
            num_eligible=len(eligible),
            has_room=any(load.has_room for load in eligible) and self._queue.head(self._has_room) is None,
            num_waiting=len(self._queue),
            max_waiting_requests=self._max_waiting_requests,
            drain_rate_rps=self._drain_rate.rps(now_s),
        )
        if refusal is None:
            self._queue.join(request, now_s)
        else:
            self.refusals[refusal.reason] += 1
        return refusal

    def dispatch(self, now_s: float) -> list[Grant]:
        """Place waiting requests, longest-waiting first, until none fits. Load is booked here, at once."""
        grants: list[Grant] = []
        if now_s < self._settled_at_s:
            return grants
        while waiting := self._queue.head(self._has_room):
            request = waiting.request
            self._queue.leave(request.request_id)
            with_room = [load for load in self._eligible(Line.of(request)) if load.has_room]
            replica = least_outstanding(with_room, self._rng).info
            lease = Lease(request.request_id, replica.replica_id, request.reserved_tokens)
            self._ledger.acquire(lease)
            grants.append(Grant(lease, replica, now_s - waiting.arrived_at_s))
        return grants

    def release(self, request_id: str, now_s: float) -> Lease:
        """A running request ended, however it ended.

        Raises:
            LeaseError: it holds no lease.
        """
        lease = self._ledger.release(request_id)
        self._drain_rate.record(now_s)
        return lease

    def withdraw(self, request_id: str, now_s: float) -> None:
        """The client left: forget the request wherever it stands.

        A request that is neither waiting nor running was refused while the word was on its way: nothing to do.
        """
        if self._queue.leave(request_id) is None and request_id in self._ledger:
            self.release(request_id, now_s)

    def adopt(self, lease: Lease) -> None:
        """Book a lease that a gateway holds from before this scheduler started."""
        self._queue.leave(lease.request_id)  # its holder says that it runs
        if lease.request_id not in self._ledger:
            self._ledger.acquire(lease)

    def expire(self, now_s: float) -> list[tuple[Waiting, Refusal]]:
        """Take out the requests that waited too long."""
        expired = []
        for waiting in self._queue.overdue(now_s - self._max_queue_wait_s):
            self._queue.leave(waiting.request.request_id)
            message = f"waited {self._max_queue_wait_s:g} s for a replica (scheduler.max_queue_wait_s)"
            expired.append((waiting, Refusal(Reason.QUEUE_TIMEOUT, message)))
            self.refusals[Reason.QUEUE_TIMEOUT] += 1
        return expired

    # State, for people and metrics

    @property
    def num_waiting(self) -> int:
        return len(self._queue)

    @property
    def num_leases(self) -> int:
        return len(self._ledger)

    def waiting_by_lane(self) -> dict[str | None, int]:
        """Waiting requests by pinned lane; None for those that leave the choice to the scheduler."""
        return self._queue.count_by_lane()

    def loads(self) -> list[ReplicaLoad]:
        """Every ready replica with what is booked on it."""
        return [self._load(info) for info in self._replicas.values()]

    def _load(self, info: ReplicaInfo) -> ReplicaLoad:
        replica_id = info.replica_id
        return ReplicaLoad(
            info, self._ledger.running(replica_id), self._ledger.outstanding_tokens(replica_id)
        )

    def _eligible(self, line: Line) -> list[ReplicaLoad]:
        return [self._load(info) for info in self._replicas.values() if may_serve(info, line)]

    def _has_room(self, line: Line) -> bool:
        return any(load.has_room for load in self._eligible(line))
