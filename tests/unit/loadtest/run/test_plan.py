from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from loadtest.offer.arrivals import parse_load
from loadtest.offer.load import ClosedLoop, TraceReplay, constant_rate
from loadtest.run.plan import Plan, StagePlan, arrivals_of, read_plan, write_plan
from tests.unit.loadtest.run.plans import demo, stages_of


def test_more_requests_than_a_schedule_holds_are_refused() -> None:
    stage = stages_of(constant_rate(4, 30))[0]
    assert len(arrivals_of(replace(stage, requests=3), 7)) == 3
    with pytest.raises(ValueError, match=r"9999 requests are planned .* its schedule of seed 7 holds"):
        arrivals_of(replace(stage, requests=9999), 7)


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
    with pytest.raises(ValueError, match=r"request_timeout_s=0 must be above 0"):
        Plan("http://h:1", "m", (stage,), request_timeout_s=0)
    with pytest.raises(ValueError, match=r"max_error_rate=5 must be in 0..1"):
        Plan("http://h:1", "m", (stage,), max_error_rate=5)


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
