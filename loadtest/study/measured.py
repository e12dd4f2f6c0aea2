"""The study on a running lab: what is offered to which lane when, and what the records of it say."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

import numpy as np

from loadtest.client.record import RequestRecord, read_records
from loadtest.offer.workload import load_workload
from loadtest.run.directory import PLAN_FILE, REQUESTS_FILE, SUMMARY_FILE, RunFile, read_run
from loadtest.run.plan import Plan, StagePlan, arrivals_of, read_plan
from loadtest.run.planning import plan_open
from loadtest.study.analysis import Answers, Objective, StepTally, Study, by_step, tally
from loadtest.study.arms import BATCHED, FIXED, PLACEMENT, PLUG_IN, SPECULATIVE, TABLE
from loadtest.study.reckon import capacity_rps, objectives_of
from loadtest.study.schedule import AROUND_S, KINDS, PARTS, offered_part, part_of
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
    """A stage for each part of the rise and fall, arm and repeat.

    Arms take turns at each part, in an order that is drawn, so that what the machine does meanwhile, and who had it
    just before, falls on all of them.

    Args:
        lanes: of each arm.

    Raises:
        ValueError: a part is so short that nobody comes.
    """
    loads = [offered_part(part, capacity_rps, step_s) for part in range(len(PARTS))]
    stages: list[StagePlan] = []
    first_prompt = 0
    arms = list(lanes)
    for repeat in range(repeats):
        for part, load in enumerate(loads):
            turns = random.Random(f"{seed}/{repeat}/{part}").sample(arms, len(arms))
            now = [
                replace(
                    plan_open(lanes[arm], WORKLOAD, load, None, seed, repeat, warmup_s=AROUND_S),
                    first_prompt=first_prompt,
                )
                for arm in turns
            ]
            stages += now
            first_prompt = max(stage.prompts_end for stage in now)
    # Refusals are a result of this study: no stage is ended for them.
    return Plan(base_url, model, tuple(stages), name=NAME, seed=seed, max_error_rate=1.0)


def studies_of_run(
    directory: Path, lanes: Mapping[str, str], objectives: tuple[Objective, ...]
) -> tuple[RunFile, dict[str, Study]]:
    """The study of a run that `plan_of` planned, by objective.

    Raises:
        ValueError: the run cannot be read, or is none of this study.
    """
    run, planned = read_run(directory), read_plan(directory / PLAN_FILE).stages
    by_stage: dict[str, list[RequestRecord]] = {}
    for record in read_records(directory / REQUESTS_FILE):
        by_stage.setdefault(record.label.stage, []).append(record)
    arm_of = {lane: arm for arm, lane in lanes.items()}
    parts: list[tuple[StagePlan, int]] = []
    for stage in planned:
        part = part_of(stage.load.label)
        if stage.lane not in arm_of or stage.workload != WORKLOAD or part is None:
            raise ValueError(f"{directory}: stage {stage.key} is none of this study")
        parts.append((stage, part))
    has_run = {stage.plan.key for stage in run.stages if not stage.is_cut}
    cut = {stage.repeat for stage in planned if stage.key not in has_run}
    whole = sorted({stage.repeat for stage in planned} - cut)
    if not whole:
        raise ValueError(f"{directory}: there is no repeat in which every arm ran")
    step_s = _step_s(planned[0])
    steps: dict[tuple[str, int, int], tuple[Answers, ...]] = {}
    for stage, part in parts:
        if stage.repeat in whole:
            first, end = PARTS[part]
            answers = answers_of(by_stage.get(stage.key, []), stage, run.run.seed)
            steps[arm_of[stage.lane], stage.repeat, part] = by_step(answers, step_s, end - first)

    def tallies(arm: str, repeat: int, objective: Objective) -> list[StepTally]:
        return [tally(own, objective) for part in range(len(PARTS)) for own in steps[arm, repeat, part]]

    return run, {
        objective.name: Study(
            {arm: [tallies(arm, repeat, objective) for repeat in whole] for arm in lanes},
            tuple(arm for arm in FIXED if arm in lanes),
            step_s,
            PARTS,
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
    """What the study looks at of the requests of a stage that count; one without a record counts as failed."""
    arrivals = arrivals_of(plan, seed)[plan.warmup_requests :]
    workload = load_workload(plan.workload)
    by_number = {record.label.number: record for record in records}
    numbers = range(plan.first_prompt + plan.warmup_requests, plan.prompts_end)
    found = [by_number.get(number) for number in numbers]
    lanes = tuple(sorted({record.served_by_lane for record in found if record and record.served_by_lane}))
    values = np.array([_latencies_s(record) for record in found], dtype=np.float64).reshape(-1, 3)
    return Answers(
        np.array([arrival.at_s - AROUND_S for arrival in arrivals]),
        np.array([KINDS.index(workload.part(seed, number).name) for number in numbers]),
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


def _step_s(stage: StagePlan) -> float:
    assert stage.load.kind == "open", "it is of this study"
    return stage.load.segments[1].duration_s
