"""The scheduler's decisions as a state machine: events in, decisions out. No asyncio, no clock, no I/O.

Every request that is submitted ends in exactly one of: granted (then released), refused, expired, withdrawn.
"""

from __future__ import annotations

import math
import random
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from serving.config import SchedulerConfig
from serving.core.choice import Choice
from serving.core.errors import LeaseError, Reason
from serving.core.lane import ReplicaInfo
from serving.core.request import Lease, ReplicaVerdict, RequestEnd, SchedulingRequest
from serving.scheduler.adaptive import Adaptive
from serving.scheduler.admission import LabView, QueueLimits, Refusal, admit
from serving.scheduler.estimator import DrainRate, LaneEstimator, OutputPredictor
from serving.scheduler.fleet import NOTHING_KEPT, Fleet, Kept, Places
from serving.scheduler.lane_costs import LaneCosts
from serving.scheduler.ledger import Ledger
from serving.scheduler.order import WaitingRequest, order_policy
from serving.scheduler.placement import ReplicaState
from serving.scheduler.placements import placement_policy
from serving.scheduler.queue import Backlog, Eligibility, WaitingQueue

KEEP_REFUSALS = 20
UNTOLD_END = RequestEnd()


@dataclass(frozen=True, slots=True)
class Grant:
    """A lease, the replica it is on, how long the request waited for it, the request, and why there.

    `choice` is None where no lanes were compared.
    """

    lease: Lease
    replica: ReplicaInfo
    waited_s: float
    request: SchedulingRequest
    choice: Choice | None = None


@dataclass(frozen=True, slots=True)
class RefusalNote:
    """A refusal, for the status page."""

    at_s: float
    reason: Reason
    tenant: str
    lane: str | None


@dataclass(frozen=True, slots=True)
class WaitingGroup:
    """What one tenant has waiting in one band for one lane; `lane` None: for any lane that will serve it.

    `tokens`: reserved, prompt and maximum output.
    """

    lane: str | None
    band: str
    tenant: str
    requests: int
    tokens: int


@dataclass(frozen=True, slots=True)
class _Running:
    request: SchedulingRequest
    lane: str
    granted_at_s: float


