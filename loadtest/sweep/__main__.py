"""Finds the highest rate at which each lane of a running lab keeps an objective: `python -m loadtest.sweep`.

Ends with a verdict and the path of the report. Exit codes: 0 every lane has a capacity, 1 one has none, 2 wrong
usage, 3 the lab cannot be reached, 5 a lane has none for want of probes that may be used, 130 stopped by hand
(Ctrl-C); a sweep that was stopped goes on with `--resume`.
"""

import loadtest.bench  # noqa: F401, I001 - brings Locust, which must come before whatever imports ssl or socket

import secrets
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, get_args

import click
from click.core import ParameterSource

from loadtest.analysis.stage_summary import Repeat, make_repeat
from loadtest.bench import job
from loadtest.bench.job import Job, RunningJob
from loadtest.bench.stage import StagePlace, run_stage
from loadtest.client import lab
from loadtest.client.record import ClientReason, RequestRecord, read_records
from loadtest.client.sse_client import ClientSettings
from loadtest.judge.slo import parse_slo
from loadtest.offer.load import Process
from loadtest.offer.workload import load_workload
from loadtest.run import resume
from loadtest.run.directory import PLAN_FILE, REQUESTS_FILE, read_run
from loadtest.run.exporter import metrics_port
from loadtest.run.experiment import MAX_SEED, choose_lanes, split_names
from loadtest.client.lane_models import other_names
from loadtest.run.options import runs_dir_option
from loadtest.run.plan import MAX_ERROR_RATE, MAX_TIMEOUT_S, MAX_OUTPUT_TOKENS, Plan, write_plan
from loadtest.sweep.settings import SweepSettings, read_settings, write_settings
from loadtest.sweep.stages import CapacitySweep
from serving import run_directory
from serving.core.addresses import GATEWAY_URL, server_root
from serving.core.exit_codes import ExitCode


