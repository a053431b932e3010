"""This module finds room for the labels of points: next to the point, or further away with a line back to it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from recap.show.svg import Point

# Of 12 px type, estimated: who opens a drawing has fonts of their own.
_LETTER_PX, _LINE_PX, _ASCENT_PX = 6.6, 13.0, 10.0
_DOT_PX = 6.0
# From a point to its label; the first needs no line back.
_GAPS_PX = (7.0, 16.0, 24.0, 34.0, 46.0, 60.0, 76.0, 94.0, 114.0, 136.0, 160.0, 186.0, 214.0)
# A label without a line back is closer to its own point than to any other by so much.
_CLOSER_PX = 5.0
# How much further away is as bad as a label over a curve, and as one over a label, a point or a line back.
_OVER_CURVE_PX, _BLOCKED_PX = 30.0, 1000.0
# Where a label may stand on a square around its point, right and down from -1 to 1, the most usual first.
_SIDES = (
    *((1.0, 0.0), (-1.0, 0.0), (0.0, -1.0), (0.0, 1.0), (1.0, -1.0), (1.0, 1.0), (-1.0, -1.0), (-1.0, 1.0)),
    *((1.0, -0.5), (1.0, 0.5), (-1.0, -0.5), (-1.0, 0.5), (0.5, -1.0), (0.5, 1.0), (-0.5, -1.0), (-0.5, 1.0)),
)
# After the first round every label may move again, as it then knows where all others are.
_ROUNDS = 3

Segment = tuple[Point, Point]


class Area(NamedTuple):
    """Is a rectangle in pixels; y runs down."""

    left: float
    top: float
    right: float
    bottom: float

    def touches(self, other: Area) -> bool:
        """Return whether the boxes have a point in common."""
        across = self.left <= other.right and other.left <= self.right
        return across and self.top <= other.bottom and other.top <= self.bottom

    def holds(self, other: Area) -> bool:
        """Return whether the other box is inside this one."""
        across = self.left <= other.left and other.right <= self.right
        return across and self.top <= other.top and other.bottom <= self.bottom

    def crossed_by(self, segment: Segment) -> bool:
        """Return whether a straight line has a point in the box."""
        (x, y), (to_x, to_y) = segment
        # The part of the line, from 0 to 1, that is between left and right, and of it between top and bottom.
        enters, leaves = 0.0, 1.0
        for start, end, low, high in ((x, to_x, self.left, self.right), (y, to_y, self.top, self.bottom)):
            if start == end:
                if not low <= start <= high:
                    return False
                continue
            first, last = sorted(((low - start) / (end - start), (high - start) / (end - start)))
            enters, leaves = max(enters, first), min(leaves, last)
        return enters <= leaves

    def nearest(self, point: Point) -> Point:
        """Return which point of the box is nearest to one that may be outside."""
        x, y = point
        return min(max(x, self.left), self.right), min(max(y, self.top), self.bottom)

    def distance(self, point: Point) -> float:
        """Return how far away a point is, 0 inside the box."""
        return math.dist(self.nearest(point), point)


class Spot(NamedTuple):
    """Is where a label is, and the line from its point if it does not stand next to it.

    The anchor is the end of the text that is nearest to the point: in a wider font it grows away from it.
    """

    x: float
    y: float
    anchor: str
    box: Area
    leader: Segment | None


def find_spots(
    labels: Sequence[str], points: Sequence[Point], curves: Sequence[Sequence[Point]], inside: Area
) -> list[Spot]:
    """Return the spot of each point's label: over no other label and no point, and over a curve only if it must be.

    A label without a line back is closer to its own point than to any other.
    """
    segments = [segment for curve in curves for segment in pairwise(curve)]
    spots: dict[int, Spot] = {}
    # Where points are close together there is the least choice, so their labels come first.
    crowded_first = sorted(range(len(points)), key=lambda each: _room(points[each], points))
    for index in crowded_first * _ROUNDS:
        others = [*points[:index], *points[index + 1 :]]
        placed = [spot for at, spot in spots.items() if at != index]
        spots[index] = _best_spot(labels[index], points[index], others, placed, segments, inside)
    return [spots[index] for index in range(len(points))]


def _best_spot(
    label: str,
    point: Point,
    others: Sequence[Point],
    placed: Sequence[Spot],
    segments: Sequence[Segment],
    inside: Area,
) -> Spot:
    """Return the spot with the least in its way, and of these the nearest to its point."""
    taken = [*(_dot_area(other) for other in others), *(spot.box for spot in placed)]
    leaders = [spot.leader for spot in placed if spot.leader]

    def cost(spot: Spot) -> float:
        over_curve = any(spot.box.crossed_by(segment) for segment in segments)
        blocked = _blocked(spot, taken, leaders) + 3 * (not inside.holds(spot.box))
        return spot.box.distance(point) + _OVER_CURVE_PX * over_curve + _BLOCKED_PX * blocked

    return min(_spots_around(label, point, others), key=cost)


def _room(point: Point, points: Sequence[Point]) -> float:
    """Return how far away the second nearest other point is."""
    return sorted(math.dist(point, other) for other in points)[:3][-1]


def _spots_around(label: str, point: Point, others: Sequence[Point]) -> Iterator[Spot]:
    """Yield where a label may be, without a line back only where nobody takes it for that of another point."""
    width, height = _LETTER_PX * len(label), _LINE_PX
    for gap in _GAPS_PX:
        for right, down in _SIDES:
            left = point[0] + right * (width / 2 + gap) - width / 2
            top = point[1] + down * (height / 2 + gap) - height / 2
            box = Area(left, top, left + width, top + height)
            anchors = {1.0: (box.left, "start"), -1.0: (box.right, "end")}
            x, anchor = anchors.get(right, (left + width / 2, "middle"))
            leader = (point, box.nearest(point)) if gap > _GAPS_PX[0] else None
            nearest = min((box.distance(other) for other in others), default=math.inf)
            if leader or nearest > box.distance(point) + _CLOSER_PX:
                yield Spot(x, top + _ASCENT_PX, anchor, box, leader)


def _blocked(spot: Spot, taken: Sequence[Area], leaders: Sequence[Segment]) -> int:
    """Return how often a label and its line back meet other labels, points and lines back.

    The label counts thrice: if it cannot be read, nobody asks where its line leads.
    """
    blocked = sum(spot.box.touches(box) for box in taken) + sum(spot.box.crossed_by(line) for line in leaders)
    if spot.leader is None:
        return 3 * blocked
    of_line = [
        *(box.crossed_by(spot.leader) for box in taken),
        *(_cross(spot.leader, line) for line in leaders),
    ]
    return 3 * blocked + sum(of_line)


def _dot_area(point: Point) -> Area:
    x, y = point
    return Area(x - _DOT_PX, y - _DOT_PX, x + _DOT_PX, y + _DOT_PX)


def _cross(one: Segment, other: Segment) -> bool:
    """Return whether each of two straight lines has its ends on different sides of the other."""

    def side(line: Segment, point: Point) -> float:
        (x, y), (to_x, to_y) = line
        return (to_x - x) * (point[1] - y) - (to_y - y) * (point[0] - x)

    apart = side(one, other[0]) * side(one, other[1]) < 0
    return apart and side(other, one[0]) * side(other, one[1]) < 0
