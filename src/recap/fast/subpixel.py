"""Enlarging without the enlarged picture.

Where every pixel is repeated in a cell of 2 x 2, a kernel of 3 x 3 meets the same pixel with several of its weights.
Four kernels of 2 x 2, one for each place in the cell, compute the same: 16 products a pixel instead of 36, and the
repeated picture is never written. One convolution with a margin of 1 makes all four, on a grid with one row and
column more, out of which each takes its own part.
"""

from __future__ import annotations

import torch
from torch import Tensor


def fuse(weight: Tensor) -> Tensor:
    """O C 3 3, over repeated pixels -> 4·O C 2 2, over the pixels themselves."""
    exact = weight.to(torch.float64)  # whatever precision products of fp32 are allowed
    # Of the cell's upper pixel the kernel's rows meet the source's rows y - 1, y, y; of the lower y, y, y + 1.
    meet = exact.new_tensor([[[1, 0, 0], [0, 1, 1]], [[1, 1, 0], [0, 0, 1]]])
    fused = torch.einsum("aiy,bjx,ocyx->abocij", meet, meet, exact).flatten(0, 2)
    return fused.to(weight.dtype)


def weave(made: Tensor, bias: Tensor | None = None, pictures: int = 1) -> Tensor:
    """N Y+1 X+1 P·4·O, of fused kernels for each of P pictures -> N·P 2Y 2X O."""
    cells = made.unflatten(-1, (pictures, 2, 2, -1))
    rows, height, width = made.shape[0], made.shape[1] - 1, made.shape[2] - 1
    whole = made.new_empty(rows, pictures, height, 2, width, 2, cells.shape[-1])
    for down in (0, 1):
        for right in (0, 1):
            part = cells[:, down : down + height, right : right + width, :, down, right].movedim(3, 1)
            target = whole[:, :, :, down, :, right]
            if bias is None:
                target.copy_(part)
            else:
                torch.add(part, bias, out=target)
    return whole.flatten(4, 5).flatten(2, 3).flatten(0, 1)
