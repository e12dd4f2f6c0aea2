"""Charts of closed-loop stages: throughput and latency as users are added."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import altair as alt

from loadtest.analysis.summary import StageSummary, Summary
from loadtest.drawing.label_places import PLACES, Point, find_places
from loadtest.drawing.style import (
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
from loadtest.offer.load import ClosedLoop

TOP_SHARE = 1.12  # of the highest value: room for the label above it

_TIPS = (
    tip("lane:N", "lane"),
    tip("concurrency:Q", "concurrency"),
    tip("requests:Q", "requests"),
    tip("tokens_per_s:Q", "tokens/s", ",.3r"),
    tip("ttft_s:Q", "TTFT p50 (s)", ".3r"),
    tip("tpot_ms:Q", "TPOT p50 (ms)", ",.3r"),
    tip("e2e_s:Q", "E2E p50 (s)", ".3r"),
)


def throughput_ttft(summary: Summary) -> Chart | None:
    return _frontier(summary, "ttft_s", "TTFT p50 (s, log scale)")


def throughput_tpot(summary: Summary) -> Chart | None:
    return _frontier(summary, "tpot_ms", "TPOT p50 (ms, log scale)")


def time_per_request(summary: Summary) -> Chart | None:
    rows = _rows(summary)
    if not rows:
        return None
    lanes = lane_series(summary)
    x = concurrency_axis([row["concurrency"] for row in rows])
    base = alt.Chart().encode(x=x, y=from_zero("e2e_s", "E2E p50 (s)"), tooltip=list(_TIPS))
    return panels([lanes.lines(base), lanes.points(base)], rows, "panel")


def lane_series(summary: Summary) -> Series:
    lanes = [lane.lane for lane in summary.lanes]
    looks = lane_looks(summary.run.config, lanes)
    return Series("lane", {lane: looks[lane] for lane in lanes}, "lane")


def _rows(summary: Summary) -> list[Row]:
    return [
        {
            "lane": stage.lane,
            "panel": _panel(stage, stage.load),
            "concurrency": stage.load.users,
            "requests": stage.requests,
            "tokens_per_s": stage.output_tokens_per_s.value,
            "low": stage.output_tokens_per_s.low,
            "high": stage.output_tokens_per_s.high,
            "ttft_s": _value(stage.ttft_s.p50),
            "tpot_ms": None if stage.tpot_s.p50 is None else stage.tpot_s.p50.value * 1000,
            "e2e_s": _value(stage.e2e_s.p50),
        }
        for stage in summary.stages
        if isinstance(stage.load, ClosedLoop) and stage.output_tokens_per_s is not None and not stage.invalid
    ]


def _panel(stage: StageSummary, load: ClosedLoop) -> str:
    return stage.workload + (f", {load.think_time_s:g} s think time" if load.think_time_s else "")


def _value(estimate: Estimate | None) -> float | None:
    return None if estimate is None else estimate.value


def _frontier(summary: Summary, field: str, title: str) -> Chart | None:
    """Throughput against a latency: a line for each lane, joined in order of concurrency."""
    rows = [row for row in _rows(summary) if row[field]]
    if not rows:
        return None
    scales = _Scales.of(rows, field)
    rows = _labelled(rows, field, scales)
    lanes = lane_series(summary)
    base = alt.Chart().encode(
        x=log_axis(field, title, [row[field] for row in rows]),
        y=from_zero("tokens_per_s", "output tokens/s", highest=scales.top_y),
        tooltip=list(_TIPS),
    )
    labels = [
        base.transform_filter(alt.datum.place == place.name)
        .mark_text(align=place.align, dx=place.dx, dy=place.dy, fontSize=11)
        .encode(text="label:N")
        for place in PLACES
        if any(row["place"] == place.name for row in rows)
    ]
    layers = [lanes.lines(base, order="concurrency:Q"), lanes.points(base), *labels]
    known = [row for row in rows if row["low"] is not None]
    if {row["panel"] for row in known} == {row["panel"] for row in rows}:  # a panel without any has no extent
        layers.insert(1, lanes.rules(base.transform_filter("datum.low != null"), y="low:Q", y2="high:Q"))
    return panels(layers, rows, "panel")


@dataclass(frozen=True, slots=True)
class _Scales:
    """Where a value stands in a panel: the x axis is a logarithm, the y axis begins at 0."""

    low_x: float
    high_x: float
    top_y: float

    @classmethod
    def of(cls, rows: Sequence[Row], field: str) -> _Scales:
        values = [row[field] for row in rows]
        return cls(min(values), max(values), max(row["tokens_per_s"] for row in rows) * TOP_SHARE or 1.0)

    def point(self, x: float, y: float, text: str) -> Point:
        span = math.log(self.high_x / self.low_x) or 1.0
        padding = 24  # as the axis has
        x_px = padding + (PANEL_WIDTH_PX - 2 * padding) * math.log(x / self.low_x) / span
        return Point(x_px, PANEL_HEIGHT_PX * (1 - y / self.top_y), text)


def _labelled(rows: Sequence[Row], field: str, scales: _Scales) -> list[Row]:
    """The rows with a `label`, their concurrency, and its `place`; none where it would cover something."""
    rows = _shared_labels(rows, field)
    placed: list[Row] = []
    for panel in dict.fromkeys(row["panel"] for row in rows):
        here = [row for row in rows if row["panel"] == panel]
        lines = [
            [row for row in here if row["lane"] == lane] for lane in dict.fromkeys(r["lane"] for r in here)
        ]
        points = [
            [scales.point(row[field], row["tokens_per_s"], row["label"]) for row in line] for line in lines
        ]
        places = find_places(points, PANEL_WIDTH_PX, PANEL_HEIGHT_PX)
        placed += [
            row | {"place": place.name if place else ""}
            for line, of_line in zip(lines, places, strict=True)
            for row, place in zip(line, of_line, strict=True)
        ]
    return placed


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
