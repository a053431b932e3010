"""Measures drift as others report it: likeness of pictures some distance apart, and late minus early quality.

Coherence is the mean likeness of picture i and picture i + d of one stretch (no cut, no change of the prompt between
them), for d of 2, 5, 10, 20 and 50 pictures, with an i every two seconds. VBench's proposal (#206) compares whole
pictures by DINO; so does `coherence_frame` where DINO is installed. `coherence_crop` compares crops of those on
stage, by the crop embedding of the embedded world.

Quality is contrast, sharpness and saturation, in place of a learnt score: the mean of the last 15 % of the video
relative to that of the first 15 %, minus 1. A drift to either side is a fault.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recap.eval.judged import JudgedRun, Measure
from recap.eval.metrics.presence import Stretch, stretches
from recap.eval.sampling import Pictures, as_tensor
from recap.eval.scores import Score
from recap.eval.visible import LIKENESS
from recap.eval.witnesses import FrameWitness, Witness

DISTANCES = (2, 5, 10, 20, 50)
"""In pictures, as others count them, whatever their number a second."""
EVERY_S = 2.0
ENDS = 0.15
"""The share of a video that counts as early, and as late."""
BY_DISTANCE = "_by_distance_"


def luma(pictures: Tensor) -> Tensor:
    """Return the Rec. 601 luma `... Y X` of pictures `... 3 Y X`, 0..1."""
    red, green, blue = pictures.float().unbind(-3)
    return 0.299 * red + 0.587 * green + 0.114 * blue


def contrast(pictures: Tensor) -> Tensor:
    """Return the standard deviation of the luma, `...` of pictures `... 3 Y X`."""
    return luma(pictures).flatten(-2).std(dim=-1, correction=0)


def sharpness(pictures: Tensor) -> Tensor:
    """Return the variance of the luma's 4-neighbour Laplacian, luma in 0..255, inner pixels only."""
    y = 255 * luma(pictures)
    around = y[..., :-2, 1:-1] + y[..., 2:, 1:-1] + y[..., 1:-1, :-2] + y[..., 1:-1, 2:]
    return (around - 4 * y[..., 1:-1, 1:-1]).flatten(-2).var(dim=-1, correction=0)


def saturation(pictures: Tensor) -> Tensor:
    """Return the mean of (highest - lowest channel) / highest, `...` of pictures `... 3 Y X`; black has 0."""
    high, low = pictures.float().amax(dim=-3), pictures.float().amin(dim=-3)
    return ((high - low) / high.clamp(min=1e-6)).flatten(-2).mean(dim=-1)


QUALITIES = {"contrast": contrast, "sharpness": sharpness, "saturation": saturation}


def quality_drift(pictures: Pictures) -> list[Score]:
    """Compare the late with the early pictures of N Y X 3, evenly spread over a video, by every quality."""
    count = max(1, round(ENDS * len(pictures)))
    early, late = as_tensor(pictures[:count]), as_tensor(pictures[-count:])
    scores = []
    for name, quality in QUALITIES.items():
        before, after = (float(quality(part).mean()) for part in (early, late))
        value = after / before - 1 if before > 0 else None
        details = {"early": before, "late": after}
        scores.append(Score(f"drift_{name}", value, "native", count, details))
    return scores


def anchor_pairs(parts: Sequence[Stretch], fps: float, num_pictures: int) -> dict[int, list[tuple[int, int]]]:
    """Return, for every distance, the pairs of pictures that are compared, each within one stretch."""
    step = max(1, round(EVERY_S * fps))
    pairs: dict[int, list[tuple[int, int]]] = {distance: [] for distance in DISTANCES}
    for part in parts:
        first, end = (min(round(second * fps), num_pictures) for second in part.span)
        for index in range(first, end, step):
            for distance in DISTANCES:
                if index + distance < end:
                    pairs[distance].append((index, index + distance))
    return pairs


def coherence(
    witness: Witness,
    casts: Iterable[tuple[str, Sequence[tuple[int, int]]]],
    shown: dict[int, NDArray[np.uint8]],
) -> tuple[float | None, int]:
    """Average likeness over pairs, each of a subject that is found in both; also return their number."""
    values: list[float] = []
    for subject, pairs in casts:
        if not pairs:
            continue
        sides = [np.stack([shown[pair[side]] for pair in pairs]) for side in (0, 1)]
        found, seen = zip(*(witness.look(side, subject) for side in sides), strict=True)
        both = found[0] & found[1]
        if both.any():
            values += np.diagonal(witness.likeness(seen[0][both], seen[1][both])).tolist()
    return (float(np.mean(values)) if values else None), len(values)


@torch.no_grad()
def _measure(run: JudgedRun) -> list[Score]:
    scores = quality_drift(run.sampled.pictures)
    parts = stretches(run.trace, run.clip.fps, run.sampled.duration_s)
    stage = run.stage or [[run.subject]] * len(parts)
    count = round(run.sampled.duration_s * run.clip.fps)
    pairs = anchor_pairs(parts, run.clip.fps, count)
    wanted = {index for own in pairs.values() for pair in own for index in pair}
    shown = {index: picture for index, picture in enumerate(run.clip.pictures()) if index in wanted}
    starts = [round(part.span.start * run.clip.fps) for part in parts]
    witnesses: list[tuple[str, Witness]] = [("frame", FrameWitness(run.embedder))]
    # With a detector a picture is a question to a large model, and these are hundreds.
    if run.crop_witness is not None:
        witnesses.insert(0, ("crop", run.crop_witness))
    for name, witness in witnesses:
        for distance, own in pairs.items():
            casts = _casts(own, starts, stage) if name == "crop" else [("", own)]
            value, number = coherence(witness, casts, shown)
            scores.append(Score(f"coherence_{name}{BY_DISTANCE}{distance}", value, witness.backend, number))
    return scores


def _casts(
    pairs: Sequence[tuple[int, int]], starts: Sequence[int], stage: Sequence[Sequence[str]]
) -> list[tuple[str, list[tuple[int, int]]]]:
    """Return for every subject the pairs during which it is on stage."""
    by_subject: dict[str, list[tuple[int, int]]] = {}
    for pair in pairs:
        for subject in stage[int(np.searchsorted(starts, pair[0], side="right")) - 1]:
            by_subject.setdefault(subject, []).append(pair)
    return list(by_subject.items())


MEASURES = (
    Measure(
        "drift",
        _measure,
        visible={
            f"coherence_{who}{BY_DISTANCE}{d}": LIKENESS for who in ("crop", "frame") for d in DISTANCES
        },
    ),
)
