"""Verbs that run a client of a lab, and `report` and `simulate`, which need none."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import IO

import click

from serving.cli.options import Number, base_url_option, running_url
from serving.cli.outcome import end, say_err
from serving.core.addresses import server_root
from serving.core.errors import TandemError
from serving.core.exit_codes import ExitCode
from serving.progress import progress
from serving.run_directory import RUNS_DIR, create_run_dir
from serving.tracing import chrome_trace, recording
from serving.tracing.trace_file import write_trace

CHILD_STOP_LIMIT_S = 20.0


def _passing_on(verb: Callable[[tuple[str, ...]], None]) -> click.Command:
    """A verb that leaves its arguments, --help among them, to the client that it runs."""
    with_arguments = click.argument("arguments", nargs=-1, type=click.UNPROCESSED)(verb)
    settings = {"ignore_unknown_options": True, "allow_extra_args": True}
    return click.command(context_settings=settings, add_help_option=False)(with_arguments)


@_passing_on
def bench(arguments: tuple[str, ...]) -> None:
    """Measure the running lab: throughput and latency of each lane."""
    end(_run_client("loadtest.bench", arguments))


@_passing_on
def sweep(arguments: tuple[str, ...]) -> None:
    """Find the highest rate at which each lane keeps an objective."""
    end(_run_client("loadtest.sweep", arguments))


@_passing_on
def lesson(arguments: tuple[str, ...]) -> None:
    """Draw five pictures of serial decoding from the running lab."""
    end(_run_client("loadtest.lesson", arguments))


@_passing_on
def report(arguments: tuple[str, ...]) -> None:
    """Write the report of a run again, or compare two runs."""
    end(run_module("loadtest.report", arguments))


@_passing_on
def calibrate(arguments: tuple[str, ...]) -> None:
    """Measure what a step, a token and a draft cost: the profile."""
    end(_run_client("loadtest.calibrate", arguments))


@_passing_on
def simulate(arguments: tuple[str, ...]) -> None:
    """Say how many replicas a load needs, by a profile; needs no lab."""
    end(run_module("loadtest.simulate", arguments))


@click.command()
@click.option(
    "--seconds",
    type=Number(0, 300, min_open=True),
    default=20.0,
    show_default=True,
    help="How long to record.",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Trace file.  [default: runs/<time>-trace/trace.json]",
)
@base_url_option
@click.option("--token-ids", is_flag=True, help="Record the tokens of drafts and answers, too.")
@click.option(
    "--share",
    type=Number(0, 1, min_open=True),
    default=1.0,
    show_default=True,
    help="Of the requests; all processes choose the same ones.",
)
def trace(seconds: float, out: Path | None, base_url: str | None, token_ids: bool, share: float) -> None:
    """Record engine steps and requests of the running lab.

    Open the result at https://ui.perfetto.dev. Beside the trace it writes steps.jsonl, the same in plain rows:
    docs/tracing.md. It sends no load itself.

    \b
    Examples:
      tandem trace --seconds 20
      tandem trace --seconds 5 --token-ids --out story.json
      tandem trace --seconds 300 --share 0.1
    """
    url = server_root(base_url or running_url())
    if out is not None and not os.access(out.parent, os.W_OK):
        raise click.BadParameter(f"{out.parent} is not a directory to write into", param_hint="--out")
    with progress() as say:
        recorded = recording.record(url, seconds, with_token_ids=token_ids, say=say, share=share)
    path = out or RUNS_DIR
    try:
        path = out or create_run_dir(RUNS_DIR, "trace", datetime.now(UTC)) / "trace.json"
        rows = path.with_name("steps.jsonl" if out is None else f"{path.stem}.steps.jsonl")
        write_trace(recorded.trace, rows)
        chrome_trace.write_chrome_trace(recorded.trace, path)
    except OSError as error:
        # A full disk has no file name.
        raise TandemError(f"{error.filename or path}: cannot be written: {error.strerror}") from None
    say_err(f"{len(recorded.trace.steps)} step events, {len(recorded.trace.spans)} requests: {rows}")
    say_err("open the trace at https://ui.perfetto.dev:")
    click.echo(path)
    for fault in recorded.faults:
        say_err(f"incomplete: {fault}")
    if recorded.faults:
        end(ExitCode.FAILED)


def _run_client(module: str, arguments: tuple[str, ...]) -> int:
    """Run a client of the lab, of the running one where the arguments name none; its exit code."""
    options = {argument.partition("=")[0] for argument in arguments}
    if {"-h", "--help"} & options:
        return run_module(module, arguments)
    if "--base-url" not in options:
        arguments = ("--base-url", running_url(), *arguments)
    # Its imports take seconds on a busy machine; nothing else is said before they are done.
    say_err("starting the load client")
    return run_module(module, arguments)


def run_module(module: str, arguments: Sequence[str], *, stdout: IO[str] | None = None) -> int:
    """Run `python -m module` with this terminal; its exit code.

    Args:
        stdout: receives its standard output instead.

    Raises:
        KeyboardInterrupt: interrupted; the child was told so, and given time to end its own way.
    """
    # A process group of its own: it hears of Ctrl-C once, from here, however the signal came.
    child = subprocess.Popen([sys.executable, "-m", module, *arguments], stdout=stdout, process_group=0)
    try:
        return child.wait()
    except KeyboardInterrupt:
        child.send_signal(signal.SIGINT)
        try:
            child.wait(timeout=CHILD_STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            say_err(f"{module} did not end within {CHILD_STOP_LIMIT_S:g} s: killing it")
        raise
    finally:
        child.kill()
        child.wait()
