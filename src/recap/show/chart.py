"""This module draws results as SVG that needs nothing around it: intervals, curves, and what a bank remembers."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from statistics import quantiles
from typing import NamedTuple

from recap.show import svg
from recap.show.labels import Area, Spot, find_spots
from recap.show.palette import MEMORY_COLOURS, colours_of

_WIDTH, _LEFT, _RIGHT = 760.0, 60.0, 730.0
_TOP, _BOTTOM = 44.0, 300.0
# Intervals leave room for the labels of their lines.
_LABELS_PX, _LINE_PX = 190.0, 30.0
_PANELS_TOP, _PANEL_LINE_PX = 62.0, 20.0
_MOST_BANDS, _SHADES = 30, 12
_LABELS_A_LINE = 4
_ARROW_PX = 6.0
# An axis leaves places out if more than two thirds of it were there for them; of fewer places, most is no notion.
_SQUEEZE, _FEWEST_OF_MOST = 3, 5


class Bar(NamedTuple):
    """Is a value with its interval, and the paper's number."""

    label: str
    mean: float
    low: float
    high: float
    paper: float | None = None


class Line(NamedTuple):
    """Holds the points of a curve; `spans` are their intervals, nan where there is none."""

    label: str
    x: Sequence[float]
    y: Sequence[float | None]
    spans: Sequence[tuple[float, float]] = ()


class Place(NamedTuple):
    """Is a point by two measures, each a mean, the low and the high end of its interval."""

    label: str
    x: tuple[float, float, float]
    y: tuple[float, float, float]
    # Places of one path are joined in their order, and have one colour.
    path: str = ""


class BankHistory(NamedTuple):
    """Lists what was in a bank after every block, in seconds of the video."""

    # When the blocks end.
    ends: Sequence[float]
    # When the content of slots first appeared -> slots.
    slots: Sequence[Mapping[float, int]]
    # When the prior was cleared.
    cuts: Sequence[float] = ()


def interval_chart(title: str, bars: Sequence[Bar]) -> str:
    """Draw a dot with its interval per label, and a hollow diamond where the paper's number is."""
    values = [v for bar in bars for v in (bar.low, bar.high, bar.mean, bar.paper) if v is not None and v == v]
    low, high = _range(values)
    bottom = _TOP + _LINE_PX * len(bars)
    at = svg.scale(low, high, _LABELS_PX, _RIGHT)
    parts = [svg.title(title)]
    for tick in svg.round_ticks(low, high):
        parts.append(svg.line(at(tick), _TOP - 8, at(tick), bottom, stroke=svg.RULE))
        parts.append(svg.note(at(tick), bottom + 18, f"{tick:g}", "middle"))
    for index, (bar, colour) in enumerate(zip(bars, colours_of([b.label for b in bars]), strict=True)):
        y = _TOP + _LINE_PX * (index + 0.5)
        parts.append(svg.text(_LABELS_PX - 12, y + 4, bar.label, "end", fill=svg.INK))
        if bar.mean == bar.mean:
            # Few prompts give no interval.
            if bar.low == bar.low:
                parts.append(svg.line(at(bar.low), y, at(bar.high), y, stroke=colour, stroke_width=3))
            parts.append(svg.dot(at(bar.mean), y, 5.5, colour))
        if bar.paper is not None:
            x = at(bar.paper)
            diamond = [(x, y - 7), (x + 6, y), (x, y + 7), (x - 6, y)]
            parts.append(svg.polyline(diamond, "polygon", stroke=svg.INK, stroke_width=1.4))
    if any(bar.paper is not None for bar in bars):
        parts.append(svg.note(_RIGHT, 24, "◇ the paper's, of its own models and judges", "end"))
    return svg.drawing(_WIDTH, bottom + 34, parts)


