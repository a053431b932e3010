"""Results as SVG drawings that need nothing around them: intervals by row, and curves over time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from recap.show import svg
from recap.show.palette import colours_of

_WIDTH, _LEFT, _RIGHT = 760.0, 190.0, 730.0
_ROW_PX, _TOP = 30.0, 44.0


class Bar(NamedTuple):
    label: str
    mean: float
    low: float
    high: float
    paper: float | None = None


class Line(NamedTuple):
    label: str
    x: Sequence[float]
    y: Sequence[float | None]
    spans: Sequence[tuple[float, float]] = ()  # the interval of every point, nan where there is none


def interval_chart(title: str, bars: Sequence[Bar]) -> str:
    """A dot with its interval per row; a hollow diamond where the paper's number is."""
    values = [v for bar in bars for v in (bar.low, bar.high, bar.mean, bar.paper) if v is not None and v == v]
    low, high = _range(values)
    bottom = _TOP + _ROW_PX * len(bars)
    at = svg.scale(low, high, _LEFT, _RIGHT)
    parts = [svg.title(title)]
    for tick in svg.round_ticks(low, high):
        parts.append(svg.line(at(tick), _TOP - 8, at(tick), bottom, stroke=svg.RULE))
        parts.append(svg.note(at(tick), bottom + 18, f"{tick:g}", "middle"))
    for index, (bar, colour) in enumerate(zip(bars, colours_of([b.label for b in bars]), strict=True)):
        y = _TOP + _ROW_PX * (index + 0.5)
        parts.append(svg.text(_LEFT - 12, y + 4, bar.label, "end", fill=svg.INK))
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


def line_chart(title: str, lines: Sequence[Line], x_label: str) -> str:
    """A curve per row, with whiskers where intervals are known; gaps where there is no value."""
    xs = [x for line in lines for x in line.x]
    ends = [end for line in lines for span in line.spans for end in span if end == end]
    low, high = _range([y for line in lines for y in line.y if y is not None] + ends)
    first, last = min(xs, default=0.0), max(xs, default=1.0)
    left, bottom = 60.0, 300.0
    across, up = svg.scale(first, last, left, _RIGHT), svg.scale(low, high, bottom, _TOP)
    parts = [svg.title(title)]
    for tick in svg.round_ticks(low, high):
        parts.append(svg.line(left, up(tick), _RIGHT, up(tick), stroke=svg.RULE))
        parts.append(svg.note(left - 8, up(tick) + 4, f"{tick:g}", "end"))
    for tick in svg.round_ticks(first, last):
        parts.append(svg.note(across(tick), bottom + 18, f"{tick:g}", "middle"))
    parts.append(svg.note(_RIGHT, bottom + 34, x_label, "end"))
    for index, (line, colour) in enumerate(
        zip(lines, colours_of([each.label for each in lines]), strict=True)
    ):
        for run in _runs(line):
            points = [(across(x), up(y)) for x, y in run]
            single = len(points) == 1
            parts.append(
                svg.dot(*points[0], 3.5, colour)
                if single
                else svg.polyline(points, stroke=colour, stroke_width=2.2)
            )
        # Those of several curves stand next to each other.
        aside = 3 * (index - (len(lines) - 1) / 2)
        for x, (under, over) in zip(line.x, line.spans, strict=False):
            if under == under:
                at = across(x) + aside
                parts.append(svg.line(at, up(over), at, up(under), stroke=colour, stroke_width=1.4))
        parts.append(svg.text(left + 150 * index, bottom + 52, f"● {line.label}", fill=colour))
    return svg.drawing(_WIDTH, bottom + 60, parts)


def _runs(line: Line) -> list[list[tuple[float, float]]]:
    runs: list[list[tuple[float, float]]] = [[]]
    for x, y in zip(line.x, line.y, strict=True):
        if y is None:
            runs.append([])
        else:
            runs[-1].append((x, y))
    return [run for run in runs if run]


def _range(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values, default=0.0), max(values, default=1.0)
    room = (high - low) * 0.08 or 0.05 * max(abs(high), 1.0)
    return low - room, high + room
