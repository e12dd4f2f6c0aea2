"""The scheduler's decisions, event by event, on a clock that is a number."""

from __future__ import annotations

from typing import Any

import pytest

from serving.config import ORDERS
from serving.core.errors import LeaseError, Reason
from serving.core.lane import Strategy
from serving.core.request import Lease, ReplicaVerdict, RequestEnd, SchedulingRequest
from serving.scheduler.core import SchedulerCore, WaitingGroup
from tests.unit.scheduler.examples import core, placed, replica, request


def refusal_of(made: SchedulerCore, asked: SchedulingRequest, now_s: float = 0.0) -> Reason | None:
    refusal = made.submit(asked, now_s)
    return refusal.reason if refusal else None


def load_of(made: SchedulerCore, replica_id: str) -> tuple[int, int]:
    (load,) = [one.load for one in made.replicas() if one.info.replica_id == replica_id]
    return load.running, load.outstanding_tokens


def test_a_request_is_placed_booked_and_given_back() -> None:
    made = core(replica("r"))
    assert made.submit(request("a", tokens=30), 5) is None
    (grant,) = made.dispatch(7)
    assert (grant.lease, grant.replica.replica_id, grant.waited_s) == (Lease("a", "r", 30), "r", 2)
    assert grant.request.request_id == "a"
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


def test_a_request_that_pins_no_lane_goes_to_lanes_of_its_model() -> None:
    made = core(replica("own", max_running=9), replica("theirs", "other", max_running=9, model="tuned"))
    for number in range(4):
        made.submit(request(f"a{number}"), 0)
        made.submit(request(f"b{number}", model="tuned"), 0)
    assert sorted(placed(made)) == [(f"a{n}", "own") for n in range(4)] + [
        (f"b{n}", "theirs") for n in range(4)
    ]
    made.replica_gone("theirs")
    assert refusal_of(made, request("c", model="tuned"), 60) is Reason.NO_REPLICA_READY
    assert refusal_of(made, request("d"), 60) is None


def test_who_waits_for_another_model_is_not_ahead() -> None:
    made = core(replica("own"), replica("theirs", "other", model="tuned"), max_queue_wait_s=600)
    for name, model in (("a", ""), ("b", "tuned")):
        made.submit(request(name, model=model), 0)
    placed(made)
    for name in ("a", "b"):
        made.release(name, 10, RequestEnd(ReplicaVerdict.HEALTHY, 1.0, 1))
        made.submit(request(f"next-{name}", model="" if name == "a" else "tuned"), 10)
    placed(made, 10)
    for number in range(5):
        made.submit(request(f"waits{number}", model="tuned"), 10)
    assert refusal_of(made, request("e", max_queue_s=15.0), 10) is None
    assert refusal_of(made, request("f", model="tuned", max_queue_s=15.0), 10) is Reason.DEADLINE_UNREACHABLE
    assert refusal_of(made, request("g", "batched", max_queue_s=25.0), 10) is None


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
    ((waiting, refusal),) = made.expire(11)
    assert waiting.request.request_id == "old"
    assert refusal.reason is Reason.QUEUE_TIMEOUT
    assert refusal.message == (
        "waited 10.0 s for a replica; the limit was 10 s "
        "(the request's deadline, x-max-queue-ms or scheduler.max_queue_wait_s)"
    )
    assert made.refusals == {Reason.QUEUE_TIMEOUT: 1}
    assert made.last_refusals[-1].at_s == 11
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


def test_a_replica_that_may_be_on_its_way_back_is_waited_for_a_moment() -> None:
    made = core(replica("r"))
    made.replica_gone("r")
    made.expect_back(until_s=3)
    assert refusal_of(made, request("a"), 2.9) is None
    assert refusal_of(made, request("b"), 3) is Reason.NO_REPLICA_READY
    made.replica_ready(replica("r"))
    assert placed(made, 3) == [("a", "r")]


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
        made = core(*(replica(name, max_running=5) for name in "abcd"), seed=seed)
        for number in range(20):
            made.submit(request(str(number)), 0)
        return placed(made)

    assert run(1) == run(1)
    assert run(1) != run(2)


