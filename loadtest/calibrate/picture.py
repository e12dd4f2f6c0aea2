"""The picture of a calibration: step times by tokens as measured and as fitted."""

from __future__ import annotations

from pathlib import Path

import altair as alt
import numpy as np
import vl_convert

from loadtest.drawing.style import (
    BAR_WIDTH_PX,
    PANEL_HEIGHT_PX,
    PAPER_THEME,
    VEGA_LITE_VERSION,
    Chart,
    Row,
    lane_colour,
    lane_looks,
    log_axis,
    table,
)
from serving.calibration.profile import LaneProfile, Profile

PNG_SCALE = 2
CURVE_POINTS = 60
MS_PER_S = 1e3


def step_times(lane: LaneProfile) -> Chart:
    """Milliseconds of a step by the tokens in it: dots measured, a line fitted at the median context."""
    plain = [point for point in lane.points if not point.num_drafts]
    rows: list[Row] = [
        {"tokens": point.tokens, "ms": MS_PER_S * point.seconds, "lane": lane.lane} for point in plain
    ]
    sizes = sorted({float(point.tokens) for point in plain})
    kv_tokens = float(np.median([point.kv_tokens for point in plain]))
    curve: list[Row] = [
        {"tokens": float(tokens), "ms": MS_PER_S * lane.step_time.step_s(float(tokens), kv_tokens)}
        for tokens in np.geomspace(sizes[0], sizes[-1], CURVE_POINTS)
    ]
    x = log_axis("tokens", "tokens computed in a step (log scale)", sizes)
    y = alt.Y("ms:Q", title="ms a step (log scale)", scale=alt.Scale(type="log"))
    looks = lane_looks({}, [lane.lane])
    dots = table(rows).mark_circle(opacity=0.35, size=22).encode(x=x, y=y, color=lane_colour("lane", looks))
    line = table(curve).mark_line(strokeWidth=2, color="black").encode(x=x, y=y)
    layers: list[Chart] = [dots, line]
    if lane.roofline is not None and sizes[0] < lane.roofline.knee_tokens < sizes[-1]:
        knee = table([{"tokens": lane.roofline.knee_tokens}])
        layers.append(knee.mark_rule(strokeDash=[4, 4]).encode(x=x))
    return alt.layer(*layers).properties(
        width=BAR_WIDTH_PX,
        height=PANEL_HEIGHT_PX,
        title=f"Steps of {lane.lane}, the line at the median context",
    )


def draw(path: Path, profile: Profile) -> Path | None:
    """Write the picture as PNG; None where no lane without drafts was measured."""
    charts = [step_times(lane) for lane in profile.lanes if not lane.num_drafts]
    if not charts:
        return None
    picture = alt.vconcat(*charts).resolve_scale(color="independent", x="independent")
    png = vl_convert.vegalite_to_png(
        picture.to_dict(), vl_version=VEGA_LITE_VERSION, scale=PNG_SCALE, config=PAPER_THEME
    )
    path.write_bytes(png)
    return path
