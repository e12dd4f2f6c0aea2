"""Adaptive placement in virtual time: a load that rises and falls, of text easy and hard to guess."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import numpy as np
import pytest

from serving.config import SchedulerConfig
from serving.core.speculation.acceptance import geometric_rates
from serving.core.speculation.cost_model import CostModel, Lengths
from serving.core.speculation.step_time import DraftCost, LinearStepTime
from serving.core.speculation.text_kind import TextKind
from serving.scheduler.lane_costs import LaneCost
from serving.simulation.calibrated import LaneModel, same_drafts
from serving.simulation.planned_lab import Offered, PlannedLab, PlannedRun

# About what a small model with a learned draft does on two cores: made up, and no measurement.
STEP = LinearStepTime(0.018, 0.0016, 3e-7)
DRAFT = DraftCost(0.002, 0.002, 0.0002)
K, SLOTS, PROMPT_TOKENS, OUTPUT_TOKENS = 3, 32, 16, 64
EASY, HARD = geometric_rates(0.9, K), geometric_rates(0.6, K)
BATCHED = LaneModel("batched", CostModel(STEP), same_drafts(0, SLOTS), ((), ()))
SPECULATIVE = LaneModel("speculative", CostModel(STEP, DRAFT), same_drafts(K, SLOTS), (EASY, HARD))
KINDS = (TextKind.COPY, TextKind.OPEN)
CAPACITY_RPS = BATCHED.cost.capacity_rps(SLOTS, Lengths(PROMPT_TOKENS, OUTPUT_TOKENS), 0, ())
LOADS = (0.1, 0.2, 0.4, 0.8, 1.0, 0.8, 0.4, 0.2, 0.1)  # of that capacity
PHASE_S = 30.0


def answer_tokens(rng: random.Random) -> int:
    return max(1, round(rng.gauss(OUTPUT_TOKENS, OUTPUT_TOKENS / 4)))


def rise_and_fall(seed: int) -> list[Offered]:
    rng, at_s, offered = random.Random(seed), 0.0, []
    for number, load in enumerate(LOADS, start=1):
        while (at_s := at_s + rng.expovariate(load * CAPACITY_RPS)) < number * PHASE_S:
            offered.append(Offered(at_s, PROMPT_TOKENS, answer_tokens(rng), rng.randrange(2)))
        at_s = number * PHASE_S
    return offered


def run(
    offered: list[Offered],
    *lanes: LaneModel,
    placement: str = "adaptive",
    lane_costs: dict[str, LaneCost] | None = None,
    shares_cores: bool = True,
) -> PlannedRun:
    config = SchedulerConfig.model_validate(
        {"placement": placement, "profile": "none is read", "max_waiting_requests": 10_000}
    )
    fleet = [(lane, 1) for lane in lanes]
    return PlannedLab(
        config, fleet, offered, text_kinds=KINDS, lane_costs=lane_costs, shares_cores=shares_cores
    ).run()


def tpot_by_load(done: PlannedRun, offered: list[Offered]) -> list[float]:
    """The mean of each phase, in seconds."""
    phase = np.array([int(request.at_s // PHASE_S) for request in offered])
    return [float(np.mean(done.tpot_s[phase == number])) for number in range(len(LOADS))]


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_over_a_rise_and_fall_of_load_it_beats_either_lane_alone(seed: int) -> None:
    offered = rise_and_fall(seed)
    batched, speculative = run(offered, BATCHED), run(offered, SPECULATIVE)
    both = run(offered, BATCHED, SPECULATIVE)
    blind = run(offered, BATCHED, SPECULATIVE, placement="least_outstanding")
    # Least loaded first puts half of all on each, which take turns.
    assert np.mean(both.e2e_s) < 0.7 * np.mean(blind.e2e_s)
    chosen, *fixed = (tpot_by_load(done, offered) for done in (both, batched, speculative))
    assert np.mean(chosen) < 0.98 * min(np.mean(lane) for lane in fixed)
    # Nowhere far from the better lane, nor where one turns into the other: there a change costs most.
    assert all(mine < 1.35 * min(theirs) for mine, *theirs in zip(chosen, *fixed, strict=True))
    served = {use.lane: use.num_requests / len(offered) for use in both.replicas}
    assert min(served.values()) > 0.1


def test_at_either_end_it_is_the_better_lane_but_for_what_a_change_costs() -> None:
    for load, best in ((0.2, SPECULATIVE), (1.3, BATCHED)):
        rng, at_s, offered = random.Random(5), 0.0, []
        for _ in range(600):
            at_s += rng.expovariate(load * CAPACITY_RPS)
            offered.append(Offered(at_s, PROMPT_TOKENS, OUTPUT_TOKENS, rng.randrange(2)))
        fixed, chosen = run(offered, best), run(offered, BATCHED, SPECULATIVE)
        # Of an overload whose queue never ends, how long all of it takes says what the lab gave.
        assert chosen.lasted_s < 1.04 * fixed.lasted_s
        assert load > 1 or np.mean(chosen.e2e_s) < 1.04 * np.mean(fixed.e2e_s)


def test_it_learns_what_no_profile_said() -> None:
    # Hard text is all there is, and guessed to be easier than it is until some of it has ended.
    hard = LaneModel("speculative", SPECULATIVE.cost, same_drafts(K, SLOTS), ((0.02,), (0.02,)))
    costs = {
        "batched": LaneCost(BATCHED.cost),
        "speculative": LaneCost(hard.cost, (K,), {TextKind.OPEN: geometric_rates(0.9, K)}),
    }
    offered = [Offered(2.0 * number, PROMPT_TOKENS, OUTPUT_TOKENS, 1) for number in range(100)]
    use = {each.lane: each.num_requests for each in run(offered, BATCHED, hard, lane_costs=costs).replicas}
    assert 1 <= use["speculative"] <= 10
    assert use["batched"] == 100 - use["speculative"]


def test_replicas_on_shared_cores_take_turns() -> None:
    alike = [LaneModel(name, CostModel(STEP), same_drafts(0, 1), ((),)) for name in ("a", "b")]
    offered = [Offered(0.0, 1, 11), Offered(0.0, 1, 11)]
    apart = run(offered, *alike, placement="least_outstanding", shares_cores=False)
    shared = run(offered, *alike, placement="least_outstanding")
    assert shared.e2e_s == pytest.approx(2 * apart.e2e_s)
    assert [use.busy_share for use in shared.replicas] == pytest.approx([0.5, 0.5])
    # One that comes when the other is half done has half of the time until that ends, and then all.
    late = [Offered(0.0, 1, 11), Offered(float(apart.e2e_s[0]) / 2, 1, 11)]
    shared = run(late, *alike, placement="least_outstanding")
    assert shared.e2e_s == pytest.approx([1.5 * apart.e2e_s[0]] * 2)
    with pytest.raises(ValueError, match="share cores"):
        PlannedLab(SchedulerConfig(), [(BATCHED, 2)], offered, num_cells=2, shares_cores=True)


def test_steps_are_told_as_they_were() -> None:
    done = run([Offered(10.0 * number, 10, 101, 0) for number in range(30)], SPECULATIVE)
    (use,) = done.replicas
    # One for the prompt, and 100 tokens at the mean of a step.
    assert use.num_steps / 30 == pytest.approx(1 + 100 / (1 + sum(EASY)), rel=0.08)
    assert not math.isinf(done.lasted_s)


def saturated(seed: int) -> list[Offered]:
    rng, at_s, offered = random.Random(seed), 0.0, []
    for _ in range(1_500):
        at_s += rng.expovariate(1.3 * CAPACITY_RPS)
        offered.append(Offered(at_s, PROMPT_TOKENS, answer_tokens(rng), rng.randrange(2)))
    return offered


def times(factor: float, lane: LaneModel) -> CostModel:
    """A lane's costs, so many times as large."""
    step, draft = lane.cost.step_time, lane.cost.draft_cost
    assert isinstance(step, LinearStepTime)
    return CostModel(
        LinearStepTime(factor * step.fixed_s, factor * step.token_s, factor * step.kv_token_s),
        DraftCost(factor * draft.step_s, factor * draft.pass_s, factor * draft.pass_sequence_s),
    )


