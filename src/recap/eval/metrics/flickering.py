"""Temporal flickering, VBench's: how little neighbouring pictures differ, 0..1. Arithmetic alone.

A clip's score is (255 - mean absolute difference of neighbours) / 255; a long video's is the mean over its clips of
2 s. VBench's filter that drops moving clips is left out, as the paper's numbers were very likely made without it.
"""

from __future__ import annotations

import itertools

import numpy as np

from recap.errors import refuse
from recap.eval.sampling import Footage, Pictures, clip_spans, windows
from recap.eval.scores import Score

CLIP_S = 2


def clip_flickering(pictures: Pictures) -> float:
    """Of one clip, N Y X 3 with N >= 2."""
    if len(pictures) < 2:
        raise refuse("pictures", len(pictures), "flickering needs at least 2", "give a longer clip")
    steps = [np.abs(after.astype(np.int16) - before).mean() for before, after in itertools.pairwise(pictures)]
    return float((255 - np.mean(steps)) / 255)


def temporal_flickering(clip: Footage, num_pictures: int) -> Score:
    """Of a long video, the mean over its clips."""
    spans = clip_spans(num_pictures, clip.fps, CLIP_S)
    values = [clip_flickering(part) for part in windows(clip.pictures(), spans)]
    return Score("temporal_flickering", float(np.mean(values)), "native", len(values), {"clips": values})
