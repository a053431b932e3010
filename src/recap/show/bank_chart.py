"""What a bank remembers, as one SVG drawing: from which second of the video its slots come, over the video's time."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from recap.show import svg
from recap.show.palette import MEMORY_COLOURS

_WIDTH, _LEFT, _RIGHT = 760.0, 60.0, 730.0
_TOP, _BOTTOM = 44.0, 300.0
_MOST_BANDS, _SHADES = 30, 12


class BankHistory(NamedTuple):
    """What was in a bank after every block. All in seconds of the video."""

    ends: Sequence[float]  # when the blocks end
    held: Sequence[Mapping[float, int]]  # when the content of slots first appeared -> slots
    cuts: Sequence[float] = ()  # when the prior was cleared


class _Band(NamedTuple):
    """Slots of one span of sources that stay about as many for a while."""

    start: float
    end: float
    source: int
    shade: int


def draw_bank(title: str, history: BankHistory) -> str:
    """Left to right the video's time, bottom to top when a slot's content was first seen; darker is more slots.

    A bank that keeps has level bands that run to the right edge; one that only follows is a diagonal.
    """
    span = max([*history.ends, 1e-6])
    band_s = next((s for s in (0.5, 1, 2, 5, 10, 30) if span / s <= _MOST_BANDS), span / _MOST_BANDS)
    x, y = svg.scale(0, span, _LEFT, _RIGHT), svg.scale(0, span, _BOTTOM, _TOP)
    parts = [svg.title(title), svg.note(_RIGHT, 24, "slots by the second they first appeared", "end")]
    for band in _bands(history, band_s):
        top, bottom = y(min((band.source + 1) * band_s, span)), y(min(band.source * band_s, span))
        corners = x(band.start), top, x(band.end), bottom
        parts.append(svg.bar(*corners, fill=MEMORY_COLOURS["recap"], fill_opacity=band.shade / _SHADES))
    parts += [
        svg.line(x(cut), _TOP, x(cut), _BOTTOM, stroke=svg.QUIET, stroke_dasharray="4 4")
        for cut in history.cuts
    ]
    parts.append(svg.line(_LEFT, _BOTTOM, _RIGHT, _BOTTOM, stroke=svg.RULE))
    parts.append(svg.line(_LEFT, _BOTTOM, _RIGHT, _TOP, stroke=svg.RULE))
    for tick in svg.round_ticks(0, span, 10):
        parts.append(svg.note(x(tick), _BOTTOM + 18, f"{tick:g}", "middle"))
        parts.append(svg.note(_LEFT - 8, y(tick) + 4, f"{tick:g}", "end"))
    parts.append(svg.note(_RIGHT, _BOTTOM + 34, "seconds of the video", "end"))
    return svg.drawing(_WIDTH, 340, parts)


def _bands(history: BankHistory, band_s: float) -> Iterator[_Band]:
    """Cells of source by block, equal neighbours joined; shade 1 to 12 of the largest share."""
    counts: list[Counter[int]] = []
    for slots in history.held:
        counts.append(Counter())
        for second, number in slots.items():
            counts[-1][int(second // band_s)] += number
    most = max((n for each in counts for n in each.values()), default=1)
    for source in sorted({source for each in counts for source in each}):
        open_band: _Band | None = None
        # What a block brought is there from its end on, until the next block's end.
        for start, end, each in zip(history.ends, [*history.ends[1:], history.ends[-1]], counts, strict=True):
            # By the root: the opening fills the whole bank for a moment, and all else would be too pale next to it.
            shade = math.ceil(math.sqrt(each[source] / most) * _SHADES)
            if open_band is not None and shade == open_band.shade:
                open_band = open_band._replace(end=end)
                continue
            if open_band is not None and open_band.shade:
                yield open_band
            open_band = _Band(start, end, source, shade)
        if open_band is not None and open_band.shade:
            yield open_band
