"""Measures a running lab: `python -m loadtest.bench`.

Locust as a library, closed loop: stage after stage, N users each send their share of a fixed number of
requests. Ends with a table and the path of the report. Exit codes: 0 every planned request has a record
and every stage a completed one, 1 not so, 2 wrong usage, 3 the lab cannot be reached, 130 stopped by hand (Ctrl-C).
"""

# Locust patches the interpreter: it must come before whatever imports ssl or socket.
# isort: off
from locust import User, constant, task
from locust.env import Environment
from locust.exception import StopUser
# isort: on

import math
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

import click
import gevent

from loadtest import lab, report, rundir
from loadtest.load import ClosedLoop
from loadtest.locustfile import report_to_locust
from loadtest.plan import (
    DEFAULT_MAX_STAGE_S,
    Plan,
    StagePlan,
    plan_stages,
    read_plan,
    time_left_s,
    write_plan,
)
from loadtest.record import ClientReason, RequestRecord, to_row
from loadtest.rundir import RunFile, RunInfo, RunStatus, StageRun
from loadtest.sse_client import ClientSettings
from loadtest.stage import Stage
from loadtest.workload import DEFAULT_OUTPUT_TOKENS, WORKLOAD_NAMES
from serving import machine, run_directory
from serving.core.lane import Strategy
from serving.progress import Say, progress

EXIT_INCOMPLETE = 1
EXIT_UNREACHABLE = 3
EXIT_SIGNAL = 128  # plus the number of the signal, as shells have it: 130 for Ctrl-C
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)

TICK_S = 0.5
# A line each tick suits a terminal; a log gets one each five seconds.
PLAIN_LINE_EVERY_S = 5.0


@dataclass(slots=True)
class Stop:
    """Whether the run was stopped by hand, and the clients that must hear of it."""

    signal: int | None = None
    stage: Stage | None = None

    @property
    def is_set(self) -> bool:
        return self.signal is not None

    def set(self, number: int) -> None:
        self.signal = number
        if self.stage is not None:
            self.stage.stop(ClientReason.INTERRUPTED)


MAX_CONCURRENCY = 1024  # users of one process
MAX_STAGE_S = 86_400


class StageUser(User):  # type: ignore[misc]
    """A Locust user that sends its share of the stage and leaves."""

    wait_time = constant(0)

    @task  # type: ignore[untyped-decorator]
    def send_share(self) -> None:
        self.environment.stage.run_user()
        raise StopUser


class Bench:
    """Runs a plan, stage after stage, and keeps every request as soon as it ended."""

    def __init__(self, plan: Plan, run_id: str, requests_file: TextIO, say: Say, stop: Stop) -> None:
        self._plan = plan
        self._run_id = run_id
        self._requests_file = requests_file
        self._say = say
        self._stop = stop
        self._started_at_s = time.perf_counter()
        self._environment = Environment(user_classes=[StageUser])
        self._runner = self._environment.create_local_runner()
        self._line_every_s = TICK_S if sys.stderr.isatty() else PLAIN_LINE_EVERY_S
        self.num_records = 0

    def clock(self) -> float:
        """Seconds since the run started."""
        return time.perf_counter() - self._started_at_s

    def run(self) -> tuple[StageRun, ...]:
        """Run the stages in order, until the last or until stopped."""
        done: list[StageRun] = []
        warm_lanes: set[str] = set()
        for number, stage in enumerate(self._plan.stages):
            if self._stop.is_set:
                break
            if stage.lane not in warm_lanes:
                warm_lanes.add(stage.lane)
                self._warm_up(stage)
            if not self._stop.is_set:
                done.append(self._run_stage(number, stage))
        self._runner.quit()
        return tuple(done)

    def _warm_up(self, plan: StagePlan) -> None:
        self._say(f"lane {plan.lane}: one request to warm up")
        stage = Stage(self._plan, plan, self._run_id, self.clock, self._keep)
        self._stop.stage = stage
        stage.warm_up()
        self._stop.stage = None

    def _run_stage(self, number: int, plan: StagePlan) -> StageRun:
        before = lab.scrape(self._plan.base_url)
        stage = Stage(self._plan, plan, self._run_id, self.clock, self._keep_and_count)
        self._environment.stage = stage
        self._stop.stage = stage
        started_at_s = self.clock()
        assert isinstance(plan.load, ClosedLoop)
        self._runner.start(plan.load.users, spawn_rate=plan.load.users)
        self._watch(number, stage, started_at_s)
        finished_at_s = self.clock()
        self._runner.stop()
        self._stop.stage = None
        counted = self._environment.stats.get("E2E", plan.key)
        return StageRun(
            plan=plan,
            started_at_s=started_at_s,
            finished_at_s=finished_at_s,
            is_cut=stage.stop_reason is not None,
            before=before,
            after=lab.scrape(self._plan.base_url),
            locust_requests=counted.num_requests,
            locust_failures=counted.num_failures,
        )

    def _watch(self, number: int, stage: Stage, started_at_s: float) -> None:
        said_at_s = float("-inf")
        while not stage.done.is_set():
            now_s = self.clock()
            if stage.stop_reason is None and now_s - started_at_s > stage.plan.max_stage_s:
                stage.stop(ClientReason.STAGE_TIME_UP)
            if now_s - said_at_s >= self._line_every_s:
                said_at_s = now_s
                self._say(self._progress_text(number, stage, now_s))
            stage.done.wait(TICK_S)

    def _progress_text(self, number: int, stage: Stage, now_s: float) -> str:
        stages = self._plan.stages
        share = stage.num_finished / stage.plan.requests
        left_s = time_left_s(stages, number, share, now_s)
        return (
            f"stage {number + 1} of {len(stages)}: {stage.plan.lane}, {stage.plan.workload}, "
            f"{stage.plan.load.label}: {stage.num_finished} of {stage.plan.requests} requests; "
            f"about {left_s:.0f} s left"
        )

    def _keep(self, record: RequestRecord) -> None:
        self._requests_file.write(to_row(record) + "\n")
        self._requests_file.flush()

    def _keep_and_count(self, record: RequestRecord) -> None:
        self._keep(record)
        self.num_records += 1
        label = record.label
        report_to_locust(self._environment, label.stage, record)


