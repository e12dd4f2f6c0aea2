"""The figures of a report: one definition each, drawn in the page and saved as PNG."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import altair as alt
import vl_convert

from loadtest.chart_style import (
    BAR_STEP_PX,
    BAR_WIDTH_PX,
    COLOURS,
    THEMES,
    Chart,
    Row,
    Series,
    concurrency_axis,
    from_zero,
    log_axis,
    panels,
    table,
    tip,
)
from loadtest.crossover import Crossover
from loadtest.summary import Estimate, StageSummary, Summary

VEGA_LITE_VERSION = ".".join(alt.SCHEMA_VERSION.split(".")[:2])
PNG_SCALE = 2
EXPORTS = "window.vegaEmbed = vegaEmbed;"


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure of the report.

    Attributes:
        name: of its PNG, and its anchor in the page.
        reading: one sentence that says how to read it.
        draw: the chart, or None when the run holds nothing to draw.
        missing: what to say then.
    """

    name: str
    title: str
    reading: str
    draw: Callable[[Summary], Chart | None]
    missing: str


@dataclass(frozen=True, slots=True)
class DrawnFigure:
    """A figure of one run; `spec` is Vega-Lite, None when there was nothing to draw."""

    figure: Figure
    spec: dict[str, Any] | None


def draw_all(summary: Summary) -> tuple[DrawnFigure, ...]:
    """Every figure, in the order of the report."""
    charts = [(figure, figure.draw(summary)) for figure in FIGURES]
    return tuple(DrawnFigure(figure, None if chart is None else chart.to_dict()) for figure, chart in charts)


def save_png(drawn: DrawnFigure, directory: Path) -> Path | None:
    """Write the figure as PNG and return its path; None when there is nothing to draw."""
    if drawn.spec is None:
        return None
    path = directory / f"{drawn.figure.name}.png"
    version, config = VEGA_LITE_VERSION, THEMES["paper"]
    path.write_bytes(
        vl_convert.vegalite_to_png(drawn.spec, vl_version=version, scale=PNG_SCALE, config=config)
    )
    return path


@cache
def javascript() -> str:
    """Vega, Vega-Lite and Vega-Embed in one script that needs no network."""
    return str(vl_convert.javascript_bundle(EXPORTS, vl_version=VEGA_LITE_VERSION))


def _completed(summary: Summary) -> list[StageSummary]:
    return [stage for stage in summary.stages if stage.output_tokens_per_s is not None]


def _stage_rows(summary: Summary) -> list[Row]:
    return [
        {
            "lane": stage.lane,
            "workload": stage.workload,
            "concurrency": stage.concurrency,
            "requests": stage.requests,
            "tokens_per_s": _value(stage.output_tokens_per_s),
            "ttft_s": _value(stage.ttft_s.p50),
            "tpot_ms": None if stage.tpot_s.p50 is None else stage.tpot_s.p50.value * 1000,
            "e2e_s": _value(stage.e2e_s.p50),
        }
        for stage in _completed(summary)
    ]


def _value(estimate: Estimate | None) -> float | None:
    return None if estimate is None else estimate.value


def _lanes(summary: Summary) -> Series:
    return Series("lane", tuple(lane.lane for lane in summary.lanes), "lane")


_STAGE_TIPS = (
    tip("lane:N", "lane"),
    tip("concurrency:Q", "concurrency"),
    tip("requests:Q", "requests"),
    tip("tokens_per_s:Q", "tokens/s", ".1f"),
    tip("ttft_s:Q", "TTFT p50 (s)", ".3f"),
    tip("tpot_ms:Q", "TPOT p50 (ms)", ".1f"),
    tip("e2e_s:Q", "E2E p50 (s)", ".2f"),
)


def _frontier(summary: Summary, field: str, title: str) -> Chart | None:
    """Throughput against a latency: a line for each lane, joined in order of concurrency."""
    rows = _stage_rows(summary)
    if not rows:
        return None
    rows = _labelled(rows, field)
    lanes = _lanes(summary)
    base = alt.Chart().encode(
        x=log_axis(field, title), y=from_zero("tokens_per_s", "output tokens/s"), tooltip=list(_STAGE_TIPS)
    )
    labels = []
    for index, name in enumerate(lanes.names):
        # Lanes often meet at concurrency 1: their labels go above and below in turn.
        mark = base.transform_filter(alt.datum.lane == name).mark_text(
            align="left", dx=8, dy=-9 if index % 2 else 11, fontSize=11
        )
        labels.append(mark.encode(text="label:N"))
    return panels([lanes.lines(base, order="concurrency:Q"), lanes.points(base), *labels], rows, "workload")


