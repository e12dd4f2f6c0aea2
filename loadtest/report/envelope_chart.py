"""The chart of the envelope: which lane gives a user most at each load, and where one that chooses k runs."""

from __future__ import annotations

from itertools import groupby

from loadtest.analysis.summary import Summary
from loadtest.client.lane_drafts import chooses_drafts
from loadtest.drawing.style import Chart
from loadtest.lesson import pictures
from loadtest.lesson.envelope import Curve, LoadPoint
from loadtest.report.closed_loop_charts import lane_series, points_of_stages
from loadtest.report.findings import lanes_that_count_alike


def envelope(summary: Summary) -> Chart | None:
    """Of each workload with two lanes and two loads or more; None where there is none.

    Of lanes with several tokenizers those of the first that two lanes share: tokens of others are no such tokens.
    """
    alike = next((group for group in lanes_that_count_alike(summary) if len(group) > 1), ())
    curves = [curve for curve in _curves(summary) if curve.lane in alike]
    drawn = [
        curve
        for curve in curves
        if len({other.lane for other in curves if other.text == curve.text}) > 1
        and len({point.requests for other in curves if other.text == curve.text for point in other.points})
        > 1
    ]
    if not drawn:
        return None
    return pictures.envelope(
        drawn,
        None,
        lane_series(summary).looks,
        "concurrency (users, log scale)",
        "output tokens/s of each user",
    )


def _curves(summary: Summary) -> list[Curve]:
    configs = {lane["name"]: lane for lane in summary.run.config.get("lanes", ())}
    rows = sorted(points_of_stages(summary), key=lambda row: (row["panel"], row["lane"], row["concurrency"]))
    return [
        Curve(
            text=panel,
            name=lane,
            lane=lane,
            is_fixed=not chooses_drafts(configs.get(lane, {})),
            points=tuple(LoadPoint(row["concurrency"], row["tokens_per_s"]) for row in own),
        )
        for (panel, lane), own in groupby(rows, key=lambda row: (row["panel"], row["lane"]))
    ]
