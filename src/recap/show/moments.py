"""A few moments of several clips as one picture: a line per clip, a column per moment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from recap.errors import refuse
from recap.io.video import Picture, open_clip
from recap.show.lettering import write_text
from recap.show.palette import colours_of

_PAPER, _INK = 16, (200, 206, 212)
_BAR_PX, _GAP_PX, _DOT_PX = 22, 6, 2


def moments_sheet(clips: Mapping[str, Path], moments: Mapping[float, str]) -> Picture:
    """Show clips of equal size, by name; `moments` maps seconds to the text above their pictures."""
    shown = {name: _pictures(clip, list(moments)) for name, clip in clips.items()}
    return pictures_sheet(shown, list(moments.values()))


def pictures_sheet(shown: Mapping[str, Sequence[Picture]], labels: Sequence[str]) -> Picture:
    """Lay out pictures of equal size, a line of them per name under a bar in its colour."""
    height, width = next(iter(shown.values()))[0].shape[:2]
    row_px, column_px = _BAR_PX + height + _GAP_PX, width + _GAP_PX
    size = _BAR_PX + len(shown) * row_px, len(labels) * column_px - _GAP_PX
    sheet: Picture = np.full((*size, 3), _PAPER, np.uint8)
    for column, label in enumerate(labels):
        _write(sheet, label, 0, column * column_px, width, _INK)
    colours = colours_of(list(shown))
    for row, (name, pictures) in enumerate(shown.items()):
        top = _BAR_PX + row * row_px
        sheet[top : top + _BAR_PX] = list(bytes.fromhex(colours[row][1:]))
        _write(sheet, name.upper(), top, 0, size[1], (255, 255, 255))
        for column, picture in enumerate(pictures):
            left = column * column_px
            sheet[top + _BAR_PX : top + _BAR_PX + height, left : left + width] = picture
    return sheet


def _write(sheet: Picture, text: str, top: int, left: int, width: int, ink: tuple[int, int, int]) -> None:
    above = (_BAR_PX - 5 * _DOT_PX) // 2
    write_text(sheet, text, top=top + above, left=left + 6, width=width - 12, dot=_DOT_PX, ink=ink)


def _pictures(path: Path, seconds: list[float]) -> list[Picture]:
    clip = open_clip(path)
    wanted = [round(second * clip.fps) for second in seconds]
    found = {index: picture for index, picture in enumerate(clip.pictures()) if index in wanted}
    for second, index in zip(seconds, wanted, strict=True):
        if index not in found:
            raise refuse("moment", second, f"{path.name} ends before it", "choose an earlier one")
    return [found[index] for index in wanted]