def test_a_replica_that_comes_back_is_not_taken_to_know_a_prompt() -> None:
    made = core(
        *(replica(name, max_running=9) for name in "ab"), placement="prefix_affinity", prefix_gap_tokens=1000
    )
    made.submit(request("first", prefix_blocks=(1, 2)), 0)
    ((_, knew),) = placed(made)
    made.replica_gone(knew)
    made.replica_ready(replica(knew, max_running=9))
    made.submit(request("again", prefix_blocks=(1, 2)), 0)
    ((_, where),) = placed(made)
    assert where != knew, "its cache is empty, and the other has nothing to do"


# Order, as the core puts it to work


def run_one(made: SchedulerCore, name: str, *, starts_s: float, ends_s: float, **end: Any) -> None:
    """A request that is placed at once and ends well."""
    tenant = end.pop("tenant", "default")
    assert made.submit(request(name, tenant=tenant, max_output_tokens=1000), starts_s) is None
    assert [one for one, _ in placed(made, starts_s)] == [name]
    made.release(name, ends_s, RequestEnd(**{"verdict": ReplicaVerdict.HEALTHY} | end))


@pytest.mark.parametrize(
    ("order", "served"),
    [
        ("fcfs", ["long", "short", "urgent", "high"]),
        ("priority", ["high", "long", "short", "urgent"]),
        ("sjf", ["short", "high", "urgent", "long"]),
        ("edf", ["urgent", "long", "short", "high"]),
    ],
)
def test_the_configured_order_decides(order: str, served: list[str]) -> None:
    made = core(replica("r"), order=order, ageing_tokens_per_s=1)
    made.adopt(Lease("busy", "r", 1))
    made.submit(request("long", max_output_tokens=900, band=1), 0)
    made.submit(request("short", max_output_tokens=10, band=1), 0)
    made.submit(request("urgent", max_output_tokens=200, band=1, ttft_deadline_s=9.0), 0)
    made.submit(request("high", max_output_tokens=100, band=0), 0)
    made.release("busy", 0)
    found = []
    while granted := placed(made):
        found += [name for name, _ in granted]
        made.release(granted[0][0], 0)
    assert found == served


def test_fair_lets_a_tenant_with_little_past_one_with_much() -> None:
    made = core(replica("r"), order="fair")
    for number in range(5):
        made.submit(request(f"much{number}", tenant="much"), 0)
    made.submit(request("little", tenant="little"), 0)
    assert placed(made) == [("much0", "r")]
    made.release("much0", 1)
    assert placed(made) == [("little", "r")]


@pytest.mark.parametrize(
    ("end", "output_tokens"),
    [
        (RequestEnd(ReplicaVerdict.HEALTHY, 0.1, 30), 30),
        (RequestEnd(ReplicaVerdict.HEALTHY), 0),  # a 4xx of the engine
        (RequestEnd(ReplicaVerdict.FAILED), 0),
        (RequestEnd(ReplicaVerdict.FAILED, 0.1, 7), 7),
        (RequestEnd(ReplicaVerdict.UNTOLD, 0.1, 7), 7),
        (RequestEnd(ReplicaVerdict.UNTOLD), 50),  # nobody knows: what was predicted
    ],
)
def test_fair_charges_what_a_request_was_served(end: RequestEnd, output_tokens: int) -> None:
    """Seen by who goes next, against a tenant that was served as many tokens, and one more."""
    for others_output, goes_first in ((output_tokens, "b2"), (output_tokens + 1, "a2")):
        made = core(replica("r", max_running=2), order="fair")
        for name in ("a1", "b1"):
            made.submit(request(name, tenant=name[0], prompt_tokens=10, max_output_tokens=50), 0)
        assert len(placed(made)) == 2
        for name in ("b2", "a2"):  # of equals, the earlier
            made.submit(request(name, tenant=name[0]), 0)
        made.release("a1", 0, end)
        made.release("b1", 0, RequestEnd(ReplicaVerdict.HEALTHY, 0.1, others_output))
        assert placed(made)[0][0] == goes_first


