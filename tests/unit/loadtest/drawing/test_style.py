"""What all pictures share: a lane's look, and the ticks of their axes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pytest

from loadtest.analysis.run_summary import summarize
from loadtest.drawing.style import Look, lane_looks, lines_of_lanes, log_tick_axis, log_ticks
from loadtest.lesson.page import five_pictures
from loadtest.report.charts import draw_all
from tests.unit.loadtest.lesson.lessons import whole
from tests.unit.loadtest.runs import whole_run
from tests.unit.loadtest.summaries import sweep

LANES = ("sequential", "batched", "speculative")


def scales(spec: Any) -> Iterator[tuple[str, Any, Any]]:
    """Every scale of a Vega-Lite spec that gives names looks: channel, name, look."""
    if isinstance(spec, dict):
        for channel in ("color", "shape", "strokeDash"):
            scale = spec.get(channel, {}).get("scale", {}) if isinstance(spec.get(channel), dict) else {}
            for name, look in zip(scale.get("domain", []), scale.get("range", []), strict=True):
                yield channel, str(name), str(look)
        for value in spec.values():
            yield from scales(value)
    elif isinstance(spec, list):
        for value in spec:
            yield from scales(value)


def looks_by_lane(specs: list[Any]) -> dict[tuple[str, str], set[str]]:
    found = defaultdict(set)
    for spec in specs:
        for channel, name, look in scales(spec):
            if name.removeprefix("lane ") in LANES:
                found[channel, name.removeprefix("lane ")].add(look)
    return found


def test_a_lane_looks_alike_in_every_picture_of_reports_and_lesson() -> None:
    drawn: list[Any] = [
        each.spec for summary in (summarize(*whole_run()), sweep()) for each in draw_all(summary)
    ]
    drawn += [picture.spec for picture in five_pictures(whole())]
    found = looks_by_lane(drawn)
    assert {lane for _, lane in found} == set(LANES)
    assert all(len(looks) == 1 for looks in found.values()), found
    assert len({look for (channel, _), looks in found.items() if channel == "color" for look in looks}) == 3


def test_what_a_lane_is_measured_by_has_its_colour() -> None:
    figures = {each.name: each.spec for each in draw_all(summarize(*whole_run()))}
    colour = lane_looks({}, LANES)["speculative"].colour
    for name in ("speculation-speed-up", "acceptance"):
        assert {look for channel, _, look in scales(figures[name]) if channel == "color"} == {colour}


def test_lines_of_one_lane_are_told_apart_by_shape_and_dash() -> None:
    looks = {"a": Look("#111111", "circle", (1, 0)), "b": Look("#222222", "square", (2, 2))}
    lines = lines_of_lanes("line", "t", {"a: x": "a", "a: y": "a", "b: x": "b"}, looks)
    assert [look.colour for look in lines.looks.values()] == ["#111111", "#111111", "#222222"]
    assert len({(look.shape, look.dash) for look in lines.looks.values()}) == 3


def test_a_lane_of_one_s_own_looks_alike_whether_or_not_all_lanes_ran() -> None:
    config = {"lanes": [{"name": "mine"}, {"name": "batched"}, {"name": "yours"}]}
    assert lane_looks(config, ["yours"])["yours"] == lane_looks(config, ["mine", "yours"])["yours"]
    assert lane_looks({}, ["yours"])["yours"] != lane_looks(config, ["yours"])["yours"]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1, 8], [1, 2, 5]),
        ([0.2, 5.9], [0.2, 0.5, 1, 2, 5]),
        ([30, 1500], [50, 100, 200, 500, 1000]),
        ([26, 47], [30, 35, 40, 45]),
        ([300, 400, 900], [300, 400, 500, 600, 800]),
        ([41.23, 42.77], [41.2, 42.8]),
        ([7.0], [7]),
    ],
)
def test_a_log_scale_has_labels_however_short_it_is(values: list[float], expected: list[float]) -> None:
    assert log_ticks(values) == expected


def test_panels_with_scales_of_their_own_have_each_their_ticks() -> None:
    axis = log_tick_axis([[1, 8], [41.23, 42.77]]).to_dict()
    assert axis["values"] == [1, 2, 5, 41.2, 42.8]
