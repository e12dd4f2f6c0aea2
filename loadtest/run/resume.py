"""Goes on with a run that was stopped: what of it is kept, and whether the lab is still the same."""

from __future__ import annotations

import fcntl
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from loadtest.client.record import ClientReason, read_rows
from loadtest.run.differences import find_differences
from loadtest.run.directory import PLAN_FILE, REQUESTS_FILE, RunFile, StageRun, read_run, replace_file
from loadtest.run.plan import Plan, read_plan

# Where the lab listens is no part of what was measured.
PLACES = ("config.gateway.host", "config.gateway.port")


@dataclass(frozen=True, slots=True)
class Past:
    """What is kept of a run that goes on.

    Attributes:
        run: as it was left, without stages that were stopped by hand.
        offset_s: where its clock stands now: real time since it started, never before its last record.
        part: 2 when it goes on for the first time, and so on.
    """

    plan: Plan
    run: RunFile
    offset_s: float
    part: int

    @property
    def finished(self) -> frozenset[str]:
        """Keys of the stages that need not run again."""
        return frozenset(stage.plan.key for stage in self.run.stages)


def read_past(directory: Path, description: Mapping[str, Any], now: datetime | None = None) -> Past:
    """Read a run that is to go on, and check that it can.

    Raises:
        ValueError: a file of it is missing or broken, no stage is left, or the lab is another.
    """
    run = read_run(directory)
    plan = read_plan(directory / PLAN_FILE)
    if {stage.key for stage in plan.stages} <= {stage.plan.key for stage in _kept(run)}:
        raise ValueError(
            f"{directory}: all {len(plan.stages)} stages have run; there is nothing to go on with"
        )
    return past_of(directory, plan, run, description, now)


def past_of(
    directory: Path, plan: Plan, run: RunFile, description: Mapping[str, Any], now: datetime | None = None
) -> Past:
    """What is kept of a run that goes on, whether or not its plan says what is left.

    Raises:
        ValueError: the lab is another.
    """
    then = {"config": run.run.config, "model": run.run.model, "engines": _engines(run.run.replicas)}
    today = {
        "config": description["config"],
        "model": description["model"],
        "engines": _engines(description["replicas"]),
    }
    if different := differences(then, today):
        raise ValueError(f"{directory}: the lab is not the one it was measured on: {'; '.join(different)}")
    started_at = datetime.fromisoformat(run.run.started_at)
    since_start_s = ((now or datetime.now(UTC)) - started_at).total_seconds()
    # The computer's clock may have been set back meanwhile: the run's own never goes back.
    offset_s = max([since_start_s, *(stage.finished_at_s for stage in run.stages)])
    return Past(plan, RunFile(run.run, _kept(run)), offset_s, run.run.parts + 1)


def _kept(run: RunFile) -> tuple[StageRun, ...]:
    return tuple(stage for stage in run.stages if stage.stop_reason != ClientReason.INTERRUPTED)


def differences(then: Mapping[str, Any], today: Mapping[str, Any]) -> list[str]:
    """What differs between two descriptions of a lab, each by its key and both values."""
    different = find_differences(then, today, absent="not there", opens_lists=True)
    return [
        f"{each.name} was {each.a}, is {each.b}"
        for each in sorted(different, key=lambda each: each.name)
        if each.name not in PLACES
    ]


def drop_unfinished(directory: Path, finished: frozenset[str]) -> int:
    """Rewrite the records without those of stages that will run again; how many were dropped.

    Each lane is warmed up again; its earlier warm-up stays, as long as the lane has a finished stage.

    Raises:
        ValueError: a line is not a record. The last one may be torn: the process was killed while it wrote.
    """
    path = directory / REQUESTS_FILE
    lanes = {key.split("/", 1)[0] for key in finished}
    kept, dropped = [], 0
    for line, record in read_rows(path):
        label = record.label
        if label.stage in finished or (label.stage == "warmup" and label.lane in lanes):
            kept.append(line)
        else:
            dropped += 1
    replace_file(path, b"".join(kept))
    return dropped


def refuse_running(directory: Path) -> None:
    """Refuse a run that some process still writes: it holds the lock of the records.

    Raises:
        ValueError: it does, or the records cannot be read.
    """
    path = directory / REQUESTS_FILE
    try:
        with path.open("rb") as records:
            fcntl.flock(records, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ValueError(f"{directory}: this run is still in progress; stop it first") from None
    except OSError as error:
        raise ValueError(
            f"{path}: cannot be read: {error.strerror}; is this the directory of a run?"
        ) from None


def _engines(replicas: list[dict[str, Any]]) -> list[str]:
    return sorted(
        f"{each.get('lane')}: {each.get('engine')} {each.get('engine_version')}" for each in replicas
    )
