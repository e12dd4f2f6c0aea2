"""The waiting queue: no blocking between subqueues, and anyone may leave. Orders are tested in test_order."""

from __future__ import annotations

from serving.scheduler.order import FirstComeFirstServed
from serving.scheduler.queue import Backlog, Eligibility, WaitingQueue
from tests.unit.scheduler.examples import request

ANY = Eligibility(None, needs_plain_decoding=False, band=0)
PLAIN = Eligibility(None, needs_plain_decoding=True, band=0)
BATCHED = Eligibility("batched", needs_plain_decoding=False, band=0)


def queued(*ids: str) -> WaitingQueue:
    queue = WaitingQueue(FirstComeFirstServed())
    for name in ids:
        queue.join(request(name), 0, 600)
    return queue


def served(queue: WaitingQueue, *open_to: Eligibility) -> list[str]:
    """Take heads until none of these has one."""
    found = []
    while waiting := queue.head(lambda eligibility: eligibility in open_to):
        assert queue.has_any(lambda eligibility: eligibility in open_to)
        queue.leave(waiting.request.request_id)
        found.append(waiting.request.request_id)
    assert not queue.has_any(lambda eligibility: eligibility in open_to)
    return found


def test_first_come_first_served() -> None:
    assert served(queued("z", "a", "m"), ANY) == ["z", "a", "m"]


def test_subqueues_that_can_be_served_are_merged_in_order() -> None:
    queue = queued("1")
    queue.join(request("2", "batched"), 0, 600)
    queue.join(request("3", needs_plain_decoding=True), 0, 600)
    queue.join(request("4"), 0, 600)
    assert served(queue, ANY, BATCHED, PLAIN) == ["1", "2", "3", "4"]


def test_a_line_that_cannot_be_served_blocks_no_other() -> None:
    queue = queued("1")
    queue.join(request("2", "batched"), 0, 600)
    assert served(queue, BATCHED) == ["2"]
    assert [waiting.request.request_id for waiting in queue] == ["1"]


def test_an_earlier_arrival_goes_first_though_it_joins_later() -> None:
    queue = WaitingQueue(FirstComeFirstServed())
    queue.join(request("new"), 5, 600)
    queue.join(request("rerouted", "batched"), 4, 600)
    assert served(queue, ANY, BATCHED) == ["rerouted", "new"]


def test_anyone_may_leave_from_the_middle() -> None:
    queue = queued("a", "b", "c")
    left = queue.leave("b")
    assert left is not None
    assert left.request.request_id == "b"
    assert queue.leave("b") is None
    assert "b" not in queue
    assert served(queue, ANY) == ["a", "c"]
    assert len(queue) == 0


def test_one_who_comes_back_waits_at_the_end() -> None:
    queue = queued("a", "b")
    queue.leave("a")
    queue.join(request("a"), 0, 600)
    assert served(queue, ANY) == ["b", "a"]


def test_out_of_patience_looks_into_every_line_the_most_overdue_first_and_takes_nobody_out() -> None:
    queue = WaitingQueue(FirstComeFirstServed())
    queue.join(request("later"), 0, 20)
    queue.join(request("pinned", "batched"), 0, 10)
    queue.join(request("first", "batched"), 5, 9)
    queue.join(request("patient"), 0, 20.1)
    assert [one.request.request_id for one in queue.out_of_patience(20)] == ["first", "pinned", "later"]
    assert len(queue) == 4


def test_how_many_go_before_counts_the_subqueues_that_compete() -> None:
    queue = queued("1", "2")
    queue.join(request("3", "batched"), 0, 600)
    queue.join(request("4"), 9, 600)
    newcomer = request("x")
    assert queue.num_ahead(newcomer, 5, lambda eligibility: eligibility == ANY) == 2
    assert queue.num_ahead(newcomer, 5, lambda _: True) == 3
    assert queue.num_ahead(newcomer, 10, lambda _: True) == 4


def test_books_are_kept_by_lane_tenant_and_band_and_name_nobody_without_a_request() -> None:
    queue = WaitingQueue(FirstComeFirstServed())
    queue.join(request("1", tenant="a", tokens=10), 0, 600)
    queue.join(request("2", tenant="b", tokens=20, needs_plain_decoding=True), 0, 600)
    queue.join(request("3", "batched", tenant="a", tokens=30, band=1), 0, 600)
    assert queue.total == Backlog(3, 60)
    assert queue.by_tenant == {"a": Backlog(2, 40), "b": Backlog(1, 20)}
    assert queue.by_choice == {(None, ""): Backlog(2, 30), ("batched", ""): Backlog(1, 30)}
    assert (queue.count_by_lane(), queue.count_by_band()) == ({None: 2, "batched": 1}, {0: 2, 1: 1})
    for name in "123":
        queue.leave(name)
    assert (queue.total, queue.by_tenant, queue.by_choice) == (Backlog(), {}, {})
    assert (queue.count_by_lane(), queue.count_by_band()) == ({}, {})
