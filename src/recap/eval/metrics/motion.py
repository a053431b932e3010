"""Camera and object motion (the paper's decomposition table).

Flow of neighbouring pictures is split by a homography, fitted to it by RANSAC: what the homography explains is the
camera's, the rest the objects'. Total flow is their sum, as in the paper's table. The object fraction is a video's
own, whose mean is the table's; the paper's text has the ratio of the means. The table's drift tail and deviation are
of many videos (`spreads`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from recap.errors import refuse
from recap.eval.judged import JudgedRun, Measure
from recap.eval.sampling import ForwardFlow
from recap.eval.scores import Floats, Score
from recap.flow.classical import load_opencv
from recap.io.video import Picture

EVERY = 8  # pictures between two pairs: half a second
GRID_PX = 8
RANSAC_PX, RANSAC_ROUNDS = 3.0, 2000
FEWEST_INLIERS = 0.3
"""Below this share no camera motion explains the picture; all of it is counted as the objects', and said so."""
_TINY = 1e-6


class PairMotion(NamedTuple):
    camera_px: float
    object_px: float
    explained: bool


def split_flow(flow: NDArray[np.float32]) -> PairMotion:
    """Mean camera and object motion in a flow 2 Y X, in pixels."""
    cv2 = load_opencv()
    rows, columns = flow.shape[1:]
    y, x = np.mgrid[0:rows, 0:columns].astype(np.float64)
    here = np.stack([x, y], axis=-1)
    there = here + np.moveaxis(flow, 0, -1)
    some = (slice(GRID_PX // 2, None, GRID_PX),) * 2
    cv2.setRNGSeed(0)  # RANSAC draws from OpenCV's own dice
    matrix, inliers = cv2.findHomography(
        here[some].reshape(-1, 2),
        there[some].reshape(-1, 2),
        cv2.RANSAC,
        RANSAC_PX,
        maxIters=RANSAC_ROUNDS,
    )
    explained = matrix is not None and float(np.mean(inliers)) >= FEWEST_INLIERS
    camera = np.zeros_like(here)
    if explained:
        moved = np.concatenate([here, np.ones((rows, columns, 1))], axis=-1) @ np.asarray(matrix).T
        camera = moved[..., :2] / moved[..., 2:] - here
    rest = there - here - camera
    return PairMotion(
        float(np.linalg.norm(camera, axis=-1).mean()), float(np.linalg.norm(rest, axis=-1).mean()), explained
    )


def motion(pictures: Iterable[Picture], flow: ForwardFlow, backend: str, gap: int = 1) -> list[Score]:
    """Camera, object and total flow, and the object's fraction, of one video; `backend` names the flow."""
    if not 1 <= gap <= EVERY:
        raise refuse("gap", gap, f"must be 1 to {EVERY} pictures", "1 is the paper's likely reading")
    pairs: list[PairMotion] = []
    first: Picture | None = None
    for index, picture in enumerate(pictures):
        if first is not None and index % EVERY == gap % EVERY:
            tensor = torch.from_numpy(np.stack([first, picture])).permute(0, 3, 1, 2)[None].float() / 255
            pairs.append(split_flow(flow(tensor)[0, 0].numpy()))
        if index % EVERY == 0:
            first = picture
    if not pairs:
        raise refuse("clip", "1 picture", "motion needs at least 2", "give a longer clip")
    camera = float(np.mean([pair.camera_px for pair in pairs]))
    moved = float(np.mean([pair.object_px for pair in pairs]))
    total = camera + moved
    details = {"unexplained_pairs": sum(not pair.explained for pair in pairs), "gap": gap}
    fraction = moved / total if total > _TINY else None
    return [
        Score(name, value, backend, len(pairs), details)
        for name, value in (
            ("camera_flow", camera), ("object_flow", moved), ("total_flow", total), ("object_fraction", fraction),
        )
    ]  # fmt: skip


def spreads(baseline: Sequence[float]) -> dict[str, Callable[[Floats], float]]:
    """What is said of the total flows of many videos, given those of the baseline's.

    The paper's drift tail are the videos above twice the median of their own configuration, which does not compare
    configurations whose medians differ: hence the second, above twice the baseline's.
    """
    limit = 2 * float(np.median(np.asarray(baseline)))
    return {
        "drift_tail": lambda flows: float(np.mean(flows > 2 * np.median(flows))),
        "drift_tail_of_baseline": lambda flows: float(np.mean(flows > limit)),
        "total_flow_sd": lambda flows: float(np.std(flows)),
    }


def _measure(run: JudgedRun) -> list[Score]:
    return motion(run.clip.pictures(), *run.motion_judge)


COLUMNS = ("camera_flow", "object_flow", "object_fraction", "total_flow", "total_flow_sd")
MEASURES = (
    Measure(
        "motion",
        _measure,
        # The paper counts videos, of 128 as is inferred.
        paper={**{name: (name, 1.0) for name in COLUMNS}, "drift_tail": ("drift_tail", 1 / 128)},
        uses_flow=True,
    ),
)
