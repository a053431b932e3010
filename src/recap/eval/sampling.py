"""Footage, from a file or as it was drawn, and its pictures at the moments a measure asks for, read in one pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from recap.errors import refuse
from recap.io.video import Picture

Pictures = NDArray[np.uint8]
"""N Y X 3, RGB."""

PER_SECOND = 2.0
"""Pictures a second at which the protocols of identity and reappearance look at a video."""

ForwardFlow = Callable[[Tensor], Tensor]
"""Pictures B T 3 Y X, 0..1, to their flow B T-1 2 Y X, from each to the next."""


class Footage(Protocol):
    """What a measure looks at; `recap.io.video.Clip` is one."""

    @property
    def fps(self) -> float: ...

    def pictures(self) -> Iterator[Picture]:
        """Every picture in turn."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """Pictures that were never a file: nothing was lost to an encoder."""

    shown: Pictures
    fps: float

    @property
    def num_pictures(self) -> int:
        return len(self.shown)

    def pictures(self) -> Iterator[Picture]:
        return iter(self.shown)


class Span(NamedTuple):
    """Seconds from `start` up to, but without, `end`."""

    start: float
    end: float

    def scaled(self, factor: float) -> Span:
        return Span(self.start * factor, self.end * factor)


@dataclass(frozen=True, slots=True)
class Sampled:
    """Some pictures of a clip and when they are shown."""

    seconds: NDArray[np.float64]  # N
    pictures: Pictures
    duration_s: float  # of the whole clip

    def within(self, span: Span) -> NDArray[np.bool_]:
        return (self.seconds >= span.start - 1e-9) & (self.seconds < span.end - 1e-9)


def sample_clip(clip: Footage, per_second: float) -> Sampled:
    """The pictures nearest to every 1 / per_second s, the first among them."""
    if not per_second > 0:
        raise refuse("per_second", per_second, "must be above 0", "2 is the protocols' rate")
    kept: list[Picture] = []
    seconds: list[float] = []
    count = 0
    for index, picture in enumerate(clip.pictures()):
        count = index + 1
        if index == round(len(kept) * clip.fps / per_second):
            kept.append(picture)
            seconds.append(index / clip.fps)
    return Sampled(np.array(seconds), np.stack(kept), count / clip.fps)


def clip_spans(num_pictures: int, fps: float, seconds: int) -> list[tuple[int, int]]:
    """VBench-Long's cuts, as first and end picture: no overlap, but a rest becomes one more whole clip, from the end.

    A video shorter than a clip is one clip.
    """
    size = int(fps) * int(seconds)
    if num_pictures < 1 or size < 1:
        limit = "at least 1 picture and clips of at least 1 s are needed"
        raise refuse("clip", f"{num_pictures} pictures, {seconds} s", limit, "give a longer video")
    if num_pictures < size:
        return [(0, num_pictures)]
    starts = list(range(0, num_pictures - size + 1, size))
    if num_pictures % size:
        starts.append(num_pictures - size)
    return [(start, start + size) for start in starts]


def windows(pictures: Iterator[Picture], spans: Sequence[tuple[int, int]]) -> Iterator[Pictures]:
    """The pictures of every span in turn; spans start in order, and only those under way are in memory."""
    held: list[Picture] = []
    first = 0
    waiting = list(spans)
    for index, picture in enumerate(pictures):
        held.append(picture)
        while waiting and waiting[0][1] == index + 1:
            start, end = waiting.pop(0)
            yield np.stack(held[start - first : end - first])
        keep = min((start for start, _ in waiting), default=index + 1)
        drop = min(keep, index + 1) - first
        if drop > 0:
            del held[:drop]
            first += drop
    if waiting:
        limit = f"the clip ends before picture {waiting[0][1]}"
        raise refuse("clip", f"{first + len(held)} pictures", limit, "copy it again, or cut it anew")
