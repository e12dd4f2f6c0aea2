"""How far a simulation is off on the running lab: calibrate, measure, simulate that. `make validate-simulate`.

Exit codes: those of the verb that failed, 0 if none did; 1 too where the time was not enough.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

import click

from loadtest.run.options import runs_dir_option
from serving.calibration import profile as profiles
from serving.core.exit_codes import ExitCode
from serving.run_directory import create_run_dir

NAME = "validate-simulate"
CALIBRATION_SHARE = 0.5  # of the time, at most
BETWEEN_STAGES_S = 4.0  # to warm a lane up, and to write the stage down
REPORT_S = 30.0
SHORTEST_STAGE_S = 5.0
STOP_S = 30.0  # for a verb that is out of time to stop by itself

Call = Callable[[Sequence[str], float], int]


def call_verb(arguments: Sequence[str], limit_s: float) -> int:
    """Run a verb of this installation; its exit code.

    Raises:
        subprocess.TimeoutExpired: it was not done in time, and was ended.
    """
    verb, *rest = arguments
    command = [sys.executable, "-m", f"loadtest.{verb}", *rest]
    with subprocess.Popen(command) as process:
        try:
            return process.wait(limit_s)
        except subprocess.TimeoutExpired:
            # As by Ctrl-C: one that is killed leaves its recording on, and the lab refuses the next for minutes.
            process.send_signal(signal.SIGINT)
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
            raise


def validate(
    directory: Path,
    runs_dir: Path,
    where: Sequence[str],
    lanes: str,
    users: str,
    workloads: str,
    repeats: int,
    limit_s: float,
    call: Call,
    clock: Callable[[], float] = time.monotonic,
) -> int:
    """Leave profile and run in a directory, and show the table; the exit code.

    Args:
        where: the option that says where the lab is, if any does.
        lanes: to calibrate and to measure; empty: those that can be.

    Raises:
        click.ClickException: the time is not enough; the text says for what.
    """
    ends_at_s = clock() + limit_s
    profile = directory / "profile.json"
    options = ["--out", str(profile), "--runs-dir", str(runs_dir), *where]
    asked = ["calibrate", *options, *(["--lanes", lanes] if lanes else [])]
    if code := _step(call, asked, CALIBRATION_SHARE * limit_s):
        return code
    names = [lane.lane for lane in profiles.load(profile).lanes]
    num_stages = len(names) * len(users.split(",")) * len(workloads.split(",")) * repeats
    left_s = ends_at_s - clock() - REPORT_S
    stage_s = left_s / num_stages - BETWEEN_STAGES_S
    if stage_s < SHORTEST_STAGE_S:
        raise click.ClickException(
            f"{num_stages} stages have {stage_s:.0f} s each, less than {SHORTEST_STAGE_S:g} s: give it more time "
            "(--limit-s), or fewer --repeats, --lanes, --users or --workloads"
        )
    run = directory / "bench"
    asked = ["bench", "--lanes", ",".join(names), "--concurrency", users, "--workloads", workloads]
    options = ["--out", str(run), "--max-stage-s", f"{stage_s:.0f}", "--no-ceiling", *where]
    measured = _step(call, [*asked, "--repeats", str(repeats), *options], left_s + REPORT_S)
    if measured not in (ExitCode.OK, ExitCode.FAILED, ExitCode.INVALID):
        return measured
    # A stage that was cut, or figures that may not be used, make bench fail; the table is then worth a look still.
    against = ["--profile", str(profile), "--against", str(run), "--runs-dir", str(runs_dir)]
    return _step(call, ["simulate", *against], limit_s) or measured


def _step(call: Call, arguments: Sequence[str], limit_s: float) -> int:
    click.echo(f"tandem {' '.join(arguments)}", err=True)
    try:
        return call(arguments, limit_s)
    except subprocess.TimeoutExpired:
        raise click.ClickException(
            f"tandem {arguments[0]} was not done after {limit_s:.0f} s, its part of --limit-s: is the machine busy?"
        ) from None


@click.command(
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Calibrate the running lab, measure it with users, and show how far a simulation of that is off. Nothing "
    "else should use lab and machine meanwhile.",
)
@click.option("--base-url", help="Where the lab is.  [default: the one that runs here]")
@click.option("--lanes", default="", help="Lanes, with commas.  [default: all that can be calibrated]")
@click.option("--users", default="1,4,8,16", show_default=True, help="Users at once, with commas.")
@click.option("--workloads", default="copy,story", show_default=True, help="Of those that are calibrated.")
@click.option(
    "--repeats",
    type=click.IntRange(1, 20),
    default=3,
    show_default=True,
    help="Of each stage, all of them before any again: a shared machine is faster now than then.",
)
@click.option(
    "--limit-s", type=click.FloatRange(60, 86_400), default=1500.0, show_default=True, help="For all of it."
)
@runs_dir_option
def main(
    base_url: str | None,
    lanes: str,
    users: str,
    workloads: str,
    repeats: int,
    limit_s: float,
    runs_dir: Path,
) -> None:
    directory = create_run_dir(runs_dir, NAME, datetime.now(UTC))
    where = ["--base-url", base_url] if base_url else []
    sys.exit(validate(directory, runs_dir, where, lanes, users, workloads, repeats, limit_s, call_verb))


if __name__ == "__main__":
    main(prog_name=f"make {NAME}")
