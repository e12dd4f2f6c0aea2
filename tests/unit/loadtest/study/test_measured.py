from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from loadtest.client.record import RequestRecord
from loadtest.offer.workload import load_workload
from loadtest.run.plan import Plan, StagePlan, arrivals_of
from loadtest.run.sender import Sender
from loadtest.study.analysis import objectives
from loadtest.study.arms import ARMS, BATCHED, PLACEMENT, SPECULATIVE
from loadtest.study.measured import (
    LANES,
    WORKLOAD,
    answers_of,
    faults_of,
    plan_of,
    reckon,
    studies_of_run,
)
from loadtest.study.schedule import KINDS, rise_and_fall
from loadtest.study.simulated import PROFILES_DIR
from serving.calibration import profile as profiles
from tests.unit.loadtest.runs import record, run_file, stage_run, write_whole_run

ROOT = Path(__file__).parents[4]
SEED = 7  # of `run_file`
SOON_S, LATE_S = 0.1, 9.0


def plan(repeats: int = 2, step_s: float = 2.0) -> Plan:
    return plan_of(
        LANES,
        base_url="http://h:1",
        model="m",
        capacity_rps=5.0,
        step_s=step_s,
        repeats=repeats,
        seed=SEED,
    )


def kind_of(stage: StagePlan, place: int) -> str:
    return load_workload(WORKLOAD).part(SEED, stage.first_prompt + place).name


def records_of(stage: StagePlan, ttft_s: float, gap_s: float = 0.02) -> list[RequestRecord]:
    """One for each arrival, all alike."""
    found = []
    for place in range(len(arrivals_of(stage, SEED))):
        made = record(stage.lane, number=stage.first_prompt + place, ttft_s=ttft_s, gap_s=gap_s)
        label = replace(made.label, stage=stage.key, workload=stage.workload)
        found.append(replace(made, label=label))
    return found


def test_arms_take_turns_under_the_same_requests_and_each_repeat_begins_with_another() -> None:
    stages = plan(repeats=3).stages
    assert [stage.lane for stage in stages[:5]] == list(LANES.values())
    assert [stage.lane for stage in stages[5:10]] == [*list(LANES.values())[1:], "batched"]
    for repeat in range(3):
        own = [stage for stage in stages if stage.repeat == repeat]
        assert {stage.lane for stage in own} == set(LANES.values())
        assert len({(stage.first_prompt, stage.requests, arrivals_of(stage, SEED)) for stage in own}) == 1
    assert stages[5].first_prompt == stages[0].prompts_end
    assert arrivals_of(stages[0], SEED) != arrivals_of(stages[5], SEED)


def test_the_adaptive_arm_names_no_lane_and_the_others_do() -> None:
    made = plan(repeats=1)
    sender = Sender(made, "run", "run", lambda: 0.0)
    asked = {stage.lane: sender.request(stage, 0).body["model"] for stage in made.stages}
    assert asked[LANES[PLACEMENT]] == "m"
    assert {name for lane, name in asked.items() if lane != LANES[PLACEMENT]} == {
        "m:batched", "m:speculative", "m:table", "m:adaptive",
    }  # fmt: skip


def test_lanes_of_the_study_are_those_of_its_lab() -> None:
    assert list(LANES) == list(ARMS)
    config = yaml.safe_load((ROOT / "deploy/study-adaptive.yaml").read_text())
    assert config["scheduler"]["placement"] == "adaptive"
    unpinned = {lane["name"]: lane.get("takes_unpinned", True) for lane in config["lanes"]}
    assert unpinned == {"batched": True, "speculative": False, "table": True, "adaptive": False}
    assert set(unpinned) == set(LANES.values()) - {LANES[PLACEMENT]}


def test_capacity_and_objectives_are_those_of_the_profile() -> None:
    profile = profiles.load(PROFILES_DIR / "cpu-2-cores.json")
    found = reckon(profile, LANES, 2.0, seed=1)
    assert 3 < found.capacity_rps < 12
    assert [objective.name for objective in found.objectives] == ["relaxed", "fast", "by kind"]


