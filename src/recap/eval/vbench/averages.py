"""From the values of clips to the value of a dimension.

VBench-Long's mean is over clips; where all videos are equally long, that is the mean over videos, which is given
beside it. Two dimensions are fused with the fast value of their video first. Where the static filter chose, few clips
of a video are left, and the mean is over videos.
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
"""Dimensions of a slow and a fast part, and the column of the table for them."""

MAY_DROP = ("color",)
"""VBench leaves out clips in which it finds no colour word for the object."""

_SCALE = {"imaging_quality": 100.0}  # VBench divides its mean by this, but not the values of clips


def dimension_score(
    dimension: str,
    backend: str,
    clips: Mapping[str, Sequence[float]],
    fast: Mapping[str, float] | None = None,
    *,
    over_videos: bool = False,
) -> Score:
    """Of the values of every video's clips, in 0..1, and for the fused two of every video's fast value.

    A video of one clip has no fast value, and its slow one stands for it.
    """
    videos = {name: [_plain(dimension, name, value) for value in values] for name, values in clips.items()}
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
    made = {
        name: [fused(value, fast[name], kind) for value in values] if name in fast else values
        for name, values in slow.items()
    }
    known = [fast[name] for name in slow if name in fast]
    details: dict[str, Any] = {"slow": fmean(value for values in slow.values() for value in values)}
    details["fast_raw"] = fmean(known) if known else None
    details["fast_mapped"] = fmean(mapped(value, kind) for value in known) if known else None
    return details, made


def _plain(dimension: str, video: str, value: float) -> float:
    plain = value / _SCALE.get(dimension, 1.0)
    if not math.isfinite(plain):
        limit = f"{dimension} of a clip must be a number"
        raise refuse("VBench's value", f"{value} of {video}", limit, "look whether that video is damaged")
    return plain
