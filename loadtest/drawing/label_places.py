"""Where the labels of points go, so that none lies on a point, a line or another label."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

CHARACTER_PX = 6.5
HEIGHT_PX = 13.0
MARK_PX = 11.0
STEP_PX = 3.0  # between points at which a line is looked at: closer than a label is wide

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
    lines: Sequence[Sequence[Point]],
    width_px: float,
    height_px: float,
    bare: Sequence[Sequence[Point]] = (),
) -> list[list[Place | None]]:
    """A place for each point's label, in the shape of `lines`; None where there is no room for it.

    A label may lie on a line where there is no better place, never on a mark or another label.

    Args:
        bare: lines without marks.
    """
    room = _Room.around(lines, bare, width_px, height_px)
    return [[None if (found := room.take([point])) is None else found[1] for point in line] for line in lines]


def find_anchors(
    curves: Sequence[Sequence[Point]],
    lines: Sequence[Sequence[Point]],
    places: Sequence[Sequence[Place | None]],
    width_px: float,
    height_px: float,
    bare: Sequence[Sequence[Point]] = (),
) -> list[tuple[int, Place] | None]:
    """For each curve the index of the point that its label stands at, and where; None where there is no room.

    Args:
        curves: points of each in their order, all with the text of its label.
        lines: what is drawn beside them, with the `places` of its own labels.
        bare: as in `find_places`.
    """
    room = _Room.around(lines, [*bare, *curves], width_px, height_px)
    room.taken.extend(
        place.box(point.x, point.y, point.text)
        for line, of_line in zip(lines, places, strict=True)
        for point, place in zip(line, of_line, strict=True)
        if place is not None
    )
    return [room.take(curve) for curve in curves]


@dataclass(frozen=True, slots=True)
class _Room:
    """What a panel holds: marks and labels, which no label may lie on, and lines, which one better does not."""

    width_px: float
    height_px: float
    strokes: list[Box]
    taken: list[Box]

    @classmethod
    def around(
        cls,
        lines: Sequence[Sequence[Point]],
        bare: Sequence[Sequence[Point]],
        width_px: float,
        height_px: float,
    ) -> _Room:
        strokes = [dot for line in (*lines, *bare) for a, b in pairwise(line) for dot in _stroke(a, b)]
        return cls(width_px, height_px, strokes, [_mark(point) for line in lines for point in line])

    def take(self, anchors: Sequence[Point]) -> tuple[int, Place] | None:
        """The best place beside one of the points, taken from now on, and which point that is."""
        best: tuple[int, int, Place, Box] | None = None
        for index, point in enumerate(anchors):
            for place in PLACES if point.text else ():
                box = place.box(point.x, point.y, point.text)
                if not self._is_inside(box) or any(_overlap(box, other) for other in self.taken):
                    continue
                crossed = sum(_overlap(box, dot) for dot in self.strokes)
                if best is None or crossed < best[0]:
                    best = crossed, index, place, box
        if best is None:
            return None
        self.taken.append(best[3])
        return best[1], best[2]

    def _is_inside(self, box: Box) -> bool:
        return box[0] >= 0 and box[1] >= 0 and box[2] <= self.width_px and box[3] <= self.height_px


def _mark(point: Point) -> Box:
    half = MARK_PX / 2
    return point.x - half, point.y - half, point.x + half, point.y + half


def _stroke(a: Point, b: Point) -> Iterator[Box]:
    steps = math.ceil(math.hypot(b.x - a.x, b.y - a.y) / STEP_PX) or 1
    for step in range(steps + 1):
        x, y = a.x + (b.x - a.x) * step / steps, a.y + (b.y - a.y) * step / steps
        yield x, y, x, y


def _overlap(a: Box, b: Box) -> bool:
    return a[0] <= b[2] and b[0] <= a[2] and a[1] <= b[3] and b[1] <= a[3]
