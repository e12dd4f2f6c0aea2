from __future__ import annotations

from pathlib import Path

import pytest

from loadtest.load import ClosedLoop
from loadtest.plan import (
    Plan,
    StagePlan,
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


def demo() -> Plan:
    return Plan("http://h:1", "m", plan_stages(LANES, ["copy", "story"], [1, 4, 8], 48))


def test_demo_is_lane_by_lane_and_fits_its_time() -> None:
    plan = demo()
    assert len(plan.stages) == 18
    assert plan.lanes == ("sequential", "batched", "speculative")
    assert [stage.key for stage in plan.stages[:4]] == [
        "sequential/copy/1 user", "sequential/copy/4 users", "sequential/copy/8 users", "sequential/story/1 user",
    ]  # fmt: skip
    assert plan.estimated_s <= 150


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
        ({"max_stage_s": 0}, r"max_stage_s=0 must be above 0"),
        ({"first_prompt": -1}, r"first_prompt=-1 must be at least 0"),
        ({"workload": "chat"}, r"workload 'chat' is unknown"),
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
    with pytest.raises(ValueError, match="no stages"):
        Plan("http://h:1", "m", ())
    with pytest.raises(ValueError, match="output_tokens=1 must be at least 2"):
        Plan("http://h:1", "m", (stage,), output_tokens=1)


def test_a_plan_survives_its_file(tmp_path: Path) -> None:
    write_plan(demo(), tmp_path / "plan.json")
    assert read_plan(tmp_path / "plan.json") == demo()


def test_a_bad_plan_file_is_named_with_its_fault(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text('{"base_url": "http://h:1", "stages": []}')
    with pytest.raises(ValueError, match=r"plan\.json: .*model: Field required"):
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
