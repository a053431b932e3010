"""This module rescales and crops pictures of any size to pictures that tokens tile."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from recap.errors import refuse
from recap.io.video import Clip

_SMALLEST, _LARGEST = 32, 8192


@dataclass(frozen=True, slots=True)
class Lens:
    """Turns a picture of a clip into one that tokens tile: it rescales, then crops at the centre."""

    scaled: tuple[int, int] | None
    size: tuple[int, int]
    token_pixels: int
    notices: tuple[str, ...]

    @property
    def grid(self) -> tuple[int, int]:
        return self.size[0] // self.token_pixels, self.size[1] // self.token_pixels

    def __call__(self, picture: NDArray[np.uint8]) -> Tensor:
        pixels = torch.from_numpy(picture).permute(2, 0, 1)
        if self.scaled is not None:
            wide = pixels[None].float()
            wide = functional.interpolate(wide, size=self.scaled, mode="bilinear", antialias=True)
            pixels = wide[0].round_().clamp_(0, 255).to(torch.uint8)
        top, left = (pixels.shape[1] - self.size[0]) // 2, (pixels.shape[2] - self.size[1]) // 2
        return pixels[:, top : top + self.size[0], left : left + self.size[1]]


def fit(clip: Clip, size: tuple[int, int] | None, token_pixels: int) -> Lens:
    """Return the lens for a clip, at `size` (rows, columns) or the clip's own; refuse what tokens cannot tile."""
    rows, columns = size or (clip.height, clip.width)
    named, shown = ("--size" if size else "size of the clip"), f"{columns}x{rows}"
    if min(rows, columns) < _SMALLEST or max(rows, columns) > _LARGEST:
        limit = f"width and height must be {_SMALLEST} to {_LARGEST} pixels"
        raise refuse(named, shown, limit, "--size WxH rescales the clip")
    if rows % 2 or columns % 2:
        even = f"--size {columns - columns % 2}x{rows - rows % 2} rescales"
        raise refuse(named, shown, "width and height must be even", f"{even}, or crop the clip first")
    cropped = rows // token_pixels * token_pixels, columns // token_pixels * token_pixels
    notices: tuple[str, ...] = ()
    if cropped != (rows, columns):
        whole = f"{cropped[1]}x{cropped[0]}, whole tokens of {token_pixels} pixels"
        notices = (f"cropped at the centre from {shown} to {whole}",)
    scaled = (rows, columns) if size and size != (clip.height, clip.width) else None
    return Lens(scaled, cropped, token_pixels, notices)


def cover(clip: Clip, size: tuple[int, int], token_pixels: int) -> Lens:
    """Return the lens that fills `size` (rows, columns) with a clip's pictures and cuts off what is too large."""
    share = max(size[0] / clip.height, size[1] / clip.width)
    scaled = max(size[0], round(share * clip.height)), max(size[1], round(share * clip.width))
    notices: tuple[str, ...] = ()
    if (clip.height, clip.width) != size:
        notices = (f"rescaled from {clip.width}x{clip.height} and cropped to {size[1]}x{size[0]}",)
    return Lens(scaled if scaled != (clip.height, clip.width) else None, size, token_pixels, notices)


def cut_tokens(pictures: Tensor, sources: Tensor) -> Tensor:
    """Cut the pixels of every token, F rows columns D (its rows, columns and colours in one), from T 3 Y X.

    `sources`, F rows columns, is the index of the picture from which each token is cut.
    """
    rows, columns = sources.shape[1:]
    height, width = pictures.shape[2] // rows, pictures.shape[3] // columns
    tiles = pictures.reshape(-1, 3, rows, height, columns, width).permute(0, 2, 4, 3, 5, 1)
    row, column = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    return tiles[sources, row, column].flatten(3)
