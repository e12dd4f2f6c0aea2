"""What is in the directory of a run."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from loadtest.client.health import ClientCeiling, ClientHealth
from loadtest.client.lab import Scrape
from loadtest.client.record import faults_in_words
from loadtest.judge.capacity import SearchSettings
from loadtest.judge.slo import parse_slo
from loadtest.run.plan import StagePlan
from serving.core.errors import TandemError
from serving.roofline import Roofline

REQUESTS_FILE = "requests.jsonl"
RUN_FILE = "run.json"
PLAN_FILE = "plan.json"
SUMMARY_FILE = "summary.json"
REPORT_FILE = "report.html"
FIGURES_DIR = "figures"
STEP_TRACES_DIR = "traces"


class RunStatus(StrEnum):
    """How a run ended."""

    RUNNING = "running"  # it has not, or it was killed
    COMPLETE = "complete"  # every planned request has a record
    INCOMPLETE = "incomplete"  # a stage was cut
    INTERRUPTED = "interrupted"  # the user stopped it


@dataclass(frozen=True, slots=True)
class RunInfo:
    """What must be known to judge a run or to repeat it.

    Attributes:
        started_at: UTC, ISO 8601. Instants of records are seconds since then.
        machine: where the load tool ran, as `serving.machine.describe` gives it.
        output_tokens: length of an answer where the workload or a trace has none; None: the workload's own.
        config, model, replicas: what the lab said of itself at the start (`/lab`).
        slo: the objective, in the form `loadtest.judge.slo` reads.
        search: how a sweep searched; each lane's first guess is the rate of its first stage.
        ceiling: what this client could read on this machine just before the run.
        token_counter: how the tokens of prompts were counted.
        token_counters: by lane, where it has a model of its own.
        roofline: of a traced run: what a step of the batched lane must take at least, or a sentence why not known.
        priorities: how the lab's processes yield to this client (`/lab`); None from a lab that does not say.
        parts: 1, and one more for each time the run was stopped and went on; `duration_s` leaves the pauses out.
    """

    id: str
    name: str
    started_at: str
    duration_s: float
    status: RunStatus
    seed: int
    output_tokens: int | None
    planned_requests: int
    base_url: str
    machine: dict[str, Any]
    versions: dict[str, str]
    config: dict[str, Any]
    model: dict[str, Any]
    replicas: list[dict[str, Any]]
    slo: str | None = None
    ceiling: ClientCeiling | None = None
    search: SearchSettings | None = None
    parts: int = 1
    token_counter: str = "estimate"
    token_counters: dict[str, str] = field(default_factory=dict)
    roofline: Roofline | str | None = None
    priorities: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class StageTrace:
    """What was recorded of a stage's engine steps.

    Attributes:
        file: in `STEP_TRACES_DIR`, as `serving.tracing.trace_file` reads it; None when nothing was.
        faults: what is missing, in sentences.
    """

    file: str | None
    faults: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class StageRun:
    """A stage that ran. Instants are seconds since the start of the run.

    Attributes:
        is_cut: it reached its time box, or the run was stopped in it.
        before, after: the replicas' figures around it.
        locust_requests, locust_failures: Locust's own count of the stage, to check ours.
        client: how the load tool fared meanwhile.
        stop_reason, stop_detail: a `ClientReason` when it was cut, and the value and the bound in words.
        trace: None for a run without `--trace`.
    """

    plan: StagePlan
    started_at_s: float
    finished_at_s: float
    is_cut: bool
    before: Scrape
    after: Scrape
    locust_requests: int
    locust_failures: int
    client: ClientHealth | None = None
    stop_reason: str | None = None
    stop_detail: str | None = None
    trace: StageTrace | None = None


@dataclass(frozen=True, slots=True)
class RunFile:
    """Everything of a run but its requests."""

    run: RunInfo
    stages: tuple[StageRun, ...]


_ADAPTER = TypeAdapter(RunFile)

# What reports say of each run; the rest of these descriptions may differ from version to version.
_NEEDED = {
    "machine": ("cpu_model", "usable_cores", "instruction_sets", "memory_bytes", "gpus", "os", "kernel"),
    "model": ("name", "dtype", "device"),
    "config": ("lanes",),
}


class RunWriteError(TandemError):
    """A file of a run cannot be written; the text names the file and says why."""


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Name the file when it cannot be written: of a full disk the system says no name.

    Raises:
        RunWriteError: it cannot.
    """
    try:
        yield
    except OSError as error:
        raise RunWriteError(f"{path}: cannot be written: {error.strerror}") from None


def write_run(run: RunFile, directory: Path) -> None:
    """Write `run.json`; whoever reads it, or comes after a crash, finds the old one or the new one, whole."""
    replace_file(directory / RUN_FILE, _ADAPTER.dump_json(run, indent=1) + b"\n")


def replace_file(path: Path, content: bytes) -> None:
    """Give a file new content in one step.

    Raises:
        RunWriteError: it cannot be written; it is as it was.
    """
    fresh = path.with_name(f".{path.name}.new")
    with writing(path):
        try:
            with fresh.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            fresh.replace(path)
        except OSError:
            fresh.unlink(missing_ok=True)
            raise


def read_run(directory: Path) -> RunFile:
    """Read a run's `run.json`.

    Raises:
        ValueError: it is missing or not as it should be; the text names the file.
    """
    path = directory / RUN_FILE
    try:
        run = _ADAPTER.validate_json(path.read_bytes())
        for part, keys in _NEEDED.items():
            if missing := [key for key in keys if key not in getattr(run.run, part)]:
                raise ValueError(f"run.{part}: {', '.join(missing)}: missing")
        if run.run.slo is not None:
            parse_slo(run.run.slo)
        return run
    except OSError as error:
        raise ValueError(
            f"{path}: cannot be read: {error.strerror}; is this the directory of a run?"
        ) from None
    except ValueError as error:
        fault = faults_in_words(error) if isinstance(error, ValidationError) else error
        raise ValueError(f"{path}: not the description of a run: {fault}") from None
