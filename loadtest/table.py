"""The table of a run, one row a stage: for a terminal and for the report."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from loadtest.summary import Estimate, StageSummary, Summary

NOTHING = "–"
FULL_WIDTH = 132


@dataclass(frozen=True, slots=True)
class Column:
    """A column: its heading, with the unit, and how a stage fills it."""

    heading: str
    cell: Callable[[StageSummary], str]
    is_number: bool = True
    is_extra: bool = False  # left out where the terminal is narrow


def _estimate(estimate: Estimate | None, digits: int = 0, scale: float = 1) -> str:
    return _number(None if estimate is None else estimate.value, digits, scale)


def _number(value: float | None, digits: int = 0, scale: float = 1) -> str:
    return NOTHING if value is None else f"{value * scale:,.{digits}f}"


COLUMNS = (
    Column("lane", lambda stage: stage.lane, is_number=False),
    Column("workload", lambda stage: stage.workload, is_number=False),
    Column("users", lambda stage: str(stage.concurrency)),
    Column("sent", lambda stage: f"{stage.requests}{' cut' if stage.cut else ''}"),
    Column("failed", lambda stage: str(stage.failures)),
    Column("tokens per s", lambda stage: _estimate(stage.output_tokens_per_s, 1)),
    Column("TTFT p50 ms", lambda stage: _estimate(stage.ttft_s.p50, 0, 1000)),
    Column("TTFT p95 ms", lambda stage: _estimate(stage.ttft_s.p95, 0, 1000), is_extra=True),
    Column("TPOT p50 ms", lambda stage: _estimate(stage.tpot_s.p50, 1, 1000)),
    Column("TPOT p95 ms", lambda stage: _estimate(stage.tpot_s.p95, 1, 1000), is_extra=True),
    Column("E2E p50 s", lambda stage: _estimate(stage.e2e_s.p50, 2)),
    Column("E2E p95 s", lambda stage: _estimate(stage.e2e_s.p95, 2), is_extra=True),
    Column("tokens per chunk", lambda stage: _number(stage.tokens_per_chunk, 2), is_extra=True),
    Column("acc. rate", lambda stage: _number(stage.acceptance_rate, 2)),
    Column("acc. len.", lambda stage: _number(stage.mean_acceptance_length, 2)),
)


def rows(summary: Summary) -> list[list[str]]:
    """The cells, in the order of `COLUMNS`."""
    return [[column.cell(stage) for column in COLUMNS] for stage in summary.stages]


def print_table(summary: Summary, console: Console | None = None) -> None:
    """Print the table, and the notes under it. Off a terminal it has all columns: a log is not folded."""
    console = console or Console()
    if not console.is_terminal:
        console = Console(file=console.file, width=FULL_WIDTH)
    is_full = console.width >= FULL_WIDTH
    shown = [index for index, column in enumerate(COLUMNS) if is_full or not column.is_extra]
    table = Table(
        title=f"{summary.run.name}: {summary.run.id}",
        title_justify="left",
        box=SIMPLE_HEAD,
        padding=(0, int(is_full), 0, 0),
    )
    for index in shown:
        column = COLUMNS[index]
        table.add_column(
            column.heading, justify="right" if column.is_number else "left", no_wrap=not column.is_number
        )
    previous = None
    for stage, cells in zip(summary.stages, rows(summary), strict=True):
        if previous is not None and previous != (stage.lane, stage.workload):
            table.add_section()
        previous = (stage.lane, stage.workload)
        style = "red" if stage.failures or stage.cut else ""
        table.add_row(*(cells[index] for index in shown), style=style)
    console.print(table)
    for stage in summary.stages:
        for note in stage.notes:
            # Text, not markup: a note may hold brackets of an error message.
            console.print(Text(f"{stage.lane}/{stage.workload}/{stage.concurrency}: {note}"))
