"""Transient texture: rain over a scene, and water that ripples.

Every picture has its own drops and its own glints on the water, so a pixel that shows them (number -1 in the identity
map) has no counterpart in the picture before. The exact flow of a drop is its fall; that of water is 0, since the
surface glitters without moving.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

FLEETING = -1
"""The number of rain and water in the identity map."""

_DROP = torch.tensor([0.93, 0.95, 0.98])
_WATER = torch.tensor([0.16, 0.36, 0.48])


@dataclass(frozen=True, slots=True)
class Weather:
    """Rain in front of everything and water behind the actors.

    Rain covers the share `cover` of the pixels and falls `fall` pixels per picture. Water begins at `shore`, a share
    of the height, and its glints differ by up to `swell` in colours 0..1. `first` is the picture of the whole clip at
    which this piece begins.
    """

    cover: float = 0.0
    fall: float = 0.0
    shore: float | None = None
    swell: float = 0.0
    seed: int = 0
    first: int = 0


CLEAR = Weather()


def rain(weather: Weather, picture: int, size: tuple[int, int]) -> Tensor:
    """Return where one picture shows drops, Y X, bool: streaks one pixel wide, each as long as its fall."""
    # The seed depends only on the picture, so that any piece of a clip can be rendered by itself.
    source = torch.Generator().manual_seed(weather.seed * 1_000_003 + weather.first + picture)
    rows, columns = size
    length = max(2, round(weather.fall))
    count = round(weather.cover * rows * columns / length)
    random = torch.rand(2, count, generator=source)
    top = (random[0] * (rows + length)).long()[:, None] - length + torch.arange(length)
    left = (random[1] * columns).long()[:, None].expand_as(top)
    visible = (top >= 0) & (top < rows)
    mask = torch.zeros(rows, columns, dtype=torch.bool)
    mask[top[visible], left[visible]] = True
    return mask


def ripples(weather: Weather, picture: int, size: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Return the water of one picture: its colours 3 Y X, and where it is, Y X, bool.

    It is a sum of short waves of many directions and speeds, sharpened into glints. It never repeats, and is too fast
    for flow estimators to track.
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
    """Add rain to a picture 3 Y X and its identities Y X."""
    if weather.cover > 0:
        drops = rain(weather, picture, (numbers.shape[0], numbers.shape[1]))
        drawn.copy_(torch.where(drops, 0.15 * drawn + 0.85 * _DROP[:, None, None], drawn))
        numbers.masked_fill_(drops, FLEETING)


def flood(weather: Weather, picture: int, drawn: Tensor, numbers: Tensor) -> None:
    """Cover the lower part of a background with water, before the actors are painted."""
    if weather.shore is not None:
        colours, where = ripples(weather, picture, (numbers.shape[0], numbers.shape[1]))
        drawn.copy_(torch.where(where, colours, drawn))
        numbers.masked_fill_(where, FLEETING)
