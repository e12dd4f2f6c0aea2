"""The scheduler's decisions, event by event, on a clock that is a number."""

from __future__ import annotations

import pytest

from serving.core.errors import LeaseError, Reason
from serving.core.lane import Strategy
from serving.core.request import SchedulingRequest
from serving.scheduler.core import SchedulerCore
from serving.scheduler.ledger import Lease
from tests.unit.scheduler.examples import core, placed, replica, request


def refusal_of(made: SchedulerCore, asked: SchedulingRequest, now_s: float = 0.0) -> Reason | None:
    refusal = made.submit(asked, now_s)
    return refusal.reason if refusal else None


def load_of(made: SchedulerCore, replica_id: str) -> tuple[int, int]:
    (load,) = [load for load in made.loads() if load.info.replica_id == replica_id]
    return load.running, load.outstanding_tokens


def test_a_request_is_placed_booked_and_given_back() -> None:
    made = core(replica("r"))
    assert made.submit(request("a", tokens=30), 5) is None
    (grant,) = made.dispatch(7)
    assert (grant.lease, grant.replica.replica_id, grant.waited_s) == (Lease("a", "r", 30), "r", 2)
    assert load_of(made, "r") == (1, 30)
    made.release("a", 9)
    assert load_of(made, "r") == (0, 0)
    assert (made.num_leases, made.num_waiting) == (0, 0)


def test_placements_of_one_dispatch_see_each_other() -> None:
    made = core(replica("r1", max_running=2), replica("r2", max_running=2))
    for name in "abcd":
        made.submit(request(name), 0)
    assert sorted(where for _, where in placed(made)) == ["r1", "r1", "r2", "r2"]


def test_long_requests_are_balanced_by_tokens() -> None:
    made = core(replica("r1", max_running=9), replica("r2", max_running=9))
    made.submit(request("long", tokens=1000), 0)
    ((_, busy),) = placed(made)
    for name in "abc":
        made.submit(request(name, tokens=10), 0)
    assert busy not in {where for _, where in placed(made)}


def test_a_full_replica_is_passed_over_though_it_has_the_fewest_tokens() -> None:
    made = core(replica("small", max_running=1), replica("big", max_running=2))
    made.adopt(Lease("short", "small", 1))
    made.adopt(Lease("long", "big", 1000))
    made.submit(request("a"), 0)
    assert placed(made) == [("a", "big")]


def test_a_sequential_lane_runs_one_at_a_time_in_order() -> None:
    made = core(replica("r", "sequential", Strategy.SEQUENTIAL))
    for name in "abc":
        made.submit(request(name, "sequential"), 0)
    order = []
    while granted := placed(made):
        assert len(granted) == 1
        order.append(granted[0][0])
        made.release(granted[0][0], 0)
    assert order == ["a", "b", "c"]


def test_a_full_lane_blocks_no_other() -> None:
    made = core(replica("r1", "batched"), replica("r2", "speculative", Strategy.SPECULATIVE))
    for name in ("a", "b"):
        made.submit(request(name, "batched"), 0)
    made.submit(request("c", "speculative"), 0)
    assert placed(made) == [("a", "r1"), ("c", "r2")]


def test_the_longest_waiting_gets_the_room_whichever_line_it_is_in() -> None:
    made = core(replica("r", "batched"))
    made.submit(request("first", "batched"), 0)
    made.submit(request("second"), 0)
    made.submit(request("third", "batched"), 0)
    assert placed(made) == [("first", "r")]
    made.release("first", 0)
    assert placed(made) == [("second", "r")]


def test_plain_decoding_waits_for_a_plain_replica_though_a_drafting_one_is_idle() -> None:
    made = core(replica("p", "batched"), replica("d", "speculative", Strategy.SPECULATIVE))
    for name in ("a", "b"):
        made.submit(request(name, needs_plain_decoding=True), 0)
    assert placed(made) == [("a", "p")]
    assert made.num_waiting == 1


def test_plain_decoding_without_a_plain_lane_is_refused_unless_pinned() -> None:
    made = core(replica("d", "speculative", Strategy.SPECULATIVE))
    assert refusal_of(made, request("a", needs_plain_decoding=True)) is Reason.NO_REPLICA_READY
    assert refusal_of(made, request("b", "speculative", needs_plain_decoding=True)) is None
    assert placed(made) == [("b", "d")]


