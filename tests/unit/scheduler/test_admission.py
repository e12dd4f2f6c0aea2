"""Admit or refuse, row by row, and the advice that goes with a refusal."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from serving.core.errors import Reason
from serving.scheduler.admission import LabView, QueueLimits, Refusal, admit, retry_after_s
from serving.scheduler.queue import Backlog
from tests.unit.scheduler.examples import request

IDLE = LabView(
    is_draining=False,
    is_missing_some=False,
    num_eligible=1,
    has_room=True,
    waiting=Backlog(),
    tenant_waiting=Backlog(),
    expected_wait_s=None,
    expected_first_token_s=None,
    drain_rate_rps=None,
)
BUSY = replace(IDLE, has_room=False)
LIMITS = QueueLimits(max_requests=4, max_tokens=100)


def decide(lab: LabView, limits: QueueLimits = LIMITS, *, tokens: int = 10, **fields: Any) -> Refusal | None:
    return admit(request("a", tokens=tokens, **fields), lab, limits)


def test_what_can_run_now_is_admitted_whatever_waits_for_other_lanes() -> None:
    full = replace(IDLE, waiting=Backlog(4, 100), tenant_waiting=Backlog(4, 100))
    assert decide(full) is None
    assert decide(full, QueueLimits(0, 1), tokens=1000, max_queue_s=0.0) is None


@pytest.mark.parametrize(
    "lab",
    [
        BUSY,
        replace(BUSY, waiting=Backlog(3, 30)),
        replace(BUSY, waiting=Backlog(1, 90)),
        replace(BUSY, num_eligible=0, is_missing_some=True),
    ],
)
def test_may_wait(lab: LabView) -> None:
    assert decide(lab) is None


@pytest.mark.parametrize(
    ("lab", "reason", "text"),
    [
        (replace(IDLE, is_draining=True), Reason.DRAINING, "shutting down"),
        (replace(IDLE, is_draining=True, num_eligible=0), Reason.DRAINING, "shutting down"),
        (replace(BUSY, num_eligible=0), Reason.NO_REPLICA_READY, "no ready replica"),
        (
            replace(BUSY, waiting=Backlog(4, 40)),
            Reason.QUEUE_FULL,
            "the waiting queue is full: 4 of 4 requests (scheduler.max_waiting_requests)",
        ),
        (replace(BUSY, waiting=Backlog(4, 40), is_missing_some=True), Reason.QUEUE_FULL, "4 of 4"),
        (
            replace(BUSY, waiting=Backlog(1, 91)),
            Reason.QUEUE_FULL,
            "91 of 100 tokens, and this request is 10 (scheduler.max_waiting_tokens)",
        ),
    ],
)
def test_refused_for_the_labs_state(lab: LabView, reason: Reason, text: str) -> None:
    refusal = decide(lab)
    assert refusal is not None
    assert refusal.reason is reason
    assert text in refusal.message


@pytest.mark.parametrize(
    ("lab", "retry_after_s"),
    [(replace(IDLE, is_draining=True), None), (replace(BUSY, num_eligible=0, drain_rate_rps=0.1), 1)],
)
def test_a_replica_may_be_back_at_once_and_a_lab_that_drains_never_is(
    lab: LabView, retry_after_s: int | None
) -> None:
    refusal = decide(lab)
    assert refusal is not None
    assert refusal.retry_after_s == retry_after_s


def test_more_tokens_than_may_ever_wait_is_too_long() -> None:
    refusal = decide(BUSY, tokens=101)
    assert refusal is not None
    assert refusal.reason is Reason.REQUEST_TOO_LONG
    assert "101 tokens exceed what may wait, 100 (scheduler.max_waiting_tokens)" in refusal.message
    assert refusal.retry_after_s is None, "coming back later does not help"


def test_a_request_that_may_not_wait_runs_now_or_is_refused() -> None:
    assert decide(IDLE, max_queue_s=0.0) is None
    refusal = decide(replace(BUSY, waiting=Backlog(4, 40)), max_queue_s=0.0)
    assert refusal is not None
    assert refusal.reason is Reason.DEADLINE_UNREACHABLE
    assert "x-max-queue-ms: 0" in refusal.message


# Shares of tenants


@pytest.mark.parametrize(
    ("mine", "share", "text"),
    [
        (Backlog(2, 20), 0.5, "2 of 2 requests"),
        (Backlog(1, 41), 0.5, "41 of 50 tokens"),
        (Backlog(1, 1), 0.01, "1 of 1 requests"),
    ],
)
def test_a_tenant_may_fill_its_share_and_no_more(mine: Backlog, share: float, text: str) -> None:
    lab = replace(BUSY, waiting=mine, tenant_waiting=mine)
    refusal = decide(lab, replace(LIMITS, tenant_share=share), tenant="t")
    assert refusal is not None
    assert refusal.reason is Reason.TENANT_OVER_SHARE
    assert f"tenant 't' fills its share of the waiting queue ({share:g}): {text}" in refusal.message


def test_a_tenant_with_nothing_waiting_always_has_one_place() -> None:
    limits = replace(LIMITS, tenant_share=0.01)
    assert decide(replace(BUSY, waiting=Backlog(2, 20)), limits, tokens=60) is None


def test_the_whole_queue_may_be_one_tenants_when_nothing_says_otherwise() -> None:
    assert decide(replace(BUSY, waiting=Backlog(3, 30), tenant_waiting=Backlog(3, 30))) is None


# Deadlines and the estimate


@pytest.mark.parametrize(
    ("fields", "is_admitted"),
    [
        ({"max_queue_s": 4.9}, False),
        ({"max_queue_s": 5.0}, True),
        ({"max_queue_s": 6.0, "age_s": 1.5, "waited_s": 1.5}, False),
        ({"max_queue_s": 6.0, "age_s": 1.5, "waited_s": 0.5}, True),
        ({"ttft_deadline_s": 5.9}, False),
        ({"ttft_deadline_s": 6.0}, True),
        ({"ttft_deadline_s": 7.0, "age_s": 1.5}, False),
        ({}, True),
    ],
)
def test_a_deadline_is_held_against_the_estimate(fields: dict[str, Any], is_admitted: bool) -> None:
    """5 s are expected to a slot, and one more to the first token."""
    refusal = decide(replace(BUSY, expected_wait_s=5, expected_first_token_s=1), **fields)
    assert (refusal is None) == is_admitted
    assert refusal is None or refusal.reason is Reason.DEADLINE_UNREACHABLE


def test_a_refused_deadline_names_both_times_and_its_header() -> None:
    lab = replace(BUSY, expected_wait_s=5, expected_first_token_s=1)
    early = decide(lab, ttft_deadline_s=2.0)
    assert early is not None
    assert (
        "first token expected after 6.0 s, wanted within 2.0 s (x-tandem-ttft-deadline-ms)" in early.message
    )
    impatient = decide(lab, max_queue_s=2.0)
    assert impatient is not None
    assert "expected to wait 5.0 s, longer than 2.0 s (x-max-queue-ms)" in impatient.message


def test_nothing_is_refused_for_an_estimate_that_is_not_known() -> None:
    assert decide(BUSY, ttft_deadline_s=0.001, max_queue_s=0.001) is None


def test_room_now_is_tried_whatever_was_expected_so_a_wrong_estimate_mends_itself() -> None:
    lab = replace(IDLE, expected_wait_s=50, expected_first_token_s=50)
    assert decide(lab, ttft_deadline_s=1.0, max_queue_s=1.0) is None


def test_a_deadline_that_has_passed_is_refused_even_with_room() -> None:
    refusal = decide(IDLE, ttft_deadline_s=1.0, age_s=1.5)
    assert refusal is not None
    assert refusal.reason is Reason.DEADLINE_UNREACHABLE


# Advice


@pytest.mark.parametrize(
    ("num_waiting", "rate_rps", "advice_s"),
    [
        (0, None, 1),
        (9, 2.0, 5),  # ten places at two a second
        (9, 3.0, 4),  # rounded up: whole seconds only
        (0, 100.0, 1),  # never 0, which would invite a storm
        (1000, 0.1, 60),  # never over a minute
        (5, 0.0, 1),
    ],
)
def test_retry_after_is_the_queue_over_the_drain_rate(
    num_waiting: int, rate_rps: float | None, advice_s: int
) -> None:
    assert retry_after_s(num_waiting, rate_rps) == advice_s


@pytest.mark.parametrize(
    ("limits", "fields"),
    [
        (LIMITS, {}),
        (replace(LIMITS, max_requests=9, tenant_share=0.1), {}),
        (replace(LIMITS, max_requests=9), {"max_queue_s": 0.0}),
        (replace(LIMITS, max_requests=9), {"max_queue_s": 1.0}),
        (replace(LIMITS, max_requests=9), {"ttft_deadline_s": 1.0}),
    ],
    ids=["queue full", "over share", "may not wait", "impatient", "deadline"],
)
def test_every_refusal_for_load_says_when_to_come_back(limits: QueueLimits, fields: dict[str, Any]) -> None:
    lab = replace(
        BUSY,
        waiting=Backlog(4, 40),
        tenant_waiting=Backlog(4, 40),
        expected_wait_s=5,
        drain_rate_rps=0.5,
    )
    refusal = decide(lab, limits, **fields)
    assert refusal is not None
    assert refusal.retry_after_s == 10
