"""The tables of a cross-check, in Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from loadtest.crosscheck.cases import Case
from loadtest.crosscheck.figures import QUANTITIES, tie, tolerance
from loadtest.crosscheck.run import Measured, NotMeasured

TITLES = {
    "ttft_p50_ms": "TTFT p50, ms",
    "ttft_p95_ms": "TTFT p95, ms",
    "tpot_mean_ms": "TPOT mean, ms",
    "gap_mean_ms": "gap mean, ms",
    "gap_p95_ms": "gap p95, ms",
    "output_tokens_per_s": "tokens/s",
    "requests_per_s": "requests/s",
}
NONE = "-"


def error_share(result: Measured, quantity: str) -> float | None:
    """(reported - sent) / sent; None where the tool has no such figure."""
    reported, sent = getattr(result.reported, quantity), getattr(result.sent, quantity)
    return None if reported is None else (reported - sent) / sent


def closest(results: Sequence[Measured], quantity: str) -> set[str]:
    """The tools whose error is the smallest, or ties with the smallest."""
    errors = {
        result.tool: abs(getattr(result.reported, quantity) - getattr(result.sent, quantity))
        for result in results
        if getattr(result.reported, quantity) is not None
    }
    best = min(errors.values(), default=0.0)
    return {
        result.tool
        for result in results
        if result.tool in errors
        and errors[result.tool] <= best + tie(quantity, getattr(result.sent, quantity), result.resolution_ms)
    }


def outside_tolerance(result: Measured) -> list[str]:
    """Each figure of a tool that is too far from the truth, in words."""
    faults = []
    for quantity in QUANTITIES:
        reported, sent = getattr(result.reported, quantity), getattr(result.sent, quantity)
        if reported is None or abs(reported - sent) > tolerance(quantity, sent):
            bound = tolerance(quantity, sent)
            faults.append(f"{TITLES[quantity]}: reported {reported}, sent {sent:.3f}, tolerance {bound:.3f}")
    return faults


def figures_table(results: Sequence[Measured | NotMeasured]) -> str:
    """A row for what each tool reports and one for what it was sent; `*` marks the closest and its ties."""
    measured = [result for result in results if isinstance(result, Measured)]
    marked = {quantity: closest(measured, quantity) for quantity in QUANTITIES}
    lines = _head("tool", *TITLES.values())
    for result in results:
        if isinstance(result, NotMeasured):
            lines.append(_row([f"{result.tool}: not measured, {result.reason}", *[NONE] * len(TITLES)]))
            continue
        cells = []
        for quantity in QUANTITIES:
            share = error_share(result, quantity)
            star = "*" if result.tool in marked[quantity] else ""
            value = getattr(result.reported, quantity)
            cells.append(NONE if share is None else f"{value:.2f} ({share:+.1%}){star}")
        mark = " INVALID" if result.report.invalid else ""
        lines.append(_row([f"{result.tool} {result.version}{mark}", *cells]))
        sent = [f"{getattr(result.sent, quantity):.2f}" for quantity in QUANTITIES]
        lines.append(_row([f"as sent to it, {result.arrivals_per_s:.2f} arrivals/s", *sent]))
    return "\n".join(lines)


def engine_table(results: Sequence[Measured | NotMeasured]) -> str:
    """How the engine fared with each tool: it is to send on time, whatever presses the tool."""
    lines = _head(
        "tool", "streams at most", "engine, of a core", "a write took, p95, ms", "engine goes first"
    )
    for each in results:
        if isinstance(each, Measured):
            share, took = f"{each.engine_share:.0%}", f"{each.resolution_ms:.2f}"
            first = "yes" if each.is_engine_first else "no"
            lines.append(_row([each.tool, str(each.most_at_once), share, took, first]))
    return "\n".join(lines)


def verdict(results: Sequence[Measured | NotMeasured]) -> str:
    """One line on our run, which is the first, and one for each reason why it is INVALID."""
    ours = results[0]
    if isinstance(ours, NotMeasured):
        return f"{ours.tool}: not measured, {ours.reason}"
    measured = [result for result in results if isinstance(result, Measured)]
    lost = beaten(results)
    line = (
        f"{ours.tool}: closest or tied in {len(QUANTITIES) - len(lost)} of {len(QUANTITIES)} columns"
        f"{' (not in ' + '; '.join(lost) + ')' if lost else ''}, of {len(measured)} tools measured; "
        f"INVALID: {'yes' if ours.report.invalid else 'no'}"
    )
    return "\n".join([line, *(f"  INVALID: {reason}" for reason in ours.report.invalid)])


def beaten(results: Sequence[Measured | NotMeasured]) -> list[str]:
    """The columns in which another tool is closer than ours, which is the first and was measured."""
    measured = [result for result in results if isinstance(result, Measured)]
    return [TITLES[each] for each in QUANTITIES if measured[0].tool not in closest(measured, each)]


def faults(case: Case, results: Sequence[Measured | NotMeasured]) -> list[str]:
    """What speaks against our figures; where tools are pressed, nothing does if our run says that it is INVALID."""
    ours = results[0]
    if isinstance(ours, NotMeasured):
        return [f"not measured: {ours.reason}"]
    if case.judged_by == "tolerance":
        unusable = [f"INVALID at light load, is the machine busy? {reason}" for reason in ours.report.invalid]
        return unusable + [f"outside tolerance: {fault}" for fault in outside_tolerance(ours)]
    if ours.report.invalid:
        return []
    return [f"another tool is closer: {title}" for title in beaten(results)]


def names_table(results: Sequence[Measured | NotMeasured]) -> str:
    """What each tool prints under the two names that mean different things."""
    lines = _head("tool", "its mean TPOT, ms", "its mean ITL, ms", "TPOT as sent", "gap as sent")
    for result in results:
        if isinstance(result, Measured):
            named = [
                NONE if (value := result.report.named[name]) is None else f"{value:.2f}"
                for name in ("TPOT", "ITL")
            ]
            lines.append(
                _row(
                    [result.tool, *named, f"{result.sent.tpot_mean_ms:.2f}", f"{result.sent.gap_mean_ms:.2f}"]
                )
            )
    return "\n".join(lines)


def _head(first: str, *numbers: str) -> list[str]:
    """The titles of a column of names and columns of numbers."""
    return [_row([first, *numbers]), _row(["---", *["---:"] * len(numbers)])]


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
