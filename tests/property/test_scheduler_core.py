"""The scheduler's core under any order of events: what must hold, holds, under every order and placement."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from serving.config import ORDERS, PLACEMENTS, BandConfig, SchedulerConfig
from serving.core.errors import LeaseError, Reason
from serving.core.lane import ReplicaInfo, Strategy
from serving.core.request import Lease, ReplicaVerdict, RequestEnd, SchedulingRequest
from serving.core.speculation.cost_model import CostModel
from serving.core.speculation.step_time import LinearStepTime
from serving.core.speculation.text_kind import TextKind
from serving.scheduler.core import SchedulerCore
from serving.scheduler.lane_costs import LaneCost

MAX_QUEUE_WAIT_S = 10
AGEING_TOKENS_PER_S = 10
SETTLE_S = 5


def _info(replica_id: str, lane: str, strategy: Strategy, max_running: int, unpinned: bool) -> ReplicaInfo:
    return ReplicaInfo(replica_id, lane, strategy, f"http://127.0.0.1:1/{replica_id}", max_running, unpinned)


REPLICAS = {
    info.replica_id: info
    for info in (
        _info("s", "sequential", Strategy.SEQUENTIAL, 1, False),
        _info("b1", "batched", Strategy.BATCHED, 2, True),
        _info("b2", "batched", Strategy.BATCHED, 4, True),
        _info("d", "speculative", Strategy.SPECULATIVE, 3, True),
    )
}
LANES = (None, "sequential", "batched", "speculative")
LANE_COSTS = {
    "batched": LaneCost(CostModel(LinearStepTime(0.02, 0.002, 1e-6))),
    "speculative": LaneCost(CostModel(LinearStepTime(0.02, 0.002, 1e-6)), (3,)),
}
replica_ids = st.sampled_from(sorted(REPLICAS))
asked = st.fixed_dictionaries(
    {
        "lane": st.sampled_from(LANES),
        "needs_plain_decoding": st.booleans(),
        "prompt_tokens": st.integers(0, 60),
        "max_output_tokens": st.integers(1, 40),
        "tenant": st.sampled_from("abc"),
        "band": st.integers(0, 2),
        "ttft_deadline_s": st.sampled_from([None, None, 4.0, 20.0]),
        "max_queue_s": st.sampled_from([None, None, 0.0, 3.0]),
        "prefix_blocks": st.sampled_from([(), (1,), (1, 2)]),
        "age_s": st.sampled_from([0.0, 0.0, 2.0]),
        "avoid_replica": st.none() | replica_ids,
        "kind": st.sampled_from(TextKind),
    }
)


# What makes requests candidates for the same room.
ALIKE: dict[str, Any] = {"lane": "batched", "needs_plain_decoding": False, "band": 1, "avoid_replica": None}


class CoreMachine(RuleBasedStateMachine):
    """The model knows each request's state only from the decisions that the core hands out."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.serial = 0
        self.ready: set[str] = set()
        self.waiting: dict[str, tuple[SchedulingRequest, float]] = {}  # with arrival, in order of joining
        self.running: dict[str, Lease] = {}
        self.adopted: set[str] = set()
        self.ended: dict[str, str] = {}

    @initialize(
        order=st.sampled_from(ORDERS),
        placement=st.sampled_from(PLACEMENTS),
        max_waiting=st.integers(0, 5),
        max_tokens=st.sampled_from([80, 1000]),
        share=st.sampled_from([0.3, 1.0]),
        reserved=st.sampled_from([(0.0, 0.0), (0.25, 0.25), (0.5, 0.0)]),
        settle_s=st.sampled_from([0, SETTLE_S]),
        ready=st.sets(replica_ids),
        is_stable=st.booleans(),
        are_alike=st.booleans(),
        shares_cores=st.booleans(),
    )
    def start(
        self,
        order: Any,
        placement: Any,
        max_waiting: int,
        max_tokens: int,
        share: float,
        reserved: tuple[float, float],
        settle_s: float,
        ready: set[str],
        is_stable: bool,
        are_alike: bool,
        shares_cores: bool,
    ) -> None:
        self.shares_cores = shares_cores
        # In half of the examples all requests want the same little room, so the order is put to the test: in the
        # others two that wait can hardly ever have the same.
        self.are_alike = are_alike
        if are_alike:
            max_waiting, max_tokens, share, settle_s, ready = 5, 1000, 1.0, 0, {"b1"}
        # Half of the examples lose no room: there the queue bound is exact. Otherwise who was let in because
        # of room that then went away waits, bound or no bound: the request was accepted.
        self.is_stable = is_stable
        self.reserved = [*reserved, 0.0] if order == "priority" else [0.0] * 3
        self.config = SchedulerConfig(
            order=order,
            placement=placement,
            profile="none is read",
            max_waiting_requests=max_waiting,
            max_waiting_tokens=max_tokens,
            tenant_queue_share=share,
            bands=tuple(
                BandConfig(name=name, reserved_share=part)
                for name, part in zip(("high", "normal", "low"), (*reserved, 0.0), strict=True)
            ),
            max_queue_wait_s=MAX_QUEUE_WAIT_S,
            ageing_tokens_per_s=AGEING_TOKENS_PER_S,
            breaker_failures=2,
            breaker_cooldown_s=3,
        )
        self.begin(settle_s)
        for replica_id in ready:
            self.replica_ready(replica_id)

    def begin(self, settle_s: float) -> None:
        self.settled_at_s = self.now_s + settle_s
        self.core = SchedulerCore(self.config, settled_at_s=self.settled_at_s, lane_costs=LANE_COSTS)

    # Events

    @rule(batch=st.lists(asked, min_size=1, max_size=5), dispatches=st.booleans())
    def submit(self, batch: list[dict[str, Any]], dispatches: bool) -> None:
        for fields in batch:
            self.serial += 1
            fields = fields | ALIKE if self.are_alike else fields
            self.submit_one(
                SchedulingRequest(request_id=f"q{self.serial}", waited_s=fields["age_s"], **fields)
            )
            if dispatches:  # as the service does
                self.dispatch()

    def submit_one(self, request: SchedulingRequest) -> None:
        eligible = self.places_of(request)
        refusal = self.core.submit(request, self.now_s)
        if refusal is None:
            assert eligible or self.now_s < self.settled_at_s
            assert not self.core.is_draining
            self.waiting[request.request_id] = (request, self.now_s - request.age_s)
            return
        self.end(request.request_id, "refused")
        reserved = sum(self.reserved[: request.band])
        max_requests = self.config.max_waiting_requests - int(reserved * self.config.max_waiting_requests)
        max_tokens = self.config.max_waiting_tokens - int(reserved * self.config.max_waiting_tokens)
        others = [one for one, _ in self.waiting.values()]
        mine = [one for one in others if one.tenant == request.tenant]
        match refusal.reason:
            case Reason.DRAINING:
                assert self.core.is_draining
            case Reason.NO_REPLICA_READY:
                assert not eligible
            case Reason.QUEUE_FULL:
                is_over = self.tokens(others) + request.reserved_tokens > max_tokens
                assert len(others) >= max_requests or is_over
            case Reason.TENANT_OVER_SHARE:
                share = self.config.tenant_queue_share
                is_over = self.tokens(mine) + request.reserved_tokens > int(share * max_tokens)
                assert mine
                assert len(mine) >= max(1, int(share * max_requests)) or is_over
            case Reason.DEADLINE_UNREACHABLE:
                assert request.max_queue_s is not None or request.ttft_deadline_s is not None
            case Reason.REQUEST_TOO_LONG:
                assert request.reserved_tokens > max_tokens
            case other:
                raise AssertionError(f"unexpected {other}")
        if refusal.reason in (Reason.QUEUE_FULL, Reason.TENANT_OVER_SHARE, Reason.DEADLINE_UNREACHABLE):
            assert refusal.retry_after_s is not None
            assert 1 <= refusal.retry_after_s <= 60

    @rule()
    def dispatch(self) -> None:
        for grant in self.core.dispatch(self.now_s):
            name, replica_id = grant.lease.request_id, grant.lease.replica_id
            request, arrived_s = self.waiting.pop(name)
            assert self.now_s >= self.settled_at_s
            assert replica_id == grant.replica.replica_id
            assert replica_id in self.places_of(request)
            assert grant.waited_s == self.now_s - arrived_s
            assert grant.lease.reserved_tokens == request.reserved_tokens
            assert self.num_running(replica_id) < self.limit(request, replica_id), "headroom of higher bands"
            self.check_order(request, arrived_s)
            self.running[name] = grant.lease
        if self.now_s >= self.settled_at_s:
            self.check_nobody_waits_beside_room()
            if self.is_stable:
                assert len(self.waiting) <= self.config.max_waiting_requests
                waiting = [request for request, _ in self.waiting.values()]
                assert self.tokens(waiting) <= self.config.max_waiting_tokens

    def check_order(self, granted: SchedulingRequest, arrived_s: float) -> None:
        """Of those who could have had the same room, none was overtaken that must not be."""
        for other, other_arrived_s in self.waiting.values():
            if any(getattr(other, name) != getattr(granted, name) for name in ALIKE):
                continue
            came_first = other_arrived_s < arrived_s
            match self.config.order:
                case "fcfs" | "priority":
                    assert not came_first
                case "edf":
                    due_s = [
                        at_s + (one.ttft_deadline_s if one.ttft_deadline_s is not None else 1e9)
                        for one, at_s in ((granted, arrived_s), (other, other_arrived_s))
                    ]
                    assert due_s[0] <= due_s[1]
                case "sjf":
                    # However short the others are: a token of length is worth no more than its ageing.
                    assert arrived_s - other_arrived_s <= other.max_output_tokens / AGEING_TOKENS_PER_S
                case "fair":
                    assert not (came_first and other.tenant == granted.tenant)
                case _:
                    pass  # held to its rank by test_queue.py; what it promises beyond that can stand here

    def check_nobody_waits_beside_room(self) -> None:
        breakers = {one.info.replica_id: one.breaker for one in self.core.replicas()}
        trusted = {name for name, breaker in breakers.items() if breaker.lets_through(self.now_s)}
        on_trial = {name for name, breaker in breakers.items() if breaker.opened_at_s is not None}
        may_wait = self.shares_cores and self.config.placement == "adaptive"
        for request, _ in self.waiting.values():
            places = self.places_of(request) & trusted
            full = {place for place in places if self.num_running(place) >= self.limit(request, place)}
            if may_wait and full - on_trial and request.lane is None and request.max_queue_s != 0:
                continue  # for one of these, and only behind somebody who does
            assert places == full, request

    @precondition(lambda self: self.running)
    @rule(
        data=st.data(),
        verdict=st.sampled_from(sorted(ReplicaVerdict)),
        output_tokens=st.none() | st.integers(0, 40),
        dispatches=st.booleans(),
    )
    def release(
        self, data: st.DataObject, verdict: ReplicaVerdict, output_tokens: int | None, dispatches: bool
    ) -> None:
        name = data.draw(st.sampled_from(sorted(self.running)))
        if self.is_stable and verdict is ReplicaVerdict.FAILED:
            verdict = ReplicaVerdict.UNTOLD  # an open breaker is room lost
        end = RequestEnd(verdict, 0.5 if output_tokens else None, output_tokens)
        assert self.core.release(name, self.now_s, end) == self.running.pop(name)
        self.adopted.discard(name)
        self.end(name, "released")
        if dispatches:
            self.dispatch()

    @precondition(lambda self: self.ended)
    @rule(data=st.data())
    def release_again(self, data: st.DataObject) -> None:
        with pytest.raises(LeaseError):
            self.core.release(data.draw(st.sampled_from(sorted(self.ended))), self.now_s)

    @precondition(lambda self: self.waiting or self.running)
    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted([*self.waiting, *self.running])))
        self.core.withdraw(name, self.now_s)
        self.waiting.pop(name, None)
        self.running.pop(name, None)
        self.adopted.discard(name)
        self.end(name, "withdrawn")

    @precondition(lambda self: self.ended)
    @rule(data=st.data())
    def withdraw_too_late(self, data: st.DataObject) -> None:
        self.core.withdraw(data.draw(st.sampled_from(sorted(self.ended))), self.now_s)

    @precondition(lambda self: self.waiting or self.running)
    @rule(data=st.data())
    def submit_again(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted([*self.waiting, *self.running])))
        with pytest.raises(LeaseError):
            self.core.submit(SchedulingRequest(name, None, 1, 1), self.now_s)

    @rule(seconds=st.integers(0, 8))
    def time_passes(self, seconds: int) -> None:
        self.now_s += seconds

    @rule()
    def expire(self) -> None:
        due = {
            name
            for name, (request, since_s) in self.waiting.items()
            if self.now_s >= since_s + self.patience_s(request)
        }
        expired = self.core.expire(self.now_s)
        assert {waiting.request.request_id for waiting, _ in expired} == due
        for waiting, refusal in expired:
            assert refusal.reason is Reason.QUEUE_TIMEOUT
            del self.waiting[waiting.request.request_id]
            self.end(waiting.request.request_id, "expired")

    @rule(replica_id=replica_ids)
    def replica_ready(self, replica_id: str) -> None:
        self.core.replica_ready(
            replace(REPLICAS[replica_id], cores="the machine" if self.shares_cores else "")
        )
        self.ready.add(replica_id)

    @precondition(lambda self: not self.is_stable)
    @rule(replica_id=replica_ids)
    def replica_gone(self, replica_id: str) -> None:
        self.core.replica_gone(replica_id)
        self.ready.discard(replica_id)

    @precondition(lambda self: not self.is_stable)
    @rule(replica_id=replica_ids, tokens=st.integers(1, 100))
    def adopt(self, replica_id: str, tokens: int) -> None:
        self.serial += 1
        lease = Lease(f"q{self.serial}", replica_id, tokens)
        self.core.adopt(lease)
        self.core.adopt(lease)
        self.running[lease.request_id] = lease
        self.adopted.add(lease.request_id)

    @precondition(lambda self: self.waiting and not self.is_stable)
    @rule(data=st.data(), replica_id=replica_ids)
    def adopt_one_who_waits(self, data: st.DataObject, replica_id: str) -> None:
        name = data.draw(st.sampled_from(sorted(self.waiting)))
        request, _ = self.waiting.pop(name)
        self.running[name] = Lease(name, replica_id, request.reserved_tokens)
        self.core.adopt(self.running[name])
        self.adopted.add(name)

    @precondition(lambda self: not self.is_stable and self.serial > 5)
    @rule(returning=st.sets(replica_ids))
    def restart(self, returning: set[str]) -> None:
        """A new scheduler knows nothing; gateways report leases and submit again, some replicas come back."""
        self.begin(SETTLE_S)
        self.ready = set()
        for lease in self.running.values():
            self.core.adopt(lease)
        self.adopted = set(self.running)
        again = [
            replace(request, age_s=self.now_s - at_s, waited_s=self.now_s - at_s)
            for request, at_s in self.waiting.values()
        ]
        self.waiting = {}
        for request in again:
            self.submit_one(request)
        for replica_id in returning:
            self.replica_ready(replica_id)

    @precondition(lambda self: self.serial > 25)
    @rule()
    def drain(self) -> None:
        self.core.is_draining = True

    # What must hold after each of them

    @invariant()
    def load_is_the_sum_of_live_leases(self) -> None:
        assert {one.info.replica_id for one in self.core.replicas()} == self.ready
        for one in self.core.replicas():
            mine = [x for x in self.running.values() if x.replica_id == one.info.replica_id]
            assert one.load.running == len(mine)
            assert one.load.outstanding_tokens == sum(lease.reserved_tokens for lease in mine)
        assert self.core.num_leases == len(self.running)

    @invariant()
    def placement_has_on_its_books_who_runs(self) -> None:
        if (adaptive := self.core.adaptive) is not None:
            assert adaptive.sequences_by_replica() == {name: self.num_running(name) for name in self.ready}

    @invariant()
    def only_adopted_leases_exceed_a_replicas_bound(self) -> None:
        """With max_running 1 this also says: a sequential lane never has two."""
        for replica_id, info in REPLICAS.items():
            granted = [
                lease
                for name, lease in self.running.items()
                if lease.replica_id == replica_id and name not in self.adopted
            ]
            assert len(granted) <= info.max_running

    @invariant()
    def who_waits_is_who_was_let_in(self) -> None:
        requests = [request for request, _ in self.waiting.values()]
        assert self.core.num_waiting == len(requests)
        by_lane, by_tenant = self.core.waiting_by_lane(), self.core.waiting_by_tenant()
        for lane in LANES:
            assert by_lane.get(lane, 0) == sum(request.lane == lane for request in requests)
        for tenant in "abc":
            assert by_tenant.get(tenant, 0) == sum(request.tenant == tenant for request in requests)
        bands = [sum(request.band == band for request in requests) for band in range(3)]
        assert list(self.core.waiting_by_band().values()) == bands

    @invariant()
    def demand_counts_nothing_twice(self) -> None:
        booked = sum(x.reserved_tokens for x in self.running.values() if x.replica_id in self.ready)
        waiting = self.tokens([request for request, _ in self.waiting.values()])
        assert booked <= sum(self.core.demand_tokens().values()) <= booked + waiting

    @invariant()
    def the_queue_bound_holds(self) -> None:
        """One more may stand there between its submission, into free room, and the dispatch that follows."""
        assert not self.is_stable or len(self.waiting) <= self.config.max_waiting_requests + 1

    @invariant()
    def each_request_is_in_one_place(self) -> None:
        places = [*self.waiting, *self.running, *self.ended]
        assert len(places) == len(set(places)) == self.serial

    def teardown(self) -> None:
        """Whatever happened, when all have left every count is 0."""
        for name in [*self.waiting, *self.running]:
            self.core.withdraw(name, self.now_s)
        for info in REPLICAS.values():
            self.core.replica_ready(info)
        assert (self.core.num_waiting, self.core.num_leases) == (0, 0)
        assert (self.core.waiting_by_lane(), self.core.waiting_by_tenant()) == ({}, {})
        assert self.core.waiting_groups() == []
        assert set(self.core.demand_tokens().values()) == {0}
        assert all(one.load.running == 0 == one.load.outstanding_tokens for one in self.core.replicas())
        assert all(one.breaker.probe is None for one in self.core.replicas())

    # The model's own reading of the rules

    def end(self, name: str, how: str) -> None:
        assert name not in self.ended, f"{name} ended {self.ended[name]} and then {how}"
        self.ended[name] = how

    def num_running(self, replica_id: str) -> int:
        return sum(lease.replica_id == replica_id for lease in self.running.values())

    def limit(self, request: SchedulingRequest, replica_id: str) -> int:
        slots = REPLICAS[replica_id].max_running
        return slots - int(sum(self.reserved[: request.band]) * slots)

    def places_of(self, request: SchedulingRequest) -> set[str]:
        """Ready replicas it may run on: without the one that it avoids, unless that is the only one."""
        allowed = {replica_id for replica_id in self.ready if self.is_allowed(request, replica_id)}
        return allowed - {request.avoid_replica} or allowed

    @staticmethod
    def tokens(requests: list[SchedulingRequest]) -> int:
        return sum(request.reserved_tokens for request in requests)

    @staticmethod
    def patience_s(request: SchedulingRequest) -> float:
        limits = [MAX_QUEUE_WAIT_S, request.max_queue_s, request.ttft_deadline_s]
        return min(limit for limit in limits if limit is not None)

    @staticmethod
    def is_allowed(request: SchedulingRequest, replica_id: str) -> bool:
        info = REPLICAS[replica_id]
        if request.lane is not None:
            return info.lane == request.lane
        return info.takes_unpinned and not (request.needs_plain_decoding and info.lane == "speculative")


TestCore = CoreMachine.TestCase
TestCore.settings = settings(max_examples=150, stateful_step_count=40)
