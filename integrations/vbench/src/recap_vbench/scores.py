"""Averages the values of clips to dimensions, and combines the sixteen dimensions to Quality, Semantic and Total.

VBench-Long averages over clips. If all videos are equally long, that equals the mean over videos, which is reported
next to it. The static filter leaves only a few clips of a video, so a filtered dimension is averaged over videos.

norm(x) = (x - min) / (max - min); Quality is the weighted mean of 7 norms (dynamic degree counts half), Semantic the
mean of 9, Total = (4 Quality + Semantic) / 5. The official script counts a missing dimension as 0 and still prints a
Total; here a score that depends on a missing dimension is refused.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from importlib import resources
from statistics import fmean
from typing import Any, NamedTuple

from recap.errors import refuse, unknown_name
from recap.eval.metrics.consistency import fused, mapped
from recap.eval.scores import Score

FUSED = {"subject_consistency": "subject", "background_consistency": "background"}
"""These dimensions have a slow and a fast part; the value names the column of the mapping table."""

MAY_DROP = ("color",)
"""VBench leaves out clips in which it finds no colour word for the object."""


class Dimension(NamedTuple):
    """Says how a dimension is normalised and weighted; its group is `quality` or `semantic`."""

    name: str
    low: float
    high: float
    weight: float
    group: str

    def norm(self, value: float) -> float:
        return (value - self.low) / (self.high - self.low)


def _read_dimensions() -> dict[str, Dimension]:
    text = resources.files("recap_vbench").joinpath("dimensions.csv").read_text(encoding="utf-8")
    lines = csv.reader(text.splitlines()[1:])
    return {
        name: Dimension(name, float(low), float(high), float(weight), group)
        for name, low, high, weight, group in lines
    }


DIMENSIONS = _read_dimensions()
QUALITY = tuple(name for name, each in DIMENSIONS.items() if each.group == "quality")
SEMANTIC = tuple(name for name, each in DIMENSIONS.items() if each.group == "semantic")


def dimension_score(
    dimension: str,
    backend: str,
    clips: Mapping[str, Sequence[float]],
    fast: Mapping[str, float],
    *,
    over_videos: bool = False,
) -> Score:
    """Average each video's clip values, in 0..1; a fused dimension also needs the fast value of each video.

    A video of one clip has no fast value and keeps its slow one.
    """
    # VBench divides its mean of imaging quality by 100, but not the values of clips.
    scale = 100.0 if dimension == "imaging_quality" else 1.0
    videos = {video: [value / scale for value in values] for video, values in clips.items() if values}
    if not videos:
        raise refuse(dimension, "no clip", "there is nothing to average", "look at the log of the dimension")
    for video, value in ((video, value) for video, values in videos.items() for value in values):
        if not math.isfinite(value):
            limit = f"{dimension} of a clip must be a number"
            raise refuse(
                "VBench's value", f"{value} of {video}", limit, "check whether that video is damaged"
            )
    details: dict[str, Any] = {}
    if kind := FUSED.get(dimension):
        known = [fast[video] for video in videos if video in fast]
        details["slow"] = fmean(value for values in videos.values() for value in values)
        details["fast_raw"] = fmean(known) if known else None
        details["fast_mapped"] = fmean(mapped(value, kind) for value in known) if known else None
        for video in videos.keys() & fast.keys():
            videos[video] = [fused(value, fast[video], kind) for value in videos[video]]
    means = {video: fmean(values) for video, values in videos.items()}
    every = [value for values in videos.values() for value in values]
    details |= {"mean_over_videos": fmean(means.values()), "videos": means}
    return Score(dimension, fmean(means.values() if over_videos else every), backend, len(every), details)


def missing(values: Mapping[str, float], wanted: Sequence[str] = tuple(DIMENSIONS)) -> list[str]:
    """Return the dimensions without a value; refuse unknown names."""
    for name, value in values.items():
        if name not in DIMENSIONS:
            raise unknown_name("dimension", name, DIMENSIONS)
        if not -1e-9 <= value <= 1 + 1e-9:
            raise refuse(f"dimension {name}", value, "must be 0 to 1", "divide percentages by 100")
    return [name for name in wanted if name not in values]


def group_score(values: Mapping[str, float], group: str) -> float:
    """Return Quality or Semantic, 0..1; refuse if a dimension of the group is missing."""
    own = [each for each in DIMENSIONS.values() if each.group == group]
    if lacking := missing(values, [each.name for each in own]):
        limit = f"{len(lacking)} of its dimensions are missing"
        raise refuse(group, ", ".join(lacking), limit, "measure them, or report the dimensions alone")
    return math.fsum(d.weight * d.norm(values[d.name]) for d in own) / sum(d.weight for d in own)


def total_score(values: Mapping[str, float]) -> float:
    """Return Total, 0..1; refuse if any of the sixteen is missing."""
    if lacking := missing(values):
        limit = f"Total needs all {len(DIMENSIONS)} dimensions"
        remedy = "report the dimensions and Quality alone"
        raise refuse("Total", f"without {', '.join(lacking)}", limit, remedy)
    return (4 * group_score(values, "quality") + group_score(values, "semantic")) / 5
