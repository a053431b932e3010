"""Plots milliseconds and memory of every block of a long rollout; the claim is that both lines are flat."""

from __future__ import annotations

from html import escape

WIDTH, HEIGHT, MARGIN = 720, 240, 44


def draw_curve(times_ms: list[float], memory_gb: list[float], title: str) -> str:
    """Return an SVG of the time per block and, where it was measured, the memory in use."""
    top = max(sorted(times_ms)[int(0.98 * (len(times_ms) - 1))] * 1.25, 1e-9)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}"',
        ' font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="{MARGIN}" y="18">{escape(title)}</text>',
        _line(times_ms, top, "#1f6feb"),
        f'<text x="{MARGIN}" y="{HEIGHT - 8}">block 1</text>',
        f'<text x="{WIDTH - MARGIN}" y="{HEIGHT - 8}" text-anchor="end">block {len(times_ms)}</text>',
        f'<text x="{MARGIN}" y="36" fill="#1f6feb">ms per block, {top:.0f} at the top</text>',
    ]
    if memory_gb:
        most = max(memory_gb) * 1.25
        parts += [
            _line(memory_gb, most, "#b35900"),
            f'<text x="{WIDTH - MARGIN}" y="36" text-anchor="end" fill="#b35900">',
            f"GB in use, {most:.0f} at the top</text>",
        ]
    return "\n".join([*parts, "</svg>"])


def _line(values: list[float], top: float, colour: str) -> str:
    step = (WIDTH - 2 * MARGIN) / max(len(values) - 1, 1)
    room = HEIGHT - 2 * MARGIN
    points = " ".join(
        f"{MARGIN + i * step:.1f},{HEIGHT - MARGIN - min(value / top, 1) * room:.1f}"
        for i, value in enumerate(values)
    )
    return f'<polyline fill="none" stroke="{colour}" stroke-width="1.5" points="{points}"/>'
