from __future__ import annotations

from loadtest.simulate.plan import LanePlan, PlannedFleet
from loadtest.simulate.verdict import Verdict


def fleet(replicas: int, *, holds: bool) -> PlannedFleet:
    verdict = Verdict(holds, 1.0, {}, None)
    return PlannedFleet("batched", replicas, verdict, (0.1, 0.2), (0.01, 0.02), 1.0, 0.5, 0, 10, False, 0.1)


def test_one_too_few_is_the_largest_fleet_that_does_not_hold() -> None:
    tried = tuple(fleet(replicas, holds=replicas >= 6) for replicas in (4, 8, 6, 5))
    plan = LanePlan("batched", tried[2], tried)
    assert plan.one_too_few is tried[3]
    assert LanePlan("batched", tried[1], (tried[1],)).one_too_few is None
