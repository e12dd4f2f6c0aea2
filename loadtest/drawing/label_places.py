"""Where the labels of points go, so that none lies on a point, a line or another label."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

CHARACTER_PX = 6.5
HEIGHT_PX = 13.0
MARK_PX = 11.0
STEPS = 24  # points at which a line is looked at

Box = tuple[float, float, float, float]  # left, top, right, bottom


@dataclass(frozen=True, slots=True)
class Place:
    """Where a label stands beside its point; the offsets are of its near edge, or of its middle."""

    name: str
    dx: int
    dy: int
    align: str

    def box(self, x: float, y: float, text: str) -> Box:
        width = CHARACTER_PX * len(text)
        share = {"left": 0.0, "center": 0.5, "right": 1.0}[self.align]
        left, top = x + self.dx - share * width, y + self.dy - HEIGHT_PX / 2
        return left, top, left + width, top + HEIGHT_PX


PLACES = (
    Place("right", 9, 0, "left"),
    Place("above", 0, -13, "center"),
    Place("below", 0, 14, "center"),
    Place("left", -9, 0, "right"),
    Place("above right", 7, -10, "left"),
    Place("below right", 7, 11, "left"),
    Place("above left", -7, -10, "right"),
    Place("below left", -7, 11, "right"),
)


@dataclass(frozen=True, slots=True)
class Point:
    """A point of a line, in pixels from the left and the top of the panel; no label where the text is empty."""

    x: float
    y: float
    text: str


def find_places(
    lines: Sequence[Sequence[Point]], width_px: float, height_px: float
) -> list[list[Place | None]]:
    """A place for each point's label, in the shape of `lines`; None where there is no room for it.

    A label may lie on a line where there is no better place, never on a mark or another label.
    """
    marks = [_mark(point) for line in lines for point in line]
    strokes = [dot for line in lines for a, b in pairwise(line) for dot in _stroke(a, b)]
    taken: list[Box] = []
    places_by_line: list[list[Place | None]] = []
    for line in lines:
        places: list[Place | None] = []
        for point in line:
            best: tuple[int, Place, Box] | None = None
            for place in PLACES if point.text else ():
                box = place.box(point.x, point.y, point.text)
                is_inside = box[0] >= 0 and box[1] >= 0 and box[2] <= width_px and box[3] <= height_px
                if not is_inside or any(_overlap(box, other) for other in (*marks, *taken)):
                    continue
                crossed = sum(_overlap(box, dot) for dot in strokes)
                if best is None or crossed < best[0]:
                    best = crossed, place, box
            if best is not None:
                taken.append(best[2])
            places.append(None if best is None else best[1])
        places_by_line.append(places)
    return places_by_line


def _mark(point: Point) -> Box:
    half = MARK_PX / 2
    return point.x - half, point.y - half, point.x + half, point.y + half


def _stroke(a: Point, b: Point) -> Iterator[Box]:
    for step in range(STEPS + 1):
        x, y = a.x + (b.x - a.x) * step / STEPS, a.y + (b.y - a.y) * step / STEPS
        yield x, y, x, y


def _overlap(a: Box, b: Box) -> bool:
    return a[0] <= b[2] and b[0] <= a[2] and a[1] <= b[3] and b[1] <= a[3]
