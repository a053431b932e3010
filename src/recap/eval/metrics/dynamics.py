"""Measures the four dimensions of VBench that need no foreign weights, and two of them over a video's length.

Temporal flickering of a clip of 2 s is (255 - mean absolute difference of neighbouring pictures) / 255. VBench's
filter that drops moving clips is not used, as the paper most likely did not use it either.

Dynamic degree, with any flow, is the share of a video's clips that move. About 8 pictures per second are compared. A
pair moves if the mean of its largest 5 % of flow exceeds 6 px per 256 px of the shorter side; a clip of n pictures
moves if n / 4 of its pairs do. VBench uses RAFT trained on Things.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from recap.errors import refuse
from recap.eval.judged import JudgedRun, Measure
from recap.eval.metrics.consistency import consistency, embedded_clips, fused_mean
from recap.eval.sampling import CLIP_S, Footage, ForwardFlow, as_tensor, cut_clips
from recap.eval.scores import Score
from recap.eval.visible import CLIPS, FLICKERING, LIKENESS
from recap.io.video import Picture

PICTURES_PER_S = 8
TOP_SHARE = 0.05
THRESHOLD_PX, REFERENCE_PX = 6.0, 256
NEEDED, OF = 4, 16
"""This many pairs of this many pictures must move."""
LENGTHS_S = (5, 10, 20, 30, 45, 60)
SHORT_BY_S = 1.0
"""Tolerance: videos end with a whole block, so they may be half a block and the first frame short."""


def clip_flickering(pictures: Collection[Picture]) -> float:
    """Measure how little neighbouring pictures of one clip differ, 0..1; it needs at least 2."""
    if len(pictures) < 2:
        raise refuse("pictures", len(pictures), "flickering needs at least 2", "give a longer clip")
    steps = [np.abs(after.astype(np.int16) - before).mean() for before, after in itertools.pairwise(pictures)]
    return float((255 - np.mean(steps)) / 255)


def temporal_flickering(clip: Footage) -> Score:
    """Measure a long video as the mean over its clips."""
    values = [clip_flickering(part) for part in cut_clips(clip)]
    return Score("temporal_flickering", float(np.mean(values)), "native", len(values), {"clips": values})


def top_flow(flow: NDArray[np.float32]) -> float:
    """Return the mean length of the largest 5 % of a flow 2 Y X, in pixels."""
    length = np.hypot(flow[0], flow[1]).ravel()
    count = int(len(length) * TOP_SHARE)
    return float(np.partition(length, len(length) - count)[len(length) - count :].mean())


def clip_moves(pictures: Sequence[Picture], fps: float, flow: ForwardFlow) -> bool:
    """Say whether one clip counts as moving."""
    few = pictures[:: max(1, round(fps / PICTURES_PER_S))]
    # VBench rounds half to even, as Python does; for two pictures that would need no pair at all.
    needed = max(1, round(NEEDED * len(few) / OF))
    limit = THRESHOLD_PX * min(pictures[0].shape[:2]) / REFERENCE_PX
    moving = (
        pair
        for pair in itertools.pairwise(few)
        if top_flow(flow(as_tensor(np.stack(pair)))[0, 0].numpy()) > limit
    )
    return len(list(itertools.islice(moving, needed))) == needed


def dynamic_degree(clip: Footage, flow: ForwardFlow, backend: str) -> Score:
    """Measure a long video; `backend` names the flow."""
    moves = [clip_moves(list(part), clip.fps, flow) for part in cut_clips(clip)]
    return Score("dynamic_degree", float(np.mean(moves)), backend, len(moves), {"clips": moves})


def _dynamic_degree(run: JudgedRun) -> Score:
    return run.once("dynamic_degree", lambda: dynamic_degree(run.clip, *run.motion_judge))


def _measure(run: JudgedRun) -> list[Score]:
    # VBench's own embedders differ for the two; without them, things for the subject and colours for the rest.
    return [
        temporal_flickering(run.clip),
        _dynamic_degree(run),
        consistency(run.clip, "subject", run.embedder),
        consistency(run.clip, "background", run.colours),
    ]


def _measure_lengths(run: JudgedRun) -> list[Score]:
    """Give the lengths that the video has, by its pictures: its last clip may overlap, for a rest of any size."""
    whole = _dynamic_degree(run)
    return [
        Score(f"dynamic_degree_{s}s", float(np.mean(whole.details["clips"][:count])), whole.backend, count)
        for s, count in _prefixes(run)
    ]


def _measure_length_consistency(run: JudgedRun) -> list[Score]:
    """Give subject consistency of the same lengths."""
    slow, firsts = embedded_clips(run.clip, run.embedder)
    return [
        Score(
            f"subject_consistency_{s}s",
            fused_mean(slow[:count], firsts[:count], "subject"),
            run.embedder.backend,
            count,
        )
        for s, count in _prefixes(run)
    ]


def _prefixes(run: JudgedRun) -> list[tuple[int, int]]:
    """Return the lengths that a video has, in seconds and in clips."""
    return [(s, s // CLIP_S) for s in LENGTHS_S if run.sampled.duration_s >= s - SHORT_BY_S]


COLUMNS = {
    "temporal_flickering": "TF", "dynamic_degree": "DD", "subject_consistency": "SC", "background_consistency": "BC",
}  # fmt: skip
# From which difference on a viewer could see it.
VISIBLE: Mapping[str, float | Mapping[str, float]] = {
    "temporal_flickering": FLICKERING,
    "dynamic_degree": CLIPS,
    "subject_consistency": LIKENESS,
    "background_consistency": LIKENESS,
}
MEASURES = (
    Measure(
        "dynamics",
        _measure,
        headlines=("dynamic_degree",),
        paper={name: (column, 0.01) for name, column in COLUMNS.items()},
        visible=VISIBLE,
        uses_flow=True,
    ),
    Measure(
        "length",
        _measure_lengths,
        visible={f"dynamic_degree_{s}s": CLIPS for s in LENGTHS_S},
        uses_flow=True,
    ),
    # A measure of its own: the published runs of `length` were judged before it was there.
    Measure(
        "length_consistency",
        _measure_length_consistency,
        visible={f"subject_consistency_{s}s": LIKENESS for s in LENGTHS_S},
    ),
)
