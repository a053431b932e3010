"""What a bank remembers, as one SVG drawing: from which second of the video its slots come, over the video's time."""

from __future__ import annotations

import html
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

_WIDTH, _LEFT, _RIGHT = 760.0, 60.0, 730.0
_TOP, _BOTTOM = 44.0, 300.0
_INK, _QUIET, _RULE, _PAPER, _HELD = "#16191d", "#67707c", "#e2e6eb", "#ffffff", "#12a150"
_MOST_BANDS, _SHADES = 30, 12


class BankHistory(NamedTuple):
    """What a bank held after every block. All in seconds of the video."""

    ends: Sequence[float]  # when the blocks end
    held: Sequence[Mapping[float, int]]  # when the slots' holders first appeared -> slots
    cuts: Sequence[float] = ()  # when the prior was cleared


class _Band(NamedTuple):
    """Slots of one span of sources that stay about as many for a while."""

    start: float
    end: float
    source: int
    shade: int


def draw_bank(title: str, history: BankHistory) -> str:
    """Left to right the video's time, bottom to top when a slot's holder was first seen; darker is more slots.

    A bank that keeps has level bands that run to the right edge; one that only follows is a diagonal.
    """
    span = max([*history.ends, 1e-6])
    band_s = next((s for s in (0.5, 1, 2, 5, 10, 30) if span / s <= _MOST_BANDS), span / _MOST_BANDS)
    height = _BOTTOM - _TOP

    def x(second: float) -> float:
        return _LEFT + second / span * (_RIGHT - _LEFT)

    def y(second: float) -> float:
        return _BOTTOM - min(second / span, 1.0) * height

    size = f'viewBox="0 0 {_WIDTH:.0f} 340" width="{_WIDTH:.0f}" height="340"'
    font = "system-ui, -apple-system, Segoe UI, Roboto, sans-serif"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" font-family="{font}" font-size="12">',
        f'<rect width="100%" height="100%" rx="10" fill="{_PAPER}"/>',
        _text(16, 24, title, "start", _INK, 15),
        _text(_RIGHT, 24, "slots by the second they first appeared", "end"),
    ]
    for band in _bands(history, band_s):
        low, high = y(band.source * band_s), y((band.source + 1) * band_s)
        parts.append(
            f'<rect x="{x(band.start):.1f}" y="{high:.1f}" width="{x(band.end) - x(band.start):.1f}" '
            f'height="{low - high:.1f}" fill="{_HELD}" fill-opacity="{band.shade / _SHADES:.2f}"/>'
        )
    parts += [_line(x(cut), _TOP, x(cut), _BOTTOM, _QUIET, ' stroke-dasharray="4 4"') for cut in history.cuts]
    parts += [_line(_LEFT, _BOTTOM, _RIGHT, _BOTTOM, _RULE), _line(x(0), y(0), x(span), y(span), _RULE)]
    for tick in _ticks(span):
        parts.append(_text(x(tick), _BOTTOM + 18, f"{tick:g}", "middle"))
        parts.append(_text(_LEFT - 8, y(tick) + 4, f"{tick:g}", "end"))
    parts.append(_text(_RIGHT, _BOTTOM + 34, "seconds of the video", "end"))
    return "".join([*parts, "</svg>"])


def _bands(history: BankHistory, band_s: float) -> Iterator[_Band]:
    """Cells of source by block, equal neighbours joined; shade 1 to 12 of the largest share."""
    counts = [
        {row: sum(n for s, n in held.items() if int(s // band_s) == row) for row in {int(s // band_s) for s in held}}
        for held in history.held
    ]  # fmt: skip
    most = max((n for each in counts for n in each.values()), default=1)
    for source in sorted({row for each in counts for row in each}):
        open_band: _Band | None = None
        # What a block brought is there from its end on, until the next block's end.
        for start, end, each in zip(history.ends, [*history.ends[1:], history.ends[-1]], counts, strict=True):
            # By the root: the opening fills the whole bank for a moment, and all else would pale beside it.
            shade = math.ceil(math.sqrt(each.get(source, 0) / most) * _SHADES)
            if open_band is not None and shade == open_band.shade:
                open_band = open_band._replace(end=end)
                continue
            if open_band is not None and open_band.shade:
                yield open_band
            open_band = _Band(start, end, source, shade)
        if open_band is not None and open_band.shade:
            yield open_band


def _ticks(span: float) -> list[float]:
    step = next((s for s in (0.5, 1, 2, 5, 10, 30, 60) if span / s <= 10), span / 10)
    return [index * step for index in range(int(span / step + 1e-9) + 1)]


def _line(x1: float, y1: float, x2: float, y2: float, colour: str, more: str = "") -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}"{more}/>'


def _text(x: float, y: float, text: str, anchor: str, fill: str = _QUIET, size: int = 12) -> str:
    said = html.escape(text)
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{fill}" font-size="{size}">{said}</text>'
    )
