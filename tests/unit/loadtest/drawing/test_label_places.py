from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from loadtest.drawing.label_places import MARK_PX, Box, Place, Point, find_anchors, find_places

WIDTH_PX, HEIGHT_PX = 330, 240

positions = st.tuples(st.floats(0, WIDTH_PX), st.floats(0, HEIGHT_PX))
labels = st.sampled_from(["1", "8", "128", "4, 8", ""])
lines = st.lists(
    st.lists(st.builds(lambda at, text: Point(at[0], at[1], text), positions, labels), max_size=5), max_size=4
)


def apart(a: Box, b: Box) -> bool:
    return a[2] < b[0] or b[2] < a[0] or a[3] < b[1] or b[3] < a[1]


def boxes_of_labels(drawn: Sequence[Sequence[Point]], places: Sequence[Sequence[Place | None]]) -> list[Box]:
    return [
        place.box(point.x, point.y, point.text)
        for line, of_line in zip(drawn, places, strict=True)
        for point, place in zip(line, of_line, strict=True)
        if place is not None
    ]


def boxes_of_marks(drawn: Sequence[Sequence[Point]]) -> list[Box]:
    half = MARK_PX / 2
    return [(p.x - half, p.y - half, p.x + half, p.y + half) for line in drawn for p in line]


@given(lines)
def test_labels_keep_off_each_other_off_marks_and_in_the_panel(drawn: list[list[Point]]) -> None:
    found = find_places(drawn, WIDTH_PX, HEIGHT_PX)
    assert [len(line) for line in found] == [len(line) for line in drawn]
    boxes = boxes_of_labels(drawn, found)
    assert all(apart(a, b) for a, b in combinations(boxes, 2))
    assert all(apart(box, mark) for box in boxes for mark in boxes_of_marks(drawn))
    assert all(box[0] >= 0 and box[1] >= 0 and box[2] <= WIDTH_PX and box[3] <= HEIGHT_PX for box in boxes)


def test_a_lonely_point_has_its_label_at_the_right_and_one_at_the_edge_elsewhere() -> None:
    ((middle,), (edge,)) = find_places([[Point(100, 100, "4")], [Point(326, 200, "8")]], WIDTH_PX, HEIGHT_PX)
    assert middle is not None
    assert middle.align == "left"
    assert edge is not None
    assert edge.align != "left"


def test_a_label_leaves_the_line_to_its_right() -> None:
    ((first, _),) = find_places([[Point(100, 100, "4"), Point(200, 100, "")]], WIDTH_PX, HEIGHT_PX)
    assert first is not None
    assert first.name == "above"


def test_a_label_leaves_a_long_line_that_falls_to_its_right() -> None:
    ((first, _),) = find_places([[Point(30, 100, "1"), Point(228, 163, "")]], WIDTH_PX, HEIGHT_PX)
    assert first is not None
    assert first.name == "above"


def test_points_on_top_of_each_other_are_not_labelled_over_each_other() -> None:
    crowd = [[Point(100 + x, 100 + y, "16")] for x in range(0, 40, 8) for y in range(0, 40, 8)]
    assert any(place is None for line in find_places(crowd, WIDTH_PX, HEIGHT_PX) for place in line)


def test_a_label_leaves_a_line_without_marks_that_runs_to_its_right() -> None:
    bare = [[Point(110, 0, ""), Point(110, 240, "")]]
    ((place,),) = find_places([[Point(100, 100, "4")]], WIDTH_PX, HEIGHT_PX, bare)
    assert place is not None
    assert place.name == "above"


@given(lines)
def test_the_label_of_a_curve_keeps_off_marks_and_labels(drawn: list[list[Point]]) -> None:
    places = find_places(drawn, WIDTH_PX, HEIGHT_PX)
    curves = [[Point(x, 240 - 1.5 * x / share, "8 at once") for x in (0, 60, 120)] for share in (1, 2)]
    found = find_anchors(curves, drawn, places, WIDTH_PX, HEIGHT_PX)
    boxes = [
        anchor[1].box(curve[anchor[0]].x, curve[anchor[0]].y, "8 at once")
        for curve, anchor in zip(curves, found, strict=True)
        if anchor is not None
    ]
    others = (*boxes_of_labels(drawn, places), *boxes_of_marks(drawn))
    assert all(apart(a, b) for a, b in combinations(boxes, 2))
    assert all(apart(box, other) for box in boxes for other in others)


def test_a_curve_is_labelled_where_its_label_crosses_nothing() -> None:
    curve = [Point(x, 120, "8 at once") for x in (40, 200)]
    line = [Point(60, 60, ""), Point(60, 180, "")]
    (found,) = find_anchors([curve], [line], [[None, None]], WIDTH_PX, HEIGHT_PX)
    assert found is not None
    assert found[0] == 1


def test_the_label_of_a_curve_does_not_lie_on_it() -> None:
    (found,) = find_anchors([[Point(x, 120, "8 at once") for x in (40, 200)]], [], [], WIDTH_PX, HEIGHT_PX)
    assert found is not None
    assert found[1].name == "above"
