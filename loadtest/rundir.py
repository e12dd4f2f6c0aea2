"""What is in the directory of a run."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from loadtest.client_health import ClientCeiling, ClientHealth
from loadtest.lab import Scrape
from loadtest.plan import StagePlan

REQUESTS_FILE = "requests.jsonl"
RUN_FILE = "run.json"
PLAN_FILE = "plan.json"
SUMMARY_FILE = "summary.json"
BENCH_FILE = "bench.json"
REPORT_FILE = "report.html"
FIGURES_DIR = "figures"


class RunStatus(StrEnum):
    """How a run ended."""

    COMPLETE = "complete"  # every planned request has a record
    INCOMPLETE = "incomplete"  # a stage was cut
    INTERRUPTED = "interrupted"  # the user stopped it


@dataclass(frozen=True, slots=True)
class RunInfo:
    """What must be known to judge a run or to repeat it.

    Attributes:
        started_at: UTC, ISO 8601. Instants of records are seconds since then.
        machine: where the load tool ran, as `serving.machine.describe` gives it.
        config, model, replicas: what the lab said of itself at the start (`/lab`).
        slo: the objective, in the form `loadtest.slo` reads.
        ceiling: what this client could read on this machine just before the run.
    """

    id: str
    name: str
    started_at: str
    duration_s: float
    status: RunStatus
    seed: int
    output_tokens: int
    planned_requests: int
    base_url: str
    machine: dict[str, Any]
    versions: dict[str, str]
    config: dict[str, Any]
    model: dict[str, Any]
    replicas: list[dict[str, Any]]
    slo: str | None = None
    ceiling: ClientCeiling | None = None


@dataclass(frozen=True, slots=True)
class StageRun:
    """A stage that ran. Instants are seconds since the start of the run.

    Attributes:
        is_cut: it reached its time box, or the run was stopped in it.
        before, after: the replicas' figures around it.
        locust_requests, locust_failures: Locust's own count of the stage, to check ours.
        client: how the load tool fared meanwhile.
        stop_reason: a `ClientReason` when it was cut.
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


@dataclass(frozen=True, slots=True)
class RunFile:
    """Everything of a run but its requests."""

    run: RunInfo
    stages: tuple[StageRun, ...]


_ADAPTER = TypeAdapter(RunFile)


def write_run(run: RunFile, directory: Path) -> None:
    (directory / RUN_FILE).write_bytes(_ADAPTER.dump_json(run, indent=1) + b"\n")


def read_run(directory: Path) -> RunFile:
    """Read a run's `run.json`.

    Raises:
        ValueError: it is missing or not as it should be; the text names the file.
    """
    path = directory / RUN_FILE
    try:
        return _ADAPTER.validate_json(path.read_bytes())
    except OSError as error:
        raise ValueError(
            f"{path}: cannot be read: {error.strerror}; is this the directory of a run?"
        ) from None
    except ValidationError as error:
        raise ValueError(f"{path}: not the description of a run: {error}") from None
