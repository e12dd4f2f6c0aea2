"""Measures a running lab: `python -m loadtest.bench`.

Ends with a table and the path of the report. Exit codes: 0 every planned request has a record and every stage
a completed one, 1 not so, 2 wrong usage, 3 the lab cannot be reached, 130 stopped by hand (Ctrl-C); a run that
was stopped goes on with `--resume`.
"""

# The runner brings Locust, which patches the interpreter: it must come before whatever imports ssl or socket.
# isort: off
from loadtest.runner import Runner, Stop
# isort: on

import secrets
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
import gevent

from loadtest import experiment, lab, report, resume, rundir
from loadtest.ceiling import measure_ceiling
from loadtest.client_health import ClientCeiling
from loadtest.load import ClosedLoop
from loadtest.plan import Plan, arrivals_of, read_plan, write_plan
from loadtest.prompt_tokens import TOKENIZER_FILE, TokenCounter, token_counter
from loadtest.rundir import RunFile, RunInfo, RunStatus, StageRun
from loadtest.sse_client import ClientSettings
from serving import machine, model_store, run_directory
from serving.progress import progress

EXIT_INCOMPLETE = 1
EXIT_UNREACHABLE = 3
EXIT_SIGNAL = 128  # plus the number of the signal, as shells have it: 130 for Ctrl-C
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
DEFAULT_URL = "http://127.0.0.1:8000"
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


def _names(_context: click.Context, _parameter: click.Parameter, value: str | None) -> tuple[str, ...] | None:
    if value is None:
        return None
    names = tuple(part.strip() for part in value.split(",") if part.strip())
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
)
@click.option("--base-url", help=f"Where the lab is.  [default: that of the plan, or {DEFAULT_URL}]")
@click.option(
    "--experiment",
    "experiment_file",
    type=click.Path(path_type=Path),
    help="YAML, such as deploy/experiments/*.",
)
@click.option("--lanes", callback=_names, help="Lanes, with commas.  [default: all, in the lab's order]")
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
@click.option(
    "--warmup-s", type=float, help="First part of an open loop, which no figure counts.  [default: 0]"
)
@click.option(
    "--max-stage-s", type=float, help="Cut a stage then.  [default: 180, or an open loop's length and 60]"
)
@click.option("--seed", type=int, help="Of prompts and arrivals.  [default: a fresh one, printed and stored]")
@click.option("--name", help="Last part of the run's directory.  [default: bench]")
@click.option("--runs-dir", type=click.Path(path_type=Path), default=Path("runs"), show_default=True)
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
    **flags: Any,
) -> None:
    given = {key: value for key, value in flags.items() if value is not None and value != ()}
    try:
        _refuse_together(experiment_file, plan_file, resume_dir, out, given)
        if resume_dir is not None:
            job = _resumed(resume_dir, base_url)
        else:
            job = _fresh(plan_file, experiment_file, given, base_url, out, runs_dir)
        run_directory.point_latest_at(job.directory.resolve())
    except lab.LabError as error:
        click.echo(f"{error}\nIs the lab up? `tandem up` starts it.", err=True)
        sys.exit(EXIT_UNREACHABLE)
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    except OSError as error:
        where = f"{error.filename}: {error.strerror}"
        raise click.UsageError(f"the run's directory cannot be made: {where} (--out, --runs-dir)") from None
    sys.exit(_run(job, ceiling, as_json))


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
    url = base_url or (given.base_url if given else DEFAULT_URL)
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
    directory = _make_directory(out, runs_dir, plan.name, now)
    write_plan(plan, directory / rundir.PLAN_FILE)
    (directory / rundir.REQUESTS_FILE).touch()
    return Job(plan, directory, _info(plan, directory, now, description))


def _resumed(directory: Path, base_url: str | None) -> Job:
    """A run that goes on; what its unfinished stage left is dropped.

    Raises:
        ValueError: the run cannot go on, or not on this lab.
        LabError: the lab cannot be reached.
    """
    url = base_url or read_plan(directory / rundir.PLAN_FILE).base_url
    ClientSettings(url)
    past = resume.read_past(directory, lab.describe_lab(url))
    dropped = resume.drop_unfinished(directory, past.finished)
    click.echo(
        f"{directory}: {len(past.run.stages)} of {len(past.plan.stages)} stages have run; "
        f"{dropped} records of unfinished ones are dropped",
        err=True,
    )
    info = replace(past.run.run, base_url=url, parts=past.part)
    return Job(replace(past.plan, base_url=url), directory, info, past.run.stages, past.offset_s)


