"""Clips, from a file or in memory, and their pictures at the times a measure needs, read in one pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recap.errors import refuse
from recap.io.video import Picture

Pictures = NDArray[np.uint8]
"""RGB pictures, N Y X 3."""

PER_SECOND = 2.0
"""Pictures a second at which the protocols of identity and reappearance look at a video."""

ForwardFlow = Callable[[Tensor], Tensor]
"""A function from pictures B T 3 Y X, 0..1, to the flow B T-1 2 Y X from each picture to the next."""


class Footage(Protocol):
    """The pictures that a measure reads; `recap.io.video.Clip` implements it."""

    @property
    def fps(self) -> float: ...

    def pictures(self) -> Iterator[Picture]:
        """Return all pictures in order."""


@dataclass(frozen=True, slots=True)
class InMemoryClip:
    """Pictures that were never encoded to a file, so that no detail is lost."""

    shown: Pictures
    fps: float

    @property
    def num_pictures(self) -> int:
        return len(self.shown)

    def pictures(self) -> Iterator[Picture]:
        return iter(self.shown)


class Span(NamedTuple):
    """A time span in seconds; it includes `start` but not `end`."""

    start: float
    end: float

    def scaled(self, factor: float) -> Span:
        return Span(self.start * factor, self.end * factor)


@dataclass(frozen=True, slots=True)
class Sampled:
    """Some pictures of a clip and their times N; the duration is that of the whole clip."""

    seconds: NDArray[np.float64]
    pictures: Pictures
    duration_s: float

    def within(self, span: Span) -> NDArray[np.bool_]:
        return (self.seconds >= span.start - 1e-9) & (self.seconds < span.end - 1e-9)


def as_tensor(pictures: Pictures) -> Tensor:
    """Convert pictures N Y X 3 to one clip 1 N 3 Y X in 0..1."""
    return torch.from_numpy(np.ascontiguousarray(pictures)).permute(0, 3, 1, 2)[None].float() / 255


def sample_clip(clip: Footage, per_second: float) -> Sampled:
    """Read the pictures nearest to every 1 / per_second s, starting with the first."""
    if not per_second > 0:
        raise refuse("per_second", per_second, "must be above 0", "the protocols use 2")
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
    """Return the clips of VBench-Long as (first picture, end picture).

    Clips do not overlap, except that a remainder becomes one more full clip that ends with the video. A video
    shorter than a clip is one clip.
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
    """Yield the pictures of each span; spans start in order, and only unfinished ones are in memory."""
    recent: list[Picture] = []
    first = 0
    waiting = list(spans)
    for index, picture in enumerate(pictures):
        recent.append(picture)
        while waiting and waiting[0][1] == index + 1:
            start, end = waiting.pop(0)
            yield np.stack(recent[start - first : end - first])
        keep = min((start for start, _ in waiting), default=index + 1)
        drop = min(keep, index + 1) - first
        if drop > 0:
            del recent[:drop]
            first += drop
    if waiting:
        limit = f"the clip ends before picture {waiting[0][1]}"
        raise refuse("clip", f"{first + len(recent)} pictures", limit, "copy it again, or cut it again")
