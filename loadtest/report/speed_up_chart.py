"""The chart of speculation: what it is worth as users are added, and where it stops paying."""

from __future__ import annotations

import math

import altair as alt

from loadtest.analysis.summary import Crossover, Summary
from loadtest.drawing.style import (
    PANEL_HEIGHT_PX,
    Chart,
    Row,
    concurrency_axis,
    from_zero,
    lines_of_lanes,
    panels,
    tip,
)
from loadtest.report.closed_loop_charts import lane_series

LABEL_ROW_PX = 16
TOP_SHARE = 1.3  # of the highest ratio: room for the labels of crossings
EDGE_SHARE = 0.25  # of the axis: a label nearer to an edge is not centred, so that it stays in its panel


def speed_up(summary: Summary) -> Chart | None:
    """Both ratios of each speculative lane, the line at 1, and a mark where they cross it."""
    crossovers = [each for each in summary.crossovers if each.unit.startswith("users")]
    is_single = len({crossover.lane for crossover in crossovers}) == 1
    rows = [row for each in crossovers for row in _rows(each, is_single)]
    measured = [row for row in rows if row["kind"] == "measured"]
    if not measured:
        return None
    lane_of = {row["ratio"]: row["lane"] for row in measured}
    ratios = lines_of_lanes("ratio", "ratio", lane_of, lane_series(summary).looks)
    x = concurrency_axis([row["concurrency"] for row in measured])
    y = from_zero(
        "value",
        "speed-up over the batched lane (ratio)",
        highest=TOP_SHARE * max(1.0, *(row["value"] for row in measured), *(row["high"] for row in measured)),
    )
    tips = [
        tip("ratio:N", "ratio"),
        tip("concurrency:Q", "concurrency", ".1f"),
        tip("value:Q", "speed-up", ".2f"),
        tip("low:Q", "at least", ".2f"),
        tip("high:Q", "at most", ".2f"),
    ]
    base = alt.Chart().transform_filter(alt.datum.kind == "measured").encode(x=x, y=y, tooltip=tips)
    layers = [
        alt.Chart().mark_rule(strokeWidth=1.2).encode(y=alt.datum(1)),
        ratios.lines(base),
        ratios.rules(base, y="low:Q", y2="high:Q"),
        ratios.points(base),
    ]
    crossed = [name for name in lane_of if any(_is_crossing(row, name) for row in rows)]
    for index, name in enumerate(crossed):
        here = alt.Chart().transform_filter((alt.datum.kind == "crossing") & (alt.datum.ratio == name))
        here = here.encode(x=x)
        # Below all labels: an upright of one ratio must not run through the label of another.
        top, bottom = alt.value(LABEL_ROW_PX * len(crossed) + 4), alt.value(PANEL_HEIGHT_PX)
        layers.append(here.mark_rule(strokeDash=[3, 3]).encode(y=top, y2=bottom))
        # Each ratio has a height of its own: two crossings may lie close together.
        height = alt.value(10 + LABEL_ROW_PX * index)
        for align in sorted({row["align"] for row in rows if _is_crossing(row, name)}):
            label = here.transform_filter(alt.datum.align == align).mark_text(align=align, fontSize=11)
            layers.append(label.encode(text="label:N", y=height))
    return panels(layers, rows, "panel")


def _is_crossing(row: Row, ratio: str) -> bool:
    return bool(row["kind"] == "crossing" and row["ratio"] == ratio)


def _rows(crossover: Crossover, is_single: bool) -> list[Row]:
    """One table for all layers, since the panels are cut from it; `kind` says which row is what."""
    rows = []
    levels = [each.level for each in crossover.speed_ups]
    prefix = "" if is_single else f"{crossover.lane}: "
    think_time = crossover.unit.removeprefix("users")
    for name, ratios, crossing in (
        (f"{prefix}TPOT", [each.tpot for each in crossover.speed_ups], crossover.tpot),
        (f"{prefix}tokens/s", [each.throughput for each in crossover.speed_ups], crossover.throughput),
    ):
        common: Row = {"panel": crossover.workload + think_time, "lane": crossover.lane, "ratio": name}
        rows += [
            common
            | {
                "kind": "measured",
                "concurrency": each.level,
                "value": ratio.value,
                "low": ratio.low,
                "high": ratio.high,
            }
            for each, ratio in zip(crossover.speed_ups, ratios, strict=True)
            if ratio is not None
        ]
        rows += [
            common
            | {
                "kind": "crossing",
                "concurrency": level,
                "label": f"{name} ≈ {level:.1f}",
                "align": _align(level, levels[0], levels[-1]),
            }
            for level in crossing.levels
        ]
    return rows


def _align(level: float, lowest: float, highest: float) -> str:
    share = math.log(level / lowest) / math.log(highest / lowest)  # of a log axis
    return "left" if share < EDGE_SHARE else "right" if share > 1 - EDGE_SHARE else "center"
