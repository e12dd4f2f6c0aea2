"""Order of the waiting queue: strict within a line, no blocking between lines."""

from __future__ import annotations

from serving.scheduler.queue import Line, WaitingQueue
from tests.unit.scheduler.examples import request

ANY = Line(None, needs_plain_decoding=False)
PLAIN = Line(None, needs_plain_decoding=True)
BATCHED = Line("batched", needs_plain_decoding=False)


def served(queue: WaitingQueue, *lines: Line) -> list[str]:
    """Take heads until none of these lines has one."""
    found = []
    while waiting := queue.head(lambda line: line in lines):
        queue.leave(waiting.request.request_id)
        found.append(waiting.request.request_id)
    return found


def test_first_come_first_served() -> None:
    queue = WaitingQueue()
    for name in ("z", "a", "m"):
        queue.join(request(name), 0)
    assert served(queue, ANY) == ["z", "a", "m"]


def test_lines_that_can_be_served_are_merged_in_order_of_arrival() -> None:
    queue = WaitingQueue()
    queue.join(request("1"), 0)
    queue.join(request("2", "batched"), 0)
    queue.join(request("3", needs_plain_decoding=True), 0)
    queue.join(request("4"), 0)
    assert served(queue, ANY, BATCHED, PLAIN) == ["1", "2", "3", "4"]


def test_a_line_that_cannot_be_served_blocks_no_other() -> None:
    queue = WaitingQueue()
    queue.join(request("1"), 0)
    queue.join(request("2", "batched"), 0)
    assert served(queue, BATCHED) == ["2"]
    assert [waiting.request.request_id for waiting in queue] == ["1"]


def test_order_is_by_ticket_even_when_the_clock_stands_still_or_goes_back() -> None:
    queue = WaitingQueue()
    queue.join(request("1"), 5)
    queue.join(request("2", "batched"), 4)
    assert served(queue, ANY, BATCHED) == ["1", "2"]


def test_anyone_may_leave_from_the_middle() -> None:
    queue = WaitingQueue()
    for name in "abc":
        queue.join(request(name), 0)
    left = queue.leave("b")
    assert left is not None
    assert left.request.request_id == "b"
    assert queue.leave("b") is None
    assert "b" not in queue
    assert served(queue, ANY) == ["a", "c"]
    assert len(queue) == 0


def test_one_who_comes_back_waits_at_the_end() -> None:
    queue = WaitingQueue()
    for name in "ab":
        queue.join(request(name), 0)
    queue.leave("a")
    queue.join(request("a"), 0)
    assert served(queue, ANY) == ["b", "a"]


def test_overdue_looks_into_every_line_and_takes_nobody_out() -> None:
    queue = WaitingQueue()
    queue.join(request("old"), 1)
    queue.join(request("old-pinned", "batched"), 1.5)
    queue.join(request("new"), 2)
    queue.join(request("new-pinned", "batched"), 3)
    assert {waiting.request.request_id for waiting in queue.overdue(2)} == {"old", "old-pinned"}
    assert len(queue) == 4


def test_counts_by_lane_merge_lines_of_one_lane() -> None:
    queue = WaitingQueue()
    queue.join(request("1"), 0)
    queue.join(request("2", needs_plain_decoding=True), 0)
    queue.join(request("3", "batched"), 0)
    assert queue.count_by_lane() == {None: 2, "batched": 1}
