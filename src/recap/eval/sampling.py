"""Reads the pictures of a clip, from a file or in memory, at the times that a measure needs, in one pass."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recap.errors import refuse
from recap.io.video import Clip, Picture

Pictures = NDArray[np.uint8]
"""RGB pictures, N Y X 3."""

PER_SECOND = 2.0
"""Pictures a second at which the protocols of identity and reappearance look at a video."""

CLIP_S = 2
"""Seconds of a clip of VBench-Long, for most of its dimensions."""

ForwardFlow = Callable[[Tensor], Tensor]
"""A function from pictures B T 3 Y X, 0..1, to the flow B T-1 2 Y X from each picture to the next."""


@dataclass(frozen=True, slots=True)
class InMemoryClip:
    """Has pictures that were never encoded to a file, so that no detail is lost."""

    shown: Pictures
    fps: float

    @property
    def num_pictures(self) -> int:
        return len(self.shown)

    def pictures(self) -> Iterator[Picture]:
        return iter(self.shown)


Footage = Clip | InMemoryClip
"""What a measure reads: `pictures()` in order, `fps` of them per second."""


class Span(NamedTuple):
    """Spans a time in seconds; it includes `start` but not `end`."""

    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Sampled:
    """Holds some pictures of a clip and their times N; the duration is that of the whole clip."""

    seconds: NDArray[np.float64]
    pictures: Pictures
    duration_s: float

    def within(self, span: Span) -> NDArray[np.bool_]:
        return (self.seconds >= span.start - 1e-9) & (self.seconds < span.end - 1e-9)

    def within_any(self, spans: Iterable[Span]) -> NDArray[np.bool_]:
        inside = np.zeros(len(self.seconds), bool)
        for span in spans:
            inside |= self.within(span)
        return inside


def as_tensor(pictures: Pictures) -> Tensor:
    """Convert pictures N Y X 3 to one clip 1 N 3 Y X in 0..1."""
    return torch.from_numpy(np.ascontiguousarray(pictures)).permute(0, 3, 1, 2)[None].float() / 255


def sample_clip(clip: Footage, per_second: float) -> Sampled:
    """Read the pictures nearest to every 1 / per_second s, starting with the first."""
    kept: list[Picture] = []
    seconds: list[float] = []
    count = 0
    for index, picture in enumerate(clip.pictures()):
        count = index + 1
        if index == round(len(kept) * clip.fps / per_second):
            kept.append(picture)
            seconds.append(index / clip.fps)
    return Sampled(np.array(seconds), np.stack(kept), count / clip.fps)


def cut_clips(clip: Footage, seconds: int = CLIP_S) -> Iterator[deque[Picture]]:
    """Yield the pictures of each clip of a long video, by the rule of VBench-Long.

    Clips do not overlap, except that a remainder becomes one more full clip that ends with the video. A video
    shorter than a clip is one clip. What is yielded is reused for the next clip, so only one is in memory.
    """
    size = int(clip.fps) * int(seconds)
    if size < 1:
        limit = f"clips of at least 1 s are needed, at {clip.fps:g} pictures per second"
        raise refuse("clip length", f"{seconds} s", limit, "cut longer clips")
    recent: deque[Picture] = deque(maxlen=size)
    count = 0
    for count, picture in enumerate(clip.pictures(), start=1):
        recent.append(picture)
        if count % size == 0:
            yield recent
    if count == 0:
        raise refuse("clip", "0 pictures", "at least 1 picture is needed", "give a longer video")
    if count % size:
        yield recent
