"""A run from its first request to its report: what `tandem bench` and `tandem sweep` share."""

import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn

import click
import gevent

from loadtest.analysis.summary import Summary
from loadtest.bench.workbench import Stop, Workbench, open_workbench
from loadtest.client import lab
from loadtest.client.ceiling import measure_ceiling
from loadtest.client.health import ClientCeiling
from loadtest.client.lane_models import counters_of_lanes, lane_models
from loadtest.client.record import torn_line
from loadtest.judge.capacity import SearchSettings
from loadtest.offer.load import ClosedLoop
from loadtest.offer.prompt_tokens import TokenCounter, token_counter, tokenizer_of
from loadtest.report.build import build, show
from loadtest.run import resume
from loadtest.run.directory import (
    REQUESTS_FILE,
    RunFile,
    RunInfo,
    RunStatus,
    RunWriteError,
    StageRun,
    write_run,
)
from loadtest.run.plan import Plan
from serving import machine, run_directory
from serving.core.errors import ConfigError
from serving.core.exit_codes import SIGNALLED, ExitCode
from serving.core.lane import Strategy
from serving.progress import Say, progress
from serving.roofline import Roofline, kept_ceilings, roofline_of

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
CEILING_S = 2.0
CEILING_STREAMS = 32  # for a run of open loops, whose width is not known before


@dataclass(frozen=True, slots=True)
class Job:
    """A run about to start, or to go on.

    Attributes:
        info: what is known of the run; its status and duration change as it goes.
        stages: those that ran already.
        offset_s: where the run's clock stands.
    """

    plan: Plan
    directory: Path
    info: RunInfo
    stages: tuple[StageRun, ...] = ()
    offset_s: float = 0.0

    @property
    def finished(self) -> frozenset[str]:
        return frozenset(stage.plan.key for stage in self.stages)


@dataclass(frozen=True, slots=True)
class RunEnd:
    """How a run ended; `signal` is that of a run stopped by hand."""

    summary: Summary
    status: RunStatus
    signal: int | None

    @property
    def exit_code(self) -> int:
        """130 and the like for a run stopped by hand; 1 when a stage is missing or empty; 5: INVALID; else 0."""
        if self.signal is not None:
            return SIGNALLED + self.signal
        has_empty_stage = any(stage.requests == stage.failures for stage in self.summary.stages)
        if has_empty_stage or self.status is not RunStatus.COMPLETE:
            return ExitCode.FAILED
        return ExitCode.OK if self.summary.is_valid else ExitCode.INVALID


def make_directory(out: Path | None, runs_dir: Path, name: str, started_at: datetime) -> Path:
    """A directory for a run alone.

    Raises:
        ValueError: `out` is not empty.
    """
    if out is None:
        return run_directory.create_run_dir(runs_dir, name, started_at)
    out.mkdir(parents=True, exist_ok=True)
    if any(out.iterdir()):
        raise ValueError(f"{out} is not empty; a run needs a directory of its own (--out)")
    return out


def first_info(
    plan: Plan,
    directory: Path,
    started_at: datetime,
    description: Mapping[str, Any],
    search: SearchSettings | None = None,
) -> RunInfo:
    """What is known of a run before its first stage."""
    return RunInfo(
        id=directory.name,
        name=plan.name,
        started_at=started_at.isoformat(timespec="milliseconds"),
        duration_s=0.0,
        status=RunStatus.RUNNING,
        seed=plan.seed,
        output_tokens=plan.output_tokens,
        planned_requests=plan.num_requests,
        base_url=plan.base_url,
        machine=machine.describe(),
        versions=run_directory.installed_versions(),
        config=description["config"],
        model=description["model"],
        replicas=description["replicas"],
        priorities=description.get("priorities"),
        slo=plan.slo,
        search=search,
        roofline=_roofline(description) if plan.trace else None,
    )


def _roofline(description: Mapping[str, Any]) -> Roofline | str:
    """That of the first batched lane, or a sentence that says why there is none."""
    batched = [
        lane["name"] for lane in description["config"]["lanes"] if lane["strategy"] == Strategy.BATCHED
    ]
    models = lane_models(description["config"], ())
    for replica in description["replicas"]:
        if replica["lane"] in batched:
            try:
                return roofline_of(replica, models[replica["lane"]].path, kept_ceilings)
            except ValueError as error:
                return str(error)
    return "No roof is drawn: it is that of a batched lane, and this lab had none that was ready."


def drop_unfinished(directory: Path, past: resume.Past, what_ran: str) -> None:
    """Drop what unfinished stages of a run that goes on left, and say so on stderr.

    Raises:
        ValueError: the records cannot be read.
    """
    if torn := torn_line(directory / REQUESTS_FILE):
        click.echo(torn, err=True)
    dropped = resume.drop_unfinished(directory, past.finished)
    click.echo(
        f"{directory}: {what_ran} have run; {dropped} records of unfinished ones are dropped", err=True
    )


@contextmanager
def usage_errors() -> Iterator[None]:
    """Faults of what was asked for end the program with a line and exit code 2, an absent lab with 3."""
    try:
        yield
    except lab.LockedLabError as error:
        _leave(str(error))
    except lab.LabError as error:
        _leave(f"{error}\nIs the lab up? `tandem up` starts it.")
    except (ValueError, ConfigError) as error:
        raise click.UsageError(str(error)) from None
    except RunWriteError as error:
        raise click.ClickException(str(error)) from None
    except OSError as error:
        where = ": ".join(filter(None, (error.filename, error.strerror)))  # a full disk has no file name
        raise click.UsageError(f"the run's directory cannot be made: {where} (--out, --runs-dir)") from None


