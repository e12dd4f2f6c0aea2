"""The study on a running lab: what is offered to which lane when, and what the records of it say."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

import numpy as np

from loadtest.client.record import RequestRecord, read_records
from loadtest.offer.workload import load_workload
from loadtest.run.directory import REQUESTS_FILE, SUMMARY_FILE, RunFile, read_run
from loadtest.run.plan import Plan, StagePlan, arrivals_of
from loadtest.run.planning import plan_open
from loadtest.study.analysis import Answers, Objective, Study, tally
from loadtest.study.arms import BATCHED, FIXED, PLACEMENT, PLUG_IN, SPECULATIVE, TABLE
from loadtest.study.reckon import capacity_rps, objectives_of
from loadtest.study.schedule import KINDS, offered_load, rise_and_fall
from serving.calibration.profile import Profile
from serving.core.lane import ANY_LANE
from serving.core.latency import e2e_latency_s, tpot_s, ttft_s
from serving.core.request import BYTES_PER_TOKEN
from serving.core.speculation.cost_model import Lengths

NAME = "study-adaptive"
WORKLOAD = "mixed:" + ",".join(f"{kind}=1" for kind in KINDS)
NUM_LOOKED_AT = 64  # prompts, for their mean length
# The lanes of deploy/study-adaptive.yaml.
LANES = {
    BATCHED: "batched",
    SPECULATIVE: "speculative",
    TABLE: "table",
    PLUG_IN: "adaptive",
    PLACEMENT: ANY_LANE,
}


@dataclass(frozen=True, slots=True)
class Reckoned:
    """What the profile says before anything runs.

    Attributes:
        capacity_rps: of the better fixed arm.
    """

    objectives: tuple[Objective, ...]
    capacity_rps: float


def reckon(profile: Profile, lanes: Mapping[str, str], ttft_limit_s: float, seed: int) -> Reckoned:
    """Objectives and capacity, by the profile of the fixed arms' lanes and the lengths of the workload.

    Raises:
        ConfigError: the profile has not these lanes.
    """
    plain, drafting = (profile.lane(lanes[arm]) for arm in FIXED)
    lengths = lengths_of_workload(seed)
    slots = [(lane, lane.max_num_seqs) for lane in (plain, drafting)]
    return Reckoned(objectives_of(plain, lengths, ttft_limit_s), capacity_rps(slots, lengths))


def lengths_of_workload(seed: int) -> Lengths:
    """Means of the first requests; prompts by their bytes."""
    requests = [load_workload(WORKLOAD).request(seed, number) for number in range(NUM_LOOKED_AT)]
    prompt_bytes = [
        sum(len(str(message["content"]).encode()) for message in request.messages) for request in requests
    ]
    return Lengths(
        fmean(prompt_bytes) / BYTES_PER_TOKEN, fmean(request.output_tokens for request in requests)
    )


def plan_of(
    lanes: Mapping[str, str],
    *,
    base_url: str,
    model: str,
    capacity_rps: float,
    step_s: float,
    repeats: int,
    seed: int,
) -> Plan:
    """A stage for each arm and repeat: the whole rise and fall. Arms take turns; each repeat begins with another.

    Args:
        lanes: of each arm.
    """
    load = offered_load(capacity_rps, step_s)
    stages: list[StagePlan] = []
    first_prompt = 0
    arms = list(lanes)
    for repeat in range(repeats):
        turn = repeat % len(arms)
        now = [
            replace(plan_open(lanes[arm], WORKLOAD, load, None, seed, repeat), first_prompt=first_prompt)
            for arm in (*arms[turn:], *arms[:turn])
        ]
        stages += now
        first_prompt = max(stage.prompts_end for stage in now)
    return Plan(base_url, model, tuple(stages), name=NAME, seed=seed)


def studies_of_run(
    directory: Path, lanes: Mapping[str, str], objectives: tuple[Objective, ...]
) -> tuple[RunFile, dict[str, Study]]:
    """The study of a run that `plan_of` planned, by objective.

    Raises:
        ValueError: the run cannot be read, or is none of this study.
    """
    run = read_run(directory)
    by_stage: dict[str, list[RequestRecord]] = {}
    for record in read_records(directory / REQUESTS_FILE):
        by_stage.setdefault(record.label.stage, []).append(record)
    answers: dict[str, list[Answers]] = {arm: [] for arm in lanes}
    for stage in sorted(run.stages, key=lambda stage: stage.plan.repeat):
        plan = stage.plan
        found = [arm for arm, lane in lanes.items() if lane == plan.lane]
        if not found or plan.workload != WORKLOAD:
            raise ValueError(f"{directory}: stage {plan.key} is none of this study")
        records = by_stage.get(plan.key, [])
        answers[found[0]].append(answers_of(records, plan, run.run.seed))
    whole = min(len(runs) for runs in answers.values())
    if not whole:
        raise ValueError(f"{directory}: there is no repeat in which every arm ran")
    step_s = _step_s(run)
    return run, {
        objective.name: Study(
            {arm: [tally(each, objective, step_s) for each in runs[:whole]] for arm, runs in answers.items()},
            tuple(arm for arm in FIXED if arm in answers),
            step_s,
        )
        for objective in objectives
    }


def faults_of(directory: Path) -> list[str]:
    """Why figures of the run may not be used, by its own report; a sentence each, with the lane.

    Raises:
        ValueError: there is no report of the run.
    """
    path = directory / SUMMARY_FILE
    try:
        stages = json.loads(path.read_bytes())["stages"]
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(
            f"{path}: is no summary of a run; `tandem report {directory}` writes it: {error}"
        ) from None
    return [f"{stage['lane']}: {fault}" for stage in stages for fault in stage["invalid"]]


def answers_of(records: list[RequestRecord], plan: StagePlan, seed: int) -> Answers:
    """What the study looks at of a stage's records; one that has none counts as failed."""
    arrivals = arrivals_of(plan, seed)
    workload = load_workload(plan.workload)
    by_number = {record.label.number: record for record in records}
    found = [by_number.get(plan.first_prompt + place) for place in range(len(arrivals))]
    lanes = tuple(sorted({record.served_by_lane for record in found if record and record.served_by_lane}))
    values = np.array([_latencies_s(record) for record in found], dtype=np.float64).reshape(-1, 3)
    return Answers(
        np.array([arrival.at_s for arrival in arrivals]),
        np.array(
            [
                KINDS.index(workload.part(seed, plan.first_prompt + place).name)
                for place in range(len(arrivals))
            ]
        ),
        values[:, 0],
        values[:, 1],
        values[:, 2],
        np.array(
            [
                lanes.index(record.served_by_lane)
                if record and record.is_completed and record.served_by_lane
                else -1
                for record in found
            ]
        ),
        lanes,
    )


def _latencies_s(record: RequestRecord | None) -> tuple[float, float, float]:
    """TTFT, TPOT and E2E."""
    if record is None or not record.is_completed or not record.chunk_at_s:
        return math.inf, math.inf, math.inf
    timeline = record.timeline
    return ttft_s(timeline), tpot_s(timeline) or 0.0, e2e_latency_s(timeline)


def _step_s(run: RunFile) -> float:
    load = run.stages[0].plan.load
    assert load.kind == "open", "arrivals_of has had it"
    return load.duration_s / len(rise_and_fall())
