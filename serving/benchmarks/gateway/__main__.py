"""`make bench-gateway`: our gateway's data path beside other gateways, in front of the same simulated engines.

Exit codes: 0 it was measured, whatever the targets say; 1 not; 2 wrong usage.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType

import click
import psutil

from serving import machine, run_directory
from serving.benchmarks.gateway import table
from serving.benchmarks.gateway.figures import Measured
from serving.benchmarks.gateway.judge import judge
from serving.benchmarks.gateway.measure import Plan, measure_all
from serving.benchmarks.gateway.names import OURS, OURS_TWICE, PEERS
from serving.benchmarks.gateway.peers import NotStarted, Peer, running
from serving.benchmarks.processes import Seen, see
from serving.benchmarks.verdict import Verdict
from serving.core.errors import StartFailedError
from serving.core.exit_codes import SIGNALLED, ExitCode
from serving.progress import progress

VERB = "bench-gateway"
LEVELS = "1,64,128,256,512,1000"
FILES_BESIDE = 200  # that this process has open beside its streams


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.option("--levels", default=LEVELS, help="Streams at once, with commas.")
@click.option("--peers", default=",".join(PEERS), help="Which gateways, with commas.")
@click.option("--repeats", type=click.IntRange(1, 100), default=3)
@click.option("--window-s", type=click.FloatRange(1, 600), default=8.0, help="Measured time of each.")
@click.option("--warm-up-s", type=click.FloatRange(0, 600), default=3.0, help="Before it.")
@click.option(
    "--spread-s", type=click.FloatRange(0, 60), default=0.0, help="Over which streams begin; 0: at once."
)
@click.option("--idle-streams", type=click.IntRange(0, 10_000), default=1000, help="Silent ones; 0: none.")
@click.option(
    "--out", type=click.Path(file_okay=False, path_type=Path), default=run_directory.RUNS_DIR / VERB
)
def main(
    levels: str,
    peers: str,
    repeats: int,
    window_s: float,
    warm_up_s: float,
    spread_s: float,
    idle_streams: int,
    out: Path,
) -> None:
    """Measure gateways in front of the same two simulated engines: a token each 20 ms, 100 tokens an answer."""
    for ending in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(ending, _leave)  # what was started must be ended
    plan = Plan(_levels(levels), repeats, warm_up_s, window_s, spread_s, idle_streams)
    names = _names(peers)
    _allow_files(max([*plan.levels, idle_streams]) + FILES_BESIDE)
    bound_min = plan.at_most_s(len(names)) / 60
    likely_min = plan.lasts_s(len(names)) / 60
    click.echo(
        f"{len(names)} gateways, {len(plan.levels)} levels, {repeats} repeats: about {likely_min:.0f} minutes and "
        f"the starts, at most {bound_min:.0f} in all",
        err=True,
    )
    try:
        with (
            tempfile.TemporaryDirectory(prefix="tandem-bench-") as scratch,
            progress() as say,
            running(names, Path(scratch), say) as (engines, found),
        ):
            started = [peer for peer in found if isinstance(peer, Peer)]
            seen = _seen(started)
            measured = measure_all(plan, started, engines, say)
            say("stopping all")
    except StartFailedError as error:
        click.echo(str(error), err=True)
        sys.exit(ExitCode.FAILED)
    ours = [peer.name for peer in started if peer.name in (OURS, OURS_TWICE)]
    verdicts = [verdict for name in ours for verdict in judge(measured, name)]
    text = report(plan, measured, found, seen, verdicts)
    click.echo(text)
    for path in _write(out, text, plan, measured, found, seen, verdicts):
        click.echo(path, err=True)


def _leave(number: int, _: FrameType | None) -> None:
    sys.exit(SIGNALLED + number)


def _levels(text: str) -> list[int]:
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        raise click.UsageError(f"--levels {text!r}: numbers with commas between them") from None
    if not all(1 <= level <= 4096 for level in found):
        raise click.UsageError(f"--levels {text!r}: each in 1..4096")
    return found


def _names(text: str) -> list[str]:
    found = [part.strip() for part in text.split(",")]
    if unknown := [name for name in found if name not in PEERS]:
        raise click.UsageError(f"--peers: {unknown[0]!r} is none of {', '.join(PEERS)}")
    return [name for name in PEERS if name in found]


def _allow_files(wanted: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # The gateways have two connections for each stream, and inherit this limit.
    wanted *= 3
    if soft < wanted:
        if hard != resource.RLIM_INFINITY and hard < wanted:
            raise click.UsageError(f"{wanted} open files are needed, the limit is {hard} (ulimit -Hn)")
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _seen(peers: Sequence[Peer]) -> list[Seen]:
    client = see("the client", "client", psutil.Process(os.getpid()))
    return [*([client] if client else []), *(one for peer in peers for one in peer.processes())]


def report(
    plan: Plan,
    measured: Measured,
    found: Sequence[Peer | NotStarted],
    seen: Sequence[Seen],
    verdicts: Sequence[Verdict],
) -> str:
    """The whole result, in Markdown."""
    return "\n\n".join(
        [
            f"Window {plan.window_s:g} s after {plan.warm_up_s:g} s, {plan.repeats} repeats: median (least..most).",
            table.levels_table(measured, found, plan.levels),
            table.once_table(measured, found),
            "Failures:\n\n" + table.failures_list(measured),
            "Targets:\n\n" + (table.verdict_lines(verdicts) or "None: ours was not measured."),
            table.equality(seen),
            table.processes_table(seen),
        ]
    )


def _write(
    out: Path,
    text: str,
    plan: Plan,
    measured: Measured,
    found: Sequence[Peer | NotStarted],
    seen: Sequence[Seen],
    verdicts: Sequence[Verdict],
) -> list[Path]:
    out.mkdir(parents=True, exist_ok=True)
    figures = {
        "verb": VERB,
        "written_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "plan": asdict(plan),
        "peers": [asdict(peer) for peer in found],
        **asdict(measured),
        "verdicts": [asdict(verdict) for verdict in verdicts],
        "processes": [asdict(one) for one in seen],
        "machine": machine.describe(),
        "versions": run_directory.installed_versions(),
    }
    json_path, text_path = out / f"{VERB}.json", out / f"{VERB}.md"
    json_path.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    text_path.write_text(text + "\n", encoding="utf-8")
    return [json_path, text_path]


if __name__ == "__main__":
    main()
