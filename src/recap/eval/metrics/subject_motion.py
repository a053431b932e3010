"""Measures subject motion: how far the subject's centroid travels, and how much its outline changes.

Dynamic degree counts camera motion, and a memory that freezes its subject loses little of it. Here a witness reports
which cells show the subject, in pictures half a second apart. A step is that of its centroid minus the camera's,
which is the median flow of the rest of the picture. A subject that stands still, or is pasted in repeatedly, scores 0
on both.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from recap.eval.judged import JudgedRun, Measure
from recap.eval.judges.subject import ProbeWitness
from recap.eval.metrics.reappearance import starts_from_trace
from recap.eval.sampling import ForwardFlow, Pictures, Sampled, as_tensor
from recap.eval.scores import Floats, Score
from recap.eval.visible import CELL_OF_SUBJECT, PATH

Shares = NDArray[np.float32]
"""The probability that each cell of N pictures shows the subject, N rows columns."""


def subject_motion(
    sampled: Sampled,
    shares: Shares,
    flow: ForwardFlow,
    backends: tuple[str, str],
    cuts_s: Sequence[float] = (),
) -> list[Score]:
    """Measure the path in picture widths per second and 1 - IoU of neighbouring outlines.

    Both are None unless the subject is found in two neighbouring pictures. `backends` name the witness and the flow.
    A pair with a cut in between is skipped.
    """
    steps, lasted, changes = [], 0.0, []
    outlines = shares > 0
    visible = np.array([outline.any() for outline in outlines], bool)
    cell = np.array(sampled.pictures.shape[1:3], np.float64) / shares.shape[1:]
    for before, after in itertools.pairwise(range(len(shares))):
        start, end = sampled.seconds[before], sampled.seconds[after]
        if not (visible[before] and visible[after]) or any(start < cut <= end for cut in cuts_s):
            continue
        moved = _centroid(shares[after]) - _centroid(shares[before])
        camera = _camera_step(sampled.pictures[before : after + 1], outlines[before] | outlines[after], flow)
        steps.append(float(np.linalg.norm(moved * cell - camera)) / sampled.pictures.shape[2])
        lasted += float(end - start)
        changes.append(outline_change(outlines[before], outlines[after], moved))
    path = sum(steps) / lasted if steps else None
    change = float(np.mean(changes)) if changes else None
    finder, judge = backends
    return [
        Score("subject_path", path, f"{finder} and {judge}", len(steps)),
        Score("subject_shape_change", change, finder, len(changes)),
    ]


def outline_change(one: NDArray[np.bool_], other: NDArray[np.bool_], moved: Floats) -> float:
    """Return 1 - IoU of two outlines, rows columns, with the first shifted by `moved` cells, down and right.

    Outlines have whole cells only, so the best of the whole shifts around `moved` counts.
    """
    start, goal = (set(map(tuple, np.argwhere(outline).tolist())) for outline in (one, other))
    down, right = ({int(np.floor(by)), int(np.ceil(by))} for by in np.round(moved, 6))
    shifted = [{(y + dy, x + dx) for y, x in start} for dy, dx in itertools.product(down, right)]
    return 1 - max(len(each & goal) / len(each | goal) for each in shifted)


def _centroid(shares: Shares) -> Floats:
    """Return the centroid (row, column) in cells."""
    cells = np.indices(shares.shape).reshape(2, -1).astype(np.float64)
    weights = shares.reshape(-1).astype(np.float64)
    centre: Floats = cells @ weights / weights.sum()
    return centre


def _camera_step(pair: Pictures, on_subject: NDArray[np.bool_], flow: ForwardFlow) -> Floats:
    """Return the median flow off the subject in pixels, down and right; of the whole picture if it fills it."""
    across, down = flow(as_tensor(pair))[0, 0].cpu().numpy()
    rows, columns = (side // cells for side, cells in zip(down.shape, on_subject.shape, strict=True))
    off = ~np.kron(on_subject, np.ones((rows, columns), bool))
    off = off if off.any() else np.ones_like(off)
    return np.array([np.median(down[off]), np.median(across[off])], np.float64)


def _measure(run: JudgedRun) -> list[Score]:
    """Use the cells that show the subject: a box would change its outline with every wobble of its detector."""
    witness = run.subject_witness
    if not isinstance(witness, ProbeWitness):
        return []
    flow, judge = run.motion_judge
    shares = witness.where(run.sampled.pictures, run.subject)
    cuts = starts_from_trace(run.trace, run.clip.fps)[1:]
    return subject_motion(run.sampled, shares, flow, (witness.backend, judge), cuts)


MEASURES = (
    Measure(
        "subject_motion",
        _measure,
        visible={"subject_path": PATH, "subject_shape_change": CELL_OF_SUBJECT},
        uses_flow=True,
    ),
)
