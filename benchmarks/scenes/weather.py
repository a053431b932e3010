"""What never stays: rain over a scene, and water that ripples.

Every picture has its own drops, and the surface of the water its own lights, so a pixel that shows one (number
-1 in the identity map) has no antecedent in the picture before. The exact flow of a drop is its fall; that of
water is 0, since the surface glitters and goes nowhere.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

FLEETING = -1
"""The number, in the identity map, of whatever shows no lasting thing."""

_DROP = torch.tensor([0.93, 0.95, 0.98])
_WATER = torch.tensor([0.16, 0.36, 0.48])


@dataclass(frozen=True, slots=True)
class Weather:
    """Rain before everything (`cover` of the pixels in every picture) and water behind the actors."""

    cover: float = 0.0
    fall: float = 0.0  # pixels a picture
    shore: float | None = None  # the row, as a share of the height, below which there is water
    swell: float = 0.0  # how far the lights on the water go, in colours 0..1
    seed: int = 0
    first: int = 0  # the picture of the whole clip with which this piece of it begins


CLEAR = Weather()


def rain(weather: Weather, picture: int, size: tuple[int, int]) -> Tensor:
    """Where drops are seen in one picture, Y X, bool: streaks one pixel wide, each as long as its fall."""
    source = torch.Generator().manual_seed(
        weather.seed * 1_000_003 + weather.first + picture
    )  # of the picture alone, so that any piece of a clip can be drawn by itself
    rows, columns = size
    length = max(2, round(weather.fall))
    count = round(weather.cover * rows * columns / length)
    place = torch.rand(2, count, generator=source)
    top = (place[0] * (rows + length)).long()[:, None] - length + torch.arange(length)
    left = (place[1] * columns).long()[:, None].expand_as(top)
    seen = (top >= 0) & (top < rows)
    mask = torch.zeros(rows, columns, dtype=torch.bool)
    mask[top[seen], left[seen]] = True
    return mask


def ripples(weather: Weather, picture: int, size: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """The water of one picture: its colours 3 Y X, and where it lies, Y X, bool.

    Short waves of many directions and speeds, their sum sharpened into glints: it never repeats, and at
    its speeds neither a search nor a network can follow it.
    """
    assert weather.shore is not None
    source = torch.Generator().manual_seed(weather.seed)
    rows, columns = size
    y, x = torch.meshgrid(torch.arange(rows) + 0.0, torch.arange(columns) + 0.0, indexing="ij")
    height = torch.zeros(rows, columns)
    num_waves = 12
    for turn, pitch, pace, begin in torch.rand(num_waves, 4, generator=source).tolist():
        angle, number = 6.2831853 * turn, 6.2831853 / (9 + 14 * pitch)
        along = x * torch.cos(torch.tensor(angle)) + 2 * y * torch.sin(torch.tensor(angle))
        clock = (0.8 + 1.6 * pace) * (weather.first + picture)
        height += torch.sin(number * along + clock + 6.2831853 * begin)
    light = torch.tanh(height / (0.5 * num_waves) ** 0.5)
    colours = (_WATER[:, None, None] + weather.swell * light).clamp(0, 1)
    return colours, (y >= weather.shore * rows).expand(rows, columns)


def wet(weather: Weather, picture: int, drawn: Tensor, numbers: Tensor) -> None:
    """Let it rain on a drawn picture 3 Y X and its identities Y X."""
    if weather.cover > 0:
        drops = rain(weather, picture, (numbers.shape[0], numbers.shape[1]))
        drawn.copy_(torch.where(drops, 0.15 * drawn + 0.85 * _DROP[:, None, None], drawn))
        numbers.masked_fill_(drops, FLEETING)


def flood(weather: Weather, picture: int, drawn: Tensor, numbers: Tensor) -> None:
    """Let water cover the lower part of a background, before the actors are painted."""
    if weather.shore is not None:
        colours, where = ripples(weather, picture, (numbers.shape[0], numbers.shape[1]))
        drawn.copy_(torch.where(where, colours, drawn))
        numbers.masked_fill_(where, FLEETING)
