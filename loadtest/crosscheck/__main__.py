"""`make crosscheck`: this load tool and three others against an engine that stamps what it sends.

Exit codes: 0 our figures are as close as they must be, or our run of a pressed case says that it is INVALID;
1 not so; 2 wrong usage.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

import click

from loadtest.crosscheck.cases import CASES, Case, Profile
from loadtest.crosscheck.run import Measured, NotMeasured, measure
from loadtest.crosscheck.table import engine_table, faults, figures_table, names_table, verdict
from loadtest.crosscheck.tools import Tool, tools
from serving import model_store
from serving.core.errors import ConfigError
from serving.core.exit_codes import SIGNALLED, ExitCode

TOOL_NAMES = [tool.name for tool in tools()]
CASE_NAMES = [case.name for case in CASES]


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.option(
    "--case", "cases", multiple=True, type=click.Choice(CASE_NAMES), help="Only this; may be repeated."
)
@click.option("--seed", type=click.IntRange(0), default=1)
@click.option("--tool", "chosen", multiple=True, type=click.Choice(TOOL_NAMES), help="Only these, and ours.")
def main(cases: tuple[str, ...], seed: int, chosen: tuple[str, ...]) -> None:
    """Measure one simulated engine with several load tools, each next to what was really sent."""
    for ending in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(ending, _leave)  # what was started has sessions of its own, and must be ended
    try:
        tokenizer = model_store.resolve("auto")
    except ConfigError as error:
        raise click.UsageError(f"the tools need the default model's tokenizer: {error}") from None
    used = [tool for tool in tools() if not chosen or tool.name in (*chosen, TOOL_NAMES[0])]
    todo = [(case, profile) for case in CASES if not cases or case.name in cases for profile in case.profiles]
    verdicts, against = [], []
    for number, (case, profile) in enumerate(todo, start=1):
        title = case.title(profile, seed)
        results = _measure_all(used, case, profile, seed, tokenizer, f"{number} of {len(todo)}")
        click.echo(f"\n{title}:\n\n{figures_table(results)}\n\n{engine_table(results)}\n")
        said = verdict(results)
        click.echo(f"{names_table(results)}\n\n{said}\n")
        verdicts.append(f"{case.name}, {profile.title}: {said}")
        against += [f"{case.name}, {profile.title}: {fault}" for fault in faults(case, results)]
    click.echo("\n".join(verdicts + against))
    sys.exit(ExitCode.FAILED if against else ExitCode.OK)


def _leave(number: int, _: FrameType | None) -> None:
    sys.exit(SIGNALLED + number)


def _measure_all(
    used: Sequence[Tool], case: Case, profile: Profile, seed: int, tokenizer: Path, place: str
) -> list[Measured | NotMeasured]:
    """One tool after another, with a line for each that begins and ends."""
    results = []
    for tool in used:
        where = f"{place}: {case.name}, {profile.title}: {tool.name}"
        click.echo(where, err=True)
        began_s = time.monotonic()
        results.append(measure(tool, case, profile, seed, tokenizer))
        result, took_s = results[-1], time.monotonic() - began_s
        end = "measured" if isinstance(result, Measured) else f"not measured: {result.reason}"
        click.echo(f"{where}: {end}, {took_s:.0f} s", err=True)
    return results


if __name__ == "__main__":
    main()