def _names(_context: click.Context, _parameter: click.Parameter, value: str | None) -> tuple[str, ...]:
    names = tuple(part.strip() for part in value.split(",") if part.strip()) if value else ()
    if value is not None and not names:
        raise click.BadParameter(f"{value!r} names nothing")
    return names


def _levels(context: click.Context, parameter: click.Parameter, value: str | None) -> tuple[int, ...]:
    try:
        levels = tuple(int(name) for name in _names(context, parameter, value))
    except ValueError:
        raise click.BadParameter(f"{value!r} is not a list of whole numbers, such as 1,4,8") from None
    if min(levels) < 1 or max(levels) > MAX_CONCURRENCY:
        raise click.BadParameter(f"{value!r}: each level must be in 1..{MAX_CONCURRENCY}")
    return tuple(sorted(set(levels)))


def _finite(_context: click.Context, _parameter: click.Parameter, value: float) -> float:
    if math.isnan(value):
        raise click.BadParameter("nan is no time")
    return value


@click.command(
    context_settings={"help_option_names": ["-h", "--help"]}, help="Measure a running lab and write a report."
)
@click.option("--base-url", help="Where the lab is.  [default: that of the plan, or http://127.0.0.1:8000]")
@click.option("--lanes", callback=_names, help="Lanes, with commas.  [default: all, in the lab's order]")
@click.option("--workloads", callback=_names, default=",".join(WORKLOAD_NAMES), show_default=True)
@click.option("--concurrency", callback=_levels, default="1,4,8", show_default=True, help="Users at once.")
@click.option("--output-tokens", type=click.IntRange(2), default=DEFAULT_OUTPUT_TOKENS, show_default=True)
@click.option(
    "--max-stage-s",
    type=click.FloatRange(0.1, MAX_STAGE_S),
    callback=_finite,
    default=DEFAULT_MAX_STAGE_S,
    show_default=True,
    help="Cut a stage then.",
)
@click.option("--name", default="bench", show_default=True, help="Last part of the run's directory.")
@click.option("--seed", type=int, default=0, show_default=True, help="Order of the prompts.")
@click.option("--runs-dir", type=click.Path(path_type=Path), default=Path("runs"), show_default=True)
@click.option(
    "--plan", "plan_file", type=click.Path(path_type=Path), help="Run this plan; only --base-url counts."
)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    help="Directory of the run.  [default: <runs-dir>/<time>-<name>]",
)
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON instead of the table.")
def main(
    base_url: str | None,
    lanes: tuple[str, ...],
    workloads: tuple[str, ...],
    concurrency: tuple[int, ...],
    output_tokens: int,
    max_stage_s: float,
    name: str,
    seed: int,
    runs_dir: Path,
    plan_file: Path | None,
    out: Path | None,
    as_json: bool,
) -> None:
    try:
        given = read_plan(plan_file) if plan_file else None
        url = base_url or (given.base_url if given else "http://127.0.0.1:8000")
        ClientSettings(url)  # says what is wrong with an address before anything is asked of it
        description = lab.describe_lab(url)
        if given:
            plan = replace(given, base_url=url)
        else:
            plan = Plan(
                base_url=url,
                model=description["model"]["name"],
                stages=plan_stages(
                    _choose_lanes(description, lanes), workloads, concurrency, output_tokens, max_stage_s
                ),
                name=name,
                seed=seed,
                output_tokens=output_tokens,
            )
        started_at = datetime.now(UTC)
        directory = _make_directory(out, runs_dir, plan.name, started_at)
        run_directory.point_latest_at(directory)
    except lab.LabError as error:
        click.echo(f"{error}\nIs the lab up? `tandem up` starts it.", err=True)
        sys.exit(EXIT_UNREACHABLE)
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    except OSError as error:
        where = f"{error.filename}: {error.strerror}"
        raise click.UsageError(f"the run's directory cannot be made: {where} (--out, --runs-dir)") from None
    sys.exit(_run(plan, directory, started_at, description, as_json))