def test_a_lane_closed_to_unpinned_requests_never_gets_one() -> None:
    made = core(replica("s", "sequential", Strategy.SEQUENTIAL, takes_unpinned=False))
    assert refusal_of(made, request("a")) is Reason.NO_REPLICA_READY
    assert refusal_of(made, request("b", "sequential")) is None


def test_queue_bound_zero_runs_what_can_run_at_once_and_refuses_the_rest() -> None:
    made = core(replica("r"), max_waiting=0)
    assert refusal_of(made, request("a")) is None
    assert placed(made) == [("a", "r")]
    assert refusal_of(made, request("b")) is Reason.QUEUE_FULL
    made.release("a", 1)
    assert refusal_of(made, request("c")) is None
    assert made.refusals == {Reason.QUEUE_FULL: 1}


def test_room_is_promised_once_though_nothing_was_dispatched_yet() -> None:
    made = core(replica("r"), max_waiting=0)
    assert refusal_of(made, request("a")) is None
    assert refusal_of(made, request("b")) is Reason.QUEUE_FULL


def test_a_full_queue_still_lets_in_a_request_for_an_idle_lane() -> None:
    made = core(replica("r1", "batched"), replica("r2", "sequential", Strategy.SEQUENTIAL), max_waiting=1)
    made.submit(request("a", "batched"), 0)
    made.dispatch(0)
    made.submit(request("b", "batched"), 0)
    assert refusal_of(made, request("c", "batched")) is Reason.QUEUE_FULL
    assert refusal_of(made, request("d", "sequential")) is None
    assert placed(made) == [("d", "r2")]
    assert made.num_waiting == 1


def test_retry_after_follows_the_rate_at_which_requests_really_end() -> None:
    made = core(replica("r"), max_waiting=1)
    for second in range(4):
        made.submit(request(f"done{second}"), second)
        made.dispatch(second)
        made.release(f"done{second}", second)
    made.submit(request("runs"), 4)
    made.dispatch(4)
    made.submit(request("waits"), 4)
    refusal = made.submit(request("too-many"), 4)
    assert refusal is not None
    assert refusal.retry_after_s == 2  # the second place, at one a second


def test_an_id_that_is_waiting_or_running_cannot_be_submitted_again() -> None:
    made = core(replica("r"))
    made.submit(request("a"), 0)
    with pytest.raises(LeaseError, match="'a'"):
        made.submit(request("a"), 0)
    made.dispatch(0)
    with pytest.raises(LeaseError, match="'a'"):
        made.submit(request("a"), 0)
    made.release("a", 0)
    assert made.submit(request("a"), 0) is None


def test_double_release_is_an_error() -> None:
    made = core(replica("r"))
    made.submit(request("a"), 0)
    made.dispatch(0)
    made.release("a", 0)
    with pytest.raises(LeaseError):
        made.release("a", 0)


def test_release_of_a_waiting_request_is_an_error_and_leaves_it_waiting() -> None:
    made = core(replica("r", max_running=1))
    made.submit(request("a"), 0)
    with pytest.raises(LeaseError):
        made.release("a", 0)
    assert made.num_waiting == 1


def test_withdrawing_gives_back_whatever_it_had() -> None:
    made = core(replica("r"))
    for name in ("runs", "waits"):
        made.submit(request(name), 0)
    made.dispatch(0)
    made.withdraw("waits", 0)
    assert (made.num_waiting, made.num_leases) == (0, 1)
    made.withdraw("runs", 0)  # the grant crossed the withdrawal
    assert (made.num_waiting, made.num_leases) == (0, 0)
    made.withdraw("runs", 0)
    made.withdraw("never-seen", 0)  # refused while the word was on its way
    assert load_of(made, "r") == (0, 0)


def test_the_next_one_runs_when_a_running_request_is_withdrawn() -> None:
    made = core(replica("r"))
    for name in ("a", "b"):
        made.submit(request(name), 0)
    made.dispatch(0)
    made.withdraw("a", 0)
    assert placed(made) == [("b", "r")]


