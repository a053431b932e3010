"""Plots milliseconds and memory of every block of a long rollout; the claim is that both lines are flat."""

from __future__ import annotations

from collections.abc import Sequence

from recap.show import svg

_WIDTH, _HEIGHT, _MARGIN = 720.0, 240.0, 44.0
_TIME, _MEMORY = "#1f6feb", "#b35900"


def draw_curve(times_ms: Sequence[float], memory_gb: Sequence[float], title: str) -> str:
    """An SVG with time per block and, where it was measured, memory in use."""
    right = _WIDTH - _MARGIN
    # The slowest two in a hundred may leave the top of the picture.
    top = max(sorted(times_ms)[int(0.98 * (len(times_ms) - 1))] * 1.25, 1e-9)
    parts = [
        svg.title(title),
        _curve(times_ms, top, _TIME),
        svg.note(_MARGIN, _HEIGHT - 8, "block 1"),
        svg.note(right, _HEIGHT - 8, f"block {len(times_ms)}", "end"),
        svg.text(_MARGIN, 40, f"ms per block, {top:.0f} at the top", fill=_TIME),
    ]
    if memory_gb:
        most = max(memory_gb) * 1.25
        parts.append(_curve(memory_gb, most, _MEMORY))
        parts.append(svg.text(right, 40, f"GB in use, {most:.0f} at the top", "end", fill=_MEMORY))
    return svg.drawing(_WIDTH, _HEIGHT, parts)


def _curve(values: Sequence[float], top: float, colour: str) -> str:
    across = svg.scale(0, max(len(values) - 1, 1), _MARGIN, _WIDTH - _MARGIN)
    up = svg.scale(0, top, _HEIGHT - _MARGIN, _MARGIN)
    points = [(across(i), up(min(value, top))) for i, value in enumerate(values)]
    return svg.polyline(points, stroke=colour, stroke_width=1.5)
