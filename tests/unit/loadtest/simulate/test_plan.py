from __future__ import annotations

import pytest

from loadtest.judge.estimate import Estimate
from loadtest.simulate.plan import LanePlan, PlannedFleet
from loadtest.simulate.tables import unsettled
from loadtest.simulate.verdict import Verdict


def fleet(replicas: int, *, holds: bool, lane: str = "batched", is_settled: bool = True) -> PlannedFleet:
    verdict = Verdict(holds, Estimate(1.0), {}, None, is_settled)
    return PlannedFleet(lane, replicas, verdict, (0.1, 0.2), (0.01, 0.02), 1.0, 0.5, 0, 10, False, 0.1)


def plan(lane: str, *tried: tuple[int, bool, bool]) -> LanePlan:
    """A lane with the replicas that were tried, whether they hold, and whether that is settled."""
    fleets = tuple(
        fleet(replicas, holds=holds, lane=lane, is_settled=is_settled)
        for replicas, holds, is_settled in tried
    )
    enough = min(
        (each for each in fleets if each.verdict.holds), key=lambda each: each.replicas, default=None
    )
    return LanePlan(lane, enough, fleets)


def test_one_too_few_is_the_largest_fleet_that_does_not_hold() -> None:
    tried = tuple(fleet(replicas, holds=replicas >= 6) for replicas in (4, 8, 6, 5))
    plan = LanePlan("batched", tried[2], tried)
    assert plan.one_too_few is tried[3]
    assert LanePlan("batched", tried[1], (tried[1],)).one_too_few is None


@pytest.mark.parametrize(
    ("tried", "least", "most", "is_settled"),
    [
        ([(5, False, True), (6, True, True)], 6, 6, True),
        ([(5, False, False), (6, True, True)], 1, 6, False),
        ([(4, False, True), (5, False, False), (6, True, False), (8, True, True)], 5, 8, False),
        ([(1, True, False)], 1, None, False),
        ([(1, True, True)], 1, 1, True),
        ([(2, False, True), (3, False, True)], 4, None, True),  # 3 are the most that may be tried
        ([(2, False, True), (3, False, False)], 3, None, False),
    ],
)
def test_what_may_be_needed_lies_between_fleets_that_are_settled(
    tried: list[tuple[int, bool, bool]], least: int, most: int | None, *, is_settled: bool
) -> None:
    found = plan("batched", *tried)
    assert (found.least_possible, found.most_possible, found.is_settled) == (least, most, is_settled)


def test_what_so_many_requests_do_not_settle_is_said() -> None:
    sure = plan("batched", (2, False, True), (3, True, True))
    larger = plan("speculative", (4, False, True), (5, True, True))
    assert unsettled([sure, larger], 60) is None
    perhaps_larger = plan("speculative", (4, False, True), (5, True, False), (7, True, True))
    assert unsettled([sure, perhaps_larger], 60) == (
        "Not settled by 60 requests, drawn once (--seed): speculative may need 5 to 7."
    )
    perhaps_as_few = plan("speculative", (4, False, False), (5, True, True))
    assert unsettled([sure, perhaps_as_few], 1) == (
        "Not settled by 1 request, drawn once (--seed): speculative may need 1 to 5; so which lane needs least is "
        "open."
    )
    one = plan("batched", (1, True, False))
    assert unsettled([one, larger], 60) == (
        "Not settled by 60 requests, drawn once (--seed): batched may need 1 or more; so which lane needs least is "
        "open."
    )
