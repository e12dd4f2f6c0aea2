"""The table of exported metrics in docs/metrics.md, made of the list: `python -m serving.metrics.table`."""

from __future__ import annotations

from pathlib import Path

from serving.metrics.names import METRICS, Metric

DOCUMENT = Path(__file__).parents[2] / "docs" / "metrics.md"
HEAD = "| name | type | unit | labels | exporter | help |\n|---|---|---|---|---|---|\n"


def row(metric: Metric) -> str:
    """A metric as a row of the table."""
    labels = ", ".join(f"`{label}`" for label in metric.labels) or "-"
    cells = (f"`{metric.name}`", metric.kind, metric.unit, labels, metric.exporter, metric.help)
    return f"| {' | '.join(cells)} |\n"


def with_table(document: str) -> str:
    """The document with its table as the list has it now.

    Raises:
        ValueError: the document has no such table.
    """
    before, head, rest = document.partition(HEAD)
    if not head:
        raise ValueError(f"no table with the heading {HEAD.splitlines()[0]!r}")
    lines = rest.splitlines(keepends=True)
    num_rows = next((number for number, line in enumerate(lines) if not line.startswith("|")), len(lines))
    return before + head + "".join(map(row, METRICS)) + "".join(lines[num_rows:])


if __name__ == "__main__":
    DOCUMENT.write_text(with_table(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")