def _labelled(rows: Sequence[Row], field: str) -> list[Row]:
    """The rows with a `label`, their concurrency. Points of a lane that fall together share one label."""
    found: list[Row] = []
    for row in rows:
        row = row | {"label": str(row["concurrency"])}
        previous = found[-1] if found else None
        if previous and all(previous[name] == row[name] for name in ("lane", "workload")):
            is_near = all(_is_near(previous[name], row[name]) for name in (field, "tokens_per_s"))
            if is_near:
                row["label"] = f"{previous['label']}, {row['label']}"
                previous["label"] = ""
        found.append(row)
    return found


def _is_near(a: float | None, b: float | None) -> bool:
    return a is not None and b is not None and math.isclose(a, b, rel_tol=0.06)


def _frontier_ttft(summary: Summary) -> Chart | None:
    return _frontier(summary, "ttft_s", "TTFT p50 (s, log scale)")


def _frontier_tpot(summary: Summary) -> Chart | None:
    return _frontier(summary, "tpot_ms", "TPOT p50 (ms, log scale)")


def _time_per_request(summary: Summary) -> Chart | None:
    rows = _stage_rows(summary)
    if not rows:
        return None
    lanes = _lanes(summary)
    x = concurrency_axis([row["concurrency"] for row in rows])
    base = alt.Chart().encode(x=x, y=from_zero("e2e_s", "E2E p50 (s)"), tooltip=list(_STAGE_TIPS))
    return panels([lanes.lines(base), lanes.points(base)], rows, "workload")


def _speed_up(summary: Summary) -> Chart | None:
    """Both ratios of each speculative lane, the line at 1, and a mark where they cross it."""
    is_single = len({crossover.lane for crossover in summary.crossovers}) == 1
    rows = [row for each in summary.crossovers for row in _speed_up_rows(each, is_single)]
    measured = [row for row in rows if row["kind"] == "measured"]
    if not measured:
        return None
    ratios = Series("ratio", tuple(dict.fromkeys(row["ratio"] for row in measured)), "ratio")
    x = concurrency_axis([row["concurrency"] for row in measured])
    tips = [
        tip("ratio:N", "ratio"),
        tip("concurrency:Q", "concurrency", ".1f"),
        tip("value:Q", "speed-up", ".2f"),
    ]
    base = alt.Chart().transform_filter(alt.datum.kind == "measured")
    base = base.encode(x=x, y=from_zero("value", "speed-up over the batched lane (ratio)"), tooltip=tips)
    layers = [
        alt.Chart().mark_rule(strokeWidth=1.2).encode(y=alt.datum(1)),
        ratios.lines(base),
        ratios.points(base),
    ]
    for index, name in enumerate(ratios.names):
        here = (
            alt.Chart()
            .transform_filter((alt.datum.kind == "crossing") & (alt.datum.ratio == name))
            .encode(x=x)
        )
        layers.append(here.mark_rule(strokeDash=[3, 3]))
        # Each ratio has a height of its own: two crossings may lie close together.
        height = alt.value(12 + 16 * index)
        for side, dx in (("left", 4), ("right", -4)):
            label = here.transform_filter(alt.datum.align == side).mark_text(align=side, dx=dx, fontSize=11)
            layers.append(label.encode(text="label:N", y=height))
    return panels(layers, rows, "workload")


def _speed_up_rows(crossover: Crossover, is_single: bool) -> list[Row]:
    """One table for all layers, since the panels are cut from it; `kind` says which row is what."""
    rows = []
    levels = [each.level for each in crossover.speed_ups]
    middle = math.sqrt(levels[0] * levels[-1])  # of a log axis
    prefix = "" if is_single else f"{crossover.lane}: "
    for ratio, values, crossing in (
        (f"{prefix}TPOT", [each.tpot for each in crossover.speed_ups], crossover.tpot),
        (f"{prefix}tokens/s", [each.throughput for each in crossover.speed_ups], crossover.throughput),
    ):
        common = {"workload": crossover.workload, "ratio": ratio}
        rows += [
            common | {"kind": "measured", "concurrency": each.level, "value": value}
            for each, value in zip(crossover.speed_ups, values, strict=True)
            if value is not None
        ]
        rows += [
            common
            | {
                "kind": "crossing",
                "concurrency": level,
                "label": f"{ratio} ≈ {level:.1f}",
                "align": "left" if level < middle else "right",  # so that the label stays in its panel
            }
            for level in crossing.levels
        ]
    return rows


