"""Temporal flickering of VBench: how little neighbouring pictures differ, 0..1. It needs no model.

The score of a clip is (255 - mean absolute difference of neighbours) / 255; that of a long video is the mean over its
clips of 2 s. VBench's filter that drops moving clips is not used, as the paper most likely did not use it either.
"""

from __future__ import annotations

import itertools

import numpy as np

from recap.errors import refuse
from recap.eval.sampling import Footage, Pictures, clip_spans, windows
from recap.eval.scores import Score

CLIP_S = 2


def clip_flickering(pictures: Pictures) -> float:
    """Measure one clip, N Y X 3 with N >= 2."""
    if len(pictures) < 2:
        raise refuse("pictures", len(pictures), "flickering needs at least 2", "give a longer clip")
    steps = [np.abs(after.astype(np.int16) - before).mean() for before, after in itertools.pairwise(pictures)]
    return float((255 - np.mean(steps)) / 255)


def temporal_flickering(clip: Footage, num_pictures: int) -> Score:
    """Measure a long video as the mean over its clips."""
    spans = clip_spans(num_pictures, clip.fps, CLIP_S)
    values = [clip_flickering(part) for part in windows(clip.pictures(), spans)]
    return Score("temporal_flickering", float(np.mean(values)), "native", len(values), {"clips": values})
