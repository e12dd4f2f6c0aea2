"""Reports at the widths of a desk and of a telephone: nothing is cut, and nothing is complained of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from loadtest.analysis.run_summary import summarize
from loadtest.analysis.summary import Summary
from loadtest.report.build import render
from loadtest.report.charts import draw_all
from tests.unit.loadtest.lesson.browser import Browser
from tests.unit.loadtest.runs import whole_run
from tests.unit.loadtest.summaries import sweep

LONG_NAME = "questions-of-our-customers-as-of-last-november"


def with_long_name(summary: Summary) -> Summary:
    return replace(
        summary,
        stages=tuple(replace(stage, workload=LONG_NAME) for stage in summary.stages),
        crossovers=tuple(replace(crossover, workload=LONG_NAME) for crossover in summary.crossovers),
    )


@pytest.mark.parametrize("width_px", [1280, 400])
@pytest.mark.parametrize("make", [lambda: summarize(*whole_run()), sweep], ids=["users", "sweep"])
def test_every_figure_fits(tab: Browser, tmp_path: Path, make: Callable[[], Summary], width_px: int) -> None:
    summary = with_long_name(make())
    figures = draw_all(summary)
    path = tmp_path / "report.html"
    path.write_text(render(summary, figures), encoding="utf-8")
    shown = tab.show(path, width_px, "light")
    assert shown.drawn == len(figures) > 4
    assert shown.overflow_px <= 0
    assert shown.complaints == []