@pytest.mark.parametrize(("slower", "promises", "takes"), [("speculative", 0.8, 1.25), ("batched", 1.0, 2.0)])
@pytest.mark.parametrize("seed", [1, 2])
def test_a_lane_whose_profile_promises_too_much_is_left(
    slower: str, promises: float, takes: float, seed: int
) -> None:
    lanes = {lane.name: lane for lane in (BATCHED, SPECULATIVE)}
    # By its profile the slower one is the better when both are full.
    promised = {name: promises if name == slower else 1.0 for name in lanes}
    costs = {
        "batched": LaneCost(times(promised["batched"], BATCHED)),
        "speculative": LaneCost(
            times(promised["speculative"], SPECULATIVE), (K,), {TextKind.COPY: EASY, TextKind.OPEN: HARD}
        ),
    }
    lanes[slower] = replace(lanes[slower], cost=times(takes, lanes[slower]))
    offered = saturated(seed)
    alone = {name: run(offered, lane).lasted_s for name, lane in lanes.items()}
    assert alone[slower] > 1.05 * min(alone.values())
    done = run(offered, *lanes.values(), lane_costs=costs)
    served = {use.lane: use.num_requests / len(offered) for use in done.replicas}
    assert served[slower] < 0.3
    assert done.lasted_s < 1.06 * min(alone.values())
