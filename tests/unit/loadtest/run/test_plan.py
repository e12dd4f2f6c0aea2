from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from loadtest.offer.arrivals import parse_load
from loadtest.offer.load import ClosedLoop, Load, TraceReplay, constant_rate
from loadtest.run.plan import (
    DEFAULT_MAX_STAGE_S,
    DRAIN_S,
    Plan,
    StagePlan,
    arrivals_of,
    estimate_s,
    num_requests,
    plan_stages,
    read_plan,
    time_left_s,
    write_plan,
)
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


def test_lanes_take_turns_and_the_demo_fits_its_time() -> None:
    plan = demo()
    assert len(plan.stages) == 18
    assert plan.lanes == ("sequential", "batched", "speculative")
    assert [stage.key for stage in plan.stages[:4]] == [
        "sequential/copy/1 user", "batched/copy/1 user", "speculative/copy/1 user", "sequential/story/1 user",
    ]  # fmt: skip
    assert plan.estimated_s <= 150
    assert plan.max_s == 18 * DEFAULT_MAX_STAGE_S


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


def test_more_requests_than_a_schedule_holds_are_refused() -> None:
    stage = stages_of(constant_rate(4, 30))[0]
    assert len(arrivals_of(replace(stage, requests=3), 7)) == 3
    with pytest.raises(ValueError, match=r"9999 requests are planned .* its schedule of seed 7 holds"):
        arrivals_of(replace(stage, requests=9999), 7)


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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"requests": 3, "load": ClosedLoop(4)}, r"requests=3 is below 4"),
        ({"max_stage_s": 0}, r"max_stage_s=0 must be in 0.1..86400"),
        ({"max_stage_s": math.nan}, r"max_stage_s=nan must be in"),
        ({"max_stage_s": math.inf}, r"max_stage_s=inf must be in"),
        ({"first_prompt": -1}, r"first_prompt=-1 must be in 0.."),
        ({"requests": 10**7}, r"requests=10000000 must be in 1.."),
        ({"load": ClosedLoop(1025), "requests": 2000}, r"users=1025 must be in 1..1024"),
        ({"warmup_requests": 1}, r"warmup_requests=1 must be in 0..0"),
        ({"workload": "chess"}, r"workload 'chess' is unknown"),
    ],
)
def test_impossible_stages_are_refused(change: dict[str, object], message: str) -> None:
    fields = {"lane": "batched", "workload": "copy", "load": ClosedLoop(1), "requests": 4} | change
    with pytest.raises(ValueError, match=message):
        StagePlan(**fields)  # type: ignore[arg-type]


def test_impossible_plans_are_refused() -> None:
    stage = StagePlan("batched", "copy", ClosedLoop(1), 4)
    with pytest.raises(ValueError, match="batched/copy/1 user is planned twice"):
        Plan("http://h:1", "m", (stage, stage))
    with pytest.raises(ValueError, match=r"output_tokens=1 must be in 2.."):
        Plan("http://h:1", "m", (stage,), output_tokens=1)
    with pytest.raises(ValueError, match=r"idle_timeout_s=nan must be above 0"):
        Plan("http://h:1", "m", (stage,), idle_timeout_s=math.nan)


@pytest.mark.parametrize(
    ("one", "other", "message"),
    [
        ("poisson:2/s,60s", "poisson:2/s,30s", "poisson 2 req/s is planned twice, for 60 s and for 30 s: "),
        ("poisson:2/s,60s", "poisson:2/s", "poisson 2 req/s is planned twice$"),
    ],
)
def test_two_loads_of_one_name_are_refused_with_what_differs(one: str, other: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Plan("http://h:1", "m", stages_of(parse_load(one), parse_load(other)))


def test_two_traces_of_one_name_are_refused_with_their_paths() -> None:
    stages = [StagePlan("batched", "copy", TraceReplay(f"{folder}/x.csv"), 4) for folder in "ab"]
    with pytest.raises(ValueError, match=r"trace x\.csv is planned twice, from a/x\.csv and from b/x\.csv: "):
        Plan("http://h:1", "m", tuple(stages))


def test_a_plan_survives_its_file(tmp_path: Path) -> None:
    write_plan(demo(), tmp_path / "plan.json")
    assert read_plan(tmp_path / "plan.json") == demo()


def test_a_bad_plan_file_is_named_with_its_fault(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text('{"base_url": "http://h:1", "stages": []}')
    with pytest.raises(ValueError, match=r"plan\.json: .*model: Field required"):
        read_plan(path)
    path.write_text('{"base_url": "http://h:1", "model": "m", "stages": []}')
    with pytest.raises(ValueError, match=r"plan\.json: stages: the plan has none"):
        read_plan(path)
    path.write_text('{"base_url": "http://h:1", "model": "m", "stages": [], "laned": 1}')
    with pytest.raises(ValueError, match=r"plan\.json: laned: "):
        read_plan(path)
    with pytest.raises(ValueError, match=r"none\.json: cannot be read: No such file"):
        read_plan(tmp_path / "none.json")


def test_time_left_follows_the_pace() -> None:
    stages = [
        StagePlan("batched", "copy", ClosedLoop(level), level, estimated_s=10) for level in (1, 2, 3, 4)
    ]
    assert time_left_s(stages, 0, 0.0, 0.1) == pytest.approx(40)
    # Half of it took three times as long as planned: so will the rest.
    assert time_left_s(stages, 2, 0.0, 60) == pytest.approx(60)
    assert time_left_s(stages, 3, 0.5, 35) == pytest.approx(5)
