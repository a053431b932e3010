"""Procedural paint: backgrounds with landmarks, and two-tone patterns for actors.

Everything is smooth on the scale of a few pixels, so that interpolating in a texture and then in a picture loses
almost nothing: flow of a fraction of a pixel stays visually exact.
"""

from __future__ import annotations

import colorsys

import torch
from torch import Tensor
from torch.nn import functional

_SKY, _SAND = torch.tensor([0.38, 0.58, 0.72]), torch.tensor([0.72, 0.58, 0.42])


def smooth_noise(size: tuple[int, int], cell: int, channels: int, source: torch.Generator) -> Tensor:
    """Make noise, channels Y X, about -1..1, with features `cell` pixels wide."""
    rows, columns = size[0] // cell + 4, size[1] // cell + 4
    coarse = torch.rand(1, channels, rows, columns, generator=source) * 2 - 1
    fine = functional.interpolate(coarse, scale_factor=cell, mode="bicubic", align_corners=False)[0]
    return fine[:, cell : cell + size[0], cell : cell + size[1]]


def panorama(size: tuple[int, int], seed: int) -> Tensor:
    """Paint a background 3 Y X in 0..1: sky over sand, grain that flow can track, and coloured landmarks."""
    source = torch.Generator().manual_seed(seed)
    rows, columns = size
    height = torch.linspace(0, 1, rows)[:, None] + 0.25 * smooth_noise(size, 96, 1, source)
    picture = torch.lerp(_SKY[:, None, None], _SAND[:, None, None], height.clamp(0, 1))
    picture = picture + 0.10 * smooth_noise(size, 64, 3, source)
    for cell, weight in ((24, 0.09), (11, 0.08), (6, 0.05)):
        # One tone for all channels with a little colour looks like grain.
        grain = smooth_noise(size, cell, 1, source) + 0.4 * smooth_noise(size, cell, 3, source)
        picture = picture + weight * grain
    y, x = torch.meshgrid(torch.arange(rows) + 0.0, torch.arange(columns) + 0.0, indexing="ij")
    for _ in range(max(3, rows * columns // 24_000)):
        random = torch.rand(4, generator=source)
        distance = torch.hypot(x - random[0] * columns, y - random[1] * rows)
        radius = 8 + 14 * float(random[2])
        colour = _hue(float(random[3]), 0.55, 0.85)[:, None, None]
        # A soft ring with a soft dot is distinctive and smooth.
        ring, dot = ((distance - radius) / 3.5) ** 2, (distance / (radius / 3)) ** 2
        strength = torch.exp(-ring) + torch.exp(-dot)
        picture = torch.lerp(picture, colour.expand_as(picture), 0.75 * strength.clamp(max=1))
    return picture.clamp(0.03, 0.97)


def two_tone(side: int, hue: float, seed: int) -> Tensor:
    """Paint an actor, 3 side side in 0..1, with two clearly different tones in a pattern of its own."""
    source = torch.Generator().manual_seed(seed)
    angle, pitch = torch.rand(2, generator=source).tolist()
    along = _direction(angle)
    y, x = torch.meshgrid(torch.arange(side) + 0.0, torch.arange(side) + 0.0, indexing="ij")
    period = max(9.0, side * (0.22 + 0.12 * pitch))
    bend = 0.6 * smooth_noise((side, side), max(6, side // 5), 1, source)[0]
    phase = (x * along[0] + y * along[1]) * (6.2831853 / period) + 2.2 * bend
    mix = torch.sigmoid(3 * torch.sin(phase))
    tones = _hue(hue, 0.85, 0.95)[:, None, None], _hue(hue + 0.42, 0.75, 0.35)[:, None, None]
    grain = 0.05 * smooth_noise((side, side), 6, 1, source)
    return (tones[0] * mix + tones[1] * (1 - mix) + grain).clamp(0, 1)


def _direction(turn: float) -> tuple[float, float]:
    angle = torch.tensor(3.14159265 * turn)
    return float(angle.cos()), float(angle.sin())


def _hue(hue: float, saturation: float, value: float) -> Tensor:
    return torch.tensor(colorsys.hsv_to_rgb(hue % 1.0, saturation, value))
