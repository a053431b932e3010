"""Average the values of clips to the value of a dimension.

VBench-Long averages over clips. If all videos are equally long, that equals the mean over videos, which is reported
next to it. Two dimensions are first fused with the fast value of their video. The static filter leaves only a few
clips of a video, so a filtered dimension is averaged over videos.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from recap.errors import refuse
from recap.eval.metrics.consistency import fused, mapped
from recap.eval.scores import Score

FUSED = {"subject_consistency": "subject", "background_consistency": "background"}
"""These dimensions have a slow and a fast part; the value names the column of the mapping table."""

MAY_DROP = ("color",)
"""VBench leaves out clips in which it finds no colour word for the object."""

# VBench divides its mean by this, but not the values of clips.
_SCALE = {"imaging_quality": 100.0}


def dimension_score(
    dimension: str,
    backend: str,
    clips: Mapping[str, Sequence[float]],
    fast: Mapping[str, float] | None = None,
    *,
    over_videos: bool = False,
) -> Score:
    """Average each video's clip values, in 0..1; a fused dimension also needs the fast value of each video.

    A video of one clip has no fast value and keeps its slow one.
    """
    videos = {name: [_scaled(dimension, name, value) for value in values] for name, values in clips.items()}
    videos = {name: values for name, values in videos.items() if values}
    if not videos:
        raise refuse(dimension, "no clip", "there is nothing to average", "look at the log of the dimension")
    details: dict[str, Any] = {}
    if dimension in FUSED:
        details, videos = _fused(FUSED[dimension], videos, fast or {})
    means = {name: fmean(values) for name, values in videos.items()}
    every = [value for values in videos.values() for value in values]
    details |= {"mean_over_videos": fmean(means.values()), "videos": means}
    value = fmean(means.values()) if over_videos else fmean(every)
    return Score(dimension, value, backend, len(every), details)


def _fused(
    kind: str, slow: Mapping[str, list[float]], fast: Mapping[str, float]
) -> tuple[dict[str, Any], dict[str, list[float]]]:
    both = {
        name: [fused(value, fast[name], kind) for value in values] if name in fast else values
        for name, values in slow.items()
    }
    measured = [fast[name] for name in slow if name in fast]
    details = {
        "slow": fmean(value for values in slow.values() for value in values),
        "fast_raw": fmean(measured) if measured else None,
        "fast_mapped": fmean(mapped(value, kind) for value in measured) if measured else None,
    }
    return details, both


def _scaled(dimension: str, video: str, value: float) -> float:
    scaled = value / _SCALE.get(dimension, 1.0)
    if not math.isfinite(scaled):
        limit = f"{dimension} of a clip must be a number"
        raise refuse("VBench's value", f"{value} of {video}", limit, "check whether that video is damaged")
    return scaled
