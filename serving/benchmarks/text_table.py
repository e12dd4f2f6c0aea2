"""Tables in Markdown that read in a terminal too. Pure."""

from __future__ import annotations

from collections.abc import Sequence

NONE = "-"
WIDEST = 60  # characters; a cell that is a sentence does not widen its column


def text_table(names: Sequence[str], numbers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table with its columns in line.

    Args:
        names, numbers: headings; what stands below the latter is aligned to the right.
    """
    cut = [[_plain(cell) for cell in row] for row in ((*names, *numbers), *rows)]
    widths = [max(3, *(len(row[n]) for row in cut if len(row[n]) <= WIDEST)) for n in range(len(cut[0]))]

    def line(cells: Sequence[str]) -> str:
        first, last = cells[: len(names)], cells[len(names) :]
        padded = [cell.ljust(width) for cell, width in zip(first, widths, strict=False)]
        padded += [cell.rjust(width) for cell, width in zip(last, widths[len(names) :], strict=True)]
        return f"| {' | '.join(padded)} |"

    rule = ["-" * width for width in widths[: len(names)]]
    rule += ["-" * (width - 1) + ":" for width in widths[len(names) :]]
    return "\n".join([line(cut[0]), line(rule), *map(line, cut[1:])])


def _plain(text: str) -> str:
    return " ".join(text.split()).replace("|", "/")[:300]