def _acceptance(summary: Summary) -> Chart | None:
    stages = [stage for stage in _completed(summary) if stage.acceptance_rate is not None]
    if not stages:
        return None
    is_single = len({stage.lane for stage in stages}) == 1
    rows = [
        {
            "measure": measure,
            "series": stage.workload if is_single else f"{stage.lane}, {stage.workload}",
            "concurrency": stage.concurrency,
            "value": value,
        }
        for measure, field in (
            ("acceptance rate (0 to 1)", "acceptance_rate"),
            ("mean acceptance length (tokens per step)", "mean_acceptance_length"),
        )
        for stage in stages
        if (value := getattr(stage, field)) is not None
    ]
    title = "workload" if is_single else "lane, workload"
    series = Series("series", tuple(dict.fromkeys(row["series"] for row in rows)), title)
    x = concurrency_axis([row["concurrency"] for row in rows])
    tips = [tip("series:N", title), tip("concurrency:Q", "concurrency"), tip("value:Q", "value", ".2f")]
    base = alt.Chart().encode(x=x, y=from_zero("value", None), tooltip=tips)
    return panels([series.lines(base), series.points(base)], rows, "measure").resolve_scale(y="independent")


def _memory(summary: Summary) -> Chart | None:
    known = [
        (lane.lane, lane.memory_bytes / 2**30) for lane in summary.lanes if lane.memory_bytes is not None
    ]
    if not known:
        return None
    rows = [{"lane": lane, "gib": gib, "label": f"{gib:.2f} GiB"} for lane, gib in known]
    # Room for the label of the longest bar.
    scale = alt.Scale(domain=[0, max(gib for _, gib in known) * 1.25 or 1], nice=False)
    base = table(rows).encode(
        x=alt.X("gib:Q", title="memory (GiB)", scale=scale), y=alt.Y("lane:N", title=None, sort=None)
    )
    bars = base.mark_bar(height=18, color=COLOURS[0]).encode(
        tooltip=[tip("lane:N", "lane"), tip("label:N", "memory")]
    )
    return _bars([bars, base.mark_text(align="left", dx=5).encode(text="label:N")], len(rows))


def _failures(summary: Summary) -> Chart | None:
    """Completed and failed requests by lane. Drawn also without a failure, which is a result too."""
    rows: list[Row] = []
    for lane in summary.lanes:
        stages = [stage for stage in summary.stages if stage.lane == lane.lane]
        failed, total = sum(stage.failures for stage in stages), sum(stage.requests for stage in stages)
        common = {"lane": lane.lane, "total": total, "label": f"{failed} of {total} failed"}
        rows.append(common | {"outcome": "completed", "place": 0, "requests": total - failed})
        rows.append(common | {"outcome": "failed", "place": 1, "requests": failed})
    if not rows:
        return None
    domain = [0, max(row["total"] for row in rows) * 1.35 or 1]
    base = table(rows).encode(y=alt.Y("lane:N", title=None, sort=None))
    colours = alt.Scale(domain=["completed", "failed"], range=[COLOURS[0], COLOURS[1]])
    bars = base.mark_bar(height=18).encode(
        x=alt.X("requests:Q", title="requests", stack="zero", scale=alt.Scale(domain=domain, nice=False)),
        color=alt.Color("outcome:N", title=None, scale=colours),
        order=alt.Order("place:Q"),
        tooltip=[tip("lane:N", "lane"), tip("outcome:N", "outcome"), tip("requests:Q", "requests")],
    )
    labels = base.transform_filter(alt.datum.outcome == "failed").mark_text(align="left", dx=5)
    return _bars([bars, labels.encode(x="total:Q", text="label:N")], len(summary.lanes))


def _bars(layers: Sequence[Chart], count: int) -> Chart:
    return alt.layer(*layers).properties(width=BAR_WIDTH_PX, height=BAR_STEP_PX * count)


FIGURES = (
    Figure(
        "throughput-ttft",
        "Throughput against time to first token",
        "Up and to the left is better; the number at a point is its concurrency, and a line that runs to the "
        "right without rising is a queue that grows.",
        _frontier_ttft,
        "No request completed.",
    ),
    Figure(
        "throughput-tpot",
        "Throughput against time per output token",
        "Up and to the left is better; to the right of a point, each reader sees the text appear more slowly.",
        _frontier_tpot,
        "No request completed.",
    ),
    Figure(
        "time-per-request",
        "Time per request against concurrency",
        "A flat line costs no one anything when another user comes; a rising one makes all of them wait.",
        _time_per_request,
        "No request completed.",
    ),
    Figure(
        "speculation-speed-up",
        "What speculation is worth",
        "Above the line at 1 speculation pays, below it costs; a dashed upright marks where a ratio crosses.",
        _speed_up,
        "The run has no speculative lane beside a batched one.",
    ),
    Figure(
        "acceptance",
        "What the model accepts of the drafts",
        "The higher the acceptance, the more tokens a step yields; a mean length of 1 means no draft was right.",
        _acceptance,
        "No lane of the run exports counts of drafts.",
    ),
    Figure(
        "memory",
        "Memory by lane",
        "The largest proportional set size seen of all processes of a lane's replicas, engine included.",
        _memory,
        "No replica exports its memory.",
    ),
    Figure(
        "failures",
        "Requests that failed",
        "Each bar is all requests of a lane; the part that did not complete is at its end.",
        _failures,
        "No stage ran.",
    ),
)
