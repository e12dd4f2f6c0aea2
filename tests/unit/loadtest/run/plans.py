"""Plans of three lanes and two workloads, for the tests of planning and of plans."""

from __future__ import annotations

from typing import Any

from loadtest.offer.load import ClosedLoop, Load
from loadtest.run.plan import Plan, StagePlan
from loadtest.run.planning import plan_stages
from serving.core.lane import Strategy

LANES = [
    ("sequential", Strategy.SEQUENTIAL),
    ("batched", Strategy.BATCHED),
    ("speculative", Strategy.SPECULATIVE),
]


def stages_of(*loads: Load, **asked: Any) -> tuple[StagePlan, ...]:
    return plan_stages(LANES, ["copy", "story"], loads, **({"output_tokens": 48, "seed": 7} | asked))


def demo() -> Plan:
    return Plan("http://h:1", "m", stages_of(ClosedLoop(1), ClosedLoop(4), ClosedLoop(8)))
