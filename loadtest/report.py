"""Writes a run's report, or compares two: `python -m loadtest.report runs/<id> [runs/<id>]`.

Everything is made again from requests.jsonl and run.json, so a report can be rebuilt after a change.
"""

from __future__ import annotations

import sys
from pathlib import Path

import click
import yaml
from rich.console import Console
from rich.text import Text

from loadtest.analysis import summarize_dir
from loadtest.compare import Change, compare, comparison_json, load_run
from loadtest.compare_report import COMPARE_FILE, print_comparison, write_page
from loadtest.figures import DrawnFigure, draw_all, save_png
from loadtest.findings import findings, invalidity, warnings
from loadtest.page import render_page
from loadtest.record import torn_line
from loadtest.rundir import (
    BENCH_FILE,
    FIGURES_DIR,
    REPORT_FILE,
    REQUESTS_FILE,
    SUMMARY_FILE,
    RunWriteError,
    read_run,
    replace_file,
    writing,
)
from loadtest.step_pictures import NO_PICTURES, StepPictures, draw_steps
from loadtest.summary import Summary, summary_json
from loadtest.table import agreement_table, print_tables, tables, wide_console
from serving.progress import progress

EXIT_INVALID = 5  # all is written, but some of the figures may not be used


def build(directory: Path) -> Summary:
    """Write summary.json, bench.json, the figures and report.html of a run.

    Raises:
        ValueError: a file of the run is missing or damaged; the text names it.
        RunWriteError: a file of the report cannot be written.
    """
    summary = summarize_dir(directory)
    for name in (SUMMARY_FILE, BENCH_FILE):
        replace_file(directory / name, summary_json(summary).encode())
    steps = draw_steps(read_run(directory), directory)
    figures = draw_all(summary) + steps.figures
    with writing(directory / FIGURES_DIR):
        (directory / FIGURES_DIR).mkdir(exist_ok=True)
        for drawn in figures:
            save_png(drawn, directory / FIGURES_DIR)
    replace_file(directory / REPORT_FILE, render(summary, figures, steps).encode())
    return summary


def render(summary: Summary, figures: tuple[DrawnFigure, ...], steps: StepPictures = NO_PICTURES) -> str:
    """The page, with its figures and all they need inside it; those of `steps` are among them."""
    return render_page(
        "report.html.j2",
        {drawn.name: drawn.spec for drawn in figures},
        run=summary.run,
        lanes=summary.lanes,
        invalidity=invalidity(summary),
        findings=findings(summary),
        warnings=warnings(summary),
        tables=tables(summary),
        agreement=agreement_table(summary),
        notes=[f"{stage.key}: {note}" for stage in summary.stages for note in stage.notes],
        figures=figures,
        steps=steps,
        failures=summary.failures,
        num_requests=summary.requests,
        facts=_facts(summary),
        config=yaml.safe_dump(summary.run.config, sort_keys=False),
    )


def _facts(summary: Summary) -> list[tuple[str, str]]:
    """What the run depended on, by name."""
    run, machine = summary.run, summary.run.machine
    engines = "; ".join(f"{lane.lane}: {lane.engine}, {lane.replicas} replica(s)" for lane in summary.lanes)
    return [
        ("Processor", f"{machine['cpu_model']}, {machine['usable_cores']} usable cores"),
        ("Instruction sets", ", ".join(machine["instruction_sets"]) or "none of those looked for"),
        ("Memory", f"{machine['memory_bytes'] / 2**30:.1f} GiB"),
        ("GPUs", ", ".join(gpu["name"] for gpu in machine["gpus"]) or "none"),
        ("Operating system", f"{machine['os']}, kernel {machine['kernel']}"),
        ("Versions", ", ".join(f"{name} {version}" for name, version in run.versions.items())),
        ("Model", f"{run.model['name']}, {run.model['dtype']} on {run.model['device']}"),
        ("Engines", engines),
        ("Seed", str(run.seed)),
        ("Objective", summary.slo or "none given"),
        ("Answers", f"{_answers(run.output_tokens)}, greedy"),
        ("Prompt tokens", f"counted by {run.token_counter}"),
        ("Address", run.base_url),
        ("Status", run.status + (f", in {run.parts} parts" if run.parts > 1 else "")),
    ]


def _answers(output_tokens: int | None) -> str:
    if output_tokens is None:
        return "as long as the workload has them"
    return f"{output_tokens} tokens each where the workload or a trace does not say otherwise"


@click.command(
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Build the report of a run again from its requests.jsonl and run.json. "
    "With two runs, A and B: the ratio B / A of each figure, with its interval.",
    epilog="Exit codes: 0 done, 1 it cannot be written, 2 wrong usage or a damaged run, "
    f"{EXIT_INVALID} figures are INVALID: they may not be used.",
)
@click.argument(
    "directories", type=click.Path(path_type=Path), metavar="RUN_DIR [RUN_DIR]", nargs=-1, required=True
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
@click.option("--lanes", help="With two runs: the lane of A and the lane of B to compare, as A,B.")
@click.option(
    "--out",
    type=click.Path(path_type=Path, dir_okay=False),
    help=f"With two runs: the page to write.  [default: {COMPARE_FILE} in B]",
)
def main(directories: tuple[Path, ...], as_json: bool, lanes: str | None, out: Path | None) -> None:
    try:
        match directories:
            case (directory,):
                if lanes is not None or out is not None:
                    raise click.UsageError("--lanes and --out are for two runs; one was given")
                with progress() as say:
                    say(f"writing the report of {directory}")
                    summary = build(directory)
                show(summary, directory, as_json)
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
    sys.exit(0 if is_valid else EXIT_INVALID)


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


def show(summary: Summary, directory: Path, as_json: bool) -> None:
    """Print tables, then the answer in words, then the report's path; or the summary, and the path on stderr."""
    if as_json:
        sys.stdout.write(summary_json(summary))
    else:
        print_summary(summary, wide_console())
    click.echo(f"report: {directory / REPORT_FILE}", err=as_json)


def print_summary(summary: Summary, console: Console) -> None:
    """The run for a terminal. The answer comes last, where the reader's eye is; INVALID stands at both ends."""
    bad = invalidity(summary)
    console.print(Text(f"{summary.run.name}: {summary.run.id}"))
    if bad is not None:
        console.print(Text(bad.headline, style="bold red"))
    print_tables(summary, console)
    for text in (*warnings(summary), *findings(summary)):
        console.print(Text(text))
    if bad is not None:
        console.print(Text(bad.headline, style="bold red"))
        console.print(Text(bad.advice))


if __name__ == "__main__":
    main(prog_name="tandem report")
