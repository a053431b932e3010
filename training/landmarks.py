"""Objects that stand in a scene, drawn once from simple shapes with soft edges.

A landmark is three masks, premultiplied shares of its primary, secondary and accent colour, so that each one can have
colours of its own in every clip.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

SIDE = 96
Shape = Callable[[Tensor, Tensor], Tensor]
"""A function from (x, y), in a box of -1..1 with y upwards, to the signed distance."""
Colour = tuple[float, float, float]


def _ellipse(x0: float, y0: float, rx: float, ry: float, power: float = 2.0) -> Shape:
    def distance(x: Tensor, y: Tensor) -> Tensor:
        total = ((x - x0) / rx).abs() ** power + ((y - y0) / ry).abs() ** power
        return (total.clamp(min=1e-6) ** (1 / power) - 1) * min(rx, ry)

    return distance


def _box(x0: float, y0: float, x1: float, y1: float) -> Shape:
    def distance(x: Tensor, y: Tensor) -> Tensor:
        return torch.maximum(torch.maximum(x0 - x, x - x1), torch.maximum(y0 - y, y - y1))

    return distance


def _wedge(y0: float, y1: float, half0: float, half1: float, x0: float = 0.0) -> Shape:
    """Make a trapezoid around x0, of half width `half0` at the bottom y0 and `half1` at the top y1."""

    def distance(x: Tensor, y: Tensor) -> Tensor:
        slope = (half0 - half1) / (y1 - y0)
        side = ((x - x0).abs() - half0 + slope * (y - y0)) / (1 + slope**2) ** 0.5
        return torch.maximum(side, torch.maximum(y0 - y, y - y1))

    return distance


def _rod(x0: float, y0: float, x1: float, y1: float, radius: float) -> Shape:
    """Make a line with round ends."""

    def distance(x: Tensor, y: Tensor) -> Tensor:
        dx, dy = x1 - x0, y1 - y0
        along = (((x - x0) * dx + (y - y0) * dy) / (dx * dx + dy * dy)).clamp(0, 1)
        return ((x - x0 - along * dx) ** 2 + (y - y0 - along * dy) ** 2).sqrt() - radius

    return distance


@dataclass(frozen=True, slots=True)
class Landmark:
    """A landmark: its layers from back to front as (colour number, shape), and its usual colours.

    The colours are primary, secondary and accent, by daylight. With `any_hue` the primary colour may be anything, as
    on buildings and corals; with `shines` the accent is a window that is lit at night.
    """

    layers: tuple[tuple[int, Shape], ...]
    colours: tuple[Colour, Colour, Colour]
    any_hue: bool = False
    shines: bool = False


_BARK, _LEAF = (0.47, 0.32, 0.20), (0.27, 0.58, 0.25)
_WINDOWS = tuple((2, _box(x, y, x + 0.2, y + 0.2)) for y in (-0.7, -0.3, 0.1, 0.5) for x in (-0.36, 0.16))

LANDMARKS: dict[str, Landmark] = {
    "tree": Landmark(
        ((1, _wedge(-1, 0.1, 0.15, 0.09)), (0, _ellipse(-0.32, 0.1, 0.46, 0.42)),
        (0, _ellipse(0.34, 0.12, 0.46, 0.4)),
         (0, _ellipse(0, 0.44, 0.52, 0.48)), (2, _ellipse(-0.16, 0.54, 0.22, 0.18))),
        (_LEAF, _BARK, (0.42, 0.70, 0.32))),
    "pine": Landmark(
        ((1, _box(-0.1, -1, 0.1, -0.6)), (0, _wedge(-0.7, 0.1, 0.62, 0.1)), (0, _wedge(-0.2, 0.5, 0.5, 0.08)),
         (0, _wedge(0.2, 0.95, 0.38, 0.0)), (2, _wedge(0.55, 0.95, 0.2, 0.0))),
        ((0.16, 0.44, 0.32), _BARK, (0.30, 0.58, 0.42))),
    "snowy pine": Landmark(
        ((1, _box(-0.1, -1, 0.1, -0.6)), (0, _wedge(-0.7, 0.1, 0.62, 0.1)), (2, _wedge(-0.25, 0.1, 0.31, 0.1)),
         (0, _wedge(-0.2, 0.5, 0.5, 0.08)), (2, _wedge(0.2, 0.5, 0.26, 0.08)), (0, _wedge(0.2, 0.95, 0.38, 0.0)),
         (2, _wedge(0.5, 0.95, 0.23, 0.0))),
        ((0.20, 0.42, 0.40), _BARK, (0.93, 0.97, 1.0))),
    "palm": Landmark(
        ((1, _rod(0.0, -1, 0.12, 0.4, 0.08)), (0, _rod(0.12, 0.42, 0.75, 0.2, 0.11)),
        (0, _rod(0.12, 0.42, -0.6, 0.15, 0.11)),
         (0, _rod(0.12, 0.42, 0.6, 0.72, 0.1)), (0, _rod(0.12, 0.42, -0.4, 0.72, 0.1)),
         (0, _rod(0.12, 0.42, 0.1, 0.86, 0.1)),
         (2, _ellipse(0.12, 0.36, 0.13, 0.12))),
        ((0.22, 0.60, 0.30), (0.60, 0.44, 0.27), (0.50, 0.30, 0.15))),
    "cactus": Landmark(
        ((0, _rod(0, -1, 0, 0.66, 0.2)), (0, _rod(-0.52, 0.0, -0.52, 0.3, 0.13)),
        (0, _rod(-0.52, -0.1, 0, -0.2, 0.12)),
         (0, _rod(0.5, 0.2, 0.5, 0.5, 0.12)), (0, _rod(0.5, 0.12, 0, 0.0, 0.11)), (2, _ellipse(0, 0.86, 0.13, 0.1)),
         (1, _rod(0.06, -0.9, 0.06, 0.6, 0.05))),
        ((0.28, 0.56, 0.30), (0.40, 0.68, 0.38), (0.95, 0.40, 0.55))),
    "house": Landmark(
        ((0, _box(-0.68, -1, 0.68, 0.15)), (1, _wedge(0.1, 0.85, 0.9, 0.12)), (2, _box(-0.48, -0.5, -0.1, -0.1)),
         (1, _box(0.14, -1, 0.46, -0.3))),
        ((0.93, 0.86, 0.72), (0.72, 0.28, 0.22), (0.62, 0.80, 0.92)), any_hue=True, shines=True),
    "tower": Landmark(
        ((0, _box(-0.52, -1, 0.52, 0.85)), (1, _box(-0.58, 0.8, 0.58, 0.97)), *_WINDOWS),
        ((0.55, 0.60, 0.70), (0.36, 0.40, 0.48), (0.72, 0.85, 0.95)), any_hue=True, shines=True),
    "lighthouse": Landmark(
        ((0, _wedge(-1, 0.5, 0.34, 0.2)), (1, _box(-0.29, -0.55, 0.29, -0.25)), (1, _box(-0.24, 0.0, 0.24, 0.28)),
         (2, _box(-0.17, 0.48, 0.17, 0.75)), (1, _wedge(0.72, 0.98, 0.28, 0.0))),
        ((0.96, 0.95, 0.92), (0.82, 0.25, 0.22), (1.0, 0.92, 0.6)), shines=True),
    "umbrella": Landmark(
        ((1, _rod(0, -1, 0, 0.5, 0.045)), (0, _wedge(0.2, 0.8, 0.92, 0.2)), (0, _ellipse(0, 0.74, 0.24, 0.14)),
         (2, _wedge(0.2, 0.86, 0.3, 0.06))),
        ((0.90, 0.32, 0.30), (0.85, 0.80, 0.70), (0.98, 0.95, 0.85)), any_hue=True),
    "tent": Landmark(
        ((0, _wedge(-1, 0.6, 0.92, 0.03)), (1, _wedge(-1, 0.1, 0.34, 0.02)), (2, _wedge(0.5, 0.78, 0.03, 0.2))),
        ((0.92, 0.55, 0.22), (0.35, 0.25, 0.22), (0.95, 0.9, 0.5)), any_hue=True),
    "rock": Landmark(
        ((0, _ellipse(-0.1, -0.75, 0.8, 0.75, 2.6)), (1, _ellipse(0.5, -0.85, 0.44, 0.42, 2.4)),
        (2, _ellipse(-0.3, -0.4, 0.3, 0.2))),
        ((0.56, 0.55, 0.57), (0.46, 0.45, 0.49), (0.68, 0.67, 0.69))),
    "kelp": Landmark(
        tuple((c, _rod(x0, y0, x1, y1, 0.09)) for c, x in ((0, -0.45), (1, 0.05), (0, 0.5))
              for x0, y0, x1, y1 in ((x, -1, x + 0.12, -0.4), (x + 0.12, -0.4, x - 0.08, 0.2),
              (x - 0.08, 0.2, x + 0.1, 0.75 - x * x))),
        ((0.20, 0.60, 0.35), (0.32, 0.70, 0.38), (0.3, 0.7, 0.4))),
    "coral": Landmark(
        ((0, _rod(0, -1, 0, -0.1, 0.17)), (0, _rod(0, -0.5, -0.5, 0.1, 0.13)), (0, _rod(0, -0.4, 0.5, 0.2, 0.13)),
         (0, _rod(0, -0.1, -0.12, 0.6, 0.12)), (0, _rod(-0.5, 0.1, -0.55, 0.4, 0.11)),
         (2, _ellipse(-0.12, 0.66, 0.14, 0.12)),
         (2, _ellipse(0.52, 0.26, 0.14, 0.12)), (2, _ellipse(-0.55, 0.46, 0.13, 0.11))),
        ((0.92, 0.42, 0.45), (0.8, 0.3, 0.4), (1.0, 0.75, 0.7)), any_hue=True),
    "cloud": Landmark(
        ((1, _ellipse(0, -0.24, 0.9, 0.26)), (0, _ellipse(-0.35, -0.08, 0.38, 0.3)),
        (0, _ellipse(0.1, 0.06, 0.44, 0.4)),
         (0, _ellipse(0.5, -0.12, 0.34, 0.26)), (0, _ellipse(0.02, -0.2, 0.8, 0.2))),
        ((0.98, 0.98, 1.0), (0.88, 0.91, 0.96), (1, 1, 1))),
    "tuft": Landmark(
        ((0, _wedge(-1, 0.5, 0.28, 0.04)), (0, _rod(-0.2, -0.9, -0.6, 0.2, 0.13)),
        (1, _rod(0.2, -0.9, 0.6, 0.1, 0.13))),
        ((0.30, 0.60, 0.24), (0.38, 0.68, 0.28), (0.4, 0.7, 0.3))),
    "pebble": Landmark(
        ((1, _ellipse(0.05, -0.66, 0.8, 0.34)), (0, _ellipse(-0.05, -0.56, 0.74, 0.36))),
        ((0.62, 0.60, 0.58), (0.42, 0.40, 0.40), (0.7, 0.7, 0.7))),
    "flower": Landmark(
        ((1, _rod(0, -1, 0, 0, 0.1)), (0, _ellipse(0, 0.3, 0.6, 0.55)), (2, _ellipse(0, 0.3, 0.25, 0.24))),
        ((0.95, 0.45, 0.5), (0.3, 0.6, 0.25), (1.0, 0.88, 0.4)), any_hue=True),
    # These can stand in front: they are solid enough to hide an actor.
    "boulder": Landmark(
        ((0, _ellipse(0, -0.5, 0.96, 1.36, 4.0)), (1, _ellipse(0.2, -0.9, 0.74, 0.5, 3.0)),
        (2, _ellipse(-0.35, 0.46, 0.4, 0.22))),
        ((0.58, 0.57, 0.60), (0.52, 0.51, 0.55), (0.68, 0.67, 0.70))),
    "hedge": Landmark(
        ((0, _box(-0.9, -1, 0.9, 0.55)), (0, _ellipse(-0.55, 0.5, 0.4, 0.36)), (0, _ellipse(0.1, 0.6, 0.45, 0.36)),
         (0, _ellipse(0.6, 0.48, 0.36, 0.34)), (1, _ellipse(0.4, -0.4, 0.34, 0.3)),
         (2, _ellipse(-0.4, 0.2, 0.32, 0.26))),
        ((0.24, 0.52, 0.24), (0.19, 0.44, 0.21), (0.34, 0.62, 0.30))),
    "kiosk": Landmark(
        ((0, _box(-0.86, -1, 0.86, 0.6)), (1, _wedge(0.5, 0.95, 0.98, 0.7)),
        (2, _box(-0.56, -0.25, 0.56, 0.3)), (1, _box(-0.86, -0.6, 0.86, -0.48))),
        ((0.85, 0.75, 0.55), (0.60, 0.30, 0.28), (0.62, 0.80, 0.92)), any_hue=True, shines=True),
}  # fmt: skip
LANDMARK_NAMES = tuple(LANDMARKS)


def draw_landmarks(device: torch.device | str = "cpu") -> Tensor:
    """Draw the masks N 3 SIDE SIDE of all landmarks, in the order of LANDMARK_NAMES, top first."""
    axis = (torch.arange(SIDE, device=device) + 0.5) / SIDE * 2 - 1
    # A small margin, so that bilinear sampling beyond the edge fades out.
    x, y = (axis * 1.05)[None, :], (-axis * 1.05)[:, None]
    drawn = []
    for landmark in LANDMARKS.values():
        masks = torch.zeros(3, SIDE, SIDE, device=device)
        for colour, shape in landmark.layers:
            cover = (0.5 - shape(x, y).expand(SIDE, SIDE) * (SIDE / 2.1) / 1.4).clamp(0, 1)
            masks = masks * (1 - cover)
            masks[colour] += cover
        drawn.append(masks)
    return torch.stack(drawn)