def test_output_is_predicted_by_tenant_and_only_from_answers_that_were_whole() -> None:
    made = core(replica("r"), order="sjf", ageing_tokens_per_s=0)
    run_one(made, "t1", starts_s=0, ends_s=1, tenant="terse", output_tokens=5)
    run_one(made, "c1", starts_s=1, ends_s=2, tenant="chatty", output_tokens=500)
    run_one(
        made, "x1", starts_s=2, ends_s=3, tenant="terse", output_tokens=900, verdict=ReplicaVerdict.UNTOLD
    )
    made.adopt(Lease("busy", "r", 1))
    for tenant in ("chatty", "unknown", "terse"):
        made.submit(request(tenant, tenant=tenant, max_output_tokens=200), 3)
    made.submit(request("told", tenant="terse", max_output_tokens=2), 3)
    made.release("busy", 3)
    found = []
    while granted := placed(made, 3):
        found.append(granted[0][0])
        made.release(granted[0][0], 3)
    assert found == ["told", "terse", "chatty", "unknown"]


# Bands


def test_the_lower_bands_leave_slots_and_places_to_the_higher_ones() -> None:
    bands = [
        {"name": "high", "reserved_share": 0.25},
        {"name": "normal", "reserved_share": 0.25},
        {"name": "low"},
    ]
    made = core(replica("r", max_running=4), max_waiting=4, order="priority", bands=bands, default_band="low")
    names = {0: "high", 1: "normal", 2: "low"}
    running, waiting = {0: 0, 1: 0, 2: 0}, {}
    for band in (2, 1, 0):
        while (
            refusal_of(made, request(f"{names[band]}-{made.num_leases}-{made.num_waiting}", band=band))
            is None
        ):
            running[band] += len(placed(made))
        waiting[names[band]] = made.waiting_by_band()[names[band]]
    assert running == {2: 2, 1: 1, 0: 1}
    assert waiting == {"low": 2, "normal": 1, "high": 1}


def test_the_lower_bands_leave_tokens_to_the_higher_ones() -> None:
    bands = [{"name": "high", "reserved_share": 0.25}, {"name": "low"}]
    made = core(replica("r"), bands=bands, order="priority", default_band="low", max_waiting_tokens=100)
    made.adopt(Lease("busy", "r", 1))
    assert refusal_of(made, request("a", tokens=75, band=1)) is None
    assert refusal_of(made, request("b", tokens=1, band=1)) is Reason.QUEUE_FULL
    assert refusal_of(made, request("c", tokens=25, band=0)) is None


def test_reserved_shares_mean_nothing_where_bands_do_not_go_first() -> None:
    bands = [{"name": "high", "reserved_share": 0.5}, {"name": "normal"}]
    made = core(replica("r", max_running=2), bands=bands, order="fcfs")
    for name in ("a", "b"):
        made.submit(request(name, band=1), 0)
    assert len(placed(made)) == 2


def test_a_large_reserved_share_leaves_the_rest_and_not_nothing() -> None:
    """1 - 0.9 is less than 0.1 to a computer."""
    bands = [{"name": "high", "reserved_share": 0.9}, {"name": "normal"}]
    made = core(replica("r"), max_waiting=10, bands=bands, order="priority")
    made.adopt(Lease("busy", "r", 1))
    assert refusal_of(made, request("a", band=1)) is None
    assert refusal_of(made, request("b", band=1)) is Reason.QUEUE_FULL
    made.withdraw("a", 0)
    made.withdraw("busy", 0)


def test_who_waits_for_what_is_told_by_group_the_largest_first() -> None:
    bands = [{"name": "high"}, {"name": "low"}]
    made = core(replica("r"), bands=bands, order="priority", default_band="low")
    made.adopt(Lease("busy", "r", 1))
    for name, lane, tenant, band in (("1", None, "a", 0), ("2", "batched", "b", 1), ("3", "batched", "b", 1)):
        made.submit(request(name, lane, tokens=20, tenant=tenant, band=band), 0)
    assert made.waiting_groups() == [
        WaitingGroup("batched", "low", "b", requests=2, tokens=40),
        WaitingGroup(None, "high", "a", requests=1, tokens=20),
    ]
    assert made.waiting_by_lane() == {None: 1, "batched": 2}
    assert made.waiting_by_band() == {"high": 1, "low": 2}


