"""The tables of a run: for a terminal and for the report."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from operator import ne
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console, JustifyMethod
from rich.table import Table
from rich.text import Text

from loadtest.analysis.summary import Agreement, StageSummary, Summary
from loadtest.judge.capacity import Capacity
from loadtest.judge.wording import NOTHING, estimate, exact_or_rounded, number, share

FULL_WIDTH = 132
MAIN_TABLES = ("capacities", "table")  # what was measured; the others say how far to trust it
INVALID = "INVALID"
MAX_NOTES = 6  # lines between a terminal's table and its answer


@dataclass(frozen=True, slots=True)
class Column:
    """A column: its heading, with the unit, and how a row's subject fills it."""

    heading: str
    cell: Callable[[Any], str]
    is_number: bool = True
    is_extra: bool = False  # left out first where the terminal is narrow
    is_plain: bool = False  # in a terminal without its interval


@dataclass(frozen=True, slots=True)
class Row:
    """The cells of one row.

    Attributes:
        is_bad: to be marked; the cells say why in words too.
        is_start: the first of a group that is not the first.
        why: its cells may not be used.
    """

    cells: tuple[str, ...]
    is_bad: bool = False
    is_start: bool = False
    why: str = ""


@dataclass(frozen=True, slots=True)
class FilledTable:
    """A table with its rows; columns in which no row says anything are gone already."""

    name: str
    title: str
    reading: str
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]

    @property
    def num_bad(self) -> int:
        return sum(row.is_bad for row in self.rows)


# In words and in the first cell: a row that may not be used must be told apart without colour.
_LANE = Column(
    "lane", lambda stage: f"{INVALID} {stage.lane}" if stage.invalid else stage.lane, is_number=False
)
_WORKLOAD = Column("workload", lambda stage: stage.workload, is_number=False)
_LOAD = Column("load", lambda stage: stage.load.label, is_number=False)

LATENCY = (
    _LANE,
    _WORKLOAD,
    _LOAD,
    Column("sent", lambda stage: f"{stage.requests}{' cut' if stage.cut else ''}"),
    Column("failed", lambda stage: str(stage.failures)),
    Column("tokens per s", lambda stage: estimate(stage.output_tokens_per_s, 1)),
    Column("TTFT p50 ms", lambda stage: estimate(stage.ttft_s.p50, 0, 1000), is_plain=True),
    Column("TTFT p95 ms", lambda stage: estimate(stage.ttft_s.p95, 0, 1000)),
    Column("TPOT p50 ms", lambda stage: estimate(stage.tpot_s.p50, 1, 1000), is_plain=True),
    Column("TPOT p95 ms", lambda stage: estimate(stage.tpot_s.p95, 1, 1000)),
    Column("E2E p50 s", lambda stage: estimate(stage.e2e_s.p50, 2), is_extra=True, is_plain=True),
    Column("E2E p95 s", lambda stage: estimate(stage.e2e_s.p95, 2), is_extra=True),
    Column("tok. per chunk", lambda stage: number(stage.tokens_per_chunk, 2), is_extra=True),
    Column("acc. rate", lambda stage: number(stage.acceptance_rate, 2), is_extra=True),
    Column("acc. len.", lambda stage: number(stage.mean_acceptance_length, 2), is_extra=True),
    Column("passes per tok.", lambda stage: number(stage.passes_per_token, 2), is_extra=True),
    Column(
        "gap p99 ms", lambda stage: estimate(stage.inter_chunk_s.p99, 0, 1000), is_extra=True, is_plain=True
    ),
)

LOAD = (
    _LANE,
    _WORKLOAD,
    _LOAD,
    Column("offered per s", lambda stage: number(stage.offered_per_s, None)),
    Column("achieved per s", lambda stage: number(stage.achieved_per_s, None)),
    Column("in flight", lambda stage: number(stage.mean_in_flight, 1), is_extra=True),
    Column("met SLO", lambda stage: share(stage.slo.attainment if stage.slo else None)),
    Column("goodput per s", lambda stage: _goodput(stage), is_extra=True),
    Column("holds", lambda stage: _holds(stage), is_number=False),
    Column("binds", lambda stage: (stage.slo and stage.slo.binding) or NOTHING, is_number=False),
    Column("prefix hits", lambda stage: share(stage.prefix_hit_rate), is_extra=True),
)

SELF_CHECK = (
    _LANE,
    _WORKLOAD,
    _LOAD,
    Column("disp. lag p50 ms", lambda stage: number(stage.client.dispatch_lag_p50_s, 1, 1000)),
    Column("disp. lag p99 ms", lambda stage: number(stage.client.dispatch_lag_p99_s, 1, 1000)),
    Column("read lag p99 ms", lambda stage: number(stage.client.read_lag_p99_s, 1, 1000)),
    Column("kernel stamps", lambda stage: share(stage.client.kernel_stamped)),
    Column("client CPU", lambda stage: share(stage.client.cpu_share)),
    Column("loop lag p99 ms", lambda stage: number(stage.client.loop_lag_p99_s, 1, 1000)),
    Column("of ceiling", lambda stage: share(stage.client.of_ceiling)),
    Column("server agrees", lambda stage: _agreed(stage.agreements)),
)

