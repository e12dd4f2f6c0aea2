"""Writes a run's report, or compares two: `python -m loadtest.report runs/<id> [runs/<id>]`.

Everything is made again from requests.jsonl and run.json, so a report can be rebuilt after a change.
"""

from __future__ import annotations

import sys
from pathlib import Path

import click

from loadtest.analysis.compare import Change, compare, comparison_json, load_run
from loadtest.client.record import torn_line
from loadtest.report.build import build, show
from loadtest.report.comparison import COMPARE_FILE, print_comparison, write_page
from loadtest.report.tables import wide_console
from loadtest.run.directory import REQUESTS_FILE, RunWriteError, writing
from serving.core.exit_codes import ExitCode
from serving.progress import progress


@click.command(
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Build the report of a run again from its requests.jsonl and run.json. "
    "With two runs, A and B: the ratio B / A of each figure, with its interval.",
    epilog="Exit codes: 0 done, 1 it cannot be written, 2 wrong usage or a damaged run, "
    f"{ExitCode.INVALID} figures are INVALID: they may not be used.",
)
@click.argument(
    "directories", type=click.Path(path_type=Path), metavar="RUN_DIR [RUN_DIR]", nargs=-1, required=True
)
@click.option("--tables", "all_tables", is_flag=True, help="Print every table, not only what was measured.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
@click.option("--lanes", help="With two runs: the lane of A and the lane of B to compare, as A,B.")
@click.option(
    "--out",
    type=click.Path(path_type=Path, dir_okay=False),
    help=f"With two runs: the page to write.  [default: {COMPARE_FILE} in B]",
)
def main(
    directories: tuple[Path, ...], as_json: bool, all_tables: bool, lanes: str | None, out: Path | None
) -> None:
    try:
        match directories:
            case (directory,):
                if lanes is not None or out is not None:
                    raise click.UsageError("--lanes and --out are for two runs; one was given")
                with progress() as say:
                    say(f"writing the report of {directory}")
                    summary = build(directory)
                show(summary, directory, as_json, all_tables)
                is_valid = summary.is_valid
            case (a, b):
                is_valid = _compare(a, b, _lane_pair(lanes), out or b / COMPARE_FILE, as_json)
            case _:
                raise click.UsageError(f"{len(directories)} runs were given; a report takes 1 or 2")
        for directory in directories:
            if torn := torn_line(directory / REQUESTS_FILE):
                click.echo(torn, err=True)
    except RunWriteError as error:
        raise click.ClickException(str(error)) from None
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    sys.exit(ExitCode.OK if is_valid else ExitCode.INVALID)


def _lane_pair(text: str | None) -> tuple[str, str] | None:
    if text is None:
        return None
    match [lane.strip() for lane in text.split(",")]:
        case [str(a), str(b)] if a and b:
            return a, b
    raise ValueError(f"--lanes {text!r} must name 2 lanes: that of A, a comma, that of B")


def _compare(a: Path, b: Path, lanes: tuple[str, str] | None, out: Path, as_json: bool) -> bool:
    """Print the comparison of two runs and write its page; whether all of its stages may be used."""
    with progress() as say:
        say(f"comparing {a} and {b}")
        comparison = compare(load_run(a), load_run(b), lanes)
        with writing(out):
            write_page(comparison, out)
    if as_json:
        sys.stdout.write(comparison_json(comparison))
    else:
        print_comparison(comparison, wide_console())
    click.echo(f"comparison: {out}", err=as_json)
    return all(ratio.change is not Change.INVALID for pair in comparison.pairs for ratio in pair.ratios)


if __name__ == "__main__":
    main(prog_name="tandem report")