# Admission, with what the core knows


def test_one_tenant_cannot_fill_the_queue_for_the_others() -> None:
    tenants = [{"name": "vip", "queue_share": 0.75}]
    made = core(replica("r"), max_waiting=9, tenant_queue_share=0.25, tenants=tenants)
    made.adopt(Lease("busy", "r", 1))
    accepted = {}
    for tenant in ("flood", "vip", "late"):
        accepted[tenant] = 0
        while (reason := refusal_of(made, request(f"{tenant}{accepted[tenant]}", tenant=tenant))) is None:
            accepted[tenant] += 1
        assert reason is (Reason.QUEUE_FULL if tenant == "late" else Reason.TENANT_OVER_SHARE)
    assert accepted == {"flood": 2, "vip": 6, "late": 1}
    assert made.waiting_by_tenant() == accepted


def test_the_queue_is_bounded_by_tokens_too() -> None:
    made = core(replica("r"), max_waiting_tokens=100)
    made.adopt(Lease("busy", "r", 1))
    assert refusal_of(made, request("a", tokens=60)) is None
    assert refusal_of(made, request("b", tokens=41)) is Reason.QUEUE_FULL
    assert refusal_of(made, request("c", tokens=40)) is None
    assert refusal_of(made, request("d", tokens=101)) is Reason.REQUEST_TOO_LONG
    made.withdraw("a", 0)
    assert refusal_of(made, request("e", tokens=60)) is None


def test_a_deadline_is_judged_by_who_is_ahead_in_the_policys_order() -> None:
    """Requests hold the one slot for 4 s, so with two ahead the third begins after 12 s or so."""
    made = core(replica("r"), order="edf", max_queue_wait_s=600)
    for number in range(3):
        run_one(made, f"done{number}", starts_s=4 * number, ends_s=4 * number + 4, first_token_s=1.0)
    made.adopt(Lease("busy", "r", 1))
    for name in ("a", "b"):
        assert refusal_of(made, request(name, ttft_deadline_s=50.0), 12) is None
    assert refusal_of(made, request("c", ttft_deadline_s=55.0, age_s=45.0), 12) is None, "it goes first"
    assert refusal_of(made, request("d", ttft_deadline_s=4.5), 12) is Reason.DEADLINE_UNREACHABLE
    assert refusal_of(made, request("e", max_queue_s=12.0), 12) is Reason.DEADLINE_UNREACHABLE
    assert refusal_of(made, request("f", max_queue_s=17.0), 12) is None


def test_who_waits_for_a_lane_is_ahead_of_who_would_take_any() -> None:
    made = core(replica("r"), max_queue_wait_s=600)
    run_one(made, "done", starts_s=0, ends_s=4, first_token_s=1.0)
    made.adopt(Lease("busy", "r", 1))
    for name in "abc":
        assert refusal_of(made, request(name, "batched"), 4) is None
    for lane in ("batched", None):
        assert refusal_of(made, request("d", lane, max_queue_s=15.0), 4) is Reason.DEADLINE_UNREACHABLE
    assert refusal_of(made, request("e", max_queue_s=17.0), 4) is None


def test_a_lane_s_wait_is_expected_from_its_own_requests() -> None:
    made = core(replica("s", "slow"), replica("f", "fast"), max_queue_wait_s=600)
    for lane, held_s in (("slow", 100), ("fast", 1)):
        assert refusal_of(made, request(lane, lane)) is None
        made.dispatch(0)
        made.release(lane, held_s, RequestEnd(ReplicaVerdict.HEALTHY, 0.1))
        made.adopt(Lease(f"busy {lane}", lane[0], 1))
    assert refusal_of(made, request("a", "fast", max_queue_s=9.0), 100) is None
    assert refusal_of(made, request("b", "slow", max_queue_s=9.0), 100) is Reason.DEADLINE_UNREACHABLE


