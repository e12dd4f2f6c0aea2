"""The frontier: what stands in it beside the lanes, and that it means what it says."""

from __future__ import annotations

from typing import Any

import pytest

from loadtest.analysis.summary import Summary
from loadtest.offer.load import ClosedLoop
from loadtest.report.charts import draw_all
from tests.unit.loadtest.summaries import objective, stage, summary

SLO = "ttft_p95<1s,tpot<60ms@99"


def run(slo: str | None = None, tpot_s: float = 0.02) -> Summary:
    """A lane that answers all its users at once, and one that answers one of them."""
    stages = [
        stage(
            lane, ClosedLoop(users), tokens_per_s=at_once / tpot_s, ttft_s=ttft_s, tpot_s=tpot_s,
            slo=None if slo is None else objective(1.0 if ttft_s < 0.5 else 0.4, 2),
        )
        for lane, users, at_once, ttft_s in (
            ("batched", 1, 1, 0.1), ("batched", 8, 8, 0.2), ("sequential", 1, 1, 0.1), ("sequential", 8, 1, 4.0),
        )
    ]  # fmt: skip
    return summary(stages, slo=slo)


def chart(made: Summary, name: str) -> tuple[list[dict[str, Any]], str, str]:
    """Its rows, the title of its x axis, and how to read it."""
    (drawn,) = [each for each in draw_all(made) if each.name == name]
    x = drawn.spec["spec"]["layer"][0]["encoding"]["x"]
    return drawn.spec["data"]["values"], x["title"], drawn.reading


def labels(rows: list[dict[str, Any]]) -> list[str]:
    return [row["label"] for row in rows if row["kind"] == "label"]


def test_a_limit_stands_on_the_axis_of_the_percentile_that_it_binds() -> None:
    rows, title, reading = chart(run(SLO), "throughput-ttft")
    assert title == "TTFT p95 (s, log scale)"
    assert [row["ttft_p95_s"] for row in rows if row["kind"] == "limit"] == [1.0]
    assert labels(rows) == ["ttft_p95<1s"]
    assert "The dashed line is the objective's limit" in reading


def test_a_limit_of_each_request_stands_on_the_axis_of_the_share_that_must_keep_it() -> None:
    rows, title, _ = chart(run(SLO), "throughput-tpot")
    assert title == "TPOT p99 (ms, log scale)"
    assert [row["tpot_p99_ms"] for row in rows if row["kind"] == "limit"] == [60.0]
    assert labels(rows) == ["tpot<60ms"]


def test_a_limit_is_in_the_picture_though_all_stay_far_below_it() -> None:
    made = run("ttft_p95<90s")
    (drawn,) = [each for each in draw_all(made) if each.name == "throughput-ttft"]
    assert drawn.spec["spec"]["layer"][0]["encoding"]["x"]["scale"]["domain"][1] == 90


@pytest.mark.parametrize("slo", [None, "e2e<9s", "ttft_p90<1s"])
def test_without_a_limit_that_the_axis_can_show_there_is_no_line(slo: str | None) -> None:
    rows, title, reading = chart(run(slo), "throughput-ttft")
    assert title == "TTFT p50 (s, log scale)"
    assert {row["kind"] for row in rows} == {"point"}
    assert "dashed" not in reading
    assert ("hollow" in reading) == (slo is not None)


def test_a_point_is_hollow_where_the_objective_does_not_hold() -> None:
    made = run(SLO)
    rows, _, reading = chart(made, "throughput-ttft")
    missed = [(row["lane"], row["concurrency"]) for row in rows if row.get("holds") is False]
    assert missed == [("sequential", 8)]
    (drawn,) = [each for each in draw_all(made) if each.name == "throughput-ttft"]
    (marks,) = [each for each in drawn.spec["spec"]["layer"] if each["mark"]["type"] == "point"]
    assert marks["encoding"]["fillOpacity"]["condition"] == {"test": "datum.holds === false", "value": 0}
    assert "a hollow point does not hold" in reading


def test_a_point_lies_on_the_curve_of_those_who_are_answered_at_once() -> None:
    rows, _, reading = chart(run(), "throughput-tpot")
    for row in rows:
        if row["kind"] == "curve":
            assert row["tokens_per_s"] * row["tpot_p50_ms"] / 1000 == pytest.approx(row["curve"])
    at_once = {
        (row["lane"], row["concurrency"]): row["tokens_per_s"] * row["tpot_p50_ms"] / 1000
        for row in rows
        if row["kind"] == "point"
    }
    assert at_once[("batched", 8)] == pytest.approx(8)
    assert at_once[("sequential", 8)] == pytest.approx(1)
    assert labels(rows) == ["1 at once", "8 at once"]
    assert "A thin curve is so many answers written at once" in reading


def test_curves_stay_away_from_axes_on_which_they_mean_nothing() -> None:
    for slo, name in ((None, "throughput-ttft"), (SLO, "throughput-ttft"), (SLO, "throughput-tpot")):
        rows, _, reading = chart(run(slo), name)
        assert "curve" not in {row["kind"] for row in rows}
        assert "curve" not in reading
