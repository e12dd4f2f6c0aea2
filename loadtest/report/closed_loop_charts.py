"""Charts of closed-loop stages: throughput and latency as users are added."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import altair as alt

from loadtest.analysis.summary import Percentiles, StageSummary, Summary
from loadtest.drawing.label_places import PLACES, Point, find_anchors, find_places
from loadtest.drawing.style import (
    GREY,
    LOG_PADDING_PX,
    PANEL_HEIGHT_PX,
    PANEL_WIDTH_PX,
    Chart,
    Row,
    Series,
    concurrency_axis,
    from_zero,
    lane_looks,
    log_axis,
    panels,
    tip,
)
from loadtest.judge.estimate import Estimate
from loadtest.judge.slo import parse_slo
from loadtest.offer.load import ClosedLoop

TOP_SHARE = 1.12  # of the highest value: room for the label above it
CURVE_STEPS = 24
LIMIT_LABEL_SHARES = (0.96, 0.85, 0.15, 0.05)  # of the panel's height

# Percentiles that a summary has, by their share.
_PERCENTILES = {0.5: "p50", 0.95: "p95", 0.99: "p99"}
_PER_S = {"s": 1, "ms": 1000}

_TIPS = (
    tip("lane:N", "lane"),
    tip("concurrency:Q", "concurrency"),
    tip("requests:Q", "requests"),
    tip("tokens_per_s:Q", "tokens/s", ",.3r"),
    tip("ttft_p50_s:Q", "TTFT p50 (s)", ".3r"),
    tip("tpot_p50_ms:Q", "TPOT p50 (ms)", ",.3r"),
    tip("e2e_p50_s:Q", "E2E p50 (s)", ".3r"),
)


def throughput_ttft(summary: Summary) -> Chart | None:
    return _frontier(summary, _latency_axis(summary.slo, "ttft", "s"))


def throughput_tpot(summary: Summary) -> Chart | None:
    """With curves of equal numbers of answers at once, where the axis is the median.

    In a time t per token, n answers written at once give n / t tokens/s (Little's law): a point tells how many
    of its users are being answered, and the rest of them wait.
    """
    return _frontier(summary, _latency_axis(summary.slo, "tpot", "ms"))


def reading_ttft(summary: Summary) -> str:
    """How to read `throughput_ttft`."""
    return (
        "Up and to the left is better; the number at a point is its concurrency, and a line that runs to the "
        "right without rising is a queue that grows." + _reading_of_objective(summary, "ttft")
    )


def reading_tpot(summary: Summary) -> str:
    """How to read `throughput_tpot`."""
    text = (
        "Up and to the left is better; to the right of a point, each reader sees the text appear more slowly."
    )
    if _latency_axis(summary.slo, "tpot", "ms").has_curves:
        text += (
            " A thin curve is so many answers written at once: where a point lies below that of its users, "
            "the others wait."
        )
    return text + _reading_of_objective(summary, "tpot")


def time_per_request(summary: Summary) -> Chart | None:
    rows = points_of_stages(summary)
    if not rows:
        return None
    lanes = lane_series(summary)
    x = concurrency_axis([row["concurrency"] for row in rows])
    base = alt.Chart().encode(x=x, y=from_zero("e2e_p50_s", "E2E p50 (s)"), tooltip=list(_TIPS))
    return panels([lanes.lines(base), lanes.points(base)], rows, "panel")


def lane_series(summary: Summary) -> Series:
    lanes = [lane.lane for lane in summary.lanes]
    looks = lane_looks(summary.run.config, lanes)
    return Series("lane", {lane: looks[lane] for lane in lanes}, "lane")


@dataclass(frozen=True, slots=True)
class _LatencyAxis:
    """The latency that a frontier is drawn against, in `unit`.

    Attributes:
        limit: the objective's limit of it, and `limit_text` as it was written; None where there is none.
    """

    metric: str
    percentile: str
    unit: str
    limit: float | None = None
    limit_text: str = ""

    @property
    def field(self) -> str:
        return f"{self.metric}_{self.percentile}_{self.unit}"

    @property
    def title(self) -> str:
        return f"{self.metric.upper()} {self.percentile} ({self.unit}, log scale)"

    @property
    def has_curves(self) -> bool:
        """Whether n / latency is what n answers at once give: of the median time per token alone."""
        return self.metric == "tpot" and self.percentile == "p50"


def _latency_axis(slo_text: str | None, metric: str, unit: str) -> _LatencyAxis:
    """The percentile that the objective limits, for a limit stands on no other axis; else the median."""
    if slo_text is None:
        return _LatencyAxis(metric, "p50", unit)
    slo = parse_slo(slo_text)
    for limit in slo.limits:
        percentile = _PERCENTILES.get(slo.attainment if limit.share is None else limit.share)
        if limit.metric == metric and percentile is not None:
            return _LatencyAxis(metric, percentile, unit, limit.limit_s * _PER_S[unit], limit.text)
    return _LatencyAxis(metric, "p50", unit)


def _reading_of_objective(summary: Summary, metric: str) -> str:
    if summary.slo is None:
        return ""
    axis = _latency_axis(summary.slo, metric, "s")
    line = "" if axis.limit is None else " The dashed line is the objective's limit;"
    return f"{line} {'a' if line else 'A'} hollow point does not hold the objective."


def points_of_stages(summary: Summary) -> list[Row]:
    """A row for each valid closed-loop stage; `panel` names its workload."""
    return [
        {
            "kind": "point",
            "lane": stage.lane,
            "panel": _panel(stage, stage.load),
            "concurrency": stage.load.users,
            "requests": stage.requests,
            "tokens_per_s": stage.output_tokens_per_s.value,
            "low": stage.output_tokens_per_s.low,
            "high": stage.output_tokens_per_s.high,
            "holds": None if stage.slo is None else stage.slo.holds,
            **_latencies("ttft", stage.ttft_s, "s"),
            **_latencies("tpot", stage.tpot_s, "ms"),
            **_latencies("e2e", stage.e2e_s, "s"),
        }
        for stage in summary.stages
        if isinstance(stage.load, ClosedLoop) and stage.output_tokens_per_s is not None and not stage.invalid
    ]


def _latencies(metric: str, of: Percentiles, unit: str) -> Row:
    values: dict[str, Estimate | None] = {"p50": of.p50, "p95": of.p95, "p99": of.p99}
    return {
        f"{metric}_{name}_{unit}": None if each is None else each.value * _PER_S[unit]
        for name, each in values.items()
    }


def _panel(stage: StageSummary, load: ClosedLoop) -> str:
    return stage.workload + (f", {load.think_time_s:g} s think time" if load.think_time_s else "")


def _frontier(summary: Summary, axis: _LatencyAxis) -> Chart | None:
    """Throughput against a latency: a line for each lane, joined in order of concurrency."""
    points = [row for row in points_of_stages(summary) if row[axis.field]]
    if not points:
        return None
    scales = _Scales.of(points, axis)
    rows = [
        row
        for panel in dict.fromkeys(row["panel"] for row in points)
        for row in _of_panel([row for row in points if row["panel"] == panel], axis, scales)
    ]
    lanes = lane_series(summary)
    everything = alt.Chart().encode(
        x=log_axis(axis.field, axis.title, [scales.low_x, scales.high_x]),
        y=from_zero("tokens_per_s", "output tokens/s", highest=scales.top_y),
    )
    base = everything.transform_filter(alt.datum.kind == "point").encode(tooltip=list(_TIPS))
    labels = [
        everything.transform_filter(alt.datum.place == place.name)
        .mark_text(align=place.align, dx=place.dx, dy=place.dy, fontSize=11)
        .encode(text="label:N")
        for place in PLACES
        if any(row.get("place") == place.name for row in rows)
    ]
    curves = everything.transform_filter(alt.datum.kind == "curve")
    limit = everything.transform_filter(alt.datum.kind == "limit")
    layers = [
        curves.mark_line(strokeWidth=1, color=GREY, clip=True).encode(detail="curve:N"),
        limit.mark_rule(strokeDash=[5, 4]).encode(y=alt.value(0), y2=alt.value("height")),
        lanes.rules(base.transform_filter("datum.low != null"), y="low:Q", y2="high:Q"),
        lanes.lines(base, order="concurrency:Q"),
        lanes.points(base, hollow=None if summary.slo is None else "datum.holds === false"),
        *labels,
    ]
    return panels(layers, rows, "panel")


@dataclass(frozen=True, slots=True)
class _Scales:
    """Where a value stands in a panel: the x axis is a logarithm, the y axis begins at 0."""

    low_x: float
    high_x: float
    top_y: float

    @classmethod
    def of(cls, rows: Sequence[Row], axis: _LatencyAxis) -> _Scales:
        values = [row[axis.field] for row in rows] + ([] if axis.limit is None else [axis.limit])
        low_x, high_x = min(values), max(values)
        if low_x == high_x:
            low_x, high_x = low_x / 2, high_x * 2
        return cls(low_x, high_x, max(row["tokens_per_s"] for row in rows) * TOP_SHARE or 1.0)

    def point(self, x: float, y: float, text: str) -> Point:
        share = math.log(x / self.low_x) / math.log(self.high_x / self.low_x)
        x_px = LOG_PADDING_PX + (PANEL_WIDTH_PX - 2 * LOG_PADDING_PX) * share
        return Point(x_px, PANEL_HEIGHT_PX * (1 - y / self.top_y), text)


def _of_panel(points: Sequence[Row], axis: _LatencyAxis, scales: _Scales) -> list[Row]:
    """The points with their labels, then the objective's limit and the curves with theirs.

    `label` is what a row is called and `place` where that stands; none where it would cover something.
    """
    field, panel = axis.field, points[0]["panel"]
    labelled = _shared_labels(points, field)
    lanes = [
        [row for row in labelled if row["lane"] == lane]
        for lane in dict.fromkeys(row["lane"] for row in labelled)
    ]
    drawn = [[scales.point(row[field], row["tokens_per_s"], row["label"]) for row in line] for line in lanes]
    limits = _limit_line(axis, scales)
    bare = [
        [scales.point(row[field], row["low"], ""), scales.point(row[field], row["high"], "")]
        for row in points
        if row["low"] is not None and row["high"] is not None
    ]
    places = find_places(
        drawn, PANEL_WIDTH_PX, PANEL_HEIGHT_PX, [*bare, *(line.in_panel(scales) for line in limits)]
    )
    rows = [
        row | {"place": place.name if place else ""}
        for line, of_line in zip(lanes, places, strict=True)
        for row, place in zip(line, of_line, strict=True)
    ]
    others = [*limits, *(_curves(points, axis, scales) if axis.has_curves else ())]
    anchors = find_anchors(
        [line.in_panel(scales) for line in others], drawn, places, PANEL_WIDTH_PX, PANEL_HEIGHT_PX, bare
    )
    for line, anchor in zip(others, anchors, strict=True):
        rows += [row | {"panel": panel} for row in line.rows]
        if anchor is not None:
            (x, y), place = line.anchors[anchor[0]], anchor[1]
            rows.append(
                {"kind": "label", "panel": panel, "label": line.label, "place": place.name}
                | {field: x, "tokens_per_s": y}
            )
    return rows


@dataclass(frozen=True, slots=True)
class _Line:
    """A line that is no lane's.

    Attributes:
        anchors: points of it in their order, as x and y, that its label may stand at.
    """

    label: str
    rows: list[Row]
    anchors: list[tuple[float, float]]

    def in_panel(self, scales: _Scales) -> list[Point]:
        return [scales.point(x, y, self.label) for x, y in self.anchors]


def _limit_line(axis: _LatencyAxis, scales: _Scales) -> list[_Line]:
    """The objective's limit, if it has one of what the axis shows."""
    if axis.limit is None:
        return []
    anchors = [(axis.limit, scales.top_y * share) for share in LIMIT_LABEL_SHARES]
    return [_Line(axis.limit_text, [{"kind": "limit", axis.field: axis.limit}], anchors)]


def _curves(points: Sequence[Row], axis: _LatencyAxis, scales: _Scales) -> list[_Line]:
    """For each number of users measured, what so many answers written at once give: n / TPOT."""
    lines = []
    for users in sorted({row["concurrency"] for row in points}):
        per_s = users * _PER_S[axis.unit]
        begins_at = max(scales.low_x, per_s / scales.top_y)
        if begins_at >= scales.high_x:
            continue  # above the panel
        ratio = scales.high_x / begins_at
        places = [begins_at * ratio ** (step / CURVE_STEPS) for step in range(CURVE_STEPS + 1)]
        curve = [(x, per_s / x) for x in places]
        rows = [{"kind": "curve", "curve": users, axis.field: x, "tokens_per_s": y} for x, y in curve]
        lines.append(_Line(f"{users} at once", rows, curve[:: CURVE_STEPS // 4]))
    return lines


def _shared_labels(rows: Sequence[Row], field: str) -> list[Row]:
    """The rows with a `label`. Points of a lane that fall together share one."""
    labelled: list[Row] = []
    for row in rows:
        row = row | {"label": str(row["concurrency"])}
        previous = labelled[-1] if labelled else None
        if previous and all(previous[name] == row[name] for name in ("lane", "panel")):
            is_near = all(
                math.isclose(previous[name], row[name], rel_tol=0.06) for name in (field, "tokens_per_s")
            )
            if is_near:
                row["label"] = f"{previous['label']}, {row['label']}"
                previous["label"] = ""
        labelled.append(row)
    return labelled
