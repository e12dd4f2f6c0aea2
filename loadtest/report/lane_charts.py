"""Charts of a whole lane: acceptance, memory, failures."""

from __future__ import annotations

import altair as alt

from loadtest.analysis.summary import Summary
from loadtest.drawing.style import (
    BAD,
    GREY,
    Chart,
    Row,
    bar_chart,
    concurrency_axis,
    from_zero,
    lane_colour,
    lines_of_lanes,
    panels,
    scale_with_labels,
    table,
    tip,
)
from loadtest.judge.wording import number
from loadtest.report.closed_loop_charts import lane_series


def acceptance(summary: Summary) -> Chart | None:
    stages = [
        (stage, stage.concurrency)
        for stage in summary.stages
        if stage.acceptance_rate is not None and stage.concurrency is not None and not stage.invalid
    ]
    if not stages:
        return None
    is_single = len({stage.lane for stage, _ in stages}) == 1
    rows = [
        {
            "measure": measure,
            "lane": stage.lane,
            "series": stage.workload if is_single else f"{stage.lane}, {stage.workload}",
            "concurrency": users,
            "value": value,
        }
        for measure, field in (
            ("acceptance rate (0 to 1)", "acceptance_rate"),
            ("mean acceptance length (tokens)", "mean_acceptance_length"),
        )
        for stage, users in stages
        if (value := getattr(stage, field)) is not None
    ]
    title = "workload" if is_single else "lane, workload"
    lane_of = {row["series"]: row["lane"] for row in rows}
    series = lines_of_lanes("series", title, lane_of, lane_series(summary).looks)
    x = concurrency_axis([row["concurrency"] for row in rows])
    tips = [tip("series:N", title), tip("concurrency:Q", "concurrency"), tip("value:Q", "value", ".2f")]
    base = alt.Chart().encode(x=x, y=from_zero("value", None), tooltip=tips)
    return panels([series.lines(base), series.points(base)], rows, "measure").resolve_scale(y="independent")


def memory(summary: Summary) -> Chart | None:
    known = [
        (lane.lane, lane.memory_bytes / 2**30) for lane in summary.lanes if lane.memory_bytes is not None
    ]
    if not known:
        return None
    rows: list[Row] = [{"lane": lane, "gib": gib, "label": f"{number(gib, None)} GiB"} for lane, gib in known]
    scale = scale_with_labels(max(gib for _, gib in known), (row["label"] for row in rows))
    base = table(rows).encode(
        x=alt.X("gib:Q", title="memory (GiB)", scale=scale), y=alt.Y("lane:N", title=None, sort=None)
    )
    bars = base.mark_bar(height=18).encode(
        color=lane_colour("lane", lane_series(summary).looks),
        tooltip=[tip("lane:N", "lane"), tip("label:N", "memory")],
    )
    return bar_chart([bars, base.mark_text(align="left", dx=5).encode(text="label:N")], len(rows))


def failures(summary: Summary) -> Chart | None:
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
    scale = scale_with_labels(max(row["total"] for row in rows), (row["label"] for row in rows))
    base = table(rows).encode(y=alt.Y("lane:N", title=None, sort=None))
    colours = alt.Scale(domain=["completed", "failed"], range=[GREY, BAD])
    bars = base.mark_bar(height=18).encode(
        x=alt.X("requests:Q", title="requests", stack="zero", scale=scale),
        color=alt.Color("outcome:N", title=None, scale=colours),
        order=alt.Order("place:Q"),
        tooltip=[tip("lane:N", "lane"), tip("outcome:N", "outcome"), tip("requests:Q", "requests")],
    )
    labels = base.transform_filter(alt.datum.outcome == "failed").mark_text(align="left", dx=5)
    return bar_chart([bars, labels.encode(x="total:Q", text="label:N")], len(summary.lanes))
