"""This module is the one writer of SVG drawings: elements, scales and round ticks."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Iterable

INK, QUIET, RULE, PAPER = "#16191d", "#67707c", "#e2e6eb", "#ffffff"
# The same drawing in dark pages: a browser passes their scheme on to pictures.
DARK = {INK: "#e8ecf0", QUIET: "#8d97a3", RULE: "#323a43", PAPER: "#171b20"}
FONT = "system-ui, -apple-system, Segoe UI, Roboto, sans-serif"

Point = tuple[float, float]


def element(tag: str, content: str | None = None, /, **attributes: str | float) -> str:
    """Return one element; `stroke_width=2` becomes stroke-width="2"."""
    written = "".join(f' {name.replace("_", "-")}="{_value(value)}"' for name, value in attributes.items())
    return f"<{tag}{written}/>" if content is None else f"<{tag}{written}>{content}</{tag}>"


def drawing(width: float, height: float, parts: Iterable[str]) -> str:
    """Return a drawing on paper that needs nothing around it, white or, for readers who prefer it, dark."""
    paper = element("rect", width="100%", height="100%", rx=10, fill=PAPER)
    rules = "".join(
        f'[{name}="{light}"]{{{name}:{dark}}}' for light, dark in DARK.items() for name in ("fill", "stroke")
    )
    style = element("style", f"@media (prefers-color-scheme: dark){{{rules}}}")
    return element(
        "svg",
        "".join([style, paper, *parts]),
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {width:.0f} {height:.0f}",
        width=width,
        height=height,
        role="img",
        font_family=FONT,
        font_size=12,
    )


def text(x: float, y: float, content: str, anchor: str = "start", **attributes: str | float) -> str:
    """Return text at a point, escaped."""
    return element("text", html.escape(content), x=x, y=y, text_anchor=anchor, **attributes)


def note(x: float, y: float, content: str, anchor: str = "start") -> str:
    """Return text that does not ask for attention."""
    return text(x, y, content, anchor, fill=QUIET)


def title(content: str) -> str:
    """Return the title of a drawing."""
    return text(16, 24, content, fill=INK, font_size=15)


def line(x1: float, y1: float, x2: float, y2: float, **attributes: str | float) -> str:
    """Return a line between two points."""
    return element("line", x1=x1, y1=y1, x2=x2, y2=y2, **attributes)


def polyline(points: Iterable[Point], tag: str = "polyline", **attributes: str | float) -> str:
    """Return a line through points, or with the tag polygon one that closes."""
    pairs = " ".join(f"{_value(x)},{_value(y)}" for x, y in points)
    return element(tag, points=pairs, **({"fill": "none"} | attributes))


def dot(x: float, y: float, radius: float, colour: str) -> str:
    """Return a filled circle."""
    return element("circle", cx=x, cy=y, r=radius, fill=colour)


def bar(left: float, top: float, right: float, bottom: float, **attributes: str | float) -> str:
    """Return a rectangle between two corners."""
    return element("rect", x=left, y=top, width=right - left, height=bottom - top, **attributes)


def scale(low: float, high: float, start: float, end: float) -> Callable[[float], float]:
    """Return a function from values low..high to pixels start..end."""
    span = max(high - low, 1e-9)
    return lambda value: start + (value - low) / span * (end - start)


def round_ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Return multiples of 1, 2 or 5 times a power of ten between two values, about `most` of them at the most."""
    span = max(high - low, 1e-9)
    size = 10.0 ** math.floor(math.log10(span / most))
    step = next(size * lead for lead in (1, 2, 5, 10) if span / (size * lead) <= most + 1e-9)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(index * step, 10) for index in range(first, last + 1)]


def _value(value: str | float) -> str:
    """Write numbers with at most two decimals: a hundredth of a pixel cannot be seen."""
    if isinstance(value, str):
        return html.escape(value)
    return f"{value:.2f}".rstrip("0").rstrip(".")
