"""Follows a flow field: where each pixel points, which value is there, and whether that is inside the picture.

Positions are pixel coordinates: channel 0 is x (column), channel 1 is y (row), and the centre of the first
pixel is (0, 0). A picture therefore covers [-0.5, X - 0.5] x [-0.5, Y - 0.5]. No function waits for a device.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def pixel_grid(size: tuple[int, int], like: Tensor) -> Tensor:
    """Return the positions 2 Y X of a picture's pixels, on the device of `like`."""
    height, width = size
    # Half precision has no odd integers above 2048, and no fractions well below that.
    kind = torch.promote_types(like.dtype, torch.float32)
    rows = torch.arange(height, device=like.device, dtype=kind)
    columns = torch.arange(width, device=like.device, dtype=kind)
    return torch.stack((columns.expand(height, width), rows[:, None].expand(height, width)))


def backtrace(flow: Tensor) -> Tensor:
    """Return the positions u' = u + F(u) that the pixels point to; flow and result are `... 2 Y X`."""
    return flow + pixel_grid((flow.shape[-2], flow.shape[-1]), flow)


def sample(image: Tensor, positions: Tensor) -> Tensor:
    """Read an image at positions, bilinearly; beyond its border the nearest border pixel is read.

    Image `... C Y X` and positions `... 2 R S` have equal leading dimensions; the result is `... C R S` in the
    image's type.
    """
    kind = torch.promote_types(image.dtype, torch.float32)
    return sample_at(image, reading_grid(positions.to(kind), (image.shape[-2], image.shape[-1])))


def reading_grid(positions: Tensor, size: tuple[int, int]) -> Tensor:
    """Convert positions `... 2 R S` on images of (rows, columns) `size` for `sample_at`, to `... R S 2`."""
    height, width = size
    # grid_sample counts from -1 to 1 between the centres of the outermost pixels (align_corners). A single row or
    # column has no such distance, and every coordinate stands for that one pixel.
    x, y = positions.unbind(-3)
    return torch.stack((x * (2 / max(width - 1, 1)) - 1, y * (2 / max(height - 1, 1)) - 1), dim=-1)


def sample_at(image: Tensor, grid: Tensor) -> Tensor:
    """Read an image at positions from `reading_grid`, which can be shared by several images."""
    leading = image.shape[:-3]
    source = image.to(grid.dtype).reshape(-1, *image.shape[-3:])
    read = F.grid_sample(
        source, grid.reshape(-1, *grid.shape[-3:]), mode="bilinear", padding_mode="border", align_corners=True
    )
    return read.reshape(*leading, *read.shape[-3:]).to(image.dtype)


def inside(positions: Tensor, size: tuple[int, int]) -> Tensor:
    """Tell which positions `... 2 R S` are inside a picture of (rows, columns) `size`: bool `... R S`."""
    height, width = size
    x, y = positions.unbind(-3)
    return (x >= -0.5) & (x <= width - 0.5) & (y >= -0.5) & (y <= height - 0.5)