CAPACITY = (
    Column("lane", lambda capacity: capacity.lane, is_number=False),
    Column("workload", lambda capacity: capacity.workload, is_number=False),
    Column("requests per s", lambda capacity: _capacity(capacity)),
    Column("repeats", lambda capacity: str(len(capacity.by_repeat))),
    Column("in flight", lambda capacity: number(capacity.mean_in_flight, 1)),
    Column("binds above it", lambda capacity: capacity.binding or NOTHING, is_number=False),
    Column("probes", lambda capacity: _probes(capacity)),
)

AGREEMENT = (
    Column("lane", lambda pair: pair[0].lane, is_number=False),
    Column("workload", lambda pair: pair[0].workload, is_number=False),
    Column("load", lambda pair: pair[0].load.label, is_number=False),
    Column("quantity", lambda pair: pair[1].quantity, is_number=False),
    Column("client", lambda pair: exact_or_rounded(pair[1].client)),
    Column("server", lambda pair: exact_or_rounded(pair[1].server)),
    Column("tolerance", lambda pair: exact_or_rounded(pair[1].tolerance)),
    Column("verdict", lambda pair: "agree" if pair[1].agrees else "DISAGREE", is_number=False),
)


def tables(summary: Summary) -> tuple[FilledTable, ...]:
    """Every table that has a row, in the order of the report."""
    stages = summary.stages
    ceiling = summary.ceiling
    filled = [
        FilledTable(
            "capacities",
            "Capacity within the objective",
            f"The highest rate at which {summary.slo} still holds, with its 95 percent interval from repeats.",
            CAPACITY,
            tuple(Row(_cells(CAPACITY, each), each.rate_per_s is None) for each in summary.capacities),
        ),
        FilledTable(
            "table",
            "All stages",
            "Latencies are those of completed requests; 95 percent intervals take requests for independent. "
            "A dash means: not measured, or nothing of the kind in that lane.",
            LATENCY,
            _stage_rows(LATENCY, stages),
        ),
        FilledTable(
            "load",
            "Load and objective",
            "Offered is what the schedule asks for, achieved what was really begun; a failure meets no objective.",
            LOAD,
            _stage_rows(LOAD, stages),
        ),
        FilledTable(
            "self-check",
            "Was the load tool the limit?",
            f"The ceiling of this client, against a server that only sends: {ceiling.tokens_per_s:,.0f} tokens/s "
            f"and {ceiling.requests_per_s:,.0f} requests/s over {ceiling.streams} streams."
            if ceiling
            else "The ceiling of this client was not measured.",
            SELF_CHECK,
            _stage_rows(SELF_CHECK, stages),
        ),
    ]
    return tuple(_without_empty_columns(each) for each in filled if each.rows)


def agreement_table(summary: Summary, only_bad: bool = False) -> FilledTable | None:
    """Client against server, quantity by quantity; None without any."""
    pairs = [(stage, each) for stage in summary.stages for each in stage.agreements]
    rows = [
        Row(_cells(AGREEMENT, pair), not pair[1].agrees)
        for pair in pairs
        if not (only_bad and pair[1].agrees)
    ]
    if not rows:
        return None
    return FilledTable(
        "agreement",
        "Client against server",
        "The same quantity as the load tool and as the lab's own counters saw it.",
        AGREEMENT,
        tuple(rows),
    )


def agreed(summary: Summary) -> str:
    """How many quantities client and server agree on, in words."""
    everything = [each for stage in summary.stages for each in stage.agreements]
    return f"{_agreed(everything)} quantities agree" if everything else "nothing to compare"


def print_tables(summary: Summary, console: Console, *, with_all: bool) -> None:
    """Print the tables and the notes under them.

    Args:
        with_all: those too that say how far the others can be trusted, and every note.
    """
    disagreements = agreement_table(summary, only_bad=True)
    for each in (*tables(summary), *([disagreements] if disagreements else [])):
        if with_all or each.name in MAIN_TABLES:
            print_table(each, console)
    notes = [f"{stage.key}: {INVALID}: {reason}" for stage in summary.stages for reason in stage.invalid]
    notes += [f"{stage.key}: {note}" for stage in summary.stages for note in stage.notes]
    shown = notes if with_all or len(notes) <= MAX_NOTES + 1 else notes[:MAX_NOTES]
    for note in shown:
        console.print(Text(note))  # not markup: a note may hold brackets of an error message
    if more := len(notes) - len(shown):
        console.print(Text(f"... and {more} notes more: the report has them, and --tables."))


def wide_console(console: Console | None = None) -> Console:
    """The console to print on. Off a terminal it has all columns: a log is not folded."""
    console = console or Console()
    return console if console.is_terminal else Console(file=console.file, width=FULL_WIDTH)


