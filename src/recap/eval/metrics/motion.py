"""Measures camera and object motion (the paper's decomposition table).

A homography, fitted by RANSAC, splits the flow of neighbouring pictures: the part it explains is camera motion, the
rest is object motion. Total flow is their sum, as in the paper's table. The object fraction is computed per video and
averaged, as in the table; the paper's text has the ratio of the means. The table's drift tail and deviation are
statistics of many videos (`spreads`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from recap.errors import refuse
from recap.eval.judged import Measure
from recap.eval.sampling import ForwardFlow, as_tensor
from recap.eval.scores import Floats, Score
from recap.eval.visible import OF_MOTION, PIXELS
from recap.flow.classical import load_opencv
from recap.io.video import Picture

EVERY = 8
"""The number of pictures from one pair of neighbours to the next: half a second."""

GRID_PX = 8
RANSAC_PX, RANSAC_ROUNDS = 3.0, 2000
FEWEST_INLIERS = 0.3
"""Below this share of inliers all motion counts as object motion, and the pair as unexplained."""

_TINY = 1e-6


class PairMotion(NamedTuple):
    """Holds the mean motion between two pictures, and whether a camera motion explains it."""

    camera_px: float
    object_px: float
    explained: bool


def split_flow(flow: NDArray[np.float32]) -> PairMotion:
    """Return the mean camera and object motion of a flow 2 Y X, in pixels."""
    cv2 = load_opencv()
    rows, columns = flow.shape[1:]
    y, x = np.mgrid[0:rows, 0:columns].astype(np.float64)
    before = np.stack([x, y], axis=-1)
    after = before + np.moveaxis(flow, 0, -1)
    grid = (slice(GRID_PX // 2, None, GRID_PX),) * 2
    points = before[grid].reshape(-1, 2), after[grid].reshape(-1, 2)
    # RANSAC uses OpenCV's global random numbers.
    cv2.setRNGSeed(0)
    matrix, inliers = cv2.findHomography(*points, cv2.RANSAC, RANSAC_PX, maxIters=RANSAC_ROUNDS)
    explained = matrix is not None and float(np.mean(inliers)) >= FEWEST_INLIERS
    camera = np.zeros_like(before)
    if explained:
        moved = np.concatenate([before, np.ones((rows, columns, 1))], axis=-1) @ np.asarray(matrix).T
        camera = moved[..., :2] / moved[..., 2:] - before
    rest = after - before - camera
    camera_px, object_px = (float(np.linalg.norm(part, axis=-1).mean()) for part in (camera, rest))
    return PairMotion(camera_px, object_px, explained)


def motion(pictures: Iterable[Picture], flow: ForwardFlow, backend: str) -> list[Score]:
    """Measure camera, object and total flow and the object fraction of one video; `backend` names the flow."""
    neighbours = itertools.islice(itertools.pairwise(pictures), 0, None, EVERY)
    pairs = [split_flow(flow(as_tensor(np.stack(pair)))[0, 0].numpy()) for pair in neighbours]
    if not pairs:
        raise refuse("clip", "1 picture", "motion needs at least 2", "give a longer clip")
    camera = float(np.mean([pair.camera_px for pair in pairs]))
    moved = float(np.mean([pair.object_px for pair in pairs]))
    total = camera + moved
    details = {"unexplained_pairs": sum(not pair.explained for pair in pairs), "gap": 1}
    fraction = moved / total if total > _TINY else None
    values = {"camera_flow": camera, "object_flow": moved, "total_flow": total, "object_fraction": fraction}
    return [Score(name, value, backend, len(pairs), details) for name, value in values.items()]


def spreads(baseline: Sequence[float]) -> dict[str, Callable[[Floats], float]]:
    """Return the statistics of the total flows of many videos, given those of the baseline.

    The paper's drift tail is the share of videos above twice the median of their own configuration. It does not
    compare configurations with different medians, hence the second: the share above twice the baseline's median.
    """
    limit = 2 * float(np.median(np.asarray(baseline)))
    return {
        "drift_tail": lambda flows: float(np.mean(flows > 2 * np.median(flows))),
        "drift_tail_of_baseline": lambda flows: float(np.mean(flows > limit)),
        "total_flow_sd": lambda flows: float(np.std(flows)),
    }


COLUMNS = ("camera_flow", "object_flow", "object_fraction", "total_flow", "total_flow_sd")
MEASURES = (
    Measure(
        "motion",
        lambda run: motion(run.clip.pictures(), *run.motion_judge),
        # The paper counts videos, of 128 as is inferred.
        paper={**{name: (name, 1.0) for name in COLUMNS}, "drift_tail": ("drift_tail", 1 / 128)},
        visible={
            **dict.fromkeys(("camera_flow", "object_flow", "total_flow"), PIXELS),
            "object_fraction": OF_MOTION,
        },
        uses_flow=True,
    ),
)
