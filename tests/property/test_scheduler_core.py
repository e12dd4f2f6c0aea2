"""The scheduler's core under any order of events: what must hold, holds."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from serving.core.errors import LeaseError, Reason
from serving.core.lane import ReplicaInfo, Strategy
from serving.core.request import SchedulingRequest
from serving.scheduler.core import SchedulerCore
from serving.scheduler.ledger import Lease

MAX_QUEUE_WAIT_S = 10


def _info(replica_id: str, lane: str, strategy: Strategy, max_running: int, unpinned: bool) -> ReplicaInfo:
    return ReplicaInfo(replica_id, lane, strategy, f"http://127.0.0.1:1/{replica_id}", max_running, unpinned)


REPLICAS = {
    info.replica_id: info
    for info in (
        _info("s", "sequential", Strategy.SEQUENTIAL, 1, False),
        _info("b1", "batched", Strategy.BATCHED, 2, True),
        _info("b2", "batched", Strategy.BATCHED, 2, True),
        _info("d", "speculative", Strategy.SPECULATIVE, 3, True),
    )
}
LANES = (None, "sequential", "batched", "speculative")
replica_ids = st.sampled_from(sorted(REPLICAS))
asked = st.tuples(st.sampled_from(LANES), st.booleans(), st.integers(1, 100))


class CoreMachine(RuleBasedStateMachine):
    """The model knows each request's state only from the decisions that the core hands out."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0
        self.serial = 0
        self.ready: set[str] = set()
        self.waiting: dict[str, tuple[SchedulingRequest, int]] = {}  # in order of arrival
        self.running: dict[str, Lease] = {}
        self.adopted: set[str] = set()
        self.ended: dict[str, str] = {}

    @initialize(
        max_waiting=st.integers(0, 4),
        settled_at_s=st.sampled_from([0, 5]),
        ready=st.sets(replica_ids),
        is_stable=st.booleans(),
    )
    def start(self, max_waiting: int, settled_at_s: int, ready: set[str], is_stable: bool) -> None:
        # Half of the examples lose no room: there the queue bound is exact. Otherwise who was let in because
        # of room that then went away waits, bound or no bound: the request was accepted.
        self.is_stable = is_stable
        self.max_waiting = max_waiting
        self.settled_at_s = settled_at_s
        self.core = SchedulerCore(
            max_waiting_requests=max_waiting,
            max_queue_wait_s=MAX_QUEUE_WAIT_S,
            seed=0,
            settled_at_s=settled_at_s,
        )
        for replica_id in ready:
            self.replica_ready(replica_id)

    # Events

    @rule(batch=st.lists(asked, min_size=1, max_size=5), dispatches=st.booleans())
    def submit(self, batch: list[tuple[str | None, bool, int]], dispatches: bool) -> None:
        for lane, plain, tokens in batch:
            self.submit_one(lane, plain, tokens)
            if dispatches:  # as the service does
                self.dispatch()

    def submit_one(self, lane: str | None, plain: bool, tokens: int) -> None:
        self.serial += 1
        request = SchedulingRequest(f"q{self.serial}", lane, tokens, 1, plain)
        eligible = [replica_id for replica_id in self.ready if self.is_allowed(request, replica_id)]
        refusal = self.core.submit(request, self.now_s)
        if refusal is None:
            assert eligible or self.now_s < self.settled_at_s
            self.waiting[request.request_id] = (request, self.now_s)
            return
        self.end(request.request_id, "refused")
        match refusal.reason:
            case Reason.DRAINING:
                assert self.core.is_draining
            case Reason.NO_REPLICA_READY:
                assert not eligible
            case Reason.QUEUE_FULL:
                assert len(self.waiting) >= self.max_waiting
                assert refusal.retry_after_s is not None
                assert 1 <= refusal.retry_after_s <= 60
            case other:
                raise AssertionError(f"unexpected {other}")

    @rule()
    def dispatch(self) -> None:
        for grant in self.core.dispatch(self.now_s):
            name, replica_id = grant.lease.request_id, grant.lease.replica_id
            request, arrived_s = self.waiting.pop(name)
            assert self.now_s >= self.settled_at_s
            assert replica_id == grant.replica.replica_id
            assert replica_id in self.ready
            assert self.is_allowed(request, replica_id)
            assert grant.waited_s == self.now_s - arrived_s
            assert grant.lease.reserved_tokens == request.reserved_tokens
            assert self.num_running(replica_id) < REPLICAS[replica_id].max_running
            earlier = [
                other
                for other, (asked, _) in self.waiting.items()
                if (asked.lane, asked.needs_plain_decoding) == (request.lane, request.needs_plain_decoding)
                and int(other[1:]) < int(name[1:])
            ]
            assert earlier == [], "strictly first come first served within a line"
            self.running[name] = grant.lease
        if self.now_s >= self.settled_at_s:
            self.check_nobody_waits_beside_room()
            assert len(self.waiting) <= self.max_waiting or not self.is_stable

    def check_nobody_waits_beside_room(self) -> None:
        for request, _ in self.waiting.values():
            for replica_id in self.ready:
                has_room = self.num_running(replica_id) < REPLICAS[replica_id].max_running
                assert not (has_room and self.is_allowed(request, replica_id)), (request, replica_id)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.running)))
        assert self.core.release(name, self.now_s) == self.running.pop(name)
        self.adopted.discard(name)
        self.end(name, "released")

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
        due = {name for name, (_, since_s) in self.waiting.items() if self.now_s - since_s > MAX_QUEUE_WAIT_S}
        expired = self.core.expire(self.now_s)
        assert {waiting.request.request_id for waiting, _ in expired} == due
        for waiting, refusal in expired:
            assert refusal.reason is Reason.QUEUE_TIMEOUT
            del self.waiting[waiting.request.request_id]
            self.end(waiting.request.request_id, "expired")

    @rule(replica_id=replica_ids)
    def replica_ready(self, replica_id: str) -> None:
        self.core.replica_ready(REPLICAS[replica_id])
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

    @precondition(lambda self: self.serial > 25)
    @rule()
    def drain(self) -> None:
        self.core.is_draining = True

    # What must hold after each of them

    @invariant()
    def load_is_the_sum_of_live_leases(self) -> None:
        assert {load.info.replica_id for load in self.core.loads()} == self.ready
        for load in self.core.loads():
            mine = [x for x in self.running.values() if x.replica_id == load.info.replica_id]
            assert load.running == len(mine)
            assert load.outstanding_tokens == sum(lease.reserved_tokens for lease in mine)
        assert self.core.num_leases == len(self.running)

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
        assert self.core.num_waiting == len(self.waiting)
        by_lane = self.core.waiting_by_lane()
        for lane in LANES:
            assert by_lane.get(lane, 0) == sum(request.lane == lane for request, _ in self.waiting.values())

    @invariant()
    def the_queue_bound_holds(self) -> None:
        """One more may stand there between its submission, into free room, and the dispatch that follows."""
        assert not self.is_stable or len(self.waiting) <= self.max_waiting + 1

    @invariant()
    def each_request_is_in_one_place(self) -> None:
        places = [*self.waiting, *self.running, *self.ended]
        assert len(places) == len(set(places)) == self.serial

    def teardown(self) -> None:
        """Whatever happened, when all have left every count is 0 and the lab serves as if new."""
        for name in [*self.waiting, *self.running]:
            self.core.withdraw(name, self.now_s)
        self.core.is_draining = False
        for replica_id in REPLICAS:
            self.core.replica_ready(REPLICAS[replica_id])
        assert (self.core.num_waiting, self.core.num_leases, self.core.waiting_by_lane()) == (0, 0, {})
        assert all(load.running == 0 == load.outstanding_tokens for load in self.core.loads())

    # The model's own reading of the rules

    def end(self, name: str, how: str) -> None:
        assert name not in self.ended, f"{name} ended {self.ended[name]} and then {how}"
        self.ended[name] = how

    def num_running(self, replica_id: str) -> int:
        return sum(lease.replica_id == replica_id for lease in self.running.values())

    @staticmethod
    def is_allowed(request: SchedulingRequest, replica_id: str) -> bool:
        info = REPLICAS[replica_id]
        if request.lane is not None:
            return info.lane == request.lane
        return info.takes_unpinned and not (request.needs_plain_decoding and info.lane == "speculative")


TestCore = CoreMachine.TestCase
TestCore.settings = settings(max_examples=150, stateful_step_count=40)