def test_requests_that_an_engine_refused_say_nothing_of_the_wait() -> None:
    made = core(replica("r"), max_queue_wait_s=600)
    run_one(made, "done", starts_s=0, ends_s=10, first_token_s=1.0)
    for number in range(30):
        run_one(made, f"refused{number}", starts_s=10, ends_s=10.005)
    made.adopt(Lease("busy", "r", 1))
    assert refusal_of(made, request("a", max_queue_s=9.0), 11) is Reason.DEADLINE_UNREACHABLE


def test_a_slow_first_answer_does_not_lock_everyone_out() -> None:
    made = core(replica("r"))
    run_one(made, "cold", starts_s=0, ends_s=9, first_token_s=8.0)
    assert refusal_of(made, request("a", ttft_deadline_s=1.0), 9) is None


def test_run_now_or_be_refused() -> None:
    made = core(replica("r"))
    assert refusal_of(made, request("a", max_queue_s=0.0)) is None
    assert placed(made) == [("a", "r")]
    assert refusal_of(made, request("b", max_queue_s=0.0)) is Reason.DEADLINE_UNREACHABLE
    assert made.expire(0) == []


def test_nobody_is_run_now_while_the_scheduler_settles() -> None:
    made = core(replica("r"), settled_at_s=3)
    assert refusal_of(made, request("a", max_queue_s=0.0), 1) is Reason.DEADLINE_UNREACHABLE


@pytest.mark.parametrize(
    ("fields", "gives_up_at_s"),
    [
        ({}, 10),
        ({"max_queue_s": 3.0}, 3),
        ({"max_queue_s": 30.0}, 10),
        ({"ttft_deadline_s": 4.0}, 4),
        ({"ttft_deadline_s": 4.0, "max_queue_s": 3.0}, 3),
        ({"max_queue_s": 3.0, "age_s": 1.0, "waited_s": 1.0}, 2),
        ({"age_s": 50.0, "waited_s": 4.0}, 6),
        ({"max_queue_s": 3.0, "age_s": 50.0}, 3),
        ({"ttft_deadline_s": 3.0, "age_s": 1.0}, 2),
    ],
)
def test_each_waits_as_long_as_it_may(fields: dict[str, Any], gives_up_at_s: float) -> None:
    made = core(replica("r"))
    made.adopt(Lease("busy", "r", 1))
    assert refusal_of(made, request("a", **fields)) is None
    assert made.expire(gives_up_at_s - 0.01) == []
    ((expired, refusal),) = made.expire(gives_up_at_s)
    assert (expired.request.request_id, refusal.reason) == ("a", Reason.QUEUE_TIMEOUT)


def test_refusals_are_remembered_for_the_status_page() -> None:
    made = core(replica("r"), max_waiting=0)
    made.adopt(Lease("busy", "r", 1))
    for number in range(25):
        made.submit(request(str(number), "batched", tenant=f"t{number}"), number)
    assert made.refusals == {Reason.QUEUE_FULL: 25}
    assert len(made.last_refusals) == 20
    last = made.last_refusals[-1]
    assert (last.at_s, last.reason, last.tenant, last.lane) == (24, Reason.QUEUE_FULL, "t24", "batched")


def test_advice_forgets_how_fast_the_lab_once_was() -> None:
    made = core(replica("r"), max_waiting=0, max_queue_wait_s=600)
    for tenth in range(20):
        run_one(made, f"fast{tenth}", starts_s=tenth / 10, ends_s=tenth / 10)
    for number in range(3):
        run_one(made, f"slow{number}", starts_s=100, ends_s=100 + 8 * number)
    made.adopt(Lease("busy", "r", 1))
    refusal = made.submit(request("a"), 118)
    assert refusal is not None
    assert refusal.retry_after_s == 6, "three in the last 18 s"


# Replicas that break


