"""Admit or refuse, and the advice that goes with a refusal."""

from __future__ import annotations

from typing import Any

import pytest

from serving.core.errors import Reason
from serving.scheduler.admission import DrainRate, admit, retry_after_s

OPEN: dict[str, Any] = {
    "is_draining": False,
    "is_settling": False,
    "num_eligible": 1,
    "has_room": True,
    "num_waiting": 0,
    "max_waiting_requests": 4,
    "drain_rate_rps": None,
}


@pytest.mark.parametrize(
    "state",
    [
        {},
        {"has_room": False},
        {"has_room": False, "num_waiting": 3},
        {"num_waiting": 4},  # others wait, for other lanes; here is room
        {"max_waiting_requests": 0},
        {"num_eligible": 0, "has_room": False, "is_settling": True},
    ],
)
def test_admitted(state: dict[str, Any]) -> None:
    assert admit(**OPEN | state) is None


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        ({"is_draining": True}, Reason.DRAINING),
        ({"is_draining": True, "num_eligible": 0}, Reason.DRAINING),
        ({"num_eligible": 0, "has_room": False}, Reason.NO_REPLICA_READY),
        ({"has_room": False, "num_waiting": 4}, Reason.QUEUE_FULL),
        ({"has_room": False, "max_waiting_requests": 0}, Reason.QUEUE_FULL),
        ({"has_room": False, "num_waiting": 4, "is_settling": True}, Reason.QUEUE_FULL),
    ],
)
def test_refused(state: dict[str, Any], reason: Reason) -> None:
    refusal = admit(**OPEN | state)
    assert refusal is not None
    assert refusal.reason is reason


def test_a_full_queue_names_value_bound_and_setting() -> None:
    refusal = admit(**OPEN | {"has_room": False, "num_waiting": 4, "drain_rate_rps": 0.5})
    assert refusal is not None
    assert refusal.message == "4 of 4 requests are waiting (scheduler.max_waiting_requests)"
    assert refusal.retry_after_s == 10


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


def test_drain_rate_is_unknown_until_two_have_ended() -> None:
    rate = DrainRate()
    assert rate.rps(100) is None
    rate.record(100)
    assert rate.rps(101) is None
    rate.record(100)
    assert rate.rps(100) is None, "two ends in one instant say nothing yet"
    assert rate.rps(101) == 2


def test_drain_rate_falls_while_nothing_ends() -> None:
    rate = DrainRate()
    for second in range(10):
        rate.record(second)
    assert rate.rps(10) == 1
    assert rate.rps(100) == 0.1


def test_drain_rate_forgets_what_is_out_of_its_window() -> None:
    rate = DrainRate(window=4)
    rate.record(0)
    for tenth in range(1, 5):
        rate.record(1000 + tenth / 10)
    assert rate.rps(1000.5) == pytest.approx(10)