def _leave(message: str) -> NoReturn:
    click.echo(message, err=True)
    sys.exit(ExitCode.NOT_RUNNING)


class RunningJob:
    """A run that is on: its workbench, and what has been kept of it. `running` makes one."""

    def __init__(self, job: Job, info: RunInfo, bench: Workbench) -> None:
        self.info = info
        self.bench = bench
        self._job = job
        self._began_at_s = bench.clock()
        self._stages = list(job.stages)

    def keep(self, stage: StageRun) -> None:
        """A stage ended: write it down at once.

        Raises:
            RunWriteError: it cannot be written.
        """
        self._stages.append(stage)
        self.save(RunStatus.RUNNING)

    def save(self, status: RunStatus) -> None:
        """Write `run.json` as things stand."""
        spent_s = self._job.info.duration_s + self.bench.clock() - self._began_at_s
        info = replace(self.info, duration_s=spent_s, status=status)
        write_run(RunFile(info, tuple(self._stages)), self._job.directory)

    @property
    def status(self) -> RunStatus:
        """How it would have ended now. A sweep has no planned stages: it is complete when it was not stopped."""
        if self.bench.stop.is_set:
            return RunStatus.INTERRUPTED
        counted = {stage.plan.key: stage.locust_requests for stage in self._stages}
        is_complete = all(counted.get(stage.key) == stage.requests for stage in self._job.plan.stages)
        return RunStatus.COMPLETE if is_complete else RunStatus.INCOMPLETE


@contextmanager
def running(job: Job, *, with_ceiling: bool) -> Iterator[RunningJob]:
    """The run is on during the block, which keeps each stage as soon as it ended; SIGINT and SIGTERM stop it.

    Where something cannot be written, the program ends with a line and exit code 1; what had been kept stays.
    """
    stop = Stop()
    try:
        with progress() as say:
            counter, counters, info = _prepare(job, with_ceiling, say)
            with (
                _told_of_signals(stop),
                open_workbench(
                    job.plan,
                    info,
                    job.directory,
                    counter=counter,
                    counters=counters,
                    say=say,
                    stop=stop,
                    offset_s=job.offset_s,
                ) as bench,
            ):
                run = RunningJob(job, info, bench)
                run.save(RunStatus.RUNNING)
                yield run
                run.save(run.status)
    except RunWriteError as error:
        raise click.ClickException(
            f"{error}\nStages that had ended are kept. Make room; --resume {job.directory} goes on with the run."
        ) from None


def report(job: Job, run: RunningJob, *, as_json: bool, all_tables: bool) -> RunEnd:
    """Write the report of a run that is over, and show it.

    Where it cannot be written, the program ends with a line and exit code 1.
    """
    try:
        with progress() as say:
            say("writing the report")
            summary = build(job.directory)
    except RunWriteError as error:
        raise click.ClickException(
            f"{error}\nAll that was measured is kept. Make room; tandem report {job.directory} writes the report."
        ) from None
    show(summary, job.directory, as_json, all_tables)
    return RunEnd(summary, run.status, run.bench.stop.signal)


def _prepare(job: Job, with_ceiling: bool, say: Say) -> tuple[TokenCounter, dict[str, TokenCounter], RunInfo]:
    """How tokens of prompts are counted, by lane where it has a model of its own, and what is known of the run just
    before its first stage."""
    plan = job.plan
    # The plan's tokenizer, else that of the served model where it lies on this machine, else an estimate.
    counter = token_counter(
        Path(plan.tokenizer) if plan.tokenizer is not None else tokenizer_of(job.info.model["path"])
    )
    counters = {} if plan.tokenizer is not None else counters_of_lanes(job.info.config)
    names = {lane: one.name for lane, one in counters.items()}
    info = replace(job.info, token_counter=counter.name, token_counters=names)
    if with_ceiling and info.ceiling is None:
        say("measuring what this client can do")
        try:
            info = replace(info, ceiling=_measure_ceiling(plan))
        except RuntimeError as error:
            raise click.ClickException(f"the client's ceiling was not measured: {error}") from None
    if info.parts == 1:
        info = replace(info, started_at=datetime.now(UTC).isoformat(timespec="milliseconds"))
    return counter, counters, info


@contextmanager
def _told_of_signals(stop: Stop) -> Iterator[None]:
    """Let signals stop the run in good order meanwhile.

    Afterwards they end the program at once: no request is in flight, the records are written.
    """
    watchers = [gevent.signal_handler(number, stop.set, number) for number in STOP_SIGNALS]
    try:
        yield
    finally:
        for number, watcher in zip(STOP_SIGNALS, watchers, strict=True):
            watcher.cancel()
            signal.signal(number, signal.SIG_DFL)


def _measure_ceiling(plan: Plan) -> ClientCeiling:
    """What this client can do at the run's own width, where that is known: users of its widest closed loop."""
    users = [stage.load.users for stage in plan.stages if isinstance(stage.load, ClosedLoop)]
    return measure_ceiling(streams=max(users, default=CEILING_STREAMS), duration_s=CEILING_S)
