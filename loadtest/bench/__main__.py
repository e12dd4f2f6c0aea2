"""Measures a running lab: `python -m loadtest.bench`.

Ends with a table and the path of the report. Exit codes: 0 every planned request has a record and every stage
a completed one, 1 not so, 2 wrong usage, 3 the lab cannot be reached, 5 as 0, but figures are INVALID, 130 stopped
by hand (Ctrl-C); a run that was stopped goes on with `--resume`.
"""

import secrets
import sys
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

from loadtest.bench import job
from loadtest.bench.job import Job
from loadtest.bench.stage import run_stages
from loadtest.client import lab
from loadtest.client.sse_client import ClientSettings
from loadtest.offer.load import ClosedLoop
from loadtest.run import experiment, resume
from loadtest.run.directory import PLAN_FILE, REQUESTS_FILE
from loadtest.run.exporter import metrics_port
from loadtest.run.options import runs_dir_option
from loadtest.run.plan import arrivals_of, notes_of, read_plan, write_plan
from serving import run_directory
from serving.core.addresses import GATEWAY_URL, server_root
from serving.core.exit_codes import ExitCode


def _names(_context: click.Context, _parameter: click.Parameter, value: str | None) -> tuple[str, ...] | None:
    if value is None:
        return None
    names = experiment.split_names(value)
    if not names:
        raise click.BadParameter(f"{value!r} names nothing")
    return names


def _levels(context: click.Context, parameter: click.Parameter, value: str | None) -> tuple[int, ...] | None:
    try:
        names = _names(context, parameter, value)
        return None if names is None else tuple(int(name) for name in names)
    except ValueError:
        raise click.BadParameter(f"{value!r} is not a list of whole numbers, such as 1,4,8") from None


@click.command(
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Measure a running lab and write a report. Flags go before the keys of an experiment file.",
    epilog="Exit codes: 0 all was measured, 1 a stage was cut or completed nothing, 2 wrong usage, "
    f"3 the lab cannot be reached, {ExitCode.INVALID} all was measured, but figures are INVALID: they may not "
    "be used, 130 stopped by hand.",
)
@click.option("--base-url", help="Where the lab is.  [default: that of the plan, or the one that runs here]")
@click.option(
    "--experiment",
    "experiment_file",
    type=click.Path(path_type=Path),
    help="YAML, such as deploy/experiments/*.",
)
@click.option(
    "--lanes",
    callback=_names,
    help="Lanes, with commas; any: the scheduler's choice.  [default: all, in the lab's order]",
)
@click.option("--workloads", callback=_names, help="[default: copy,story]")
@click.option(
    "--load",
    "loads",
    multiple=True,
    help="A load, such as 8, closed:8,think=2s, poisson:2/s,60s or trace:FILE,speed=2; may be repeated.",
)
@click.option(
    "--concurrency", callback=_levels, help="Users at once.  [default: 1,4,8 where no load is given]"
)
@click.option("--repeats", type=int, help="How often each stage runs.  [default: 1]")
@click.option("--output-tokens", type=int, help="Length of each answer.  [default: the workload's own]")
@click.option("--prompt-tokens", type=int, help="Size of each prompt.  [default: the workload's own]")
@click.option("--tokenizer", help="File or directory that counts them.  [default: the served model's]")
@click.option("--slo", help="Objective, such as ttft_p95<2s,tpot_p95<300ms.")
@click.option(
    "--stop-early/--no-stop-early",
    default=None,
    help="End a stage when the objective can no longer be attained.",
)
@click.option("--request-timeout-s", type=float, help="Longest time for a whole answer.  [default: none]")
@click.option(
    "--needs-done/--no-needs-done",
    default=None,
    help="An answer without [DONE] is cut off, even if it is whole.  [default: no]",
)
@click.option(
    "--max-error-rate", type=float, help="End a stage when a larger share fails, 0 to 1.  [default: 0.5]"
)
@click.option(
    "--warmup-s", type=float, help="First part of an open loop, which no figure counts.  [default: 0]"
)
@click.option(
    "--max-stage-s", type=float, help="Cut a stage then.  [default: 180, or an open loop's length and 60]"
)
@click.option(
    "--trace/--no-trace",
    default=None,
    help="Record engine steps, for traces and for more pictures in the report.  [default: no]",
)
@click.option("--seed", type=int, help="Of prompts and arrivals.  [default: a fresh one, printed and stored]")
@click.option("--name", help="Last part of the run's directory.  [default: bench]")
@runs_dir_option
@click.option(
    "--plan",
    "plan_file",
    type=click.Path(path_type=Path),
    help="Run this plan, stage by stage; only --base-url counts.",
)
@click.option(
    "--resume",
    "resume_dir",
    type=click.Path(path_type=Path),
    help="Go on with a run that was stopped, in its directory.",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    help="Directory of the run.  [default: <runs-dir>/<time>-<name>]",
)
@click.option(
    "--ceiling/--no-ceiling", default=True, help="Measure first what this client can do; takes about 3 s."
)
@click.option("--tables", "all_tables", is_flag=True, help="Print every table, not only what was measured.")
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON instead of the table.")
def main(
    base_url: str | None,
    experiment_file: Path | None,
    runs_dir: Path,
    plan_file: Path | None,
    resume_dir: Path | None,
    out: Path | None,
    ceiling: bool,
    as_json: bool,
    all_tables: bool,
    **flags: Any,
) -> None:
    given = {key: value for key, value in flags.items() if value is not None and value != ()}
    base_url = base_url and server_root(base_url)
    with job.usage_errors():
        metrics_port()  # before a directory is made that nothing can be done with
        _refuse_together(experiment_file, plan_file, resume_dir, out, given)
        if resume_dir is not None:
            run = _resumed(resume_dir, base_url)
        else:
            run = _fresh(plan_file, experiment_file, given, base_url, out, runs_dir)
        run_directory.point_latest_at(run.directory.resolve())
    sys.exit(_run(run, ceiling, as_json, all_tables))


