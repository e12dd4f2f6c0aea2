"""Any order of joining and leaving: the queue agrees with a plain list, under every policy."""

from __future__ import annotations

from collections import Counter
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from serving.config import ORDERS, SchedulerConfig, TenantConfig
from serving.core.request import SchedulingRequest
from serving.scheduler.order import WaitingRequest, order_policy
from serving.scheduler.queue import Eligibility, WaitingQueue

LANES = (None, "batched", "sequential")
BANDS = (0, 1)
ELIGIBILITIES = [
    Eligibility(lane, plain, band) for lane in LANES for plain in (False, True) for band in BANDS
]


class QueueMachine(RuleBasedStateMachine):
    """The model is a list of what waits, in order of joining; ranks are the policy's own."""

    def __init__(self) -> None:
        super().__init__()
        self.model: list[WaitingRequest] = []
        self.now_s = 0
        self.serial = 0

    @initialize(order=st.sampled_from(ORDERS))
    def start(self, order: Any) -> None:
        config = SchedulerConfig(
            order=order, ageing_tokens_per_s=2, tenants=(TenantConfig(name="a", weight=2),)
        )
        self.policy = order_policy(config)
        self.queue = WaitingQueue(self.policy)

    @rule(
        eligibility=st.sampled_from(ELIGIBILITIES),
        tenant=st.sampled_from("abc"),
        output=st.integers(1, 9),
        deadline_s=st.sampled_from([None, 1.0, 5.0]),
        age_s=st.integers(0, 5),
        patience_s=st.integers(0, 9),
    )
    def join(
        self,
        eligibility: Eligibility,
        tenant: str,
        output: int,
        deadline_s: float | None,
        age_s: int,
        patience_s: int,
    ) -> None:
        self.serial += 1
        request = SchedulingRequest(
            request_id=f"q{self.serial}",
            lane=eligibility.lane,
            prompt_tokens=1,
            max_output_tokens=output,
            needs_plain_decoding=eligibility.needs_plain_decoding,
            tenant=tenant,
            band=eligibility.band,
            ttft_deadline_s=deadline_s,
            predicted_output_tokens=output,
        )
        arrived_at_s = self.now_s - age_s
        waiting = self.queue.join(request, arrived_at_s, arrived_at_s + patience_s)
        assert (waiting.request, waiting.arrived_at_s) == (request, arrived_at_s)
        self.model.append(waiting)

    @rule(pause_s=st.integers(0, 3))
    def time_passes(self, pause_s: int) -> None:
        self.now_s += pause_s

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        waiting = data.draw(st.sampled_from(self.model))
        self.model.remove(waiting)
        assert self.queue.leave(waiting.request.request_id) is waiting

    @rule()
    def leave_as_a_stranger(self) -> None:
        assert self.queue.leave("nobody") is None

    @rule(open_to=st.sets(st.sampled_from(ELIGIBILITIES)))
    def serve(self, open_to: set[Eligibility]) -> None:
        """The head is the lowest rank of the open subqueues; serving it changes the ranks of `fair`."""
        open_ones = [one for one in self.model if Eligibility.of(one.request) in open_to]
        head = self.queue.head(open_to.__contains__)
        assert head is min(open_ones, key=self.policy.rank, default=None)
        assert self.queue.has_any(open_to.__contains__) == bool(open_ones)
        if head is not None:
            self.queue.leave(head.request.request_id)
            self.model.remove(head)
            self.policy.dispatched(head.request)

    @rule(tenant=st.sampled_from("abc"), predicted=st.integers(1, 9), output=st.integers(0, 20))
    def finish(self, tenant: str, predicted: int, output: int) -> None:
        request = SchedulingRequest("done", None, 1, 9, tenant=tenant, predicted_output_tokens=predicted)
        self.policy.finished(request, output)

    @invariant()
    def holds_what_the_model_holds_in_its_order(self) -> None:
        assert list(self.queue) == self.model
        assert len(self.queue) == len(self.model)

    @invariant()
    def out_of_patience_are_all_whose_time_has_come(self) -> None:
        expected = sorted(
            (one for one in self.model if one.give_up_at_s <= self.now_s),
            key=lambda one: (one.give_up_at_s, one.ticket),
        )
        assert self.queue.out_of_patience(self.now_s) == expected

    @invariant()
    def books_add_up_and_name_nobody_without_a_request(self) -> None:
        requests = [one.request for one in self.model]
        tokens = sum(request.reserved_tokens for request in requests)
        assert (self.queue.total.requests, self.queue.total.tokens) == (len(requests), tokens)
        assert self.queue.count_by_lane() == Counter(request.lane for request in requests)
        assert self.queue.count_by_band() == Counter(request.band for request in requests)
        by_tenant = {tenant: backlog.requests for tenant, backlog in self.queue.by_tenant.items()}
        assert by_tenant == Counter(request.tenant for request in requests)
        by_group = {tuple(group): backlog.requests for group, backlog in self.queue.by_group.items()}
        assert by_group == Counter((request.lane, request.band, request.tenant) for request in requests)
        assert sum(backlog.tokens for backlog in self.queue.by_group.values()) == tokens


TestQueue = QueueMachine.TestCase