def fail(made: SchedulerCore, name: str, now_s: float) -> str:
    """A request that is placed and fails; where."""
    made.submit(request(name), now_s)
    ((_, where),) = placed(made, now_s)
    made.release(name, now_s, RequestEnd(ReplicaVerdict.FAILED))
    return where


def test_a_replica_that_fails_in_a_row_is_left_alone_then_tried_with_one_request() -> None:
    made = core(replica("r", max_running=4), breaker_failures=3, breaker_cooldown_s=2)
    for number in range(3):
        fail(made, f"f{number}", 0)
    for name in ("a", "b", "c"):
        assert refusal_of(made, request(name)) is None, "it is ready, only not trusted"
    assert placed(made, 1.9) == []
    assert placed(made, 2) == [("a", "r")]
    assert placed(made, 9) == [], "one probe"
    made.release("a", 9, RequestEnd(ReplicaVerdict.HEALTHY))
    assert placed(made, 9) == [("b", "r"), ("c", "r")]


def test_a_probe_that_fails_is_followed_by_another_after_the_cooldown() -> None:
    made = core(replica("r", max_running=4), breaker_failures=1, breaker_cooldown_s=2)
    for at_s in (0, 2, 4):
        fail(made, f"at {at_s} s", at_s)
        made.submit(request(f"waits from {at_s} s"), at_s)
        assert placed(made, at_s + 1.9) == []
        made.withdraw(f"waits from {at_s} s", at_s + 1.9)


def test_a_replica_whose_engine_died_gets_nothing_after_one_failure() -> None:
    made = core(replica("r", max_running=4), breaker_failures=3)
    run_one(made, "kills", starts_s=0, ends_s=1, verdict=ReplicaVerdict.DIED)
    made.submit(request("next"), 1)
    assert placed(made, 1) == []


def test_a_probe_whose_client_leaves_makes_way_for_another() -> None:
    made = core(replica("r", max_running=4), breaker_failures=1, breaker_cooldown_s=2)
    fail(made, "f", 0)
    for name in ("a", "b"):
        made.submit(request(name), 2)
    assert placed(made, 2) == [("a", "r")]
    made.withdraw("a", 2)
    assert placed(made, 2) == [("b", "r")]


def test_a_clients_mistake_never_opens_a_breaker() -> None:
    made = core(replica("r"), breaker_failures=1)
    for number in range(5):
        run_one(made, f"bad{number}", starts_s=number, ends_s=number, output_tokens=None)
    assert made.replicas()[0].breaker.failures == 0


def test_others_take_over_from_a_replica_that_fails() -> None:
    made = core(replica("r1", max_running=9), replica("r2", max_running=9), breaker_failures=1)
    broken = fail(made, "f", 0)
    for name in "abcd":
        made.submit(request(name), 1)
    assert broken not in {where for _, where in placed(made, 1)}


def test_the_end_of_a_lease_on_a_replica_that_is_gone_judges_nobody() -> None:
    made = core(replica("r"), breaker_failures=1)
    made.submit(request("a"), 0)
    made.dispatch(0)
    books = made.replicas()[0].load
    made.replica_gone("r")
    made.release("a", 1, RequestEnd(ReplicaVerdict.FAILED))
    made.replica_ready(replica("r"))
    assert (made.replicas()[0].breaker.failures, load_of(made, "r")) == (0, (0, 0))
    assert made.replicas()[0].load is not books, "they were closed with its last lease"


# Reroutes


def test_a_rerouted_request_avoids_the_replica_that_failed_it() -> None:
    made = core(replica("dead"), replica("busy"))
    made.adopt(Lease("held", "busy", 1))
    made.submit(request("a", avoid_replica="dead"), 0)
    assert placed(made) == [], "another is ready, only full"
    made.release("held", 1)
    assert placed(made, 1) == [("a", "busy")]


def test_a_rerouted_request_goes_back_when_there_is_no_other() -> None:
    made = core(replica("only"))
    made.submit(request("a", avoid_replica="only"), 0)
    assert placed(made) == [("a", "only")]


