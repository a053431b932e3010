"""This module makes the clips that pages show: marked, next to each other, and small enough to embed."""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from recap.io.video import ClipWriter, open_clip
from recap.show.palette import colours_of
from recap.show.sheet import bar, lay_out

GREEN = (38, 222, 96)
# Enough to see at a glance, little enough to recognise what is under it.
_TINT = 0.30
_BORDER_PX = 2
# A page of 25 MB still opens at once; base64 makes four bytes of three.
EMBED_LIMIT = 18_000_000
_MOST_COLUMNS = 4
# Clips narrower than this are shown at double size.
_SMALL_PX = 480
_BAR_PX, _GAP_PX = 32, 8


def tint(pictures: Tensor, marked: Tensor) -> Tensor:
    """Tint and outline in green the marked tokens, T rows columns, bool, of pictures T 3 Y X, uint8.

    Neighbouring tokens share one outline, so that what came in together reads as one thing.
    """
    side = pictures.shape[-1] // marked.shape[-1]
    area = marked.repeat_interleave(side, dim=1).repeat_interleave(side, dim=2)
    # Replicated padding: the edge of the picture is not an outline.
    outside = functional.pad((~area).float(), [_BORDER_PX] * 4, mode="replicate")
    inner = area & (functional.max_pool2d(outside, 2 * _BORDER_PX + 1, stride=1) == 0)
    green = torch.tensor(GREEN, dtype=torch.float32, device=pictures.device)[:, None, None]
    # 1 on the outline, the tint's share inside it, 0 elsewhere.
    strength = torch.where(inner, _TINT, area.to(torch.float32))[:, None]
    return torch.lerp(pictures.to(torch.float32), green, strength).round_().to(torch.uint8)


def write_side_by_side(
    out: Path, clips: Mapping[str, Path], advance: Callable[[int], None] = lambda count: None
) -> None:
    """Join clips of equal size and length, each under a bar with its name, up to four in a line.

    `advance` is called with 1 after every picture.
    """
    opened = [open_clip(path) for path in clips.values()]
    scale = 2 if opened[0].width < _SMALL_PX else 1
    columns, width = min(len(clips), _MOST_COLUMNS), opened[0].width * scale
    bars = [bar(name, (_BAR_PX, width), c) for name, c in zip(clips, colours_of(list(clips)), strict=True)]
    lines = math.ceil(len(clips) / columns)
    size = (
        lines * (opened[0].height * scale + _BAR_PX + _GAP_PX) - _GAP_PX,
        columns * (width + _GAP_PX) - _GAP_PX,
    )
    with ClipWriter(out, size, opened[0].fps) as writer:
        for pictures in zip(*(clip.pictures() for clip in opened), strict=True):
            large = [picture.repeat(scale, axis=0).repeat(scale, axis=1) for picture in pictures]
            tiles = [np.concatenate(tile) for tile in zip(bars, large, strict=True)]
            writer.write(torch.from_numpy(lay_out(tiles, columns, _GAP_PX)).permute(2, 0, 1)[None])
            advance(1)


def embed(video: Path, limit: int = EMBED_LIMIT, link: str = "") -> tuple[str, str]:
    """Return the source for a page's player, and a remark for its reader (empty if the clip is embedded as it is).

    Beyond the limit a clip is embedded at half size; if that is too large as well, the page links the file.
    `link` is the path from the page to the clip, where they are not in one folder.
    """
    link = link or video.name
    if video.stat().st_size <= limit:
        return _data_uri(video), ""
    small = video.with_name("preview.mp4")
    try:
        _halve(video, small)
        if small.stat().st_size <= limit:
            return _data_uri(small), f"Shown at half size; the full one is {link} next to this page."
    finally:
        small.unlink(missing_ok=True)
    return link, f"The video is too large for the page and is read from {link} next to it."


def _halve(video: Path, small: Path) -> None:
    clip = open_clip(video)
    size = (clip.height // 4 * 2, clip.width // 4 * 2)
    with ClipWriter(small, size, clip.fps, quality=29) as writer:
        for picture in clip.pictures():
            pixels = torch.from_numpy(picture).permute(2, 0, 1)[None].float() / 255
            writer.write(functional.interpolate(pixels, size=size, mode="area"))


def _data_uri(video: Path) -> str:
    return "data:video/mp4;base64," + base64.b64encode(video.read_bytes()).decode()
