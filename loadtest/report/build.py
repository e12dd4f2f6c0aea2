"""A run's report: the files made of its requests.jsonl and run.json, and what a terminal shows of it."""

from __future__ import annotations

import shlex
import sys
from collections import defaultdict
from pathlib import Path

import click
import yaml
from rich.console import Console
from rich.text import Text

from loadtest.analysis.run_summary import read_measured, summarize
from loadtest.analysis.summary import Summary, summary_json
from loadtest.client.lane_models import other_names
from loadtest.drawing.page import render_page
from loadtest.judge.wording import count
from loadtest.report.charts import DrawnChart, draw_all, save_png
from loadtest.report.findings import findings, invalidity, warnings
from loadtest.report.step_charts import NO_PICTURES, StepPictures, draw_steps
from loadtest.report.tables import agreed, agreement_table, print_tables, tables, wide_console
from loadtest.run.directory import (
    FIGURES_DIR,
    REPORT_FILE,
    SUMMARY_FILE,
    RunInfo,
    replace_file,
    writing,
)


def build(directory: Path) -> Summary:
    """Write summary.json, the charts and report.html of a run.

    Raises:
        ValueError: a file of the run is missing or damaged; the text names it.
        RunWriteError: a file of the report cannot be written.
    """
    run, records = read_measured(directory)
    summary = summarize(run, records)
    replace_file(directory / SUMMARY_FILE, summary_json(summary).encode())
    steps = draw_steps(run, directory)
    charts = draw_all(summary) + steps.charts
    with writing(directory / FIGURES_DIR):
        (directory / FIGURES_DIR).mkdir(exist_ok=True)
        for drawn in charts:
            save_png(drawn, directory / FIGURES_DIR)
    replace_file(directory / REPORT_FILE, render(summary, charts, steps).encode())
    return summary


def render(summary: Summary, charts: tuple[DrawnChart, ...], steps: StepPictures = NO_PICTURES) -> str:
    """The page, with its charts and all they need inside it; those of `steps` are among them."""
    return render_page(
        Path(__file__).with_name("report.html.j2"),
        {drawn.name: drawn.spec for drawn in charts},
        run=summary.run,
        lanes=summary.lanes,
        invalidity=invalidity(summary),
        findings=findings(summary),
        warnings=warnings(summary),
        measured=_measured(summary),
        tables=tables(summary),
        open_tables=("capacities",),
        agreed=agreed(summary),
        disagreement=agreement_table(summary, only_bad=True),
        notes=[f"{stage.key}: {note}" for stage in summary.stages for note in stage.notes],
        charts=charts,
        steps=steps,
        failures=summary.failures,
        num_requests=summary.requests,
        facts=_facts(summary),
        config=yaml.safe_dump(summary.run.config, sort_keys=False),
    )


def _measured(summary: Summary) -> str:
    """What was measured, in a line."""
    run = summary.run
    workloads = ", ".join(dict.fromkeys(stage.workload for stage in summary.stages))
    minutes = f"{run.duration_s:.0f} s" if run.duration_s < 120 else f"{run.duration_s / 60:.0f} min"
    requests = f"{count(summary.requests, 'request')} in {minutes}"
    return (
        f"{_model(run)}, {run.machine['cpu_model']} with {run.machine['usable_cores']} usable cores. "
        f"{workloads}; {requests}, "
        f"started {run.started_at}. Run {run.id}."
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
        ("Model", _model(run)),
        ("Engines", engines),
        *_engine_options(run),
        *_lacks(run),
        *_oracles(run),
        ("Seed", str(run.seed)),
        ("Objective", summary.slo or "none given"),
        ("Answers", f"{_answers(run.output_tokens)}, greedy"),
        ("Prompt tokens", f"counted by {run.token_counter}"),
        *((f"Prompt tokens of {lane}", f"counted by {name}") for lane, name in run.token_counters.items()),
        ("Address", run.base_url),
        ("Status", run.status + (f", in {run.parts} parts" if run.parts > 1 else "")),
    ]


def _engine_options(run: RunInfo) -> list[tuple[str, str]]:
    """The options that each lane's engines were started with; none of engines that have none."""
    options: dict[str, set[str]] = defaultdict(set)
    for replica in run.replicas:
        if arguments := replica.get("arguments"):  # runs of before this key have none
            options[str(replica["lane"])].add(shlex.join(arguments))
    return [(f"Options of {lane}", "; or ".join(sorted(given))) for lane, given in options.items()]


def _lacks(run: RunInfo) -> list[tuple[str, str]]:
    """What each lane's servers were found not to do; none of engines of the lab's own."""
    lacks: dict[str, set[str]] = defaultdict(set)
    for replica in run.replicas:
        lacks[str(replica["lane"])].update(replica.get("lacks", ()))
    return [(f"{lane} lacks", "; ".join(sorted(found))) for lane, found in lacks.items() if found]


def _oracles(run: RunInfo) -> list[tuple[str, str]]:
    """Lanes whose drafts were no real ones: their speed is that of the acceptance which was asked for."""
    drafts = {lane["name"]: lane.get("speculation") or {} for lane in run.config.get("lanes", [])}
    return [
        (
            f"Drafts of {name}",
            f"by an oracle, acceptance {given.get('acceptance')} asked for: for studies only",
        )
        for name, given in drafts.items()
        if given.get("method") == "oracle"
    ]


def _model(run: RunInfo) -> str:
    others = "".join(f"; {lane}: {name}" for lane, name in other_names(run.config).items())
    return f"{run.model['name']}, {run.model['dtype']} on {run.model['device']}{others}"


def _answers(output_tokens: int | None) -> str:
    if output_tokens is None:
        return "as long as the workload has them"
    return f"{output_tokens} tokens each where the workload or a trace does not say otherwise"


def show(summary: Summary, directory: Path, as_json: bool, all_tables: bool = False) -> None:
    """Print tables, then the answer in words, then the report's path; or the summary, and the path on stderr.

    Args:
        all_tables: as `print_tables`.
    """
    if as_json:
        sys.stdout.write(summary_json(summary))
    else:
        print_summary(summary, wide_console(), all_tables=all_tables)
    click.echo(f"report: {directory / REPORT_FILE}", err=as_json)


def print_summary(summary: Summary, console: Console, *, all_tables: bool = False) -> None:
    """The run for a terminal. The answer comes last, where the reader's eye is, and INVALID just above it."""
    console.print(Text(f"{summary.run.name}: {summary.run.id}"))
    print_tables(summary, console, with_all=all_tables)
    console.print()
    for text in warnings(summary):
        console.print(Text(text))
    if (bad := invalidity(summary)) is not None:
        console.print(Text(bad.headline, style="bold red"))
        console.print(Text(bad.advice))
    if bad is not None or warnings(summary):
        console.print()
    for text in findings(summary):
        console.print(Text(text))
