"""Finds the highest rate at which each lane of a running lab keeps an objective: `python -m loadtest.sweep`.

Ends with a verdict and the path of the report. Exit codes: 0 every lane has a capacity, 1 one has none or
the sweep is not valid, 2 wrong usage, 3 the lab cannot be reached, 130 stopped by hand (Ctrl-C).
"""

# The runner brings Locust, which patches the interpreter: it must come before whatever imports ssl or socket.
# isort: off
from loadtest.runner import MeasuredStage, Runner
# isort: on

import secrets
import sys
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, get_args

import click

from loadtest import job, lab, rundir
from loadtest.capacity import SearchSettings
from loadtest.capacity_sweep import CapacitySweep, ProbeLength
from loadtest.experiment import MAX_SEED, choose_lanes, split_names
from loadtest.job import Job
from loadtest.load import Process
from loadtest.plan import MAX_OUTPUT_TOKENS, Plan, write_plan
from loadtest.record import ClientReason
from loadtest.rundir import RunInfo
from loadtest.slo import parse_slo
from loadtest.sse_client import ClientSettings
from loadtest.stage_summary import make_repeat
from loadtest.workload import load_workload
from serving import run_directory

MIN_EXPECTED = 3.0  # requests of the longest probe: of fewer, a share says nothing
START_S = 30.0  # ceiling, warm-up, scrapes and report, besides the searches


@click.command(
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Find the highest rate at which each lane keeps an objective, and say which lane serves most.",
)
@click.option("--base-url", default=job.DEFAULT_URL, show_default=True)
@click.option("--lanes", help="Lanes, with commas.  [default: all, in the lab's order]")
@click.option("--workload", default="copy", show_default=True)
@click.option("--slo", "slo_text", required=True, help="Objective, such as ttft_p95<2s,tpot_p95<300ms.")
@click.option(
    "--process",
    type=click.Choice([*get_args(Process)]),
    default="poisson",
    show_default=True,
    help="Gaps between requests.",
)
@click.option(
    "--first-rate",
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
@click.option("--max-minutes", type=click.FloatRange(1, 1440), default=24.0, show_default=True)
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
    "--seed", type=click.IntRange(0, MAX_SEED), help="Of prompts and arrivals.  [default: a fresh one]"
)
@click.option("--name", default="sweep", show_default=True, help="Last part of the run's directory.")
@click.option("--runs-dir", type=click.Path(path_type=Path), default=Path("runs"), show_default=True)
@click.option("--out", type=click.Path(path_type=Path), help="Directory of the run.")
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON instead of the table.")
def main(
    base_url: str,
    lanes: str | None,
    workload: str,
    slo_text: str,
    process: Process,
    first_rate: float,
    resolution: float,
    repeats: int,
    max_minutes: float,
    probe_s: float,
    probe_requests: int,
    output_tokens: int | None,
    seed: int | None,
    name: str,
    runs_dir: Path,
    out: Path | None,
    as_json: bool,
) -> None:
    with job.usage_errors():
        slo = parse_slo(slo_text)
        load_workload(workload)
        ClientSettings(base_url)
        description = lab.describe_lab(base_url)
        chosen = _choose(lanes, description)
        length = ProbeLength(probe_s, probe_requests, 3 * probe_s)
        settings = SearchSettings(
            first_rate_per_s=first_rate,
            lowest_rate_per_s=min(first_rate, MIN_EXPECTED / length.most_s),
            resolution=resolution,
            repeats=repeats,
            max_s=max(1.0, (60 * max_minutes - START_S) / len(chosen)),
        )
        plan = Plan(
            base_url=base_url,
            model=description["model"]["name"],
            stages=(),
            name=name,
            seed=secrets.randbelow(MAX_SEED) if seed is None else seed,
            output_tokens=output_tokens,
            slo=slo_text,
        )
        now = datetime.now(UTC)
        directory = job.make_directory(out, runs_dir, name, now)
        write_plan(plan, directory / rundir.PLAN_FILE)
        info = job.first_info(plan, directory, now, description, settings)
        run_directory.point_latest_at(directory.resolve())
        sweep = CapacitySweep(
            chosen,
            workload,
            slo,
            settings,
            length,
            process=process,
            output_tokens=output_tokens,
            seed=plan.seed,
        )
    click.echo(
        f"{len(chosen)} lanes, up to {settings.max_probes} probes of {length.least_s:g} to {length.most_s:g} s "
        f"each; at most {max_minutes:g} min (--max-minutes); seed {plan.seed}",
        err=True,
    )
    outcome = job.execute(
        Job(plan, directory, info),
        lambda runner, info: _search(runner, info, sweep, 60 * max_minutes),
        with_ceiling=True,
        as_json=as_json,
    )
    if outcome.signal is not None:
        sys.exit(outcome.exit_code)
    found = {capacity.lane: capacity.rate_per_s for capacity in outcome.summary.capacities}
    sys.exit(int(any(found.get(lane) is None for lane in chosen)))


def _choose(lanes: str | None, description: Mapping[str, Any]) -> list[str]:
    names = () if lanes is None else split_names(lanes)
    if lanes is not None and not names:
        raise ValueError(f"{lanes!r} names no lane (--lanes)")
    return list(dict.fromkeys(name for name, _ in choose_lanes(names, description, "--lanes")))


def _search(runner: Runner, info: RunInfo, sweep: CapacitySweep, max_s: float) -> Iterator[MeasuredStage]:
    sweep.ceiling = info.ceiling
    num_probes = 0
    while (stage := sweep.next_stage()) is not None:
        if runner.clock() + stage.estimated_s > max_s:
            return
        num_probes += 1
        measured = runner.run_stage(
            stage,
            f"probe {num_probes}",
            lambda _: f"at most {max(0.0, max_s - runner.clock()):.0f} s left",
        )
        if measured is None:
            return
        yield measured
        if measured.run.stop_reason == ClientReason.INTERRUPTED:
            return
        sweep.record(make_repeat(measured.run, measured.records))


if __name__ == "__main__":
    main(prog_name="tandem sweep")
