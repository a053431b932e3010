"""Enlarges a picture and convolves it without writing the enlarged picture.

If every pixel is repeated in a cell of 2 x 2, a 3 x 3 kernel meets the same pixel with several of its weights. Four
2 x 2 kernels, one for each pixel of the cell, compute the same: 16 products per pixel instead of 36, and the
repeated picture is never written. One convolution with a margin of 1 computes all four on a grid that has one row
and one column more, and each of the four uses its own part of that grid.
"""

from __future__ import annotations

import torch
from torch import Tensor


def fuse(weight: Tensor) -> Tensor:
    """Turn a kernel O C 3 3 over repeated pixels into 4·O C 2 2 over the pixels themselves."""
    # In fp64, because products of fp32 may be allowed a lower precision.
    exact = weight.to(torch.float64)
    # For the cell's upper pixel the kernel's rows meet the source rows y - 1, y, y; for the lower one y, y, y + 1.
    meet = exact.new_tensor([[[1, 0, 0], [0, 1, 1]], [[1, 1, 0], [0, 0, 1]]])
    fused = torch.einsum("aiy,bjx,ocyx->abocij", meet, meet, exact).flatten(0, 2)
    return fused.to(weight.dtype)


def weave(made: Tensor, bias: Tensor | None = None, pictures: int = 1) -> Tensor:
    """Interleave N Y+1 X+1 P·4·O, the output of fused kernels for each of P pictures, into N·P 2Y 2X O."""
    cells = made.unflatten(-1, (pictures, 2, 2, -1))
    batch, height, width = made.shape[0], made.shape[1] - 1, made.shape[2] - 1
    whole = made.new_empty(batch, pictures, height, 2, width, 2, cells.shape[-1])
    for down in (0, 1):
        for right in (0, 1):
            part = cells[:, down : down + height, right : right + width, :, down, right].movedim(3, 1)
            target = whole[:, :, :, down, :, right]
            if bias is None:
                target.copy_(part)
            else:
                torch.add(part, bias, out=target)
    return whole.flatten(4, 5).flatten(2, 3).flatten(0, 1)
