"""A measured run once more in virtual time: what the simulation says of its stages, beside what was measured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from pydantic import ValidationError

from loadtest.analysis.stage_summary import Repeat, make_repeat
from loadtest.client.lane_drafts import chooses_drafts, num_drafts_of
from loadtest.client.lane_models import other_names
from loadtest.client.record import RequestRecord, faults_in_words, read_records
from loadtest.offer.load import ClosedLoop
from loadtest.offer.recorded_trace import MAX_TOKENS
from loadtest.run.directory import REQUESTS_FILE, RUN_FILE, RunFile, read_run
from loadtest.run.plan import StagePlan
from loadtest.simulate.lanes import TextMix, candidates
from loadtest.simulate.offered import mean_lengths
from loadtest.simulate.verdict import percentile
from serving.calibration.profile import LaneProfile, Profile
from serving.config import SchedulerConfig
from serving.core.latency import tpots_s, ttfts_s
from serving.core.request import Outcome
from serving.progress import Say
from serving.simulation.planned_lab import Offered, PlannedLab, PlannedRun

# Noise and accepted drafts are drawn, and one draw of a few requests says little of p95.
NUM_SIMULATED = 5
MIN_REQUESTS = 4  # of a stage: of fewer, a percentile says nothing; bench asks a lone user for 4
MAX_CHUNKS = 1000  # of a simulated answer: more would change tokens/s by less than can be seen
FIGURES = ("ttft_p50_s", "ttft_p95_s", "tpot_p50_s", "output_tokens_per_s")


@dataclass(frozen=True, slots=True)
class Compared:
    """A stage's figures, by the names of `FIGURES`; of all its repeats together, tokens/s their mean.

    Attributes:
        num_left_out: requests that did not complete; they are in neither.
        spread: by how much repeats of the same stage differed, the largest less the smallest over the mean: no
            simulation can be held to less. Empty where it ran once.
    """

    lane: str
    workload: str
    load: str
    num_requests: int
    num_left_out: int
    measured: dict[str, float]
    simulated: dict[str, float]
    spread: dict[str, float] = field(default_factory=dict)

    def error(self, figure: str) -> float | None:
        """Of the simulation: a share of what was measured; below 0 where it is too low.

        None where nothing was: answers of one token have no TPOT.
        """
        measured = self.measured[figure]
        return self.simulated[figure] / measured - 1 if measured else None


@dataclass(frozen=True, slots=True)
class Capacity:
    """The most output tokens/s of a lane on a kind of text, of all loads."""

    lane: str
    workload: str
    measured_tokens_per_s: float
    simulated_tokens_per_s: float

    @property
    def error(self) -> float | None:
        """Share of the measured; None where nothing was: no stage has a steady part."""
        measured = self.measured_tokens_per_s
        return self.simulated_tokens_per_s / measured - 1 if measured else None


def capacities(compared: Sequence[Compared]) -> list[Capacity]:
    """One for each lane and kind of text, in order of the stages."""
    by_place: dict[tuple[str, str], list[Compared]] = {}
    for stage in compared:
        by_place.setdefault((stage.lane, stage.workload), []).append(stage)
    return [
        Capacity(
            *place,
            max(stage.measured["output_tokens_per_s"] for stage in stages),
            max(stage.simulated["output_tokens_per_s"] for stage in stages),
        )
        for place, stages in by_place.items()
    ]


def compare_with_run(
    directory: Path,
    profile: Profile,
    scheduler: SchedulerConfig | None,
    say: Say,
    *,
    seed: int,
    left_out: Say = lambda text: None,
    warn: Say = lambda text: None,
) -> list[Compared]:
    """Every stage of a lane that the profile has, its repeats as one: its requests when they were due.

    All of it is simulated `NUM_SIMULATED` times, and figures are the mean of those.

    Users of a closed loop begin when they did, and send the next request once the one before has ended. Their think
    time is not simulated; a stage that has one is left out. What a stage sent before and after what counts is
    simulated too, for the load that it is.

    Args:
        scheduler: its bounds; None: those of the lab that was measured.
        left_out: told of each stage that is not simulated, and why.
        warn: told where the run is of another model than the profile.

    Raises:
        ValueError: the run cannot be read or holds what cannot be, or has no such stage.
    """
    run = read_run(directory)
    scheduler = scheduler or _scheduler_of(directory, run)
    by_stage = _by_stage(directory / REQUESTS_FILE, [stage.plan.key for stage in run.stages])
    replicas = Counter(_lane_of(directory, replica) for replica in run.run.replicas)
    known = {lane.lane: lane for lane in profile.lanes}
    configs = {lane["name"]: lane for lane in run.run.config.get("lanes", ())}
    usable: dict[str, list[Repeat]] = {}
    for stage in run.stages:
        measured = make_repeat(stage, by_stage[stage.plan.key])
        num_usable = sum(map(_is_served, measured.records))
        if why := _why_left_out(stage.plan, known, configs.get(stage.plan.lane, {}), num_usable):
            left_out(f"{stage.plan.key}: {why}")
        else:
            usable.setdefault(stage.plan.group, []).append(measured)
    if not usable:
        raise ValueError(
            f"{directory}: no stage of {', '.join(sorted(known))} with {MIN_REQUESTS} completed requests or more"
        )
    compared = []
    for group, repeats in usable.items():
        say(f"simulating {group}")
        plan = repeats[0].stage.plan
        num_replicas = max(1, replicas[plan.lane])
        draws = [
            [_simulated(profile, repeat, num_replicas, scheduler, seed + number) for repeat in repeats]
            for number in range(NUM_SIMULATED)
        ]
        if (served := min(map(_num_served, draws))) < MIN_REQUESTS:
            left_out(
                f"{group}: in the simulation {served} of its requests were served; the scheduler refused the rest"
            )
            continue
        num_served = _num_served(repeats)
        compared.append(
            Compared(
                plan.lane,
                plan.workload,
                plan.load.label,
                num_served,
                sum(len(repeat.records) for repeat in repeats) - num_served,
                _figures(repeats),
                _mean([_figures(draw) for draw in draws]),
                _spread([_figures([repeat]) for repeat in repeats]),
            )
        )
    if not compared:
        raise ValueError(
            f"{directory}: in the simulation the scheduler refused nearly all; --config says its bounds"
        )
    if others := _models_of(run, [stage.lane for stage in compared]) - {profile.model}:
        warn(
            f"{directory}: was measured with model {', '.join(sorted(others))}, the profile with {profile.model}: "
            "what the simulation is off by is between two models"
        )
    return compared


def _models_of(run: RunFile, lanes: Iterable[str]) -> set[str]:
    """Names of the models that lanes of a run served."""
    others = other_names(run.run.config)
    return {others.get(lane, str(run.run.model["name"])) for lane in lanes}


def _by_stage(path: Path, keys: Iterable[str]) -> dict[str, list[RequestRecord]]:
    """The records of each of these stages.

    Raises:
        ValueError: a file cannot be read, has a request twice, or a number of tokens that cannot be; the text names
            file and request.
    """
    by_stage: dict[str, dict[str, RequestRecord]] = {key: {} for key in keys}
    for record in read_records(path):
        if (stage := by_stage.get(record.label.stage)) is None:
            continue
        request_id = record.label.request_id
        if request_id in stage:
            raise ValueError(f"{path}: request {request_id!r} is there twice")
        if _ran(record):
            _check_tokens(path, record)
        stage[request_id] = record
    return {key: list(stage.values()) for key, stage in by_stage.items()}


def _check_tokens(path: Path, record: RequestRecord) -> None:
    counts = {
        "prompt_tokens": record.prompt_tokens,
        "output_tokens": record.output_tokens,
        "asked_output_tokens": record.asked_output_tokens,
        "the least of chunk_tokens": min(record.chunk_tokens or (0,)),
        "the sum of chunk_tokens": sum(record.chunk_tokens or ()),
    }
    for name, value in counts.items():
        if value is not None and not 0 <= value <= MAX_TOKENS:
            raise ValueError(
                f"{path}: request {record.label.request_id!r}: {name} is {value}, must be in 0..{MAX_TOKENS}"
            )


def _mean(several: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """By figure. Of draws pooled, a percentile would be that of more requests than were measured, and so higher."""
    return {figure: fmean(each[figure] for each in several) for figure in FIGURES}


def _why_left_out(
    plan: StagePlan, known: Mapping[str, LaneProfile], config: Mapping[str, Any], num_usable: int
) -> str | None:
    """Why a stage is not simulated; None where it is.

    Args:
        known: lanes of the profile, by name.
        config: of the stage's lane, in the lab that was measured; empty where that is not known.
        num_usable: its requests that completed.
    """
    if isinstance(plan.load, ClosedLoop) and plan.load.think_time_s:
        return "its users think, which is not simulated"
    if (lane := known.get(plan.lane)) is None:
        return f"lane {plan.lane!r} is not in the profile"
    if chooses_drafts(config):
        return "how many tokens its lane drafts follows the load, which is not simulated"
    if (num_drafts := num_drafts_of(config)) not in (0, lane.num_drafts):
        return f"its lane drafted {num_drafts} tokens a step, that of the profile {lane.num_drafts}"
    if lane.num_drafts and plan.workload not in lane.acceptance:
        return f"the profile lacks acceptance on {plan.workload!r}; it has {', '.join(lane.acceptance)}"
    if num_usable < MIN_REQUESTS:
        return f"{num_usable} of its requests completed, of {MIN_REQUESTS} at least"
    return None


def _spread(by_repeat: Sequence[Mapping[str, float]]) -> dict[str, float]:
    if len(by_repeat) < 2:
        return {}
    spread = {}
    for figure in FIGURES:
        values = [each[figure] for each in by_repeat]
        spread[figure] = (max(values) - min(values)) / fmean(values) if any(values) else 0.0
    return spread


def _simulated(
    profile: Profile, measured: Repeat, replicas: int, scheduler: SchedulerConfig, seed: int
) -> Repeat:
    """The repeat as it would have been measured."""
    plan = measured.stage.plan
    ran = sorted(filter(_ran, measured.everything), key=lambda record: record.scheduled_at_s)
    counted = [record for record in measured.records if _is_served(record)]
    lengths = mean_lengths([_offered(record, 0, 0) for record in counted])
    offered = [_offered(record, round(lengths.prompt_tokens), round(lengths.output_tokens)) for record in ran]
    candidate = candidates(profile, (plan.lane,), TextMix((plan.workload,), (1.0,)), lengths)[0]
    num_users = plan.load.users if isinstance(plan.load, ClosedLoop) else None
    run = PlannedLab(scheduler, [(candidate.model, replicas)], offered, num_users=num_users, seed=seed).run()
    return make_repeat(measured.stage, _as_records(ran, run))


def _offered(record: RequestRecord, prompt_tokens: int, output_tokens: int) -> Offered:
    """What it asked for; these lengths where it says none."""
    return Offered(
        record.scheduled_at_s,
        record.prompt_tokens or max(1, prompt_tokens),
        record.output_tokens or record.asked_output_tokens or max(1, output_tokens),
    )


def _as_records(ran: Sequence[RequestRecord], run: PlannedRun) -> list[RequestRecord]:
    """The requests with the instants of the simulation, in even chunks; without those that were refused."""
    records = []
    for number in np.flatnonzero(np.isfinite(run.e2e_s)):
        arrived_at_s, num_tokens = float(run.arrived_at_s[number]), int(run.output_tokens[number])
        first_at_s, ended_at_s = (arrived_at_s + float(each[number]) for each in (run.ttft_s, run.e2e_s))
        chunk_at_s = np.linspace(first_at_s, ended_at_s, min(num_tokens, MAX_CHUNKS)).tolist()
        records.append(
            replace(
                ran[number],
                scheduled_at_s=arrived_at_s,
                sent_at_s=arrived_at_s,
                chunk_at_s=tuple(chunk_at_s),
                chunk_tokens=None,
                finished_at_s=ended_at_s,
                output_tokens=num_tokens,
            )
        )
    return records


def _scheduler_of(directory: Path, run: RunFile) -> SchedulerConfig:
    try:
        return SchedulerConfig.model_validate(run.run.config.get("scheduler") or {}, strict=False)
    except ValidationError as error:
        raise ValueError(f"{directory / RUN_FILE}: config.scheduler: {faults_in_words(error)}") from None


def _lane_of(directory: Path, replica: Mapping[str, Any]) -> str:
    if "lane" not in replica:
        raise ValueError(f"{directory / RUN_FILE}: a replica has no lane: {dict(replica)!s:.200}")
    return str(replica["lane"])


def _is_served(record: RequestRecord) -> bool:
    return record.is_completed and bool(record.output_tokens) and bool(record.chunk_at_s)


def _num_served(repeats: Sequence[Repeat]) -> int:
    """Of the requests that count."""
    return sum(_is_served(record) for repeat in repeats for record in repeat.records)


def _ran(record: RequestRecord) -> bool:
    """Whether it took an engine's time, to its end or until its stage ended."""
    return _is_served(record) or record.outcome is Outcome.CANCELLED


def _figures(repeats: Sequence[Repeat]) -> dict[str, float]:
    """As the load lab has them: of the requests that count, and tokens/s of the steady parts."""
    timelines = [record.timeline for repeat in repeats for record in repeat.records if _is_served(record)]
    ttft_s, tpot_s = np.array(ttfts_s(timelines)), np.array(tpots_s(timelines) or [0.0])
    values = (
        percentile(ttft_s, 0.5),
        percentile(ttft_s, 0.95),
        percentile(tpot_s, 0.5),
        fmean(repeat.tokens_per_s or 0.0 for repeat in repeats),
    )
    return dict(zip(FIGURES, values, strict=True))