def test_who_waited_too_long_is_refused_and_nobody_else() -> None:
    made = core(replica("r"))
    for name, at_s in (("runs", 0), ("old", 1), ("new", 5)):
        made.submit(request(name), at_s)
        made.dispatch(at_s)
    assert made.expire(10.9) == []
    ((waiting, refusal),) = made.expire(11.1)
    assert waiting.request.request_id == "old"
    assert refusal.reason is Reason.QUEUE_TIMEOUT
    assert refusal.message == "waited 10 s for a replica (scheduler.max_queue_wait_s)"
    assert made.refusals == {Reason.QUEUE_TIMEOUT: 1}
    assert (made.num_waiting, made.num_leases) == (1, 1)
    made.release("runs", 12)
    assert placed(made, 12) == [("new", "r")], "the expired one is not placed any more"


def test_a_replica_that_goes_takes_nothing_more_but_its_leases_live_on() -> None:
    made = core(replica("r1", max_running=5))
    made.submit(request("a", tokens=30), 0)
    made.dispatch(0)
    made.submit(request("b"), 0)
    made.replica_gone("r1")
    assert placed(made) == []
    assert made.num_leases == 1
    assert refusal_of(made, request("c")) is Reason.NO_REPLICA_READY
    made.replica_ready(replica("r2"))
    assert placed(made) == [("b", "r2")], "who waited before the loss still waits"
    made.release("a", 0)


def test_a_replica_that_comes_back_under_its_id_still_bears_its_leases() -> None:
    made = core(replica("r"))
    made.submit(request("a", tokens=30), 0)
    made.dispatch(0)
    made.replica_gone("r")
    made.replica_gone("r")
    made.replica_ready(replica("r"))
    assert load_of(made, "r") == (1, 30)
    made.submit(request("b"), 0)
    assert placed(made) == []


def test_adopted_leases_count_before_anything_is_placed() -> None:
    made = core(replica("r1"), replica("r2"))
    made.adopt(Lease("held", "r1", 50))
    made.adopt(Lease("held", "r1", 50))
    assert load_of(made, "r1") == (1, 50)
    for name in ("a", "b"):
        made.submit(request(name), 0)
    assert placed(made) == [("a", "r2")]
    made.release("held", 0)
    assert placed(made) == [("b", "r1")]


def test_a_lease_that_is_held_is_not_granted_a_second_time() -> None:
    made = core(replica("r"))
    made.submit(request("a"), 0)
    made.adopt(Lease("a", "r", 10))
    assert placed(made) == []
    assert (made.num_waiting, made.num_leases) == (0, 1)


def test_a_restarted_scheduler_makes_requests_wait_until_it_knows_the_load() -> None:
    made = core(settled_at_s=3)
    assert refusal_of(made, request("a", "sequential"), 1) is None, "its replica may be on its way back"
    made.replica_ready(replica("s", "sequential", Strategy.SEQUENTIAL))
    assert placed(made, 1) == [], "a gateway that has not reported yet may hold a lease there"
    made.adopt(Lease("held", "s", 10))
    assert placed(made, 3) == []
    made.release("held", 4)
    assert placed(made, 4) == [("a", "s")]


def test_after_settling_a_missing_replica_is_missing() -> None:
    assert refusal_of(core(settled_at_s=3), request("a"), 3) is Reason.NO_REPLICA_READY


def test_the_queue_bound_holds_while_settling() -> None:
    made = core(settled_at_s=3, max_waiting=1)
    assert refusal_of(made, request("a"), 0) is None
    assert refusal_of(made, request("b"), 0) is Reason.QUEUE_FULL


def test_draining_refuses_the_new_and_serves_those_who_wait() -> None:
    made = core(replica("r"))
    for name in ("runs", "waits"):
        made.submit(request(name), 0)
    made.dispatch(0)
    made.is_draining = True
    assert refusal_of(made, request("late")) is Reason.DRAINING
    made.release("runs", 1)
    assert placed(made, 1) == [("waits", "r")]


def test_same_seed_same_placements() -> None:
    def run(seed: int) -> list[tuple[str, str]]:
        made = SchedulerCore(max_waiting_requests=100, max_queue_wait_s=10, seed=seed)
        for name in "abcd":
            made.replica_ready(replica(name, max_running=5))
        for number in range(20):
            made.submit(request(str(number)), 0)
        return placed(made)

    assert run(1) == run(1)
    assert run(1) != run(2)
