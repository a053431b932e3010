"""Measures how far the subject's centroid travels, how much its outline changes, and how far the camera travels.

Dynamic degree counts camera motion, and a memory that freezes its subject loses little of it. Here a witness reports
which cells show the subject, in pictures half a second apart. A step is that of its centroid minus the camera's,
which is the median flow of the rest of the picture. A subject that stands still, or is pasted in repeatedly, scores 0
on the first two; what a memory holds still besides its subject is the third.
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


def camera_steps(
    sampled: Sampled, flow: ForwardFlow, shares: Shares | None = None, cuts_s: Sequence[float] = ()
) -> Floats:
    """Return the camera's steps from picture to picture, N - 1 of (down, right) in pixels; nan across a cut.

    A step is the median flow off the subject that `shares` show, or of the whole picture.
    """
    steps = np.full((max(len(sampled.pictures) - 1, 0), 2), np.nan)
    for index, (start, end) in enumerate(itertools.pairwise(sampled.seconds)):
        if not any(start < cut <= end for cut in cuts_s):
            on_subject = None if shares is None else np.any(shares[index : index + 2] > 0, axis=0)
            steps[index] = _camera_step(sampled.pictures[index : index + 2], on_subject, flow)
    return steps


def camera_motion(sampled: Sampled, camera: Floats, backend: str) -> list[Score]:
    """Measure the camera's path in picture widths per second, given its steps; `backend` names who found them."""
    known = ~np.isnan(camera).any(axis=1)
    path = None
    if known.any():
        lasted = float(np.diff(sampled.seconds)[known].sum())
        path = float(np.linalg.norm(camera[known], axis=1).sum()) / sampled.pictures.shape[2] / lasted
    return [Score("camera_path", path, backend, int(known.sum()))]


def subject_motion(
    sampled: Sampled, shares: Shares, camera: Floats, backends: tuple[str, str]
) -> list[Score]:
    """Measure the path in picture widths per second and 1 - IoU of neighbouring outlines.

    Both are None unless the subject is found in two neighbouring pictures with a step of the camera between them.
    `backends` name the witness and the flow.
    """
    steps, lasted, changes = [], 0.0, []
    outlines = shares > 0
    visible = np.array([outline.any() for outline in outlines], bool)
    cell = np.array(sampled.pictures.shape[1:3], np.float64) / shares.shape[1:]
    for before, after in itertools.pairwise(range(len(shares))):
        if not (visible[before] and visible[after]) or np.isnan(camera[before]).any():
            continue
        moved = _centroid(shares[after]) - _centroid(shares[before])
        steps.append(float(np.linalg.norm(moved * cell - camera[before])) / sampled.pictures.shape[2])
        lasted += float(sampled.seconds[after] - sampled.seconds[before])
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


def _camera_step(pair: Pictures, on_subject: NDArray[np.bool_] | None, flow: ForwardFlow) -> Floats:
    """Return the median flow off the subject in pixels, down and right; of the whole picture if it fills it."""
    across, down = flow(as_tensor(pair))[0, 0].cpu().numpy()
    off = np.ones(down.shape, bool)
    if on_subject is not None and not on_subject.all():
        rows, columns = (side // cells for side, cells in zip(down.shape, on_subject.shape, strict=True))
        off = ~np.kron(on_subject, np.ones((rows, columns), bool))
    return np.array([np.median(down[off]), np.median(across[off])], np.float64)


def _found(run: JudgedRun) -> tuple[Shares | None, str]:
    """Return the cells that show the subject, and who found them; None where nobody sees cells.

    A box would change its outline with every wobble of its detector.
    """
    witness = run.subject_witness
    if not isinstance(witness, ProbeWitness):
        return None, ""
    return witness.where(run.sampled.pictures, run.subject), witness.backend


def _camera(run: JudgedRun) -> Floats:
    cuts = starts_from_trace(run.trace, run.clip.fps)[1:]
    flow, _ = run.motion_judge
    return run.once("camera_steps", lambda: camera_steps(run.sampled, flow, _found(run)[0], cuts))


def _measure_camera(run: JudgedRun) -> list[Score]:
    return camera_motion(run.sampled, _camera(run), run.motion_judge.backend)


def _measure(run: JudgedRun) -> list[Score]:
    shares, finder = _found(run)
    if shares is None:
        return []
    return subject_motion(run.sampled, shares, _camera(run), (finder, run.motion_judge.backend))


MEASURES = (
    Measure(
        "subject_motion",
        _measure,
        visible={"subject_path": PATH, "subject_shape_change": CELL_OF_SUBJECT},
        uses_flow=True,
    ),
    Measure("camera_motion", _measure_camera, visible={"camera_path": PATH}, uses_flow=True),
)
