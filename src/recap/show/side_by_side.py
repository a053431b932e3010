"""Several clips as one, each under a bar with its name."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import torch

from recap.io.video import ClipWriter, Picture, open_clip
from recap.show.lettering import write_text
from recap.show.palette import colours_of

_MOST_COLUMNS = 4
# Clips narrower than this are shown at double size.
_SMALL_PX = 480
_BAR_PX, _GAP_PX, _DOT_PX = 32, 8, 4
_PAPER = 16


def write_side_by_side(out: Path, clips: Mapping[str, Path], shown: Callable[[], None]) -> None:
    """Join clips of equal size and length, by name, up to four in a line; `shown` is called after every picture."""
    opened = [open_clip(path) for path in clips.values()]
    first, columns = opened[0], min(len(clips), _MOST_COLUMNS)
    scale = 2 if first.width < _SMALL_PX else 1
    height, width = first.height * scale, first.width * scale
    row_px, column_px = height + _BAR_PX + _GAP_PX, width + _GAP_PX
    size = math.ceil(len(clips) / columns) * row_px - _GAP_PX, columns * column_px - _GAP_PX
    sheet: Picture = np.full((*size, 3), _PAPER, np.uint8)
    corners = [(i // columns * row_px, i % columns * column_px) for i in range(len(clips))]
    for name, colour, (top, left) in zip(clips, colours_of(list(clips)), corners, strict=True):
        sheet[top : top + _BAR_PX, left : left + width] = list(bytes.fromhex(colour[1:]))
        write_text(
            sheet,
            name.upper(),
            top=top + 6,
            left=left + 8,
            width=width - 16,
            dot=_DOT_PX,
            ink=(255, 255, 255),
        )
    with ClipWriter(out, size, first.fps) as writer:
        for pictures in zip(*(clip.pictures() for clip in opened), strict=True):
            for picture, (top, left) in zip(pictures, corners, strict=True):
                large = picture.repeat(scale, axis=0).repeat(scale, axis=1)
                sheet[top + _BAR_PX : top + _BAR_PX + height, left : left + width] = large
            writer.write(torch.from_numpy(sheet).permute(2, 0, 1)[None])
            shown()
