"""Marks on the pictures themselves: green where a token was new."""

from __future__ import annotations

import torch
from torch import Tensor

GREEN = (38, 222, 96)
# Enough to see at a glance, little enough to recognise what is under it.
_TINT = 0.30
_BORDER_PX = 2


def tint(pictures: Tensor, marked: Tensor) -> Tensor:
    """Tint and outline in green the marked tokens, T rows columns, bool, of pictures T 3 Y X, uint8.

    Neighbouring tokens share one outline, so that what came in together reads as one thing.
    """
    side = pictures.shape[-1] // marked.shape[-1]
    area = marked.repeat_interleave(side, dim=1).repeat_interleave(side, dim=2)
    inner = _shrunk(area, _BORDER_PX)
    green = torch.tensor(GREEN, dtype=torch.float32, device=pictures.device)[:, None, None]
    # 1 on the outline, the tint's share inside it, 0 elsewhere.
    strength = torch.where(inner, _TINT, area.to(torch.float32))[:, None]
    return torch.lerp(pictures.to(torch.float32), green, strength).round_().to(torch.uint8)


def _shrunk(area: Tensor, depth: int) -> Tensor:
    """Remove the outermost pixels of an area, T Y X; the edge of the picture is not an outline."""
    inner = area.clone()
    for _ in range(depth):
        layer = inner.clone()
        layer[:, 1:] &= inner[:, :-1]
        layer[:, :-1] &= inner[:, 1:]
        layer[:, :, 1:] &= inner[:, :, :-1]
        layer[:, :, :-1] &= inner[:, :, 1:]
        inner = layer
    return inner