def print_table(filled: FilledTable, console: Console) -> None:
    """Print one table, with as much of it as the console has room for."""
    shown, cells, widths = _fitting(filled, console.width)
    made = Table(title=Text(filled.title), title_justify="left", box=SIMPLE_HEAD, padding=0)
    for index, width in zip(shown, widths, strict=True):
        column = filled.columns[index]
        justify: JustifyMethod = "right" if column.is_number else "left"
        made.add_column(column.heading, justify=justify, width=width, overflow="fold")
    for row, texts in zip(filled.rows, cells, strict=True):
        if row.is_start:
            made.add_section()
        made.add_row(*(Text(text) for text in texts), style="red" if row.is_bad else "")
    console.print(made)


def _fitting(filled: FilledTable, width: int) -> tuple[list[int], list[list[str]], Sequence[int | None]]:
    """The columns that fit, their cells and their widths, None where words must be folded all the same.

    What does not fit goes in this order: intervals to a line below their values, extra columns from the
    right, intervals altogether, words to a line of their own.
    """
    extras = [index for index, column in enumerate(filled.columns) if column.is_extra]
    for has_intervals, is_folded in ((True, False), (False, False), (True, True), (False, True)):
        for dropped in range(len(extras) + 1):
            gone = extras[len(extras) - dropped :]
            shown = [index for index in range(len(filled.columns)) if index not in gone]
            cells = [
                [_shortened(row.cells[i], has_intervals and not filled.columns[i].is_plain) for i in shown]
                for row in filled.rows
            ]
            columns = [
                (filled.columns[index], [row[place] for row in cells]) for place, index in enumerate(shown)
            ]
            least = [
                max(
                    _longest(column.heading.split()),
                    _longest(texts if not (column.is_number or is_folded) else " ".join(texts).split()),
                )
                for column, texts in columns
            ]
            room = width - sum(least) - len(least) - 1  # a space between columns and at both edges
            if room >= 0:
                return shown, cells, _widened(least, [_longest(texts) for _, texts in columns], room)
    return shown, cells, [None] * len(shown)


def _widened(least: Sequence[int], wanted: Sequence[int], room: int) -> list[int]:
    """The room shared out from the left, where words are, so that fewer cells take several lines."""
    widths = []
    for narrow, full in zip(least, wanted, strict=True):
        grown = min(max(full - narrow, 0), room)
        room -= grown
        widths.append(narrow + grown)
    return widths


def _longest(texts: Iterable[str]) -> int:
    return max((len(text) for text in texts), default=1)


def _shortened(cell: str, has_interval: bool) -> str:
    return cell if has_interval else cell.partition(" [")[0]


def _stage_rows(columns: Sequence[Column], stages: Iterable[StageSummary]) -> tuple[Row, ...]:
    rows: list[Row] = []
    previous: tuple[object, ...] | None = None
    for stage in stages:
        is_bad = bool(stage.failures or stage.cut or stage.invalid)
        # What is compared differs in one of lane, workload and load.
        group = (stage.lane, stage.workload, stage.load)
        is_start = previous is not None and sum(map(ne, group, previous)) > 1
        why = f"{INVALID}: {'; '.join(stage.invalid)}" if stage.invalid else ""
        rows.append(Row(_cells(columns, stage), is_bad, is_start, why))
        previous = group
    return tuple(rows)


def _cells(columns: Iterable[Column], subject: Any) -> tuple[str, ...]:
    return tuple(column.cell(subject) for column in columns)


def _without_empty_columns(filled: FilledTable) -> FilledTable:
    kept = [
        index
        for index in range(len(filled.columns))
        if any(row.cells[index] != NOTHING for row in filled.rows)
    ]
    return FilledTable(
        filled.name,
        filled.title,
        filled.reading,
        tuple(filled.columns[index] for index in kept),
        tuple(replace(row, cells=tuple(row.cells[index] for index in kept)) for row in filled.rows),
    )


def _goodput(stage: StageSummary) -> str:
    return NOTHING if stage.slo is None else estimate(stage.slo.goodput_per_s, None)


def _holds(stage: StageSummary) -> str:
    return NOTHING if stage.slo is None else "yes" if stage.slo.holds else "no"


def _agreed(agreements: Sequence[Agreement]) -> str:
    if not agreements:
        return NOTHING
    agreeing = sum(each.agrees for each in agreements)
    return f"{agreeing} of {len(agreements)}"


def _capacity(capacity: Capacity) -> str:
    if capacity.rate_per_s is None:
        return "none found"
    return ("at least " if capacity.is_lower_bound else "") + estimate(capacity.rate_per_s, None)


def _probes(capacity: Capacity) -> str:
    invalid = sum(not probe.is_valid for probe in capacity.probes)
    return f"{len(capacity.probes)}" + (f", {invalid} {INVALID}" if invalid else "")