def panel_chart(title: str, panels: Mapping[str, Sequence[Bar]], marked: str = "") -> str:
    """Draw several measures side by side, a line for each label, with the interval of each; `marked` stands out.

    Every panel has its own axis, and an upright line where the marked label lies.
    """
    labels = list(dict.fromkeys(bar.label for bars in panels.values() for bar in bars))
    bottom, width = _PANELS_TOP + _PANEL_LINE_PX * len(labels), (_RIGHT - _LABELS_PX) / max(len(panels), 1)
    parts, middle = [svg.title(title)], {}
    for index, (label, colour) in enumerate(zip(labels, colours_of(labels), strict=True)):
        middle[label] = y = _PANELS_TOP + _PANEL_LINE_PX * (index + 0.5)
        weight = "bold" if label == marked else "normal"
        parts.append(svg.text(_LABELS_PX - 12, y + 4, label, "end", fill=colour, font_weight=weight))
    colours = dict(zip(labels, colours_of(labels), strict=True))
    for index, (name, bars) in enumerate(panels.items()):
        left, right = _LABELS_PX + width * index, _LABELS_PX + width * (index + 1) - 26
        low, high = _range([v for bar in bars for v in (bar.low, bar.high, bar.mean) if v == v])
        at = svg.scale(low, high, left, right)
        parts.append(svg.note((left + right) / 2, _PANELS_TOP - 10, name, "middle"))
        for tick in svg.round_ticks(low, high, 3):
            parts.append(svg.line(at(tick), _PANELS_TOP, at(tick), bottom, stroke=svg.RULE))
            parts.append(svg.note(at(tick), bottom + 16, f"{tick:g}", "middle"))
        for bar in bars:
            if bar.label == marked and bar.mean == bar.mean:
                x = at(bar.mean)
                parts.append(svg.line(x, _PANELS_TOP, x, bottom, stroke=svg.QUIET, stroke_dasharray="3 3"))
        for bar in (each for each in bars if each.mean == each.mean):
            y, colour = middle[bar.label], colours[bar.label]
            if bar.low == bar.low:
                parts.append(svg.line(at(bar.low), y, at(bar.high), y, stroke=colour, stroke_width=2))
            parts.append(svg.dot(at(bar.mean), y, 3.5, colour))
    return svg.drawing(_WIDTH, bottom + 30, parts)


