"""This module makes the clips that pages show: marked, next to each other, and small enough to embed."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from recap.errors import refuse
from recap.io.files import write_whole
from recap.io.video import Clip, ClipWriter, Picture, open_clip
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
_BAR_PX, _BADGE_PX, _GAP_PX = 32, 20, 8
_GOOD, _OTHER = "#12a150", "#7d8796"
GIF_PER_SECOND = 8


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
    writer: ClipWriter | None = None
    with ExitStack() as stack:
        for joined in _joined(list(clips), opened, scale):
            if writer is None:
                writer = stack.enter_context(ClipWriter(out, joined.shape[:2], opened[0].fps))
            writer.write(torch.from_numpy(joined).permute(2, 0, 1)[None])
            advance(1)


def _joined(names: Sequence[str], clips: Sequence[Clip], scale: int) -> Iterator[Picture]:
    """Yield the pictures of the clips next to each other."""
    columns, width = min(len(clips), _MOST_COLUMNS), clips[0].width * scale
    bars = [bar(name, (_BAR_PX, width), c) for name, c in zip(names, colours_of(names), strict=True)]
    for pictures in zip(*(clip.pictures() for clip in clips), strict=True):
        large = [picture.repeat(scale, axis=0).repeat(scale, axis=1) for picture in pictures]
        tiles = [np.concatenate(tile) for tile in zip(bars, large, strict=True)]
        yield lay_out(tiles, columns, _GAP_PX)


class Excerpt(NamedTuple):
    """Names a part of a clip, from one second to another, and what is written below its pictures."""

    start_s: float
    end_s: float
    label: str


class Badge(NamedTuple):
    """Says in a word what became of a clip, and whether that was hoped for."""

    text: str
    good: bool


def write_gif(
    out: Path,
    clips: Mapping[str, Sequence[Path]],
    excerpts: Sequence[Excerpt],
    badges: Mapping[str, Sequence[Badge]],
) -> None:
    """Join excerpts of clips of equal size and length into a GIF that repeats for ever.

    A column has the clips of one name, a line one clip of every name, each with its badge in the last excerpt.
    """
    names, lines = list(clips), [list(line) for line in zip(*clips.values(), strict=True)]
    marks = [badge for line in zip(*(badges[name] for name in names), strict=True) for badge in line]
    opened = [open_clip(path) for line in lines for path in line]
    fps, every, width = opened[0].fps, round(opened[0].fps / GIF_PER_SECOND), opened[0].width
    heads = [bar(name, (_BAR_PX, width), c) for name, c in zip(names, colours_of(names), strict=True)]
    head, blank = lay_out(heads, len(names), _GAP_PX), bar("", (_BADGE_PX, width))
    ends = [bar(mark.text, (_BADGE_PX, width), _GOOD if mark.good else _OTHER) for mark in marks]
    shown: list[Picture] = []
    for index, pictures in enumerate(zip(*(clip.pictures() for clip in opened), strict=True)):
        here = [part for part in excerpts if part.start_s <= index / fps < part.end_s]
        if here and index % every == 0:
            below = ends if here[0] is excerpts[-1] else [blank] * len(marks)
            tiles = [np.concatenate(tile) for tile in zip(pictures, below, strict=True)]
            foot = bar(here[0].label, (_BAR_PX, head.shape[1]))
            shown.append(np.concatenate([head, lay_out(tiles, len(names), _GAP_PX), foot]))
    if not shown:
        limit = "show no picture of these clips"
        raise refuse("excerpts", list(excerpts), limit, "choose seconds within them")
    write_whole(out, gif_bytes(shown, GIF_PER_SECOND))


def gif_bytes(pictures: Sequence[Picture], per_second: int) -> bytes:
    """Encode pictures of equal size as a GIF, with one palette made for all of them."""
    import av

    height, width = pictures[0].shape[:2]
    beat = Fraction(1, per_second)
    graph = av.filter.Graph()
    pixels = av.VideoFormat("rgb24", width, height)
    source = graph.add_buffer(width=width, height=height, format=pixels, time_base=beat)
    split, made = graph.add("split"), graph.add("palettegen", "stats_mode=diff")
    used, sink = graph.add("paletteuse", "dither=none:diff_mode=rectangle"), graph.add("buffersink")
    source.link_to(split)
    split.link_to(made, 0, 0)
    split.link_to(used, 1, 0)
    made.link_to(used, 0, 1)
    used.link_to(sink)
    graph.configure()
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="gif", options={"loop": "0"}) as target:
        stream: Any = target.add_stream("gif", rate=per_second)
        stream.width, stream.height, stream.pix_fmt = width, height, "pal8"
        for index, picture in enumerate(pictures):
            frame: Any = av.VideoFrame.from_ndarray(np.ascontiguousarray(picture), format="rgb24")
            frame.pts, frame.time_base = index, beat
            source.push(frame)
        source.push(None)
        for index in range(len(pictures)):
            coloured: Any = sink.pull()
            coloured.pts, coloured.time_base = index, beat
            target.mux(stream.encode(coloured))
        target.mux(stream.encode())
    return buffer.getvalue()


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
