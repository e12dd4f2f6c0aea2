"""A measured run once more in virtual time: what the simulation says of its stages, beside what was measured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from loadtest.client.record import RequestRecord, read_records
from loadtest.offer.load import ClosedLoop, Load
from loadtest.run.directory import REQUESTS_FILE, RUN_FILE, read_run
from loadtest.simulate.lanes import TextMix, candidates
from loadtest.simulate.offered import mean_lengths
from loadtest.simulate.verdict import percentile
from serving.calibration.profile import Profile
from serving.config import SchedulerConfig
from serving.core.latency import tpots_s, ttfts_s
from serving.progress import Say
from serving.simulation.planned_lab import Floats, Offered, PlannedLab, PlannedRun

MIN_REQUESTS = 4  # of a stage: of fewer, a percentile says nothing; bench asks a lone user for 4
FIGURES = ("ttft_p50_s", "ttft_p95_s", "tpot_p50_s", "output_tokens_per_s")


@dataclass(frozen=True, slots=True)
class Compared:
    """A stage's figures, by the names of `FIGURES`.

    Attributes:
        num_left_out: requests that did not complete; they are in neither.
    """

    lane: str
    workload: str
    load: str
    num_requests: int
    num_left_out: int
    measured: dict[str, float]
    simulated: dict[str, float]

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
    def error(self) -> float:
        """Share of the measured."""
        return self.simulated_tokens_per_s / self.measured_tokens_per_s - 1


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
    scheduler: SchedulerConfig,
    say: Say,
    *,
    seed: int,
    left_out: Say = lambda text: None,
) -> list[Compared]:
    """Every stage of a lane that the profile has: its requests at the instants at which they were due.

    Users of a closed loop send as they did: the next request once the one before has ended. Their think time is not
    simulated; a stage that has one is left out.

    Args:
        left_out: told of each stage that is not simulated, and why.

    Raises:
        ValueError: the run cannot be read, or has no such stage.
        ConfigError: the profile lacks acceptance on a stage's workload.
    """
    run = read_run(directory)
    by_stage: dict[str, list[RequestRecord]] = {}
    for record in read_records(directory / REQUESTS_FILE):
        by_stage.setdefault(record.label.stage, []).append(record)
    replicas = Counter(_lane_of(directory, replica) for replica in run.run.replicas)
    known = {lane.lane for lane in profile.lanes}
    compared = []
    for stage in run.stages:
        records = [each for each in by_stage.get(stage.plan.key, []) if not each.label.is_warmup]
        load = stage.plan.load
        num_usable = sum(_is_usable(each) for each in records)
        if isinstance(load, ClosedLoop) and load.think_time_s:
            left_out(f"{stage.plan.key}: its users think, which is not simulated")
        elif stage.plan.lane not in known:
            left_out(f"{stage.plan.key}: lane {stage.plan.lane!r} is not in the profile")
        elif num_usable < MIN_REQUESTS:
            left_out(f"{stage.plan.key}: {num_usable} of its requests completed, of {MIN_REQUESTS} at least")
        else:
            say(f"simulating {stage.plan.key}")
            compared.append(
                _compared(
                    profile,
                    stage.plan.lane,
                    stage.plan.workload,
                    load,
                    records,
                    max(1, replicas[stage.plan.lane]),
                    scheduler,
                    seed,
                )
            )
    if not compared:
        raise ValueError(
            f"{directory}: no stage of {', '.join(sorted(known))} with {MIN_REQUESTS} completed requests or more"
        )
    return compared


def _compared(
    profile: Profile,
    lane: str,
    workload: str,
    load: Load,
    records: Sequence[RequestRecord],
    replicas: int,
    scheduler: SchedulerConfig,
    seed: int,
) -> Compared:
    usable = sorted(filter(_is_usable, records), key=lambda record: record.scheduled_at_s)
    offered = [
        Offered(record.scheduled_at_s, record.prompt_tokens or 1, record.output_tokens or 1)
        for record in usable
    ]
    candidate = candidates(profile, (lane,), TextMix((workload,), (1.0,)), mean_lengths(offered))[0]
    num_users = load.users if isinstance(load, ClosedLoop) else None
    run = PlannedLab(scheduler, [(candidate.model, replicas)], offered, num_users=num_users, seed=seed).run()
    began_at_s = 0.0 if num_users else offered[0].at_s
    return Compared(
        lane,
        workload,
        load.label,
        len(usable),
        len(records) - len(usable),
        _measured(usable),
        _simulated(run, began_at_s),
    )


def _lane_of(directory: Path, replica: Mapping[str, Any]) -> str:
    if "lane" not in replica:
        raise ValueError(f"{directory / RUN_FILE}: a replica has no lane: {dict(replica)!s:.200}")
    return str(replica["lane"])


def _is_usable(record: RequestRecord) -> bool:
    return record.is_completed and bool(record.output_tokens) and bool(record.chunk_at_s)


def _measured(records: Sequence[RequestRecord]) -> dict[str, float]:
    timelines = [record.timeline for record in records]
    lasted_s = max(each.finished_at_s for each in records) - records[0].scheduled_at_s
    return _figures(
        np.array(ttfts_s(timelines)),
        np.array(tpots_s(timelines) or [0.0]),
        sum(record.output_tokens or 0 for record in records) / lasted_s,
    )


def _simulated(run: PlannedRun, began_at_s: float) -> dict[str, float]:
    served = np.isfinite(run.e2e_s)
    has_more = served & (run.output_tokens > 1)
    tokens = int(run.output_tokens[served].sum())
    return _figures(
        run.ttft_s[served],
        run.tpot_s[has_more] if has_more.any() else np.zeros(1),
        tokens / (run.lasted_s - began_at_s),
    )


def _figures(ttft_s: Floats, tpot_s: Floats, output_tokens_per_s: float) -> dict[str, float]:
    values = (percentile(ttft_s, 0.5), percentile(ttft_s, 0.95), percentile(tpot_s, 0.5), output_tokens_per_s)
    return dict(zip(FIGURES, values, strict=True))
