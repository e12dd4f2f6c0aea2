"""The charts of a report: one definition each, drawn in the page and saved as PNG."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import vl_convert

from loadtest.analysis.summary import Summary
from loadtest.drawing.style import PAPER_THEME, VEGA_LITE_VERSION, Chart
from loadtest.report import closed_loop_charts, lane_charts, rate_charts
from loadtest.report.envelope_chart import envelope
from loadtest.report.speed_up_chart import speed_up

PNG_SCALE = 2


@dataclass(frozen=True, slots=True)
class ReportChart:
    """A chart of the report.

    Attributes:
        name: of its PNG, and its anchor in the page.
        reading: one sentence or two that say how to read it; of a run where what is drawn depends on it.
        draw: the chart, or None when the run holds nothing to draw: then it is left out.
    """

    name: str
    title: str
    reading: str | Callable[[Summary], str]
    draw: Callable[[Summary], Chart | None]


@dataclass(frozen=True, slots=True)
class DrawnChart:
    """A chart of one run; `spec` is Vega-Lite, the rest is that of its `ReportChart`."""

    name: str
    title: str
    reading: str
    spec: dict[str, Any]


def draw_all(summary: Summary) -> tuple[DrawnChart, ...]:
    """Every chart that has something to show, in the order of the report."""
    drawn = [(chart, chart.draw(summary)) for chart in CHARTS]
    return tuple(
        DrawnChart(
            chart.name,
            chart.title,
            chart.reading if isinstance(chart.reading, str) else chart.reading(summary),
            spec.to_dict(),
        )
        for chart, spec in drawn
        if spec is not None
    )


def save_png(drawn: DrawnChart, directory: Path) -> Path:
    """Write the chart as PNG and return its path."""
    path = directory / f"{drawn.name}.png"
    path.write_bytes(
        vl_convert.vegalite_to_png(
            drawn.spec, vl_version=VEGA_LITE_VERSION, scale=PNG_SCALE, config=PAPER_THEME
        )
    )
    return path


CHARTS = (
    ReportChart(
        "capacity",
        "Capacity within the objective",
        "The highest rate at which the objective still holds; the line is its 95 percent interval, and an arrow "
        "says that the search ended before the limit.",
        rate_charts.capacity,
    ),
    ReportChart(
        "attainment",
        "Requests that met the objective, by offered rate",
        "A lane serves a rate while it stays above the dashed line, the share that the objective asks for; "
        "failures count as misses.",
        rate_charts.attainment,
    ),
    ReportChart(
        "latency-by-rate",
        "Latency by offered rate",
        "Where a curve turns upwards the queue begins to grow; the dashed line is the objective's limit.",
        rate_charts.latency,
    ),
    ReportChart(
        "throughput-ttft",
        "Throughput against time to first token",
        closed_loop_charts.reading_ttft,
        closed_loop_charts.throughput_ttft,
    ),
    ReportChart(
        "throughput-tpot",
        "Throughput against time per output token",
        closed_loop_charts.reading_tpot,
        closed_loop_charts.throughput_tpot,
    ),
    ReportChart(
        "time-per-request",
        "Time per request against concurrency",
        "A flat line costs no one anything when another user comes; a rising one makes all of them wait.",
        closed_loop_charts.time_per_request,
    ),
    ReportChart(
        "speculation-speed-up",
        "What speculation is worth",
        "Above the line at 1 speculation pays, below it costs; a dashed upright marks where a ratio crosses.",
        speed_up,
    ),
    ReportChart(
        "envelope",
        "The envelope",
        "The band is the best lane at each load, of those that draft as many tokens whatever the load; what lies "
        "below it gives tokens away there.",
        envelope,
    ),
    ReportChart(
        "acceptance",
        "What the model accepts of the drafts",
        "The higher the acceptance, the more tokens a step with a draft yields; "
        "a mean length of 1 means no draft was right.",
        lane_charts.acceptance,
    ),
    ReportChart(
        "memory",
        "Memory by lane",
        "The largest proportional set size seen of all processes of a lane's replicas, engine included.",
        lane_charts.memory,
    ),
    ReportChart(
        "failures",
        "Requests that failed",
        "Each bar is all requests of a lane; the part that did not complete is at its end.",
        lane_charts.failures,
    ),
)
