"""When things were new, and how the bank filled, as one SVG drawing that follows the page's colours."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from recap.show import svg

_WIDTH, _LEFT, _RIGHT = 1000.0, 46.0, 954.0
_TOP, _MIDDLE, _GAP, _BOTTOM = 22.0, 128.0, 46.0, 240.0


@dataclass(frozen=True, slots=True)
class Timeline:
    """What the drawing shows. Times are in seconds."""

    duration: float
    fired: Sequence[tuple[float, int]]  # (time, tokens that fired), a pair per frame
    bank: Sequence[tuple[float, float, float]]  # (time, share of slots filled, lowest score if full or 0)


def draw_timeline(timeline: Timeline) -> str:
    """Above: new tokens per second. Below: how full the bank is, and the score a newcomer must beat."""
    span = max(timeline.duration, 1e-6)
    bin_s = next((width for width in (0.25, 0.5, 1, 2, 5, 10, 30) if span / width <= 130), span / 130)
    rates = _rates(timeline, bin_s)
    peak = _round_up(max([*rates, 1.0]))
    x, up = svg.scale(0, span, _LEFT, _RIGHT), svg.scale(0, peak, _MIDDLE, _TOP)
    parts = [
        svg.text(_LEFT + 5, _TOP - 8, f"new tokens per second (bars of {bin_s:g} s)"),
        *_axis(_TOP, _MIDDLE, f"{peak:g}", "0"),
    ]
    for index, rate in enumerate(rates):
        left, right = x(index * bin_s), x(span if index == len(rates) - 1 else (index + 1) * bin_s)
        if rate > 0:
            right = max(right - 1.2, left + 0.6)
            parts.append(svg.bar(left, up(rate), right, _MIDDLE, class_="bar", rx=1))
    parts += _bank(timeline, span)
    for tick in svg.round_ticks(0, span, 12):
        parts.append(svg.text(x(tick), _BOTTOM + 18, f"{tick:g} s", "middle"))
    parts.append(svg.line(_LEFT, _TOP, _LEFT, _BOTTOM, id="playhead", class_="playhead"))
    attributes = {
        "id": "timeline",
        "class": "chart",
        "viewBox": f"0 0 {_WIDTH:.0f} 268",
        "role": "img",
        "aria_label": "New tokens per second and the state of the bank over time",
        # The script of the page puts the playhead by these, so they are not rounded.
        "data_left": str(_LEFT / _WIDTH),
        "data_right": str(_RIGHT / _WIDTH),
    }
    return svg.element("svg", "".join(parts), **attributes)


def _rates(timeline: Timeline, bin_s: float) -> list[float]:
    """Tokens per second in every bin; the last one takes what is left, half to one and a half bins."""
    count = max(1, round(timeline.duration / bin_s))
    totals = [0.0] * count
    for when, fired in timeline.fired:
        totals[min(count - 1, int(when / bin_s))] += fired
    widths = [bin_s] * (count - 1) + [timeline.duration - (count - 1) * bin_s]
    return [total / max(width, 1e-6) for total, width in zip(totals, widths, strict=True)]


def _bank(timeline: Timeline, span: float) -> list[str]:
    top = _MIDDLE + _GAP
    highest = _round_up(max([cutoff for _, _, cutoff in timeline.bank] + [0.1]))
    x, up = svg.scale(0, span, _LEFT, _RIGHT), svg.scale(0, 1, _BOTTOM, top)
    # Steps, not slopes: the bank changes when a block ends and at no time between.
    fill, cutoff = [(_LEFT, _BOTTOM)], [(_LEFT, _BOTTOM)]
    for second, share, score in timeline.bank:
        at = min(x(second), _RIGHT)
        fill += [(at, fill[-1][1]), (at, up(share))]
        cutoff += [(at, cutoff[-1][1]), (at, up(score / highest))]
    fill += [(_RIGHT, fill[-1][1]), (_RIGHT, _BOTTOM)]
    cutoff += [(_RIGHT, cutoff[-1][1])]
    return [
        svg.text(_LEFT + 5, top - 8, "bank: slots with something new", class_="fill-label"),
        svg.text(_RIGHT, top - 8, "score to beat", "end", class_="cutoff-label"),
        *_axis(top, _BOTTOM, "100%", "0"),
        svg.text(_RIGHT + 6, top + 4, f"{highest:g}"),
        svg.polyline(fill, "polygon", class_="fill"),
        svg.polyline(cutoff, class_="cutoff"),
    ]


def _axis(top: float, bottom: float, high: str, low: str) -> list[str]:
    heights = (top, (top + bottom) / 2, bottom)
    rules = [svg.line(_LEFT, y, _RIGHT, y, class_="rule") for y in heights]
    return [*rules, svg.text(_LEFT - 8, top + 4, high, "end"), svg.text(_LEFT - 8, bottom + 4, low, "end")]


def _round_up(value: float) -> float:
    """The next number of the form 1, 2 or 5 times a power of ten, for the top of an axis."""
    power = 10.0 ** len(str(int(value))) / 10 if value >= 1 else 0.1
    return next(power * lead for lead in (1, 2, 5, 10) if power * lead >= value)
