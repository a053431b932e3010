"""The bank's patches as pictures: one sheet with labels, and one without for the page to cut from."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from recap.io.video import Picture
from recap.show.lettering import write_text


@dataclass(frozen=True, slots=True)
class Patches:
    """Tokens of the bank as one sees them, in order of first appearance."""

    pixels: NDArray[np.uint8]  # N side side 3
    seconds: NDArray[np.float64]  # N: when each scored highest
    frames: NDArray[np.int64]  # N
    rows: NDArray[np.int64]  # N
    columns: NDArray[np.int64]  # N
    scores: NDArray[np.float32]  # N

    def __len__(self) -> int:
        return len(self.seconds)


_PAPER, _INK = 18, (176, 184, 192)


def contact_sheet(patches: Patches, scale: int | None = None) -> Picture:
    """Lay out all patches enlarged, each with its second below, in order of first appearance."""
    count, side = len(patches), patches.pixels.shape[1]
    # Thousands of patches at triple size would make a picture that few programs can open.
    scale = scale or (3 if count <= 2500 else 2)
    cell, gap, dot = side * scale, 4, 1 if scale < 3 else 2
    text = 5 * dot + 5
    columns = max(8, math.ceil(math.sqrt(count * 1.4)))
    rows = max(1, math.ceil(count / columns))
    sheet = np.full((rows * (cell + text + gap) + gap, columns * (cell + gap) + gap, 3), _PAPER, np.uint8)
    large = patches.pixels.repeat(scale, axis=1).repeat(scale, axis=2)
    for index in range(count):
        top = gap + index // columns * (cell + text + gap)
        left = gap + index % columns * (cell + gap)
        sheet[top : top + cell, left : left + cell] = large[index]
        label = f"{patches.seconds[index]:.1f}s"
        write_text(sheet, label, top=top + cell + 2, left=left, width=cell, dot=dot, ink=_INK)
    return sheet


def sprite(patches: Patches, columns: int = 32) -> Picture:
    """Lay out all patches edge to edge, `columns` to a line, for the page to show pieces of."""
    count, side = len(patches), patches.pixels.shape[1]
    rows = max(1, math.ceil(count / columns))
    tiles = np.zeros((rows * columns, side, side, 3), np.uint8)
    tiles[:count] = patches.pixels
    grid = tiles.reshape(rows, columns, side, side, 3).swapaxes(1, 2)
    return np.ascontiguousarray(grid.reshape(rows * side, columns * side, 3))