def test_answers_are_told_apart_by_when_they_were_due_and_by_kind() -> None:
    stage = plan().stages[0]
    records = records_of(stage, SOON_S)
    failed = replace(record(stage.lane, reason="queue_timeout", chunks=0), label=records[1].label)
    # The second was refused, of the last nothing is known.
    found = answers_of([records[0], failed, *records[2:-1]], stage, SEED)
    assert found.due_s.tolist() == [arrival.at_s for arrival in arrivals_of(stage, SEED)]
    assert [KINDS[kind] for kind in found.kind] == [kind_of(stage, i) for i in range(len(records))]
    assert Counter(found.kind.tolist()).keys() == {0, 1}
    assert found.lanes == ("batched",)
    assert found.lane.tolist() == [0, -1, *[0] * (len(records) - 3), -1]
    assert (found.ttft_s[0], found.tpot_s[0]) == pytest.approx((SOON_S, 0.02))
    assert (found.e2e_s[1], found.e2e_s[-1]) == (math.inf, math.inf)


def test_a_run_is_read_as_the_study_that_it_was(tmp_path: Path) -> None:
    stages, records = [], []
    for stage in plan().stages:
        # Late without drafts, in time with them and on the lane that the scheduler chose.
        own = records_of(stage, LATE_S if stage.lane == "batched" else SOON_S)
        own = [replace(each, served_by_lane="speculative") for each in own] if stage.lane == "any" else own
        stages.append(stage_run(own, plan=stage))
        records += own
    run = run_file([stage for stage in stages if stage.plan.lane == "batched"])
    write_whole_run(tmp_path, replace(run, stages=tuple(stages)), records)
    _, found = studies_of_run(tmp_path, LANES, objectives(2.0, 0.050, 0.010))
    relaxed, by_kind = found["relaxed"], found["by kind"]
    assert relaxed.step_s == 2.0
    assert relaxed.num_repeats == 2
    assert relaxed.best_fixed() == SPECULATIVE
    assert relaxed.goodput_rps(BATCHED, relaxed.steps_of(None)).value == 0
    assert relaxed.gain(PLACEMENT).value == 1
    assert relaxed.goodput_rps(PLACEMENT, relaxed.steps_of(None)).value == pytest.approx(
        sum(stage.requests for stage in plan().stages[::5][:2]) / (2 * 2.0 * len(rise_and_fall()))
    )
    assert relaxed.lane_shares(PLACEMENT, relaxed.steps_of(None))[0] == {"speculative": 1.0}
    # TPOT is 20 ms: of copies that is too slow by then.
    counted = sum(
        kind_of(stage, i) == "story" for stage in plan().stages[::5][:2] for i in range(stage.requests)
    )
    met = by_kind.goodput_rps(PLACEMENT, by_kind.steps_of(None)).value * 2 * 2.0 * len(rise_and_fall())
    assert met == pytest.approx(counted)


def test_what_the_report_says_against_a_run_is_told(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is no summary of a run; `tandem report"):
        faults_of(tmp_path)
    stages = [{"lane": "batched", "invalid": []}, {"lane": "any", "invalid": ["the client was late"]}]
    (tmp_path / "summary.json").write_text(json.dumps({"stages": stages}))
    assert faults_of(tmp_path) == ["any: the client was late"]


def test_a_run_of_something_else_is_refused(tmp_path: Path) -> None:
    other = stage_run([record("sequential")])
    write_whole_run(tmp_path, run_file([other]), [record("sequential")])
    with pytest.raises(ValueError, match="stage sequential/copy/1 user is none of this study"):
        studies_of_run(tmp_path, LANES, objectives(2.0, 0.05, 0.01))


def test_a_repeat_that_was_not_finished_is_left_out(tmp_path: Path) -> None:
    made = plan()
    stages = [stage_run(records_of(stage, SOON_S), plan=stage) for stage in made.stages[:7]]
    run = run_file(stages[:1])
    records = [each for stage in made.stages[:7] for each in records_of(stage, SOON_S)]
    write_whole_run(tmp_path, replace(run, stages=tuple(stages)), records)
    _, found = studies_of_run(tmp_path, LANES, objectives(2.0, 0.05, 0.01))
    assert found["relaxed"].num_repeats == 1
    write_whole_run(tmp_path, replace(run, stages=tuple(stages[:3])), records)
    with pytest.raises(ValueError, match="no repeat in which every arm ran"):
        studies_of_run(tmp_path, LANES, objectives(2.0, 0.05, 0.01))
