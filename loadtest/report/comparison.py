"""What is said of two runs: sentences, a table, and a page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.text import Text

from loadtest.analysis.compare import Change, Comparison, Pair, Ratio
from loadtest.drawing.page import render_page
from loadtest.judge.wording import NOTHING, count, estimate, number
from loadtest.report.tables import Column, FilledTable, Row, print_table

COMPARE_FILE = "compare.html"

# What an interval of 95 percent leaves out although nothing differs.
CHANCE = 0.05


def sentences(comparison: Comparison) -> Iterator[str]:
    """How much was settled and how much of that chance alone would give, then each stage's verdict."""
    changes = Counter(ratio.change for pair in comparison.pairs for ratio in pair.ratios)
    judged = sum(changes[each] for each in (Change.BETTER, Change.WORSE, Change.SAME))
    text = f"Of {count(changes.total(), 'ratio')}, {judged} have an interval"
    if judged:
        text += (
            f": B is better in {changes[Change.BETTER]}, worse in {changes[Change.WORSE]}, and not distinguishable "
            f"in {changes[Change.SAME]}. Chance alone would settle about {number(CHANCE * judged, 1)} of them"
        )
    yield text + "."
    yield from map(_sentence, comparison.pairs)


def _sentence(pair: Pair) -> str:
    where = f"On {pair.workload}{f' at {pair.load}' if pair.load else ''}, {_lanes(pair)}"
    by_change = {change: [each for each in pair.ratios if each.change is change] for change in Change}
    if by_change[Change.INVALID]:
        return f"{where}: no verdict, for one of the stages is INVALID."
    parts = [
        f"B is {change.value} in {', '.join(f'{each.quantity} ({_ratio(each)})' for each in ratios)}"
        for change in (Change.BETTER, Change.WORSE)
        if (ratios := by_change[change])
    ]
    if same := by_change[Change.SAME]:
        parts.append(f"{Change.SAME.value} in {', '.join(each.quantity for each in same)}")
    if unknown := by_change[Change.UNKNOWN]:
        parts.append(f"no verdict on {', '.join(each.quantity for each in unknown)}, which have no interval")
    return f"{where}: {'; '.join(parts)}."


def _lanes(pair: Pair) -> str:
    return pair.lane_b if pair.lane_a == pair.lane_b else f"{pair.lane_b} (B) against {pair.lane_a} (A)"


def _ratio(ratio: Ratio) -> str:
    return NOTHING if ratio.ratio is None else estimate(ratio.ratio, 2)


def _value(value: float | None, unit: str) -> str:
    """Latencies in milliseconds, the rest in its own unit."""
    if value is None:
        return NOTHING
    return f"{number(value, None, 1000)} ms" if unit == "s" else f"{number(value, None)} {unit}"


_COLUMNS = (
    Column("workload", lambda row: row[0].workload, is_number=False),
    Column("load", lambda row: row[0].load or NOTHING, is_number=False),
    Column("lane", lambda row: row[0].lanes, is_number=False),
    Column("quantity", lambda row: row[1].quantity, is_number=False),
    Column("A", lambda row: _value(row[1].a, row[1].unit)),
    Column("B", lambda row: _value(row[1].b, row[1].unit)),
    Column("B / A", lambda row: _ratio(row[1])),
    Column("B is", lambda row: row[1].change.value, is_number=False),
    Column("interval from", lambda row: row[1].basis, is_number=False, is_extra=True),
)


def ratio_table(comparison: Comparison) -> FilledTable:
    """Every ratio, stage by stage."""
    rows = [
        Row(
            tuple(column.cell((pair, ratio)) for column in _COLUMNS),
            is_bad=ratio.change in (Change.WORSE, Change.INVALID),
            is_start=index == 0 and pair is not comparison.pairs[0],
        )
        for pair in comparison.pairs
        for index, ratio in enumerate(pair.ratios)
    ]
    reading = "Above 1 B has more. For tokens/s, goodput and capacity more is better, for latencies less is."
    return FilledTable("ratios", "B against A", reading, _COLUMNS, tuple(rows))


def write_page(comparison: Comparison, path: Path) -> None:
    page = render_page(
        Path(__file__).with_name("compare.html.j2"),
        comparison=comparison,
        sentences=list(sentences(comparison)),
        ratios=ratio_table(comparison),
    )
    path.write_text(page, encoding="utf-8")


def print_comparison(comparison: Comparison, console: Console) -> None:
    """The comparison for a terminal, with the verdicts last, where the reader's eye is."""
    console.print(Text(f"A: {comparison.run_a}\nB: {comparison.run_b}"))
    print_table(ratio_table(comparison), console)
    for name, keys in (("A", comparison.only_in_a), ("B", comparison.only_in_b)):
        for key in keys:
            console.print(Text(f"only in {name}: {key}"))
    if comparison.differences:
        console.print(Text(f"{count(len(comparison.differences), 'difference')} between the runs:"))
    for each in comparison.differences:
        console.print(Text(f"  {each.name}: {each.a} in A, {each.b} in B"))
    for text in comparison.warnings:
        console.print(Text(text, style="bold red" if text.startswith("INVALID") else ""))
    for text in sentences(comparison):
        console.print(Text(text))