def _refuse_together(
    experiment_file: Path | None,
    plan_file: Path | None,
    resume_dir: Path | None,
    out: Path | None,
    flags: Mapping[str, Any],
) -> None:
    """Refuse what would be ignored.

    Raises:
        ValueError: options contradict each other; the text names them.
    """
    whole = {"--plan": plan_file, "--resume": resume_dir}
    for option, value in whole.items():
        others = {"--experiment": experiment_file, **whole} | {_option(key): flags[key] for key in flags}
        if option == "--resume":
            others["--out"] = out
        if value is not None and (
            set_too := [name for name in others if name != option and others[name] is not None]
        ):
            raise ValueError(
                f"{option} says all there is to do; {', '.join(set_too)} cannot be given with it"
            )


def _option(key: str) -> str:
    return "--load" if key == "loads" else "--" + key.replace("_", "-")


def _fresh(
    plan_file: Path | None,
    experiment_file: Path | None,
    flags: Mapping[str, Any],
    base_url: str | None,
    out: Path | None,
    runs_dir: Path,
) -> Job:
    """A run of its own, in a directory of its own.

    Raises:
        ValueError: the plan, the experiment or the flags ask for what cannot be done.
        LabError: the lab cannot be reached.
    """
    given = read_plan(plan_file) if plan_file else None
    url = base_url or (given.base_url if given else GATEWAY_URL)
    ClientSettings(url)  # says what is wrong with an address before anything is asked of it
    asked = None
    if given is None:
        keys = experiment.read_file(experiment_file) if experiment_file else {}
        origin = f"{experiment_file} and flags" if experiment_file else "flags"
        asked = experiment.check(keys | dict(flags), origin)
    description = lab.describe_lab(url)
    if asked is not None:
        plan = experiment.make_plan(asked, url, description, secrets.randbelow(experiment.MAX_SEED))
    else:
        assert given is not None
        plan = replace(given, base_url=url)
        for stage in plan.stages:
            if not isinstance(stage.load, ClosedLoop):
                arrivals_of(stage, plan.seed)
    now = datetime.now(UTC)
    directory = job.make_directory(out, runs_dir, plan.name, now)
    write_plan(plan, directory / PLAN_FILE)
    (directory / REQUESTS_FILE).touch()
    return Job(plan, directory, job.first_info(plan, directory, now, description))


def _resumed(directory: Path, base_url: str | None) -> Job:
    """A run that goes on; what its unfinished stage left is dropped.

    Raises:
        ValueError: the run cannot go on, or not on this lab.
        LabError: the lab cannot be reached.
    """
    url = base_url or read_plan(directory / PLAN_FILE).base_url
    ClientSettings(url)
    resume.refuse_running(directory)
    past = resume.read_past(directory, lab.describe_lab(url))
    job.drop_unfinished(directory, past, f"{len(past.run.stages)} of {len(past.plan.stages)} stages")
    info = replace(past.run.run, base_url=url, parts=past.part)
    return Job(replace(past.plan, base_url=url), directory, info, past.run.stages, past.offset_s)


def _run(run: Job, with_ceiling: bool, as_json: bool, all_tables: bool) -> int:
    """Run what is left of the plan, write run and report, and return the exit code."""
    plan = run.plan
    todo = replace(plan, stages=tuple(stage for stage in plan.stages if stage.key not in run.finished))
    click.echo(
        f"{len(todo.stages)} stages, {todo.num_requests} requests; "
        f"about {todo.estimated_s:.0f} s expected, each stage is cut after at most "
        f"{todo.longest_stage_s:g} s; seed {plan.seed}",
        err=True,
    )
    for note in notes_of(todo):
        click.echo(note, err=True)
    with job.running(run, with_ceiling=with_ceiling) as going:
        for measured in run_stages(going.bench, todo.stages):
            going.keep(measured.stage)
    end = job.report(run, going, as_json=as_json, all_tables=all_tables)
    if end.signal is not None:
        click.echo(f"tandem bench --resume {run.directory} goes on with it", err=True)
    return end.exit_code


if __name__ == "__main__":
    main(prog_name="tandem bench")
