"""`make study-adaptive`: the study on the lab that runs here, its arms in turns at each part of the load."""

from __future__ import annotations

import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import click

from loadtest.client import lab
from loadtest.report.tables import wide_console
from loadtest.run.experiment import MAX_SEED
from loadtest.run.options import runs_dir_option
from loadtest.run.plan import write_plan
from loadtest.study.analysis import together
from loadtest.study.arms import ARMS, PLACEMENT
from loadtest.study.figures import figures_of
from loadtest.study.measured import LANES, NAME, faults_of, plan_of, reckon, studies_of_run
from loadtest.study.picture import Panel, draw
from loadtest.study.schedule import PARTS, rise_and_fall
from loadtest.study.tables import lanes_in_words, print_study, print_verdicts
from loadtest.study.verdicts import verdicts
from serving import run_directory
from serving.calibration import profile as profiles
from serving.core.addresses import GATEWAY_URL
from serving.core.errors import ConfigError
from serving.core.exit_codes import ExitCode

PLAN_FILE = "study-plan.json"
USABLE = (ExitCode.OK, ExitCode.INVALID)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--profile",
    "profile_file",
    type=click.Path(path_type=Path),
    required=True,
    help="Of the lanes, by `tandem calibrate`: it says what capacity is.",
)
@click.option("--base-url", default=GATEWAY_URL, help="Where the lab is.  [default: the one that runs here]")
@click.option(
    "--step-s",
    type=click.FloatRange(0.5, 3600),
    default=6.0,
    show_default=True,
    help=f"Of each of the load's {len(rise_and_fall())} steps, which come in {len(PARTS)} parts.",
)
@click.option("--repeats", type=click.IntRange(1, 50), default=3, show_default=True)
@click.option("--ttft-limit-s", type=click.FloatRange(0, 600, min_open=True), default=2.0, show_default=True)
@click.option(
    "--capacity-rps",
    type=click.FloatRange(0, 1e6, min_open=True),
    help="What 1 is on the scale of load.  [default: by the profile]",
)
@click.option("--seed", type=click.IntRange(0, MAX_SEED), default=1, show_default=True)
@click.option(
    "--run",
    "run_dirs",
    multiple=True,
    type=click.Path(path_type=Path),
    help="Only read this run of the study again, with the same --profile; several are read as one.",
)
@runs_dir_option
def main(
    profile_file: Path,
    base_url: str,
    step_s: float,
    repeats: int,
    ttft_limit_s: float,
    capacity_rps: float | None,
    seed: int,
    run_dirs: tuple[Path, ...],
    runs_dir: Path,
) -> None:
    """Compare decoding that adapts with decoding that does not, on a running lab that has no other load."""
    try:
        reckoned = reckon(profiles.load(profile_file), LANES, ttft_limit_s, seed)
        capacity_rps = capacity_rps or reckoned.capacity_rps
        if not run_dirs:
            run_dirs = (_measure(base_url, step_s, repeats, capacity_rps, seed, runs_dir),)
        read = [studies_of_run(run_dir, LANES, reckoned.objectives) for run_dir in run_dirs]
        run, names = read[-1]
        judged_by = {name: together([studies[name] for _, studies in read]) for name in names}
        faults = [fault for run_dir in run_dirs for fault in faults_of(run_dir)]
    except (ValueError, ConfigError) as error:
        raise click.UsageError(str(error)) from None
    except lab.LabError as error:
        click.echo(
            f"{error}\nIs the lab up? `tandem up --config deploy/study-adaptive.yaml` starts it.", err=True
        )
        sys.exit(ExitCode.NOT_RUNNING)
    console = wide_console()
    found, panels = [], []
    for objective in reckoned.objectives:
        judged = judged_by[objective.name]
        found += verdicts(judged, PLACEMENT, objective.name)
        panels.append(Panel(objective.name, run.run.model["name"], judged, capacity_rps))
        print_study(console, f"{objective.name}: {objective.text}", judged)
    console.print(lanes_in_words(judged, PLACEMENT), markup=False, highlight=False)
    print_verdicts(console, found)
    path = run_directory.write_figures(
        NAME,
        {
            "runs": list(map(str, run_dirs)),
            "arms": ARMS,
            "lanes": LANES,
            "capacity_rps": capacity_rps,
            "measured_on": run.run.machine,
            "objectives": {
                objective.name: {"text": objective.text} | figures_of(judged_by[objective.name])
                for objective in reckoned.objectives
            },
            "verdicts": [str(verdict) for verdict in found],
            "invalid": faults,
        },
        runs_dir,
    )
    picture = draw(path.with_suffix(".png"), panels)
    click.echo(f"figures: {path}\npicture: {picture}")
    if faults:
        click.echo("\n".join(f"INVALID: {fault}" for fault in faults))
        sys.exit(ExitCode.INVALID)


def _measure(
    base_url: str, step_s: float, repeats: int, capacity_rps: float, seed: int, runs_dir: Path
) -> Path:
    """Offer the load to every arm, through `tandem bench`; the run's directory.

    Raises:
        LabError: there is no lab.
        ValueError: it lacks a lane.
    """
    description = lab.describe_lab(base_url)
    known = {lane["name"] for lane in description["config"]["lanes"]}
    if missing := [lane for arm, lane in LANES.items() if arm != PLACEMENT and lane not in known]:
        raise ValueError(
            f"the lab has no lane {missing[0]!r}, it has {', '.join(sorted(known))}: "
            "deploy/study-adaptive.yaml has all of the study"
        )
    if (placement := description["config"]["scheduler"].get("placement")) != "adaptive":
        raise ValueError(f"scheduler.placement is {placement!r}, must be 'adaptive' for this study")
    plan = plan_of(
        LANES,
        base_url=base_url,
        model=description["model"]["name"],
        capacity_rps=capacity_rps,
        step_s=step_s,
        repeats=repeats,
        seed=seed,
    )
    run_dir = run_directory.create_run_dir(runs_dir, NAME, datetime.now(UTC))
    plan_file = runs_dir / f".{run_dir.name}-{PLAN_FILE}"
    write_plan(plan, plan_file)
    click.echo(
        f"{len(plan.stages)} stages, {plan.num_requests} requests, "
        f"{capacity_rps:.3g} requests/s as capacity: about {plan.estimated_s / 60:.0f} minutes",
        err=True,
    )
    bench = [sys.executable, "-m", "loadtest.bench", "--plan", str(plan_file), "--out", str(run_dir)]
    try:
        code = subprocess.run([*bench, "--base-url", base_url], check=False).returncode
    finally:
        plan_file.unlink()
    if code not in USABLE:
        click.echo(f"`tandem bench` ended with {code}; {run_dir} has what was measured", err=True)
        sys.exit(code)
    return run_dir


if __name__ == "__main__":
    main(prog_name=NAME)
