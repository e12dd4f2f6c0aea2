"""The queue against a plain list: any order of joining, leaving and being served."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from serving.core.request import SchedulingRequest
from serving.scheduler.queue import Line, WaitingQueue

LANES = (None, "batched", "sequential")
LINES = [Line(lane, plain) for lane in LANES for plain in (False, True)]


class QueueMachine(RuleBasedStateMachine):
    """The model is a list of (request, arrival), in order of arrival."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = WaitingQueue()
        self.model: list[tuple[SchedulingRequest, int]] = []
        self.now_s = 0
        self.serial = 0

    @rule(lane=st.sampled_from(LANES), plain=st.booleans(), pause_s=st.integers(0, 3))
    def join(self, lane: str | None, plain: bool, pause_s: int) -> None:
        self.now_s += pause_s
        self.serial += 1
        request = SchedulingRequest(f"q{self.serial}", lane, 1, 1, plain)
        self.queue.join(request, self.now_s)
        self.model.append((request, self.now_s))

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        entry = data.draw(st.sampled_from(self.model))
        self.model.remove(entry)
        left = self.queue.leave(entry[0].request_id)
        assert left is not None
        assert (left.request, left.arrived_at_s) == entry

    @rule()
    def leave_as_a_stranger(self) -> None:
        assert self.queue.leave("nobody") is None

    @rule(open_lines=st.sets(st.sampled_from(LINES)))
    def head_is_the_first_whose_line_is_open(self, open_lines: set[Line]) -> None:
        expected = next((request for request, _ in self.model if Line.of(request) in open_lines), None)
        found = self.queue.head(open_lines.__contains__)
        assert (found.request if found else None) == expected

    @rule(before_s=st.integers(0, 30))
    def overdue_are_all_who_came_before(self, before_s: int) -> None:
        expected = {request.request_id for request, arrived_s in self.model if arrived_s < before_s}
        assert {waiting.request.request_id for waiting in self.queue.overdue(before_s)} == expected

    @invariant()
    def holds_what_the_model_holds_in_its_order(self) -> None:
        assert [waiting.request for waiting in self.queue] == [request for request, _ in self.model]
        assert len(self.queue) == len(self.model)

    @invariant()
    def counts_by_lane_add_up_and_name_no_empty_lane(self) -> None:
        counts = self.queue.count_by_lane()
        assert sum(counts.values()) == len(self.model)
        assert all(count > 0 for count in counts.values())


TestQueue = QueueMachine.TestCase