def line_chart(title: str, lines: Sequence[Line], x_label: str) -> str:
    """Draw a curve per line, with whiskers where intervals are known and gaps where there is no value."""
    xs = [x for line in lines for x in line.x]
    ends = [end for line in lines for span in line.spans for end in span if end == end]
    low, high = _range([y for line in lines for y in line.y if y is not None] + ends)
    first, last = min(xs, default=0.0), max(xs, default=1.0)
    across, up = svg.scale(first, last, _LEFT, _RIGHT), svg.scale(low, high, _BOTTOM, _TOP)
    parts = [svg.title(title)]
    for tick in svg.round_ticks(low, high):
        parts.append(svg.line(_LEFT, up(tick), _RIGHT, up(tick), stroke=svg.RULE))
        parts.append(svg.note(_LEFT - 8, up(tick) + 4, f"{tick:g}", "end"))
    for tick in svg.round_ticks(first, last):
        parts.append(svg.note(across(tick), _BOTTOM + 18, f"{tick:g}", "middle"))
    parts.append(svg.note(_RIGHT, _BOTTOM + 34, x_label, "end"))
    for index, (line, colour) in enumerate(zip(lines, colours_of([n.label for n in lines]), strict=True)):
        known = groupby(zip(line.x, line.y, strict=True), key=lambda point: point[1] is not None)
        for points in (
            [(across(x), up(y)) for x, y in run if y is not None] for there, run in known if there
        ):
            curve = svg.polyline(points, stroke=colour, stroke_width=2.2)
            parts.append(curve if len(points) > 1 else svg.dot(*points[0], 3.5, colour))
        # The whiskers of several curves stand next to each other.
        aside = 3 * (index - (len(lines) - 1) / 2)
        for x, (under, over) in zip(line.x, line.spans, strict=False):
            if under == under:
                at = across(x) + aside
                parts.append(svg.line(at, up(over), at, up(under), stroke=colour, stroke_width=1.4))
        down, right = divmod(index, _LABELS_A_LINE)
        label = f"● {line.label}"
        parts.append(svg.text(_LEFT + 150 * right, _BOTTOM + 52 + 18 * down, label, fill=colour))
    return svg.drawing(_WIDTH, _BOTTOM + 60 + 18 * max(0, (len(lines) - 1) // _LABELS_A_LINE), parts)


def plane_chart(
    title: str, places: Sequence[Place], x_label: str, y_label: str, *, front: bool = False
) -> str:
    """Draw places in a plane with the intervals of both measures as a cross, and a line through those of a path.

    With `front` a wide line joins the places that no other exceeds in both measures. Places far away from all others
    are arrows at the border, with their values. Later points of a path over a number are labelled with it alone.
    """
    left, right, top, bottom = _LEFT, _RIGHT, _TOP + 16, _TOP + 456
    known = [place for place in places if place.x[0] == place.x[0] and place.y[0] == place.y[0]]
    first, last = _range_of_most([place.x for place in known])
    low, high = _range_of_most([place.y for place in known])
    across, up = svg.scale(first, last, left, right), svg.scale(low, high, bottom, top)

    def at(x: float, y: float) -> svg.Point:
        """Return where a point is in the drawing; one that the axes leave out is at the border."""
        inner_x = min(max(across(x), left + _ARROW_PX), right - _ARROW_PX)
        return inner_x, min(max(up(y), top + _ARROW_PX), bottom - _ARROW_PX)

    parts = [svg.title(title), svg.note(left, top - 12, f"↑ {y_label}")]
    for tick in svg.round_ticks(low, high):
        parts.append(svg.line(left, up(tick), right, up(tick), stroke=svg.RULE))
        parts.append(svg.note(left - 8, up(tick) + 4, f"{tick:g}", "end"))
    for tick in svg.round_ticks(first, last):
        parts.append(svg.line(across(tick), top, across(tick), bottom, stroke=svg.RULE))
        parts.append(svg.note(across(tick), bottom + 18, f"{tick:g}", "middle"))
    parts.append(svg.note(right, bottom + 34, f"{x_label} →", "end"))
    if front:
        steps = [at(place.x[0], place.y[0]) for place in not_exceeded(known)]
        parts.append(svg.polyline(steps, stroke=svg.RULE, stroke_width=9, stroke_linejoin="round"))
    groups = list(dict.fromkeys(place.path or place.label for place in known))
    colours = dict(zip(groups, colours_of(groups), strict=True))
    inks = [colours[place.path or place.label] for place in known]
    parts += _crosses(known, inks, at)
    if any(end == end for place in known for end in (place.x[1], place.y[1])):
        parts.append(svg.note(right, top - 12, "pale crosses: intervals", "end"))
    curves = []
    for path in dict.fromkeys(place.path for place in known if place.path):
        curves.append([at(place.x[0], place.y[0]) for place in known if place.path == path])
        parts.append(svg.polyline(curves[-1], stroke=colours[path], stroke_width=1.6, stroke_dasharray="5 4"))
    points, labels = [at(place.x[0], place.y[0]) for place in known], _short_labels(known)
    for index, (place, colour) in enumerate(zip(known, inks, strict=True)):
        sides = _side(place.x[0], first, last), -_side(place.y[0], low, high)
        if any(sides):
            measured = zip((x_label, y_label), (place.x, place.y), sides, strict=True)
            values = [f"{name} {mean:.3g}" for name, (mean, *_), side in measured if side]
            labels[index] = f"{place.label}: {', '.join(values)}"
            parts.append(_arrow(points[index], sides, colour))
        else:
            parts.append(svg.dot(*points[index], 4.5, colour))
    spots = find_spots(labels, points, curves, Area(left, top, _WIDTH, bottom))
    parts += [_label(*each) for each in zip(labels, spots, inks, strict=True)]
    return svg.drawing(_WIDTH, bottom + 50, parts)


def _crosses(
    places: Sequence[Place], colours: Sequence[str], at: Callable[[float, float], svg.Point]
) -> Iterator[str]:
    """Yield the intervals of places, pale, as points and labels are read first."""
    for place, colour in zip(places, colours, strict=True):
        (x, *x_ends), (y, *y_ends) = place.x, place.y
        if x_ends[0] == x_ends[0]:
            yield svg.line(*at(x_ends[0], y), *at(x_ends[1], y), stroke=colour, stroke_opacity=0.2)
        if y_ends[0] == y_ends[0]:
            yield svg.line(*at(x, y_ends[0]), *at(x, y_ends[1]), stroke=colour, stroke_opacity=0.2)


def _label(label: str, spot: Spot, colour: str) -> str:
    """Return a label with the line back to its point; on an outline of paper it can be read over other lines."""
    outline: dict[str, str | float] = {"stroke": svg.PAPER, "stroke_width": 3, "paint_order": "stroke"}
    words = svg.text(spot.x, spot.y, label, spot.anchor, fill=colour, **outline)
    if spot.leader is None:
        return words
    return svg.line(*spot.leader[0], *spot.leader[1], stroke=colour, stroke_width=0.8) + words


def _short_labels(places: Sequence[Place]) -> list[str]:
    """Return the labels of places; 'sink, lambda 5' is '5' if the path has a place 'sink, lambda 1' before it."""
    labels, begun = [], set()
    for place in places:
        words, _, last = place.label.rpartition(" ")
        counted = bool(place.path and words) and last.replace(".", "", 1).isdigit()
        labels.append(last if counted and (place.path, words) in begun else place.label)
        if counted:
            begun.add((place.path, words))
    return labels


def _side(value: float, low: float, high: float) -> int:
    """Return -1 below an axis, 1 above it, 0 on it."""
    return (value > high) - (value < low)


def _arrow(middle: svg.Point, sides: tuple[int, int], colour: str) -> str:
    """Return a triangle that points to the right or the left and down or up, by the signs of `sides`."""
    (x, y), (right, down) = middle, (side / math.hypot(*sides) * _ARROW_PX for side in sides)
    corners = [
        (x + right, y + down),
        (x - right - down, y - down + right),
        (x - right + down, y - down - right),
    ]
    return svg.polyline(corners, "polygon", fill=colour)


def not_exceeded(places: Sequence[Place]) -> list[Place]:
    """Return the places of which no other is higher in one measure and not lower in the other, from left to right."""

    def exceeds(one: Place, other: Place) -> bool:
        at, than = (one.x[0], one.y[0]), (other.x[0], other.y[0])
        return at != than and all(a >= b for a, b in zip(at, than, strict=True))

    kept = [place for place in places if not any(exceeds(other, place) for other in places)]
    return sorted(kept, key=lambda place: place.x[0])


def _range(values: Sequence[float]) -> tuple[float, float]:
    """Return the ends of an axis, with room beyond the lowest and the highest value."""
    low, high = min(values, default=0.0), max(values, default=1.0)
    room = (high - low) * 0.08 or 0.05 * max(abs(high), 1.0)
    return low - room, high + room


def _range_of_most(spans: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    """Return the ends of an axis for means and their intervals, without the few means that would squeeze all others.

    These lie outside the quartiles by three times what is between them.
    """

    def reach(some: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
        return _range([value for span in some for value in span if value == value])

    if len(spans) < _FEWEST_OF_MOST:
        return reach(spans)
    lower, _, upper = quantiles([span[0] for span in spans], method="inclusive")
    away = 3 * (upper - lower)
    most = reach([span for span in spans if lower - away <= span[0] <= upper + away])
    every = reach(spans)
    return most if (most[1] - most[0]) * _SQUEEZE < every[1] - every[0] else every


def draw_bank(title: str, history: BankHistory) -> str:
    """Draw from which second of the video a bank's slots come, over the video's time; darker is more slots.

    A bank that keeps has level bands that run to the right edge; one that only follows is a diagonal.
    """
    span = max([*history.ends, 1e-6])
    band_s = next((s for s in (0.5, 1, 2, 5, 10, 30) if span / s <= _MOST_BANDS), span / _MOST_BANDS)
    x, y = svg.scale(0, span, _LEFT, _RIGHT), svg.scale(0, span, _BOTTOM, _TOP)
    parts = [svg.title(title), svg.note(_RIGHT, 24, "slots by the second they first appeared", "end")]
    for start, end, source, shade in _bands(history, band_s):
        top, bottom = y(min((source + 1) * band_s, span)), y(min(source * band_s, span))
        colour, opacity = MEMORY_COLOURS["recap"], shade / _SHADES
        parts.append(svg.bar(x(start), top, x(end), bottom, fill=colour, fill_opacity=opacity))
    for cut in history.cuts:
        parts.append(svg.line(x(cut), _TOP, x(cut), _BOTTOM, stroke=svg.QUIET, stroke_dasharray="4 4"))
    parts.append(svg.line(_LEFT, _BOTTOM, _RIGHT, _BOTTOM, stroke=svg.RULE))
    parts.append(svg.line(_LEFT, _BOTTOM, _RIGHT, _TOP, stroke=svg.RULE))
    for tick in svg.round_ticks(0, span, 10):
        parts.append(svg.note(x(tick), _BOTTOM + 18, f"{tick:g}", "middle"))
        parts.append(svg.note(_LEFT - 8, y(tick) + 4, f"{tick:g}", "end"))
    parts.append(svg.note(_RIGHT, _BOTTOM + 34, "seconds of the video", "end"))
    return svg.drawing(_WIDTH, 340, parts)


def _bands(history: BankHistory, band_s: float) -> Iterator[tuple[float, float, int, int]]:
    """Yield (start, end, span of sources, shade) of slots that stay about as many; shades run from 1 to 12."""
    counts: list[Counter[int]] = []
    for slots in history.slots:
        counts.append(Counter())
        for second, number in slots.items():
            counts[-1][int(second // band_s)] += number
    most = max((n for each in counts for n in each.values()), default=1)
    # What a block brought is there from its end on, until the next block's end.
    spans = list(zip(history.ends, [*history.ends[1:], history.ends[-1]], counts, strict=True))
    for source in sorted({source for each in counts for source in each}):
        # By the root: the opening fills the whole bank for a moment, and all else would be too pale next to it.
        shades = [(a, b, math.ceil(math.sqrt(each[source] / most) * _SHADES)) for a, b, each in spans]
        for shade, equal in groupby(shades, key=lambda cell: cell[2]):
            (start, end, _), *others = equal
            if shade:
                yield start, others[-1][1] if others else end, source, shade
