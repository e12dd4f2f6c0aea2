"""Measures what the lanes of a running lab cost: `python -m loadtest.calibrate`, which is `tandem calibrate`.

Exit codes: 0 the profile is written, 1 a request failed, 2 wrong usage, 3 there is no lab, 5 the profile is written
and fits so badly that nothing should be decided by it, 130 stopped.
"""

from __future__ import annotations

import sys
import time
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

import click

from loadtest.calibrate.measure import Calibration, calibrate, default_lanes
from loadtest.calibrate.picture import draw
from loadtest.calibrate.tables import print_calibration
from loadtest.client.lab import LabError
from loadtest.client.traced_lab import TracedLabError, find_lab
from loadtest.report.tables import wide_console
from loadtest.run.experiment import split_names
from loadtest.run.options import runs_dir_option
from serving.calibration import profile as profiles
from serving.core.addresses import GATEWAY_URL
from serving.core.errors import TandemError
from serving.core.exit_codes import ExitCode
from serving.progress import progress
from serving.run_directory import write_figures_of_own

VERB = "calibrate"


@click.command(
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Measure step times, what drafts cost and how many are accepted, on the running lab, and write a profile: "
    "docs/simulate.md. Takes two to five minutes, in which nothing else may use the lab or keep the machine busy.",
)
@click.option("--base-url", default=GATEWAY_URL, help="Where the lab is.  [default: the one that runs here]")
@click.option("--lanes", default="", help="Lanes, with commas.  [default: all of the lab's model that batch]")
@click.option(
    "--out",
    type=click.Path(path_type=Path, dir_okay=False),
    default=Path("profile.json"),
    show_default=True,
    help="The profile to write.",
)
@runs_dir_option
def main(base_url: str, lanes: str, out: Path, runs_dir: Path) -> None:
    if not out.parent.is_dir():
        raise click.BadParameter(f"{out.parent} is not a directory to write into", param_hint="--out")
    try:
        profiles.check_writable(out)
    except TandemError as error:
        raise click.BadParameter(str(error), param_hint="--out") from None
    if out.suffix == ".png":
        raise click.BadParameter(f"{out} is where the picture beside it would go", param_hint="--out")
    started_at_s = time.perf_counter()
    try:
        with progress() as say:
            lab = find_lab(base_url)
            made = calibrate(lab, split_names(lanes) if lanes else default_lanes(lab), datetime.now(UTC), say)
            profiles.save(made.profile, out)
            say("drawing")
            picture = draw(out.with_suffix(".png"), made.profile)
        path = write_figures_of_own(VERB, _figures(made, time.perf_counter() - started_at_s), runs_dir)
    except LabError as error:
        _fail(str(error), ExitCode.NOT_RUNNING)
    except (TracedLabError, TandemError) as error:
        _fail(str(error), ExitCode.FAILED)
    except OSError as error:
        _fail(f"{error.filename}: cannot be written: {error.strerror}", ExitCode.FAILED)
    except KeyboardInterrupt:
        _fail("interrupted", ExitCode.INTERRUPTED)
    print_calibration(wide_console(), made)
    click.echo(f"profile: {out}")
    click.echo(f"figures: {path}")
    if picture is not None:
        click.echo(f"picture: {picture}")
    if made.profile.doubts:
        _fail(made.profile.doubts, ExitCode.INVALID)


def _figures(made: Calibration, took_s: float) -> dict[str, object]:
    return {
        "took_s": took_s,
        "model": made.profile.model,
        "lanes": [
            {"lane": lane.lane, "step_time": asdict(lane.step_time), "residuals": asdict(lane.residuals)}
            for lane in made.profile.lanes
        ],
        "compared": [asdict(each) | {"error": each.error} for each in made.compared],
    }


def _fail(text: str, code: ExitCode) -> None:
    click.echo(f"error: {text}", err=True)
    sys.exit(code)


if __name__ == "__main__":
    main(prog_name="tandem calibrate")