class SchedulerCore:
    """Admission, order and placement over replicas that come and go.

    Args:
        settled_at_s: until then gateways and replicas of an earlier scheduler may be on their way back:
            requests wait and nothing is placed, so no placement overlooks a lease that is still held.
        lane_costs: of the lanes that take requests which pin none; for placement `adaptive`.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        *,
        settled_at_s: float = -math.inf,
        lane_costs: LaneCosts | None = None,
    ) -> None:
        self._config = config
        self._settled_at_s = self._missed_until_s = settled_at_s
        self._order = order_policy(config)
        self._queue = WaitingQueue(self._order)
        self._ledger = Ledger()
        # Reserved room means something only where higher bands go first.
        has_bands = config.order == "priority"
        self._reserved_shares = [band.reserved_share if has_bands else 0.0 for band in config.bands]
        self._fleet = Fleet(
            self._ledger,
            breaker_failures=config.breaker_failures,
            breaker_cooldown_s=config.breaker_cooldown_s,
            reserved_shares=self._reserved_shares,
        )
        self._placement = placement_policy(config, random.Random(config.seed), lane_costs)
        self._running: dict[str, _Running] = {}
        self._lanes: dict[str, LaneEstimator] = {}
        self._predictor = OutputPredictor()
        self._drain_rate = DrainRate()
        self._kept = NOTHING_KEPT  # by the last `dispatch`, which follows every event
        self._queue_shares = {tenant.name: tenant.queue_share for tenant in config.tenants}
        self.is_draining = False
        self.refusals_by_lane: Counter[tuple[str | None, Reason]] = Counter()
        self.last_refusals: deque[RefusalNote] = deque(maxlen=KEEP_REFUSALS)

    # Replicas

    def replica_ready(self, info: ReplicaInfo) -> None:
        """A replica may take requests from now on."""
        self._placement.join(info)
        self._fleet.join(info)

    def replica_gone(self, replica_id: str) -> None:
        """A replica takes no more requests. Leases on it live on until their holders release them."""
        self._fleet.leave(replica_id)
        self._placement.forget(replica_id)

    def expect_back(self, until_s: float) -> None:
        """Connections broke or are made anew: until then a replica that is missing may be on its way back."""
        self._missed_until_s = max(self._missed_until_s, until_s)

    # Requests

    def submit(self, request: SchedulingRequest, now_s: float) -> Refusal | None:
        """Queue a request, or say why not. Call `dispatch` afterwards to place what can be placed.

        Raises:
            LeaseError: a request of that id is waiting or running.
        """
        if request.request_id in self._queue or request.request_id in self._ledger:
            raise LeaseError(f"request {request.request_id!r} is already waiting or running")
        request = self._predicted(request)
        eligibility = Eligibility.of(request)
        refusal = admit(request, self._view(request, eligibility, now_s), self._limits(request))
        if refusal is not None:
            self._note(refusal, request, now_s)
            return refusal
        self._queue.join(request, now_s - request.age_s, self._give_up_at_s(request, now_s))
        return None

    def dispatch(self, now_s: float) -> list[Grant]:
        """Place waiting requests in order until none fits. Load is booked here, at once."""
        grants: list[Grant] = []
        if now_s < self._settled_at_s:
            return grants
        self._kept = kept = Kept()
        while waiting := self._queue.head(lambda kind: self._fleet.has_slot(kind, now_s, kept)):
            kind = Eligibility.of(waiting.request)
            if candidates := self._fleet.with_room(kind, now_s, kept):
                if awaited := self._awaited(waiting.request, kind, candidates):
                    self._fleet.wait_for(awaited, kind, kept)
                else:
                    grants.append(self._place(waiting, candidates, now_s))
            else:
                # Its turn, and no replica has all of its slots free: those behind it must not take them one by one.
                self._fleet.keep_for(kind, now_s, kept)
        return grants

    def release(self, request_id: str, now_s: float, end: RequestEnd = UNTOLD_END) -> Lease:
        """A running request ended, however it ended.

        Raises:
            LeaseError: it holds no lease.
        """
        lease = self._ledger.release(request_id)
        self._drain_rate.record(now_s)
        self._judge(lease, end.verdict, now_s)
        self._placement.ended(request_id, end, now_s)
        running = self._running.pop(request_id, None)
        if running is not None:
            self._learn(running, end, now_s)
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
            self._placement.adopted(lease)

    def expire(self, now_s: float) -> list[tuple[WaitingRequest, Refusal]]:
        """Take out the requests whose time to wait is over."""
        expired = []
        for waiting in self._queue.out_of_patience(now_s):
            request = waiting.request
            self._queue.leave(request.request_id)
            waited_s = waiting.waited_s(now_s)
            refusal = Refusal(
                Reason.QUEUE_TIMEOUT,
                f"waited {waited_s:.1f} s for a replica; the limit was {self._patience_s(request):g} s "
                "(the request's deadline, x-max-queue-ms or scheduler.max_queue_wait_s)",
            )
            self._note(refusal, request, now_s)
            expired.append((waiting, refusal))
        return expired

    # State, for people and metrics

    @property
    def adaptive(self) -> Adaptive | None:
        """What `adaptive` expects and has done; None under another placement."""
        return self._placement if isinstance(self._placement, Adaptive) else None

    @property
    def num_waiting(self) -> int:
        return len(self._queue)

    @property
    def num_leases(self) -> int:
        return len(self._ledger)

    @property
    def refusals(self) -> Counter[Reason]:
        """Refused requests by reason, whatever lane they asked for."""
        totals: Counter[Reason] = Counter()
        for (_, reason), count in self.refusals_by_lane.items():
            totals[reason] += count
        return totals

    def waiting_by_lane(self) -> dict[str | None, int]:
        """Waiting requests by pinned lane; None for those that leave the choice to the scheduler."""
        return self._queue.count_by_lane()

    def waiting_by_band(self) -> dict[str, int]:
        """Waiting requests by the band's name."""
        counts = self._queue.count_by_band()
        return {band.name: counts.get(index, 0) for index, band in enumerate(self._config.bands)}

    def waiting_by_tenant(self) -> dict[str, int]:
        """Waiting requests of each tenant that has any."""
        return {tenant: backlog.requests for tenant, backlog in self._queue.by_tenant.items()}

    def waiting_groups(self) -> list[WaitingGroup]:
        """Who waits for which lane, the groups with the most requests first."""
        groups = [
            WaitingGroup(lane, self._config.bands[band].name, tenant, backlog.requests, backlog.tokens)
            for (lane, band, tenant), backlog in self._queue.by_group.items()
        ]
        return sorted(groups, key=lambda group: group.requests, reverse=True)

    def demand_tokens(self) -> dict[str, int]:
        """By replica: its outstanding tokens, and its even part of those that wait for a replica like it."""
        replicas = self._fleet.all()
        num_by_lane = Counter(replica.info.lane for replica in replicas)
        num_unpinned = Counter(replica.info.model for replica in replicas if replica.info.takes_unpinned)
        demand = {}
        for replica in replicas:
            lane = replica.info.lane
            demand[replica.info.replica_id] = (
                replica.load.outstanding_tokens + self._waiting_tokens(lane) // num_by_lane[lane]
            )
            if replica.info.takes_unpinned:
                model = replica.info.model
                demand[replica.info.replica_id] += self._waiting_tokens(None, model) // num_unpinned[model]
        return demand

    def replicas(self) -> list[ReplicaState]:
        """Every ready replica with what is booked on it."""
        return self._fleet.all()

    # Parts of the above

    def _waiting_tokens(self, lane: str | None, model: str = "") -> int:
        return self._queue.by_choice.get((lane, model), Backlog()).tokens

    def _place(self, waiting: WaitingRequest, candidates: Sequence[ReplicaState], now_s: float) -> Grant:
        request = waiting.request
        self._queue.leave(request.request_id)
        replica = self._placement.choose(request, candidates)
        lease = Lease(
            request.request_id, replica.info.replica_id, request.reserved_tokens, request.num_sequences
        )
        self._ledger.acquire(lease)
        self._placement.placed(request, replica.info, now_s)
        replica.breaker.sent(request.request_id)
        self._order.dispatched(request)
        self._running[request.request_id] = _Running(request, replica.info.lane, now_s)
        return Grant(lease, replica.info, waiting.waited_s(now_s), request, self._placement.explain())

    def _awaited(
        self,
        request: SchedulingRequest,
        eligibility: Eligibility,
        candidates: Sequence[ReplicaState],
    ) -> Sequence[ReplicaState]:
        if not eligibility.is_patient:
            return ()
        return self._placement.awaited(request, candidates, lambda: self._fleet.full(eligibility, self._kept))

    def _would_wait(self, request: SchedulingRequest, eligibility: Eligibility, now_s: float) -> bool:
        # Asked at every arrival, so who has room is looked up for the one placement that weighs it.
        return self.adaptive is not None and bool(
            self._awaited(request, eligibility, self._fleet.with_room(eligibility, now_s, self._kept))
        )

    def _predicted(self, request: SchedulingRequest) -> SchedulingRequest:
        if request.predicted_output_tokens:
            return request
        predicted = self._predictor.predict(request.tenant, request.max_output_tokens)
        return replace(request, predicted_output_tokens=predicted)

    def _patience_s(self, request: SchedulingRequest) -> float:
        limits = (self._config.max_queue_wait_s, request.max_queue_s, request.ttft_deadline_s)
        return min(limit for limit in limits if limit is not None)

    def _give_up_at_s(self, request: SchedulingRequest, now_s: float) -> float:
        """Limits of waiting count what it has waited; the deadline of its first token, from its arrival."""
        limits = [self._config.max_queue_wait_s - request.waited_s]
        if request.max_queue_s is not None:
            limits.append(request.max_queue_s - request.waited_s)
        if request.ttft_deadline_s is not None:
            limits.append(request.ttft_deadline_s - request.age_s)
        return now_s + min(limits)

    def _view(self, request: SchedulingRequest, eligibility: Eligibility, now_s: float) -> LabView:
        places = self._fleet.places(eligibility)
        can_place = now_s >= self._settled_at_s
        has_room = (
            can_place
            and self._fleet.has_room(eligibility, now_s, self._kept)
            and not self._queue.has_any(lambda other: self._fleet.has_slot(other, now_s, self._kept))
            and not self._would_wait(request, eligibility, now_s)
        )
        estimators = [self._lane(name) for name in places.lanes]
        first_token = [e.first_token_s for e in estimators if e.first_token_s is not None]
        known_waits: list[float] = []
        # Counting who is ahead takes time under some orders, so only for those whom it matters to.
        if not has_room and (request.max_queue_s is not None or request.ttft_deadline_s is not None):
            num_ahead = self._num_ahead(request, places, now_s)
            waits = [e.wait_s(num_ahead, places.num_slots) for e in estimators]
            known_waits = [wait for wait in waits if wait is not None]
        return LabView(
            is_draining=self.is_draining,
            is_missing_some=now_s < self._missed_until_s,
            num_eligible=len(places.replicas),
            has_room=has_room,
            waiting=self._queue.total,
            tenant_waiting=self._queue.by_tenant.get(request.tenant, Backlog()),
            expected_wait_s=min(known_waits, default=None),
            expected_first_token_s=min(first_token, default=None),
            drain_rate_rps=self._drain_rate.rps(now_s),
        )

    def _num_ahead(self, request: SchedulingRequest, places: Places, now_s: float) -> int:
        def shares_room(other: Eligibility) -> bool:
            return other.model in places.models if other.lane is None else other.lane in places.lanes

        # By the policy's order: whom it overtakes, it need not wait for.
        return self._queue.num_ahead(request, now_s - request.age_s, shares_room)

    def _limits(self, request: SchedulingRequest) -> QueueLimits:
        reserved_share = sum(self._reserved_shares[: request.band])
        max_requests, max_tokens = self._config.max_waiting_requests, self._config.max_waiting_tokens
        share = self._queue_shares.get(request.tenant)
        return QueueLimits(
            max_requests=max_requests - int(reserved_share * max_requests),
            max_tokens=max_tokens - int(reserved_share * max_tokens),
            tenant_share=self._config.tenant_queue_share if share is None else share,
        )

    def _judge(self, lease: Lease, verdict: ReplicaVerdict, now_s: float) -> None:
        replica = self._fleet.get(lease.replica_id)
        if replica is None:
            self._ledger.forget(lease.replica_id)
        elif verdict is ReplicaVerdict.HEALTHY:
            replica.breaker.succeeded(lease.request_id)
        elif verdict in (ReplicaVerdict.FAILED, ReplicaVerdict.DIED):
            replica.breaker.failed(lease.request_id, now_s, is_dead=verdict is ReplicaVerdict.DIED)
        else:
            replica.breaker.untold(lease.request_id)

    def _learn(self, running: _Running, end: RequestEnd, now_s: float) -> None:
        request = running.request
        # One that the engine refused was answered at once: it says nothing of those that run.
        if end.verdict is ReplicaVerdict.HEALTHY and (end.first_token_s is not None or end.output_tokens):
            self._lane(running.lane).ended(now_s - running.granted_at_s, end.first_token_s)
            if end.output_tokens:
                self._predictor.learn(request.tenant, end.output_tokens)
        served = end.output_tokens
        if served is None:
            # Of a client that left without a count, what was charged at dispatch stands.
            is_untold = end.verdict is ReplicaVerdict.UNTOLD
            served = request.predicted_output_tokens if is_untold else 0
        self._order.finished(request, served)

    def _lane(self, name: str) -> LaneEstimator:
        return self._lanes.setdefault(name, LaneEstimator())

    def _note(self, refusal: Refusal, request: SchedulingRequest, now_s: float) -> None:
        self.refusals_by_lane[request.lane, refusal.reason] += 1
        self.last_refusals.append(RefusalNote(now_s, refusal.reason, request.tenant, request.lane))
