from __future__ import annotations

from dataclasses import replace

import pytest

from loadtest.offer.load import ClosedLoop, constant_rate
from loadtest.run.plan import DEFAULT_MAX_STAGE_S, StagePlan, arrivals_of
from loadtest.run.planning import DRAIN_S, estimate_s, num_requests, time_left_s
from serving.core.lane import Strategy
from tests.unit.loadtest.run.plans import demo, stages_of


def test_lanes_take_turns_and_the_demo_fits_its_time() -> None:
    plan = demo()
    assert len(plan.stages) == 18
    assert plan.lanes == ("sequential", "batched", "speculative")
    assert [stage.key for stage in plan.stages[:4]] == [
        "sequential/copy/1 user", "batched/copy/1 user", "speculative/copy/1 user", "sequential/story/1 user",
    ]  # fmt: skip
    assert plan.estimated_s <= 240
    assert plan.longest_stage_s == DEFAULT_MAX_STAGE_S


def test_the_whole_round_is_repeated_with_other_prompts() -> None:
    once, twice = stages_of(ClosedLoop(2), repeats=1), stages_of(ClosedLoop(2), repeats=2)
    assert twice[:6] == once
    assert [stage.key for stage in twice[6:]] == [f"{stage.key}/repeat 2" for stage in once]
    assert {stage.group for stage in twice} == {stage.group for stage in once}
    assert min(stage.first_prompt for stage in twice[6:]) >= max(stage.prompts_end for stage in once)


def test_lanes_get_the_same_arrivals_and_repeats_others() -> None:
    stages = stages_of(constant_rate(2, 30), repeats=2)
    arrivals = {(stage.lane, stage.workload, stage.repeat): arrivals_of(stage, 7) for stage in stages}
    assert arrivals["batched", "copy", 0] == arrivals["speculative", "copy", 0]
    assert arrivals["batched", "copy", 0] != arrivals["batched", "copy", 1]
    assert arrivals["batched", "copy", 0] != arrivals["batched", "story", 0]
    assert arrivals["batched", "copy", 0] != arrivals_of(replace(stages[1], requests=20), 8)[:20]


def test_an_open_loop_has_what_its_schedule_holds_and_its_warm_up_is_apart() -> None:
    stage, whole = stages_of(constant_rate(4, 30), warmup_s=10)[0], stages_of(constant_rate(4, 30))[0]
    arrivals = arrivals_of(stage, 7)
    assert arrivals == arrivals_of(whole, 7)
    assert stage.warmup_requests == sum(arrival.at_s < 10 for arrival in arrivals) > 0
    assert stage.requests == sum(arrival.at_s >= 10 for arrival in arrivals)
    assert stage.prompts_end == whole.prompts_end == len(arrivals)
    assert stage.max_stage_s == 30 + DRAIN_S
    assert 30 < stage.estimated_s < 35


def test_an_open_loop_must_fit_its_time_box_and_outlast_its_warm_up() -> None:
    with pytest.raises(ValueError, match=r"takes 30 s, more than max_stage_s=20"):
        stages_of(constant_rate(4, 30), max_stage_s=20)
    with pytest.raises(ValueError, match=r"none of its \d+ requests comes after warmup_s=31"):
        stages_of(constant_rate(4, 30), warmup_s=31)


@pytest.mark.parametrize(
    ("strategy", "concurrency", "requests"),
    [
        (Strategy.BATCHED, 1, 4), (Strategy.BATCHED, 4, 12), (Strategy.BATCHED, 8, 16), (Strategy.BATCHED, 64, 128),
        (Strategy.SEQUENTIAL, 1, 4), (Strategy.SEQUENTIAL, 8, 8), (Strategy.SEQUENTIAL, 64, 64),
    ],
)  # fmt: skip
def test_number_of_requests(strategy: Strategy, concurrency: int, requests: int) -> None:
    assert num_requests(strategy, concurrency) == requests


def test_lanes_share_prompts_and_levels_do_not() -> None:
    used: dict[tuple[str, int], set[int]] = {}
    for stage in demo().stages:
        prompts = set(range(stage.first_prompt, stage.first_prompt + stage.requests))
        assert isinstance(stage.load, ClosedLoop)
        used[stage.lane, stage.load.users] = prompts
    assert used["batched", 4] == used["speculative", 4]
    # The sequential lane sends fewer requests, but none of its own.
    assert used["sequential", 8] < used["batched", 8]
    assert not used["batched", 1] & used["batched", 4]
    assert not used["batched", 4] & used["batched", 8]


def test_sequential_takes_as_long_for_each_request_whatever_the_concurrency() -> None:
    assert estimate_s(Strategy.SEQUENTIAL, 8, 8, 48) == estimate_s(Strategy.SEQUENTIAL, 1, 8, 48)
    assert estimate_s(Strategy.BATCHED, 8, 16, 48) < estimate_s(Strategy.BATCHED, 1, 16, 48) / 2


def test_time_left_follows_the_pace() -> None:
    stages = [
        StagePlan("batched", "copy", ClosedLoop(level), level, estimated_s=10) for level in (1, 2, 3, 4)
    ]
    assert time_left_s(stages, 0, 0.0, 0.1) == pytest.approx(40)
    # Half of it took three times as long as planned: so will the rest.
    assert time_left_s(stages, 2, 0.0, 60) == pytest.approx(60)
    assert time_left_s(stages, 3, 0.5, 35) == pytest.approx(5)
