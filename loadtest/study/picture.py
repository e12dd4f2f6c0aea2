"""The picture of the study: goodput of each arm while the load rises and falls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import altair as alt
import vl_convert

from loadtest.drawing.style import (
    DASHES,
    GREY,
    PANEL_HEIGHT_PX,
    PANEL_WIDTH_PX,
    PAPER_THEME,
    SHAPES,
    VEGA_LITE_VERSION,
    Chart,
    Look,
    Row,
    Series,
    from_zero,
)
from loadtest.study.analysis import Study
from loadtest.study.schedule import rise_and_fall
from serving.core.lane_colours import LANE_COLOURS

PNG_SCALE = 2
PADDING_STEPS = 0.4  # at both ends of the axis


@dataclass(frozen=True, slots=True)
class Panel:
    """One study: the column and the row in which it stands, and what 1 is on its axis."""

    column: str
    row: str
    study: Study
    capacity_rps: float


def goodput_over_time(panels: Sequence[Panel]) -> Chart:
    """A line for each arm, over the steps of the load; grey is what was offered."""
    rows: list[Row] = [row for panel in panels for row in _rows(panel)]
    arms = list(dict.fromkeys(row["arm"] for row in rows))
    looks = {arm: Look(LANE_COLOURS[place], SHAPES[place], DASHES[place]) for place, arm in enumerate(arms)}
    series = Series("arm", looks, "")
    labels = [f"{level:g}" for level in rise_and_fall()]
    axis = alt.Axis(
        values=list(range(len(labels))),
        labelExpr=f"{labels}[datum.value]",
        grid=False,
        labelFontSize=10,
        labelOverlap=False,
        labelBound=False,
        labelFlush=False,
    )
    scale = alt.Scale(domain=[-PADDING_STEPS, len(labels) - 1 + PADDING_STEPS], nice=False)
    x = alt.X("step:Q", title="offered load, of capacity: it rises, then falls", axis=axis, scale=scale)
    y = from_zero("goodput", "goodput, of capacity", max(row["offered"] for row in rows))
    base = alt.Chart()
    offered = base.mark_line(color=GREY, strokeWidth=6, opacity=0.3).encode(x=x, y=alt.Y("offered:Q"))
    layers = [
        offered,
        series.rules(base, x=x, y=alt.Y("low:Q"), y2="high:Q"),
        series.lines(base, x=x, y=y),
        series.points(base.encode(x=x, y=y)),
    ]
    layered = alt.layer(*layers, data=alt.Data(values=rows)).properties(
        width=PANEL_WIDTH_PX, height=PANEL_HEIGHT_PX
    )
    return layered.facet(
        column=alt.Column("column:N", title=None, sort=_distinct(rows, "column")),
        row=alt.Row("row:N", title=None, sort=_distinct(rows, "row")),
    )


def draw(path: Path, panels: Sequence[Panel]) -> Path:
    """Write the picture as PNG; the path."""
    picture = goodput_over_time(panels).to_dict()
    path.write_bytes(
        vl_convert.vegalite_to_png(picture, vl_version=VEGA_LITE_VERSION, scale=PNG_SCALE, config=PAPER_THEME)
    )
    return path


def _rows(panel: Panel) -> list[Row]:
    study = panel.study
    rows: list[Row] = []
    for arm in study.arms:
        for step in range(len(rise_and_fall())):
            goodput = study.goodput_rps(arm, (step,))
            shares: Mapping[str, float | None] = {
                "goodput": goodput.value,
                "low": goodput.low,
                "high": goodput.high,
                "offered": study.offered_rps((step,)),
            }
            rows.append(
                {"arm": arm, "step": step, "column": panel.column, "row": panel.row}
                | {
                    name: None if value is None else value / panel.capacity_rps
                    for name, value in shares.items()
                }
            )
    return rows


def _distinct(rows: Sequence[Row], field: str) -> list[str]:
    return list(dict.fromkeys(row[field] for row in rows))
