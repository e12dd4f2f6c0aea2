from __future__ import annotations

import math
from itertools import combinations

import pytest

from serving.core.lane_colours import KNOWN_LANES, LANE_COLOURS, lane_colours

Linear = tuple[float, ...]

# What people see who lack one kind of cone: Machado, Oliveira and Fernandes 2009, severity 1, on linear RGB.
SIGHT = {
    "all colours": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "no red": ((0.1523, 1.0526, -0.2049), (0.1145, 0.7863, 0.0992), (-0.0039, -0.0481, 1.0520)),
    "no green": ((0.3673, 0.8606, -0.2280), (0.2801, 0.6725, 0.0474), (-0.0118, 0.0429, 0.9689)),
}
MIN_DIFFERENCE = 17  # CIE76; below about 10 two lines are taken for one


def linear(colour: str) -> Linear:
    channels = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    return tuple(c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)


def lab(colour: str, sight: str) -> Linear:
    seen = [
        min(1.0, max(0.0, sum(map(math.prod, zip(row, linear(colour), strict=True))))) for row in SIGHT[sight]
    ]
    to_xyz = ((0.4339, 0.3762, 0.1899), (0.2126, 0.7152, 0.0722), (0.0177, 0.1095, 0.8729))
    x, y, z = (math.cbrt(sum(map(math.prod, zip(row, seen, strict=True)))) for row in to_xyz)
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


@pytest.mark.parametrize("sight", SIGHT)
def test_colours_are_told_apart(sight: str) -> None:
    for one, other in combinations(LANE_COLOURS, 2):
        assert math.dist(lab(one, sight), lab(other, sight)) > MIN_DIFFERENCE, (one, other)


@pytest.mark.parametrize("page", ["#ffffff", "#15181c"])
def test_colours_are_seen_on_light_and_dark_pages(page: str) -> None:
    def luminance(colour: str) -> float:
        return sum(map(math.prod, zip((0.2126, 0.7152, 0.0722), linear(colour), strict=True)))

    for colour in LANE_COLOURS:
        dark, light = sorted((luminance(colour), luminance(page)))
        assert (light + 0.05) / (dark + 0.05) > 2.7, colour


def test_a_known_lane_keeps_its_colour_whatever_is_beside_it() -> None:
    alone = {lane: lane_colours([lane])[lane] for lane in KNOWN_LANES}
    assert len(set(alone.values())) == len(KNOWN_LANES)
    assert lane_colours(["mine", *reversed(KNOWN_LANES), "yours"]).items() >= alone.items()


def test_other_lanes_take_what_is_free_in_their_order() -> None:
    found = lane_colours(["a", "batched", "b", "c", "a"])
    assert len(set(found.values())) == 4
    assert [found["a"], found["b"]] == list(LANE_COLOURS[5:])
    assert lane_colours(["b", "a"])["b"] == found["a"]
    assert found["c"] == lane_colours(["sequential"])["sequential"]


def test_more_lanes_than_colours_repeat_but_never_a_known_lane_s() -> None:
    found = lane_colours([*KNOWN_LANES, "a", "b", "c"])
    assert found["a"] == found["c"]
    assert found["c"] not in [found[lane] for lane in KNOWN_LANES]
