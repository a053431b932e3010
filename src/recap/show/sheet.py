"""This module lays out pictures on labelled sheets and encodes them as PNG.

OpenCV is imported by the functions that need it: the package is imported without it.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from recap.errors import refuse
from recap.io.files import write_whole
from recap.io.trace import Bank, Position
from recap.io.video import Picture, open_clip
from recap.show.palette import colours_of

_PAPER, _INK = 17, (190, 196, 202)
_BAR_PX, _GAP_PX = 22, 6


@dataclass(frozen=True, slots=True)
class Patches:
    """Holds the new tokens of a bank as one sees them, in order of first appearance."""

    # N side side 3
    pixels: NDArray[np.uint8]
    # N: when each scored highest
    seconds: NDArray[np.float64]
    frames: NDArray[np.int64]
    rows: NDArray[np.int64]
    columns: NDArray[np.int64]
    scores: NDArray[np.float32]

    def __len__(self) -> int:
        return len(self.seconds)


def cut_out(picture: Picture, position: Position, side: int) -> Picture:
    """Return the pixels of a token, side side 3."""
    _, row, column = position
    return picture[row * side : (row + 1) * side, column * side : (column + 1) * side].copy()


def gather_patches(
    cut: Mapping[Position, Picture], scores: Bank, seconds: Mapping[int, float], side: int
) -> Patches:
    """Put cut-outs of tokens in order of first appearance; `seconds` says when each frame is shown."""
    frames, rows, columns = np.array(sorted(cut), np.int64).reshape(-1, 3).T
    pixels = np.array([cut[position] for position in sorted(cut)], np.uint8).reshape(-1, side, side, 3)
    seen_s = np.array([seconds[int(frame)] for frame in frames], np.float64)
    found = np.array([scores[position] for position in sorted(cut)], np.float32)
    return Patches(pixels, seen_s, frames, rows, columns, found)


def png_bytes(picture: Picture) -> bytes:
    """Encode a picture Y X 3 as PNG."""
    import cv2

    return bytes(cv2.imencode(".png", np.ascontiguousarray(picture[..., ::-1]))[1])


def png_uri(png: bytes) -> str:
    """Return an encoded picture as an address that holds all of it."""
    return f"data:image/png;base64,{base64.b64encode(png).decode()}"


def write_png(path: Path | str, picture: Picture) -> None:
    """Write a picture as a PNG file."""
    write_whole(Path(path), png_bytes(picture))


def contact_sheet(patches: Patches, scale: int | None = None) -> Picture:
    """Lay out all patches enlarged, each with its second below, in order of first appearance."""
    # Thousands of patches at triple size would make a picture that few programs can open.
    scale = scale or (3 if len(patches) <= 2500 else 2)
    cell = patches.pixels.shape[1] * scale
    tiles = [
        np.concatenate(
            [patch.repeat(scale, axis=0).repeat(scale, axis=1), bar(f"{second:.1f}s", (6 * scale, cell))]
        )
        for patch, second in zip(patches.pixels, patches.seconds, strict=True)
    ]
    return lay_out(tiles or [bar("", (cell, cell))], max(8, math.ceil(math.sqrt(len(tiles) * 1.4))), gap_px=4)


def moments_sheet(clips: Mapping[str, Path], moments: Mapping[float, str]) -> Picture:
    """Show clips of equal size, by name; `moments` maps seconds to the text above their pictures."""
    shown = {name: _pictures_at(clip, list(moments)) for name, clip in clips.items()}
    return pictures_sheet(shown, list(moments.values()))


def pictures_sheet(shown: Mapping[str, Sequence[Picture]], labels: Sequence[str]) -> Picture:
    """Lay out pictures of equal size, a line of them per name under a bar in its colour."""
    width, count = next(iter(shown.values()))[0].shape[1], len(labels)
    parts = [lay_out([bar(label, (_BAR_PX, width)) for label in labels], count, _GAP_PX)]
    for (name, pictures), colour in zip(shown.items(), colours_of(list(shown)), strict=True):
        parts += [bar(name, (_BAR_PX, parts[0].shape[1]), colour), lay_out(pictures, count, _GAP_PX)]
    return np.concatenate(parts)


def lay_out(tiles: Sequence[Picture], columns: int, gap_px: int = 0) -> Picture:
    """Put pictures of equal size on a sheet, `columns` to a line, with a gap between them."""
    height, width = tiles[0].shape[0] + gap_px, tiles[0].shape[1] + gap_px
    lines = math.ceil(len(tiles) / columns)
    sheet: Picture = np.full((lines * height - gap_px, columns * width - gap_px, 3), _PAPER, np.uint8)
    for index, tile in enumerate(tiles):
        top, left = index // columns * height, index % columns * width
        sheet[top : top + tile.shape[0], left : left + tile.shape[1]] = tile
    return sheet


def bar(text: str, size: tuple[int, int], colour: str | None = None) -> Picture:
    """Draw a bar (rows, columns) in a colour, #rrggbb, with a line of text; letters that do not fit are left out."""
    import cv2

    height, width = size
    made: Picture = np.empty((height, width, 3), np.uint8)
    made[:] = list(bytes.fromhex(colour[1:])) if colour else _PAPER
    font, edge = cv2.FONT_HERSHEY_SIMPLEX, min(8, width // 24)
    scale = cv2.getFontScaleFromHeight(font, height * 6 // 10)
    while text and cv2.getTextSize(text, font, scale, 1)[0][0] > width - 2 * edge:
        text = text[:-1]
    ink = (255, 255, 255) if colour else _INK
    cv2.putText(made, text, (edge, height * 8 // 10), font, scale, ink, 1, cv2.LINE_AA)
    return made


def _pictures_at(path: Path, seconds: Sequence[float]) -> list[Picture]:
    clip = open_clip(path)
    wanted = [round(second * clip.fps) for second in seconds]
    found = {index: picture for index, picture in enumerate(clip.pictures()) if index in wanted}
    for second, index in zip(seconds, wanted, strict=True):
        if index not in found:
            raise refuse("moment", second, f"{path.name} ends before it", "choose an earlier one")
    return [found[index] for index in wanted]
