"""Reports at the widths of a desk and of a telephone: nothing is cut, and nothing is complained of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from loadtest.analysis.run_summary import summarize
from loadtest.analysis.summary import Percentiles, Summary
from loadtest.judge.estimate import Estimate
from loadtest.offer.load import constant_rate
from loadtest.report.build import render
from loadtest.report.charts import draw_all
from tests.unit.loadtest.lesson.browser import Browser
from tests.unit.loadtest.runs import whole_run
from tests.unit.loadtest.summaries import SLO, objective, stage, summary, sweep

LONG_NAME = "questions-of-our-customers-as-of-last-november"


def with_long_name(made: Summary) -> Summary:
    return replace(
        made,
        stages=tuple(replace(each, workload=LONG_NAME) for each in made.stages),
        crossovers=tuple(replace(crossover, workload=LONG_NAME) for crossover in made.crossovers),
    )


def few_requests() -> Summary:
    """At rates, with an objective: too few requests for the interval of any p95."""
    nothing_known = Percentiles(Estimate(0.4), Estimate(0.6), Estimate(0.8))
    stages = [
        replace(each, ttft_s=nothing_known, tpot_s=nothing_known)
        for each in (stage(load=constant_rate(rate, 20), slo=objective(0.9, rate)) for rate in (1, 2))
    ]
    return summary(stages, slo=SLO)


@pytest.mark.parametrize("width_px", [1280, 400])
@pytest.mark.parametrize(
    "make", [lambda: summarize(*whole_run()), sweep, few_requests], ids=["users", "sweep", "few"]
)
def test_every_figure_fits(tab: Browser, tmp_path: Path, make: Callable[[], Summary], width_px: int) -> None:
    made = with_long_name(make())
    figures = draw_all(made)
    path = tmp_path / "report.html"
    path.write_text(render(made, figures), encoding="utf-8")
    shown = tab.show(path, width_px, "light")
    assert shown.drawn == len(figures) >= 4
    assert shown.overflow_px <= 0
    assert shown.complaints == []


def test_a_page_read_in_the_dark_prints_dark_on_white_and_unfolded(tab: Browser, tmp_path: Path) -> None:
    made = summarize(*whole_run())
    path = tmp_path / "report.html"
    path.write_text(render(made, draw_all(made)), encoding="utf-8")
    lightness = "Math.max(...getComputedStyle(document.querySelector('{}')).{}.match(/[0-9]+/g).map(Number))"
    texts = [lightness.format("p", "color"), lightness.format(".chart svg text", "fill")]
    folded = (
        "document.querySelector('details:not([open]) table').checkVisibility({contentVisibilityAuto: true})"
    )
    tab.show(path, 1000, "dark")
    assert min(map(tab.value, texts)) > 150
    assert tab.value(folded) is False
    tab.show(path, 1000, "dark", media="print")
    assert max(map(tab.value, texts)) < 120
    assert tab.value(folded) is True
