"""Results as SVG drawings that need nothing around them: intervals by row, and curves over time."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from typing import NamedTuple

from recap.show.side_by_side import colour_of

_WIDTH, _LEFT, _RIGHT = 760.0, 190.0, 730.0
_ROW_PX, _TOP = 30.0, 44.0
_INK, _QUIET, _RULE, _PAPER = "#16191d", "#67707c", "#e2e6eb", "#ffffff"


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
    height = _TOP + _ROW_PX * len(bars) + 34
    bottom = _TOP + _ROW_PX * len(bars)

    def at(value: float) -> float:
        return _LEFT + (value - low) / (high - low) * (_RIGHT - _LEFT)

    parts = [_open(height), _text(16, 24, title, "start", _INK, 15)]
    for tick in _ticks(low, high):
        parts.append(_stroke(at(tick), _TOP - 8, at(tick), bottom, _RULE))
        parts.append(_text(at(tick), bottom + 18, f"{tick:g}", "middle"))
    for index, bar in enumerate(bars):
        y, colour = _TOP + _ROW_PX * (index + 0.5), colour_of(index)
        parts.append(_text(_LEFT - 12, y + 4, bar.label, "end", _INK))
        if bar.mean == bar.mean:
            if bar.low == bar.low:  # few prompts give no interval
                parts.append(_stroke(at(bar.low), y, at(bar.high), y, colour, 3))
            parts.append(f'<circle cx="{at(bar.mean):.1f}" cy="{y:.1f}" r="5.5" fill="{colour}"/>')
        if bar.paper is not None:
            x = at(bar.paper)
            points = f"{x:.1f},{y - 7:.1f} {x + 6:.1f},{y:.1f} {x:.1f},{y + 7:.1f} {x - 6:.1f},{y:.1f}"
            parts.append(f'<polygon points="{points}" fill="none" stroke="{_INK}" stroke-width="1.4"/>')
    if any(bar.paper is not None for bar in bars):
        parts.append(_text(_RIGHT, 24, "◇ the paper's, of its own models and judges", "end"))
    return "".join([*parts, "</svg>"])


def line_chart(title: str, lines: Sequence[Line], x_label: str) -> str:
    """A curve per row, with whiskers where intervals are known; gaps where there is no value."""
    xs = [x for line in lines for x in line.x]
    ends = [end for line in lines for span in line.spans for end in span if end == end]
    low, high = _range([y for line in lines for y in line.y if y is not None] + ends)
    first, last = min(xs, default=0.0), max(xs, default=1.0)
    span = max(last - first, 1e-9)
    left, bottom = 60.0, 300.0

    def place(x: float, y: float) -> tuple[float, float]:
        return left + (x - first) / span * (_RIGHT - left), bottom - (y - low) / (high - low) * (
            bottom - _TOP
        )

    parts = [_open(bottom + 60), _text(16, 24, title, "start", _INK, 15)]
    for tick in _ticks(low, high):
        y = place(first, tick)[1]
        parts += [_stroke(left, y, _RIGHT, y, _RULE), _text(left - 8, y + 4, f"{tick:g}", "end")]
    for tick in _ticks(first, last):
        parts.append(_text(place(tick, low)[0], bottom + 18, f"{tick:g}", "middle"))
    parts.append(_text(_RIGHT, bottom + 34, x_label, "end"))
    for index, line in enumerate(lines):
        colour = colour_of(index)
        for run in _runs(line):
            places = [place(*point) for point in run]
            if len(places) == 1:
                parts.append(
                    f'<circle cx="{places[0][0]:.1f}" cy="{places[0][1]:.1f}" r="3.5" fill="{colour}"/>'
                )
                continue
            points = " ".join(f"{a:.1f},{b:.1f}" for a, b in places)
            parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2.2"/>')
        for x, (under, over) in zip(line.x, line.spans, strict=False):
            if under == under:
                across, top = place(x, over)
                across += 3 * (
                    index - (len(lines) - 1) / 2
                )  # those of several curves stand beside each other
                parts.append(_stroke(across, top, across, place(x, under)[1], colour, 1.4))
        parts.append(_text(left + 150 * index, bottom + 52, f"● {line.label}", "start", colour))
    return "".join([*parts, "</svg>"])


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


def _ticks(low: float, high: float) -> list[float]:
    span = max(high - low, 1e-9)
    size = 10 ** math.floor(math.log10(span / 4))
    step = next(size * m for m in (1, 2, 5, 10) if span / (size * m) <= 6)
    count = math.floor(high / step) - math.ceil(low / step) + 1
    return [round((math.ceil(low / step) + i) * step, 10) for i in range(max(0, count))]


def _open(height: float) -> str:
    size = f'viewBox="0 0 {_WIDTH:.0f} {height:.0f}" width="{_WIDTH:.0f}" height="{height:.0f}"'
    font = "system-ui, -apple-system, Segoe UI, Roboto, sans-serif"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" font-family="{font}" font-size="12">'
        f'<rect width="100%" height="100%" rx="10" fill="{_PAPER}"/>'
    )


def _stroke(x1: float, y1: float, x2: float, y2: float, colour: str, width: float = 1) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}" stroke-width="{width}"/>'


def _text(x: float, y: float, text: str, anchor: str, fill: str = _QUIET, size: int = 12) -> str:
    said = html.escape(text)
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{fill}" font-size="{size}">{said}</text>'
    )
