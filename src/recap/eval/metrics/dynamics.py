"""The four dimensions of VBench that need no foreign weights, and dynamic degree over the length of a video."""

from __future__ import annotations

import numpy as np

from recap.eval.judged import JudgedRun, Measure
from recap.eval.metrics.consistency import consistency
from recap.eval.metrics.dynamic_degree import CLIP_S, dynamic_degree
from recap.eval.metrics.flickering import temporal_flickering
from recap.eval.scores import Score

LENGTHS_S = (5, 10, 20, 30, 45, 60)
SHORT_BY_S = 1.0
"""Tolerance: videos end with a whole block, so they may be half a block and the first frame short."""


def _dynamic_degree(run: JudgedRun) -> Score:
    return run.once("dynamic_degree", lambda: dynamic_degree(run.clip, run.num_pictures, *run.motion_judge))


def _measure(run: JudgedRun) -> list[Score]:
    clip, num = run.clip, run.num_pictures
    # VBench's own embedders differ for the two; without them, things for the subject and colours for the rest.
    return [
        temporal_flickering(clip, num),
        _dynamic_degree(run),
        consistency(clip, num, "subject", run.embedder),
        consistency(clip, num, "background", run.colours),
    ]


def _measure_lengths(run: JudgedRun) -> list[Score]:
    """Gives the lengths that the video has, by its pictures: its last clip may overlap, for a rest of any size."""
    whole = _dynamic_degree(run)
    lasts_s = run.num_pictures / run.clip.fps
    return [
        Score(
            f"dynamic_degree_{s}s",
            float(np.mean(whole.details["clips"][: s // CLIP_S])),
            whole.backend,
            s // CLIP_S,
        )
        for s in LENGTHS_S
        if lasts_s >= s - SHORT_BY_S
    ]


COLUMNS = {
    "temporal_flickering": "TF", "dynamic_degree": "DD", "subject_consistency": "SC", "background_consistency": "BC",
}  # fmt: skip
MEASURES = (
    Measure(
        "dynamics",
        _measure,
        headlines=("dynamic_degree",),
        paper={name: (column, 0.01) for name, column in COLUMNS.items()},
        uses_flow=True,
    ),
    Measure("length", _measure_lengths, uses_flow=True),
)