@click.command(
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Find the highest rate at which each lane keeps an objective, and say which lane serves most.",
)
@click.option("--base-url", default=GATEWAY_URL, help="Where the lab is.  [default: the one that runs here]")
@click.option("--lanes", help="Lanes, with commas.  [default: all, in the lab's order]")
@click.option("--workload", default="copy", show_default=True)
@click.option("--slo", help="Objective, such as ttft_p95<2s,tpot_p95<300ms.  [required without --resume]")
@click.option(
    "--process",
    type=click.Choice([*get_args(Process)]),
    default="poisson",
    show_default=True,
    help="Gaps between requests.",
)
@click.option(
    "--first-rate",
    "first_rate_per_s",
    type=click.FloatRange(0.001, 10_000),
    default=1.0,
    show_default=True,
    help="Where each search begins, requests/s.",
)
@click.option(
    "--resolution",
    type=click.FloatRange(0.02, 1),
    default=0.1,
    show_default=True,
    help="How near the rate that holds and the one that does not must come.",
)
@click.option(
    "--repeats", type=click.IntRange(1, 20), default=3, show_default=True, help="Searches of each lane."
)
@click.option(
    "--max-minutes",
    type=click.FloatRange(1, 1440),
    default=24.0,
    show_default=True,
    help="Longest time; of a sweep that goes on, from then on.",
)
@click.option(
    "--probe-s",
    type=click.FloatRange(1, 3600),
    default=20.0,
    show_default=True,
    help="Shortest time that a rate is offered.",
)
@click.option(
    "--probe-requests",
    type=click.IntRange(5, 100_000),
    default=30,
    show_default=True,
    help="Fewest requests of a probe, up to three times --probe-s.",
)
@click.option(
    "--output-tokens",
    type=click.IntRange(2, MAX_OUTPUT_TOKENS),
    help="Length of each answer.  [default: the workload's own]",
)
@click.option(
    "--request-timeout-s",
    type=click.FloatRange(0, MAX_TIMEOUT_S, min_open=True),
    help="Longest time for a whole answer.  [default: none]",
)
@click.option(
    "--needs-done/--no-needs-done",
    default=False,
    help="An answer without [DONE] is cut off, even if it is whole.  [default: no]",
)
@click.option(
    "--max-error-rate",
    type=click.FloatRange(0, 1),
    default=MAX_ERROR_RATE,
    show_default=True,
    help="End a probe when a larger share of its requests fails.",
)
@click.option(
    "--seed", type=click.IntRange(0, MAX_SEED), help="Of prompts and arrivals.  [default: a fresh one]"
)
@click.option("--name", default="sweep", show_default=True, help="Last part of the run's directory.")
@runs_dir_option
@click.option("--out", type=click.Path(path_type=Path), help="Directory of the run.")
@click.option(
    "--resume",
    "resume_dir",
    type=click.Path(path_type=Path),
    help="Go on with a sweep that was stopped or had no more time, in its directory and with its settings.",
)
@click.option("--tables", "all_tables", is_flag=True, help="Print every table, not only what was measured.")
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON instead of the table.")
def main(
    base_url: str,
    max_minutes: float,
    name: str,
    runs_dir: Path,
    out: Path | None,
    resume_dir: Path | None,
    as_json: bool,
    all_tables: bool,
    **asked: Any,
) -> None:
    base_url = server_root(base_url)
    with job.usage_errors():
        metrics_port()  # before a directory is made that nothing can be done with
        ClientSettings(base_url)
        if resume_dir is None:
            settings, run, sweep = _fresh(asked, base_url, max_minutes, name, out, runs_dir)
        else:
            settings, run, sweep = _resumed(resume_dir, _given(asked), base_url, max_minutes)
        run_directory.point_latest_at(run.directory.resolve())
        search, length = settings.search(max_minutes), settings.length
    click.echo(
        f"{len(settings.lanes)} lanes, up to {search.max_probes} probes of {length.least_s:g} to "
        f"{length.most_s:g} s each; at most {max_minutes:g} min (--max-minutes); seed {settings.seed}",
        err=True,
    )
    with job.running(run, with_ceiling=True) as going:
        for measured in probes(going, sweep, 60 * max_minutes, len(run.stages)):
            going.keep(measured.stage)
    end = job.report(run, going, as_json=as_json, all_tables=all_tables)
    if end.signal is not None:
        click.echo(f"tandem sweep --resume {run.directory} goes on with it", err=True)
        sys.exit(end.exit_code)
    if not end.summary.is_valid:
        sys.exit(ExitCode.INVALID)
    rates = {capacity.lane: capacity.rate_per_s for capacity in end.summary.capacities}
    sys.exit(int(any(rates.get(lane) is None for lane in settings.lanes)))


def _fresh(
    asked: Mapping[str, Any],
    base_url: str,
    max_minutes: float,
    name: str,
    out: Path | None,
    runs_dir: Path,
) -> tuple[SweepSettings, Job, CapacitySweep]:
    """A sweep of its own, in a directory of its own.

    Raises:
        ValueError: what is asked for cannot be done.
        LabError: the lab cannot be reached.
    """
    if asked["slo"] is None:
        raise ValueError("a sweep needs an objective, such as ttft_p95<2s,tpot_p95<300ms (--slo)")
    parse_slo(asked["slo"])
    for note in load_workload(asked["workload"]).notes:
        click.echo(note, err=True)
    description = lab.describe_lab(base_url)
    seed = secrets.randbelow(MAX_SEED) if asked["seed"] is None else asked["seed"]
    settings = SweepSettings(**{**asked, "seed": seed, "lanes": _choose(asked["lanes"], description)})
    plan = _plan(settings, base_url, name, description["config"])
    now = datetime.now(UTC)
    sweep = settings.sweep(max_minutes)
    directory = job.make_directory(out, runs_dir, name, now)
    write_plan(plan, directory / PLAN_FILE)
    write_settings(settings, directory)
    (directory / REQUESTS_FILE).touch()
    info = job.first_info(plan, directory, now, description, settings.search(max_minutes))
    return settings, Job(plan, directory, info), sweep