@pytest.mark.parametrize("order", ORDERS)
def test_a_rerouted_request_keeps_its_place(order: str) -> None:
    def served(*submitted: tuple[str, float, float]) -> list[str]:
        """In which order they are, by name, instant and age."""
        made = core(replica("r"), order=order)
        made.adopt(Lease("busy", "r", 1))
        for name, at_s, age_s in submitted:
            made.submit(request(name, age_s=age_s), at_s)
        made.release("busy", 6)
        found = []
        while granted := placed(made, 6):
            found += [name for name, _ in granted]
            made.release(granted[0][0], 6)
        return found

    first, second = ("first", 4, 0), ("second", 5, 0)
    rerouted = served(first, second, ("again", 6, 3))
    assert rerouted == served(("again", 3, 0), first, second)
    assert len(rerouted) == 3


@pytest.mark.parametrize(("waited_s", "expected_s"), [(0.0, 1), (2.0, 3)])
def test_what_a_request_spent_on_a_replica_that_broke_is_no_waiting(
    waited_s: float, expected_s: float
) -> None:
    made = core(replica("r"))
    made.submit(request("a", age_s=30.0, waited_s=waited_s), 60)
    (grant,) = made.dispatch(61)
    assert grant.waited_s == expected_s


# Requests of several sequences


def test_a_request_takes_a_slot_for_each_of_its_sequences() -> None:
    made = core(replica("r", max_running=4))
    for name, num_sequences in (("a", 3), ("b", 2), ("c", 1)):
        made.submit(request(name, num_sequences=num_sequences), 0)
    assert placed(made) == [("a", "r")], "b lacks a slot, and c comes after b"
    (state,) = made.replicas()
    assert (state.load.running, state.load.sequences) == (1, 3)
    made.release("a", 1)
    assert placed(made, 1) == [("b", "r"), ("c", "r")]
    for name in "bc":
        made.release(name, 2)
    assert state.load.sequences == 0


def test_narrow_requests_do_not_take_the_slots_that_a_wide_one_waits_for() -> None:
    made = core(replica("r", max_running=4))
    for name in "abcd":
        made.submit(request(name), 0)
    assert len(made.dispatch(0)) == 4
    made.submit(request("wide", num_sequences=4), 1)
    for number, name in enumerate("abcd"):
        made.submit(request(f"narrow{number}"), 2)
        made.release(name, 2)
        granted = placed(made, 2)
    assert granted == [("wide", "r")]


def test_a_wide_request_that_waits_holds_up_no_other_replica() -> None:
    made = core(replica("r1", max_running=2), replica("r2", max_running=2))
    made.adopt(Lease("x", "r1", 1))
    made.adopt(Lease("y", "r2", 1))
    made.submit(request("wide", num_sequences=2), 0)
    made.submit(request("narrow"), 1)
    ((name, _),) = placed(made, 1)
    assert name == "narrow"


def test_a_narrow_request_goes_beside_the_replica_that_is_kept_for_a_wide_one() -> None:
    made = core(replica("r1", max_running=4), replica("r2", max_running=4))
    made.adopt(Lease("x", "r1", 1))
    made.adopt(Lease("y", "r2", 500, num_sequences=2))
    made.submit(request("wide", num_sequences=4), 0)
    made.submit(request("narrow"), 1)
    assert placed(made, 1) == [("narrow", "r2")], "r1, with the fewest tokens, is kept"
    assert placed(made, 1) == []
    made.adopt(Lease("z", "r2", 1))
    assert refusal_of(made, request("now", max_queue_s=0.0), 2) is Reason.DEADLINE_UNREACHABLE, (
        "no other has room"
    )


def test_what_is_kept_for_a_wide_request_is_a_replica_that_is_trusted() -> None:
    made = core(replica("r1", max_running=4), replica("r2", max_running=4), breaker_failures=1)
    trusted = {"r1": "r2", "r2": "r1"}[fail(made, "f", 0)]
    made.adopt(Lease("x", trusted, 1))
    made.submit(request("wide", num_sequences=4), 1)
    made.submit(request("narrow"), 1)
    assert placed(made, 1) == []
    made.release("x", 1)
    assert placed(made, 1) == [("wide", trusted)]


