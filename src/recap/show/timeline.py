"""When things were new, and how the bank filled, as one SVG drawing that follows the page's colours."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_WIDTH, _LEFT, _RIGHT = 1000.0, 46.0, 954.0
_TOP, _MIDDLE, _GAP, _BOTTOM = 22.0, 128.0, 46.0, 240.0


@dataclass(frozen=True, slots=True)
class Timeline:
    """What the drawing shows. Times are in seconds."""

    duration: float
    fired: Sequence[tuple[float, int]]  # (time, tokens that fired), a pair per frame
    bank: Sequence[
        tuple[float, float, float]
    ]  # (time, share of slots filled, lowest score in a full bank or 0)


def draw_timeline(timeline: Timeline) -> str:
    """Above: new tokens per second. Below: how full the bank is, and the score a newcomer must beat."""
    span = max(timeline.duration, 1e-6)
    bin_s = next((width for width in (0.25, 0.5, 1, 2, 5, 10, 30) if span / width <= 130), span / 130)
    rates = _rates(timeline, bin_s)
    peak = _round_up(max([*rates, 1.0]))
    parts = [
        f'<svg id="timeline" class="chart" viewBox="0 0 {_WIDTH:.0f} 268" role="img" '
        f'aria-label="New tokens per second and the state of the bank over time" '
        f'data-left="{_LEFT / _WIDTH}" data-right="{_RIGHT / _WIDTH}">',
        _text(_LEFT + 5, _TOP - 8, f"new tokens per second (bars of {bin_s:g} s)", "start"),
        _axis(_TOP, _MIDDLE, f"{peak:g}", "0"),
    ]
    for index, rate in enumerate(rates):
        end = span if index == len(rates) - 1 else (index + 1) * bin_s
        left, right = _x(index * bin_s, span), _x(end, span)
        height = (_MIDDLE - _TOP) * rate / peak
        if rate > 0:
            parts.append(
                f'<rect class="bar" x="{left:.2f}" y="{_MIDDLE - height:.2f}" '
                f'width="{max(right - left - 1.2, 0.6):.2f}" height="{height:.2f}" rx="1"/>'
            )
    parts += _bank(timeline, span)
    parts += _seconds(span)
    parts.append(
        f'<line id="playhead" class="playhead" x1="{_LEFT}" x2="{_LEFT}" y1="{_TOP}" y2="{_BOTTOM}"/></svg>'
    )
    return "".join(parts)


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
    height = _BOTTOM - top
    highest = _round_up(max([cutoff for _, _, cutoff in timeline.bank] + [0.1]))
    # Steps, not slopes: the bank changes when a block ends and at no time between.
    fill, cutoff = [(_LEFT, _BOTTOM)], [(_LEFT, _BOTTOM)]
    for when, share, score in timeline.bank:
        x = _x(when, span)
        fill += [(x, fill[-1][1]), (x, _BOTTOM - height * share)]
        cutoff += [(x, cutoff[-1][1]), (x, _BOTTOM - height * score / highest)]
    fill += [(_RIGHT, fill[-1][1]), (_RIGHT, _BOTTOM)]
    cutoff += [(_RIGHT, cutoff[-1][1])]
    return [
        _text(_LEFT + 5, top - 8, "bank: slots holding something new", "start", "fill-label"),
        _text(_RIGHT, top - 8, "score to beat", "end", "cutoff-label"),
        _axis(top, _BOTTOM, "100%", "0"),
        _text(_RIGHT + 6, top + 4, f"{highest:g}", "start"),
        f'<path class="fill" d="M{_path(fill)}Z"/>',
        f'<path class="cutoff" d="M{_path(cutoff)}"/>',
    ]


def _seconds(span: float) -> list[str]:
    step = next((each for each in (0.5, 1, 2, 5, 10, 30, 60, 120, 300) if span / each <= 12), span / 10)
    return [
        _text(_x(tick * step, span), _BOTTOM + 18, f"{tick * step:g} s", "middle")
        for tick in range(int(span / step + 1e-9) + 1)
    ]


def _x(second: float, span: float) -> float:
    return _LEFT + (_RIGHT - _LEFT) * min(second / span, 1.0)


def _path(points: Sequence[tuple[float, float]]) -> str:
    return "L".join(f"{x:.2f} {y:.2f}" for x, y in points)


def _axis(top: float, bottom: float, high: str, low: str) -> str:
    lines = "".join(
        f'<line class="rule" x1="{_LEFT}" x2="{_RIGHT}" y1="{y}" y2="{y}"/>'
        for y in (top, (top + bottom) / 2, bottom)
    )
    return lines + _text(_LEFT - 8, top + 4, high, "end") + _text(_LEFT - 8, bottom + 4, low, "end")


def _text(x: float, y: float, text: str, anchor: str, kind: str = "") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{text}</text>'


def _round_up(value: float) -> float:
    """The next number of the form 1, 2 or 5 times a power of ten, for the top of an axis."""
    power = 10.0 ** len(str(int(value))) / 10 if value >= 1 else 0.1
    return next(power * lead for lead in (1, 2, 5, 10) if power * lead >= value)