def _make_directory(out: Path | None, runs_dir: Path, name: str, started_at: datetime) -> Path:
    if out is None:
        return run_directory.create_run_dir(runs_dir, name, started_at)
    out.mkdir(parents=True, exist_ok=True)
    if any(out.iterdir()):
        raise ValueError(f"{out} is not empty; a run needs a directory of its own (--out)")
    return out


def _run(job: Job, with_ceiling: bool, as_json: bool) -> int:
    """Run what is left of the plan, write run and report, and return the exit code."""
    plan = job.plan
    todo = replace(plan, stages=tuple(stage for stage in plan.stages if stage.key not in job.finished))
    click.echo(
        f"{len(todo.stages)} stages, {todo.num_requests} requests; "
        f"about {todo.estimated_s:.0f} s expected, at most {todo.max_s:.0f} s by the time boxes; seed {plan.seed}",
        err=True,
    )
    stop = Stop()
    with progress() as say:
        counter = _token_counter(plan, job.info.model)
        info = replace(job.info, token_counter=counter.name)
        if with_ceiling and info.ceiling is None:
            say("measuring what this client can do")
            info = replace(info, ceiling=_measure_ceiling(plan))
        if info.parts == 1:
            info = replace(info, started_at=datetime.now(UTC).isoformat(timespec="milliseconds"))
        stages = list(job.stages)
        with _told_of_signals(stop):
            requests_path = job.directory / rundir.REQUESTS_FILE
            with Runner(
                plan,
                info.id,
                requests_path,
                say,
                stop,
                counter=counter,
                part=info.parts,
                offset_s=job.offset_s,
            ) as runner:
                began_at_s = runner.clock()

                def save(status: RunStatus) -> None:
                    spent_s = job.info.duration_s + runner.clock() - began_at_s
                    rundir.write_run(
                        RunFile(replace(info, duration_s=spent_s, status=status), tuple(stages)),
                        job.directory,
                    )

                save(RunStatus.RUNNING)
                for measured in runner.run_all(job.finished):
                    stages.append(measured.run)
                    save(RunStatus.RUNNING)
                status = _status(stop, plan, stages)
                save(status)
        say("writing the report")
        summary = report.build(job.directory)
    report.show(summary, job.directory, as_json)
    if stop.signal is not None:
        click.echo(f"tandem bench --resume {job.directory} goes on with it", err=True)
        return EXIT_SIGNAL + stop.signal
    has_empty_stage = any(stage.requests == stage.failures for stage in summary.stages)
    return EXIT_INCOMPLETE if has_empty_stage or status is not RunStatus.COMPLETE else 0


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


def _token_counter(plan: Plan, model: Mapping[str, Any]) -> TokenCounter:
    """The tokenizer of the plan, else that of the served model where it lies on this machine, else an estimate.

    Raises:
        ValueError: the plan names a place without a tokenizer.
    """
    if plan.tokenizer is not None:
        return token_counter(Path(plan.tokenizer))
    directory = model_store.directory_of(model["path"])
    return token_counter(directory if (directory / TOKENIZER_FILE).is_file() else None)


def _measure_ceiling(plan: Plan) -> ClientCeiling:
    """What this client can do at the run's own width, where that is known: users of its widest closed loop."""
    users = [stage.load.users for stage in plan.stages if isinstance(stage.load, ClosedLoop)]
    return measure_ceiling(streams=max(users, default=CEILING_STREAMS), duration_s=CEILING_S)


def _status(stop: Stop, plan: Plan, stages: list[StageRun]) -> RunStatus:
    if stop.is_set:
        return RunStatus.INTERRUPTED
    counted = {stage.plan.key: stage.locust_requests for stage in stages}
    is_complete = all(counted.get(stage.key) == stage.requests for stage in plan.stages)
    return RunStatus.COMPLETE if is_complete else RunStatus.INCOMPLETE


def _info(plan: Plan, directory: Path, started_at: datetime, description: Mapping[str, Any]) -> RunInfo:
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
        slo=plan.slo,
    )


if __name__ == "__main__":
    main(prog_name="tandem bench")
