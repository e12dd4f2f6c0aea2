"""Charts of open-loop stages and of capacity searches: what a rate of arrivals does."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable

import altair as alt

from loadtest.analysis.summary import StageSummary, Summary
from loadtest.drawing.style import (
    Chart,
    Row,
    bar_chart,
    lane_colour,
    log_tick_axis,
    panels,
    rate_axis,
    scale_with_labels,
    table,
    tip,
)
from loadtest.judge.estimate import Estimate
from loadtest.judge.slo import parse_slo
from loadtest.judge.wording import estimate
from loadtest.offer.load import OpenLoop
from loadtest.report.closed_loop_charts import lane_series

LOWER_BOUND_SHAPE = "triangle-right"

# What is drawn of latency: the SLO's metric, the panel's title, the figure, and its scale.
_LATENCIES: tuple[tuple[str, str, Callable[[StageSummary], Estimate | None], float], ...] = (
    ("ttft", "TTFT p95 (s, log scale)", lambda stage: stage.ttft_s.p95, 1),
    ("tpot", "TPOT p95 (ms, log scale)", lambda stage: stage.tpot_s.p95, 1000),
)


def capacity(summary: Summary) -> Chart | None:
    """A mark and its interval for each lane."""
    is_single = len({each.workload for each in summary.capacities}) == 1
    rows: list[Row] = [
        {
            "lane": each.lane,
            "bar": each.lane if is_single else f"{each.lane}, {each.workload}",
            "value": rate_per_s.value,
            "low": rate_per_s.low,
            "high": rate_per_s.high,
            "bound": each.is_lower_bound,
            "label": ("≥ " if each.is_lower_bound else "") + estimate(rate_per_s, None),
            "label_at": max(rate_per_s.value, rate_per_s.high or 0.0),
        }
        for each in summary.capacities
        if (rate_per_s := each.rate_per_s) is not None
    ]
    if not rows:
        return None
    scale = scale_with_labels(max(row["label_at"] for row in rows), (row["label"] for row in rows))
    base = table(rows).encode(
        y=alt.Y("bar:N", title=None, sort=None), color=lane_colour("lane", lane_series(summary).looks)
    )
    x = alt.X("value:Q", title="requests/s", scale=scale)
    tips = [tip("bar:N", "lane"), tip("label:N", "requests/s")]
    shape = alt.Shape(
        "bound:N", legend=None, scale=alt.Scale(domain=[False, True], range=["circle", LOWER_BOUND_SHAPE])
    )
    layers = [
        base.mark_bar(height=10, opacity=0.25).encode(x=x),
        base.transform_filter("datum.low != null").mark_rule(strokeWidth=2).encode(x="low:Q", x2="high:Q"),
        base.mark_point(filled=True, size=90, opacity=1).encode(x=x, shape=shape, tooltip=tips),
        table(rows)
        .mark_text(align="left", dx=9)
        .encode(y=alt.Y("bar:N", sort=None), x="label_at:Q", text="label:N"),
    ]
    return bar_chart(layers, len(rows))


def attainment(summary: Summary) -> Chart | None:
    """The share that met the objective, over offered rate, with the share that is asked for."""
    rows = [
        _row(stage, load, stage.workload, stage.slo.attainment)
        for stage, load in _open_stages(summary)
        if stage.slo is not None
    ]
    if not rows or summary.slo is None:
        return None
    asked = parse_slo(summary.slo).attainment
    lowest = min(asked, *(row["value"] if row["low"] is None else row["low"] for row in rows))
    y = alt.Y(
        "value:Q",
        title="requests that met it",
        # The question is on which side of a line near the top a point lies.
        scale=alt.Scale(domain=[max(0, math.floor(lowest * 10 - 0.5) / 10), 1.02], nice=False, zero=False),
        axis=alt.Axis(format="%", grid=True),
    )
    rule = alt.Chart().mark_rule(strokeDash=[5, 4]).encode(y=alt.datum(asked))
    return panels([rule, *_curves(summary, rows, y, ".1%")], rows, "panel")


def latency(summary: Summary) -> Chart | None:
    """TTFT and TPOT over offered rate, with the objective's limits."""
    stages = list(_open_stages(summary))
    is_single = len({stage.workload for stage, _ in stages}) == 1
    limits = () if summary.slo is None else parse_slo(summary.slo).limits
    rows: list[Row] = []
    for metric, title, of_stage, scale in _LATENCIES:
        for stage, load in stages:
            if (measured := of_stage(stage)) is None or measured.value <= 0:
                continue
            panel = title if is_single else f"{stage.workload}: {title}"
            limit_s = min((limit.limit_s for limit in limits if limit.metric == metric), default=None)
            row = _row(stage, load, panel, measured, scale)
            rows.append(row | {"limit": None if limit_s is None else limit_s * scale})
    if not rows:
        return None
    # Beyond its capacity a lane's TTFT grows by orders of magnitude.
    by_panel = defaultdict(list)
    for row in rows:
        by_panel[row["panel"]].append(row["value"])
    axis = log_tick_axis(by_panel.values(), grid=True)
    y = alt.Y("value:Q", title=None, scale=alt.Scale(type="log", nice=False, padding=14), axis=axis)
    rule = (
        alt.Chart().transform_filter("datum.limit != null").mark_rule(strokeDash=[5, 4]).encode(y="limit:Q")
    )
    chart = panels([rule, *_curves(summary, rows, y, ".3~g")], rows, "panel")
    return chart.resolve_scale(y="independent")


def _open_stages(summary: Summary) -> list[tuple[StageSummary, OpenLoop]]:
    """Stages at a rate that may be used, by rising rate."""
    stages = [
        (stage, stage.load)
        for stage in summary.stages
        if isinstance(stage.load, OpenLoop) and not stage.invalid
    ]
    return sorted(stages, key=lambda each: each[1].rate_per_s)


def _row(stage: StageSummary, load: OpenLoop, panel: str, measured: Estimate, scale: float = 1) -> Row:
    value = measured.value * scale
    low = None if measured.low is None else measured.low * scale
    high = None if measured.high is None else measured.high * scale
    return {
        "lane": stage.lane,
        "panel": panel,
        "rate": load.rate_per_s,
        "requests": stage.requests,
        "value": value,
        "low": low,
        "high": high,
        # Without an interval a line of no length: a panel without any line would have no extent.
        "from": value if low is None else low,
        "to": value if high is None else high,
    }


def _curves(summary: Summary, rows: list[Row], y: alt.Y, format_: str) -> list[Chart]:
    """A line, its marks and their intervals for each lane."""
    lanes = lane_series(summary)
    tips = [
        tip("lane:N", "lane"),
        tip("rate:Q", "offered requests/s", ".3~g"),
        tip("requests:Q", "requests"),
        tip("value:Q", "value", format_),
        tip("low:Q", "from", format_),
        tip("high:Q", "to", format_),
    ]
    base = alt.Chart().encode(x=rate_axis([row["rate"] for row in rows]), y=y, tooltip=tips)
    bounds = lanes.rules(base, y="from:Q", y2="to:Q")
    return [bounds, lanes.lines(base), lanes.points(base)]