def _choose_lanes(description: Mapping[str, Any], wanted: tuple[str, ...]) -> list[tuple[str, Strategy]]:
    """The lanes to measure with their strategies; all of the lab's, in its order, unless some were named."""
    known = {lane["name"]: Strategy(lane["strategy"]) for lane in description["config"]["lanes"]}
    for lane in wanted:
        if lane not in known:
            raise ValueError(f"lane {lane!r} is not in the lab, which has {', '.join(known)} (--lanes)")
    return [(lane, known[lane]) for lane in wanted or known]


def _make_directory(out: Path | None, runs_dir: Path, name: str, started_at: datetime) -> Path:
    if out is None:
        return run_directory.create_run_dir(runs_dir, name, started_at)
    out.mkdir(parents=True, exist_ok=True)
    if any(out.iterdir()):
        raise ValueError(f"{out} is not empty; a run needs a directory of its own (--out)")
    return out


def _run(
    plan: Plan, directory: Path, started_at: datetime, description: Mapping[str, Any], as_json: bool
) -> int:
    """Run the plan, write the run and its report, and return the exit code."""
    click.echo(
        f"{len(plan.stages)} stages, {plan.num_requests} requests of {plan.output_tokens} tokens; "
        f"about {plan.estimated_s:.0f} s expected",
        err=True,
    )
    write_plan(plan, directory / rundir.PLAN_FILE)
    stop = Stop()
    watchers = [gevent.signal_handler(number, stop.set, number) for number in STOP_SIGNALS]
    with progress() as say:
        with (directory / rundir.REQUESTS_FILE).open("w", encoding="utf-8") as requests_file:
            bench = Bench(plan, directory.name, requests_file, say, stop)
            stages = bench.run()
            duration_s = bench.clock()
        # From here on a signal ends the program at once: no request is in flight, the records are written.
        for number, watcher in zip(STOP_SIGNALS, watchers, strict=True):
            watcher.cancel()
            signal.signal(number, signal.SIG_DFL)
        say("writing the report")
        status = _status(stop, bench.num_records, plan)
        info = _info(plan, directory, started_at, duration_s, status, description)
        rundir.write_run(RunFile(info, stages), directory)
        summary = report.build(directory)
    report.show(summary, directory, as_json)
    if stop.signal is not None:
        return EXIT_SIGNAL + stop.signal
    has_empty_stage = any(stage.requests == stage.failures for stage in summary.stages)
    return EXIT_INCOMPLETE if has_empty_stage or status is not RunStatus.COMPLETE else 0


def _status(stop: Stop, num_records: int, plan: Plan) -> RunStatus:
    if stop.is_set:
        return RunStatus.INTERRUPTED
    return RunStatus.COMPLETE if num_records == plan.num_requests else RunStatus.INCOMPLETE


def _info(
    plan: Plan,
    directory: Path,
    started_at: datetime,
    duration_s: float,
    status: RunStatus,
    description: Mapping[str, Any],
) -> RunInfo:
    return RunInfo(
        id=directory.name,
        name=plan.name,
        started_at=started_at.isoformat(timespec="seconds"),
        duration_s=duration_s,
        status=status,
        seed=plan.seed,
        output_tokens=plan.output_tokens,
        planned_requests=plan.num_requests,
        base_url=plan.base_url,
        machine=machine.describe(),
        versions=run_directory.installed_versions(),
        config=description["config"],
        model=description["model"],
        replicas=description["replicas"],
    )


if __name__ == "__main__":
    main(prog_name="tandem bench")
