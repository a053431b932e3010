"""Dynamic degree by VBench's rule, with any flow: the share of a video's 2 s clips that move.

About 8 pictures per second are compared. A pair moves if the mean of its largest 5 % of flow exceeds 6 px per 256 px
of the shorter side; a clip of n pictures moves if n / 4 of its pairs do. VBench uses RAFT trained on Things.
"""

from __future__ import annotations

import itertools

import numpy as np
from numpy.typing import NDArray

from recap.eval.sampling import Footage, ForwardFlow, Pictures, as_tensor, clip_spans, windows
from recap.eval.scores import Score

CLIP_S = 2
PICTURES_PER_S = 8
TOP_SHARE = 0.05
THRESHOLD_PX, REFERENCE_PX = 6.0, 256
NEEDED, OF = 4, 16
"""This many pairs of this many pictures must move."""


def top_flow(flow: NDArray[np.float32]) -> float:
    """Return the mean length of the largest 5 % of a flow 2 Y X, in pixels."""
    length = np.hypot(flow[0], flow[1]).ravel()
    count = int(len(length) * TOP_SHARE)
    return float(np.partition(length, len(length) - count)[len(length) - count :].mean())


def clip_moves(pictures: Pictures, fps: float, flow: ForwardFlow) -> bool:
    """Say whether one clip counts as moving."""
    few = pictures[:: max(1, round(fps / PICTURES_PER_S))]
    if len(few) < 2:
        return False
    # VBench rounds half to even, as Python does; for two pictures that would need no pair at all.
    needed = max(1, round(NEEDED * len(few) / OF))
    limit = THRESHOLD_PX * min(pictures.shape[1:3]) / REFERENCE_PX
    moving = 0
    for pair in itertools.pairwise(few):
        moving += top_flow(flow(as_tensor(np.stack(pair)))[0, 0].numpy()) > limit
        if moving >= needed:
            return True
    return False


def dynamic_degree(clip: Footage, num_pictures: int, flow: ForwardFlow, backend: str) -> Score:
    """Measure a long video; `backend` names the flow."""
    spans = clip_spans(num_pictures, clip.fps, CLIP_S)
    moves = [clip_moves(part, clip.fps, flow) for part in windows(clip.pictures(), spans)]
    return Score("dynamic_degree", float(np.mean(moves)), backend, len(moves), {"clips": moves})
