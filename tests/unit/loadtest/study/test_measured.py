from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from loadtest.client.record import RequestRecord
from loadtest.offer.workload import load_workload
from loadtest.run.directory import PLAN_FILE, read_run, write_run
from loadtest.run.plan import Plan, StagePlan, arrivals_of, write_plan
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
from loadtest.study.schedule import AROUND_S, KINDS, PARTS, part_of, rise_and_fall
from loadtest.study.simulated import PROFILES_DIR
from serving.calibration import profile as profiles
from tests.unit.loadtest.runs import record, run_file, stage_run, write_whole_run

ROOT = Path(__file__).parents[4]
SEED = 7  # of `run_file`
SOON_S, LATE_S = 0.1, 9.0
STEP_S = 2.0


def plan(repeats: int = 2, step_s: float = STEP_S, capacity_rps: float = 25.0) -> Plan:
    return plan_of(
        LANES,
        base_url="http://h:1",
        model="m",
        capacity_rps=capacity_rps,
        step_s=step_s,
        repeats=repeats,
        seed=SEED,
    )


def kind_of(stage: StagePlan, place: int) -> str:
    return load_workload(WORKLOAD).part(SEED, stage.first_prompt + place).name


def counted_places(stage: StagePlan) -> list[int]:
    """Requests of a stage that are in a step, by their place in it."""
    part = part_of(stage.load.label)
    assert part is not None
    first, end = PARTS[part]
    due_s = [arrival.at_s - AROUND_S for arrival in arrivals_of(stage, SEED)]
    return [place for place, at_s in enumerate(due_s) if 0 <= at_s < STEP_S * (end - first)]


def records_of(stage: StagePlan, ttft_s: float, gap_s: float = 0.02) -> list[RequestRecord]:
    """One for each arrival, all alike; those before and after the steps come late."""
    found = []
    counted = set(counted_places(stage))
    for place in range(len(arrivals_of(stage, SEED))):
        is_lead = place < stage.warmup_requests
        made = record(
            stage.lane,
            number=stage.first_prompt + place,
            ttft_s=ttft_s if place in counted else LATE_S,
            gap_s=gap_s,
        )
        label = replace(made.label, stage=stage.key, workload=stage.workload, is_warmup=is_lead)
        found.append(replace(made, label=label))
    return found


def write_study(
    directory: Path,
    made: Plan,
    stages: Sequence[StagePlan],
    records_of_stage: Callable[[StagePlan], list[RequestRecord]],
) -> None:
    """A run of so many stages of a plan."""
    found = {stage: records_of_stage(stage) for stage in stages}
    run = run_file([stage_run(found[stages[0]], plan=stages[0])])
    ran = tuple(stage_run(records, plan=stage) for stage, records in found.items())
    write_whole_run(directory, replace(run, stages=ran), [each for own in found.values() for each in own])
    write_plan(made, directory / PLAN_FILE)


def test_arms_take_turns_at_each_part_under_the_same_requests_in_an_order_that_is_drawn() -> None:
    stages = plan(repeats=4).stages
    assert len(stages) == 4 * len(PARTS) * len(LANES)
    orders = []
    for begin in range(0, len(stages), len(LANES)):
        own = stages[begin : begin + len(LANES)]
        orders.append(tuple(stage.lane for stage in own))
        assert {stage.lane for stage in own} == set(LANES.values())
        assert len({(stage.load, stage.first_prompt, arrivals_of(stage, SEED)) for stage in own}) == 1
        assert begin == 0 or own[0].first_prompt == stages[begin - 1].prompts_end
    assert len(set(orders)) > len(orders) / 2
    assert len({order[0] for order in orders}) > len(LANES) / 2
    by_repeat = [stage for stage in stages if stage.lane == "batched" and stage.load == stages[0].load]
    assert arrivals_of(by_repeat[0], SEED) != arrivals_of(by_repeat[1], SEED)


def test_requests_before_and_after_the_steps_are_offered_and_do_not_count() -> None:
    for stage in plan().stages:
        arrivals, counted = arrivals_of(stage, SEED), counted_places(stage)
        assert 0 < stage.warmup_requests == counted[0]
        assert counted[-1] + 1 < len(arrivals) == stage.warmup_requests + stage.requests
        found = answers_of(records_of(stage, SOON_S), stage, SEED)
        assert found.due_s[: len(counted)].tolist() == [arrivals[place].at_s - AROUND_S for place in counted]
        assert found.ttft_s.tolist() == pytest.approx(
            [SOON_S] * len(counted) + [LATE_S] * (stage.requests - len(counted))
        )


def test_no_stage_is_ended_for_its_refusals() -> None:
    assert plan().max_error_rate == 1


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
    stage = next(stage for stage in plan().stages if stage.lane == "batched")
    records = records_of(stage, SOON_S)[stage.warmup_requests :]
    failed = replace(record(stage.lane, reason="queue_timeout", chunks=0), label=records[1].label)
    # The second was refused, of the last nothing is known.
    found = answers_of([records[0], failed, *records[2:-1]], stage, SEED)
    assert [KINDS[kind] for kind in found.kind] == [
        kind_of(stage, stage.warmup_requests + i) for i in range(len(records))
    ]
    assert Counter(found.kind.tolist()).keys() == {0, 1}
    assert found.lanes == ("batched",)
    assert found.lane.tolist() == [0, -1, *[0] * (len(records) - 3), -1]
    assert (found.ttft_s[0], found.tpot_s[0]) == pytest.approx((SOON_S, 0.02))
    assert (found.e2e_s[1], found.e2e_s[-1]) == (math.inf, math.inf)