def _resumed(
    directory: Path, given: Mapping[str, Any], base_url: str, max_minutes: float
) -> tuple[SweepSettings, Job, CapacitySweep]:
    """A sweep that goes on: its finished probes are gone through again, what its unfinished one left is dropped.

    Raises:
        ValueError: it cannot go on, or not on this lab, or not as is asked for.
        LabError: the lab cannot be reached.
    """
    settings = read_settings(directory)
    settings.refuse_others(directory, given, _options())
    resume.refuse_running(directory)
    before = read_run(directory)
    plan = _plan(settings, base_url, before.run.name, before.run.config)
    past = resume.past_of(directory, plan, before, lab.describe_lab(base_url))
    by_stage: dict[str, list[RequestRecord]] = {}
    for record in read_records(directory / REQUESTS_FILE):
        by_stage.setdefault(record.label.stage, []).append(record)
    sweep = settings.sweep(max_minutes)
    sweep.ceiling = before.run.ceiling
    for stage in past.run.stages:
        sweep.replay(make_repeat(stage, by_stage.get(stage.plan.key, [])))
    if sweep.next_stage() is None:
        raise ValueError(f"{directory}: every lane's search is done; there is nothing to go on with")
    job.drop_unfinished(directory, past, f"{len(past.run.stages)} probes")
    search = settings.search(max_minutes)
    info = replace(before.run, base_url=base_url, parts=past.part, search=search)
    return settings, Job(plan, directory, info, past.run.stages, past.offset_s), sweep


def _plan(settings: SweepSettings, base_url: str, name: str, config: Mapping[str, Any]) -> Plan:
    return Plan(
        base_url=base_url,
        model=config["model"]["name"],
        models=other_names(config),
        stages=(),
        name=name,
        seed=settings.seed,
        output_tokens=settings.output_tokens,
        request_timeout_s=settings.request_timeout_s,
        needs_done=settings.needs_done,
        max_error_rate=settings.max_error_rate,
        slo=settings.slo,
    )


def _given(asked: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that the command line names, in the types of `SweepSettings`.

    Raises:
        ValueError: it names what a sweep that goes on has already.
    """
    source = click.get_current_context().get_parameter_source
    for option in ("out", "name"):
        if source(option) is ParameterSource.COMMANDLINE:
            raise ValueError(f"--{option} cannot be given with --resume, which says where the sweep is")
    given = {name: value for name, value in asked.items() if source(name) is ParameterSource.COMMANDLINE}
    if "lanes" in given:
        given["lanes"] = split_names(given["lanes"])
    return given


def _options() -> dict[str, str]:
    """The option of each parameter."""
    return {str(each.name): each.opts[0] for each in click.get_current_context().command.params}


def _choose(lanes: str | None, description: Mapping[str, Any]) -> tuple[str, ...]:
    names = () if lanes is None else split_names(lanes)
    if lanes is not None and not names:
        raise ValueError(f"{lanes!r} names no lane (--lanes)")
    return tuple(dict.fromkeys(name for name, _ in choose_lanes(names, description, "--lanes")))


def probes(run: RunningJob, sweep: CapacitySweep, max_s: float, num_probes: int) -> Iterator[Repeat]:
    """The probes still missing, for `max_s` at most; `num_probes` have run already."""
    sweep.ceiling = run.info.ceiling
    clock = run.bench.clock
    ends_at_s = clock() + max_s

    def time_left(_: float) -> str:
        return f"at most {max(0.0, ends_at_s - clock()):.0f} s left"

    while (stage := sweep.next_stage()) is not None:
        if clock() + stage.estimated_s > ends_at_s:
            return
        num_probes += 1
        measured = run_stage(run.bench, stage, StagePlace(f"probe {num_probes}", time_left))
        if measured is None:
            return
        yield measured
        if measured.stage.stop_reason == ClientReason.INTERRUPTED:
            return
        sweep.record(measured)


if __name__ == "__main__":
    main(prog_name="tandem sweep")