def test_a_wide_request_that_waits_makes_no_free_slot_look_taken() -> None:
    made = core(replica("a1", "a", max_running=4), replica("a2", "a", max_running=4), replica("b", "b"))
    made.adopt(Lease("x", "a1", 1, num_sequences=2))
    made.adopt(Lease("y", "a2", 1, num_sequences=3))
    made.submit(request("wide", "a", num_sequences=4), 0)
    assert placed(made) == []
    for lane, replica_id in (("a", "a2"), ("b", "b")):
        assert made.submit(request(f"on {lane}", lane, max_queue_s=0), 1) is None
        assert placed(made, 1) == [(f"on {lane}", replica_id)]


@pytest.mark.parametrize("num_taken", [0, 1])
def test_a_wide_request_goes_where_it_has_its_slots_not_where_it_would_be_alone(num_taken: int) -> None:
    made = core(
        replica("narrow", "sequential", Strategy.SEQUENTIAL), replica("wide", max_running=8), seed=num_taken
    )
    for number in range(num_taken):
        made.adopt(Lease(f"x{number}", "wide", 1))
    made.submit(request("four", num_sequences=4), 0)
    assert placed(made) == [("four", "wide")]


def test_one_that_is_wider_than_a_replica_runs_there_alone() -> None:
    made = core(replica("r", max_running=2))
    made.submit(request("wide", num_sequences=5), 0)
    made.submit(request("next"), 0)
    assert placed(made) == [("wide", "r")]
    made.release("wide", 1)
    assert placed(made, 1) == [("next", "r")]


# What autoscaling goes by


def test_demand_is_what_is_booked_and_an_even_part_of_what_waits() -> None:
    made = core(
        replica("b1"),
        replica("b2"),
        replica("s", "sequential", Strategy.SEQUENTIAL, takes_unpinned=False),
        max_queue_wait_s=600,
    )
    made.adopt(Lease("x", "b1", 100))
    made.adopt(Lease("y", "b2", 50))
    made.adopt(Lease("z", "s", 7))
    assert made.demand_tokens() == {"b1": 100, "b2": 50, "s": 7}
    made.submit(request("pinned", "batched", tokens=41), 0)
    made.submit(request("free", tokens=21), 0)
    made.submit(request("one", "sequential", tokens=9), 0)
    assert made.demand_tokens() == {"b1": 130, "b2": 80, "s": 16}


def test_what_may_go_to_either_of_two_lanes_is_counted_once() -> None:
    made = core(replica("b"), replica("d", "speculative", Strategy.SPECULATIVE))
    made.adopt(Lease("x", "b", 1))
    made.adopt(Lease("y", "d", 1))
    made.submit(request("free", tokens=20), 0)
    assert made.demand_tokens() == {"b": 11, "d": 11}


def test_what_waits_for_a_model_is_demand_of_its_lanes() -> None:
    made = core(replica("own"), replica("t1", "other", model="tuned"), replica("t2", "other", model="tuned"))
    for replica_id in ("own", "t1", "t2"):
        made.adopt(Lease(replica_id, replica_id, 1))
    made.submit(request("a", tokens=20), 0)
    made.submit(request("b", model="tuned", tokens=30), 0)
    assert made.demand_tokens() == {"own": 21, "t1": 16, "t2": 16}


def test_without_replicas_there_is_no_demand_to_report() -> None:
    made = core(settled_at_s=3)
    made.submit(request("a"), 0)
    assert made.demand_tokens() == {}


def test_wide_requests_that_differ_in_patience_alone_keep_one_replica_and_not_one_each() -> None:
    made = core(replica("r1", max_running=4), replica("r2", max_running=4))
    for number in range(6):
        made.submit(request(f"x{number}"), 0)
    assert len(placed(made)) == 6
    made.submit(request("wide", num_sequences=4), 1)
    made.submit(request("hasty", num_sequences=4, ttft_deadline_s=60.0), 2)
    made.submit(request("narrow"), 3)
    assert [name for name, _ in placed(made, 3)] == ["narrow"]