def test_a_run_is_read_as_the_study_that_it_was(tmp_path: Path) -> None:
    def records_of_arm(stage: StagePlan) -> list[RequestRecord]:
        # Late without drafts, in time with them and on the lane that the scheduler chose.
        own = records_of(stage, LATE_S if stage.lane == "batched" else SOON_S)
        return [replace(each, served_by_lane="speculative") for each in own] if stage.lane == "any" else own

    made = plan()
    write_study(tmp_path, made, made.stages, records_of_arm)
    _, found = studies_of_run(tmp_path, LANES, objectives(2.0, 0.050, 0.010))
    relaxed, by_kind = found["relaxed"], found["by kind"]
    assert (relaxed.step_s, relaxed.parts) == (STEP_S, PARTS)
    assert relaxed.num_repeats == 2
    assert relaxed.best_fixed() == SPECULATIVE
    assert relaxed.goodput_rps(BATCHED, relaxed.steps_of(None)).value == 0
    assert relaxed.gain(PLACEMENT).value == 1
    assert relaxed.goodput_rps(PLACEMENT, relaxed.steps_of(None)).value == pytest.approx(
        sum(len(counted_places(stage)) for stage in made.stages[::5]) / (2 * STEP_S * len(rise_and_fall()))
    )
    assert relaxed.lane_shares(PLACEMENT, relaxed.steps_of(None))[0] == {"speculative": 1.0}
    # TPOT is 20 ms: of copies that is too slow by then.
    counted = sum(
        kind_of(stage, place) == "story" for stage in made.stages[::5] for place in counted_places(stage)
    )
    met = by_kind.goodput_rps(PLACEMENT, by_kind.steps_of(None)).value * 2 * 2.0 * len(rise_and_fall())
    assert met == pytest.approx(counted)


def test_each_step_has_the_requests_that_were_due_in_it(tmp_path: Path) -> None:
    made = plan()
    write_study(tmp_path, made, made.stages, lambda stage: records_of(stage, SOON_S))
    _, found = studies_of_run(tmp_path, LANES, objectives(2.0, 0.05, 0.01))
    for repeat in range(2):
        expected = []
        for part, (first, end) in enumerate(PARTS):
            stage = next(
                stage for stage in made.stages if (stage.repeat, part_of(stage.load.label)) == (repeat, part)
            )
            due_s = [arrival.at_s - AROUND_S for arrival in arrivals_of(stage, SEED)]
            expected += [sum(2.0 * n <= at_s < 2.0 * (n + 1) for at_s in due_s) for n in range(end - first)]
        for arm in LANES:
            assert [step.offered for step in found["relaxed"].arms[arm][repeat]] == expected


def test_a_part_in_which_nobody_comes_is_refused() -> None:
    with pytest.raises(ValueError, match=r"none of its \d+ requests comes after warmup_s=6"):
        plan(step_s=0.5, capacity_rps=0.01)


def test_what_the_report_says_against_a_run_is_told(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is no summary of a run; `tandem report"):
        faults_of(tmp_path)
    stages = [{"lane": "batched", "invalid": []}, {"lane": "any", "invalid": ["the client was late"]}]
    (tmp_path / "summary.json").write_text(json.dumps({"stages": stages}))
    assert faults_of(tmp_path) == ["any: the client was late"]


def test_a_run_of_something_else_is_refused(tmp_path: Path) -> None:
    other = stage_run([record("sequential")])
    write_whole_run(tmp_path, run_file([other]), [record("sequential")])
    write_plan(replace(plan(), stages=(other.plan,)), tmp_path / PLAN_FILE)
    with pytest.raises(ValueError, match="stage sequential/copy/1 user is none of this study"):
        studies_of_run(tmp_path, LANES, objectives(2.0, 0.05, 0.01))


def test_a_repeat_that_was_not_finished_is_left_out(tmp_path: Path) -> None:
    made = plan()
    of_first = len(made.stages) // 2
    write_study(tmp_path, made, made.stages[:-1], lambda stage: records_of(stage, SOON_S))
    _, found = studies_of_run(tmp_path, LANES, objectives(2.0, 0.05, 0.01))
    assert found["relaxed"].num_repeats == 1
    # So is one whose last stage was stopped.
    run = read_run(tmp_path)
    *ran, last = [stage_run(records_of(stage, SOON_S), plan=stage) for stage in made.stages]
    write_run(replace(run, stages=(*ran, replace(last, is_cut=True))), tmp_path)
    _, found = studies_of_run(tmp_path, LANES, objectives(2.0, 0.05, 0.01))
    assert found["relaxed"].num_repeats == 1
    write_study(tmp_path, made, made.stages[: of_first - 1], lambda stage: records_of(stage, SOON_S))
    with pytest.raises(ValueError, match="no repeat in which every arm ran"):
        studies_of_run(tmp_path, LANES, objectives(2.0, 0.05, 0.01))
