"""Subject and background consistency of VBench-Long: slow within clips, fast between clips, and both fused.

Slow is, per clip of 2 s, the mean likeness of each picture to the previous and to the first one. Fast is the same
formula over the first pictures of all clips. The fast value c is mapped by VBench's table of 101 quantiles, and
fused = (slow + mapped c) / 2. The table maps most of 0..1 to its top tenth, so the raw c is reported too.
VBench embeds subjects with DINO (fast: DINOv2) and backgrounds with CLIP (fast: DreamSim).
"""

from __future__ import annotations

import csv
from functools import cache
from importlib import resources

import numpy as np
from numpy.typing import NDArray

from recap.errors import refuse, unknown_name
from recap.eval.sampling import Footage, clip_spans, windows
from recap.eval.scores import Score
from recap.eval.witnesses import Embedder, Vectors

CLIP_S = 2
KINDS = ("subject", "background")


def sequence_consistency(vectors: Vectors) -> float:
    """Average [max(0, cos to k - 1) + max(0, cos to 0)] / 2 over pictures k >= 1 of unit vectors N D, N >= 2."""
    if len(vectors) < 2:
        raise refuse("pictures", len(vectors), "consistency needs at least 2", "give a longer clip")
    v = vectors.astype(np.float64)
    before = np.maximum(0, (v[1:] * v[:-1]).sum(axis=1))
    first = np.maximum(0, v[1:] @ v[0])
    return float((before + first).mean() / 2)


@cache
def _table() -> tuple[NDArray[np.float64], dict[str, NDArray[np.float64]]]:
    text = resources.files("recap.eval.metrics").joinpath("slow_fast.csv").read_text(encoding="utf-8")
    lines = list(csv.DictReader(text.splitlines()))
    similarity, *columns = (
        np.array([float(line[name]) for line in lines]) for name in ("similarity", *KINDS)
    )
    return similarity, dict(zip(KINDS, columns, strict=True))


def mapped(similarity: float, kind: str) -> float:
    """Map a similarity by VBench's quantile table, with linear interpolation."""
    if kind not in KINDS:
        raise unknown_name("kind", kind, KINDS)
    at, columns = _table()
    return float(np.interp(similarity, at, columns[kind]))


def fused(slow: float, fast: float, kind: str) -> float:
    """Average slow and mapped fast; return slow if the table has 0."""
    high = mapped(fast, kind)
    return slow if high == 0 else (slow + high) / 2


def consistency(
    clip: Footage, num_pictures: int, kind: str, embedder: Embedder, fast: Embedder | None = None
) -> Score:
    """Measure a long video; `fast` embeds the first pictures of the clips, by default with the same embedder.

    A video of a single clip has no fast value, and its score is the slow one.
    """
    if kind not in KINDS:
        raise unknown_name("kind", kind, KINDS)
    spans = clip_spans(num_pictures, clip.fps, CLIP_S)
    slow, firsts = [], []
    for part in windows(clip.pictures(), spans):
        slow.append(sequence_consistency(embedder.embed(list(part))))
        firsts.append(part[0])
    mean = float(np.mean(slow))
    between = sequence_consistency((fast or embedder).embed(firsts)) if len(firsts) > 1 else None
    value = mean if between is None else float(np.mean([fused(each, between, kind) for each in slow]))
    backend = embedder.backend if fast is None else f"{embedder.backend}; fast {fast.backend}"
    details = {"slow": mean, "fast_raw": between, "clips": slow}
    if between is not None:
        details["fast_mapped"] = mapped(between, kind)
    return Score(f"{kind}_consistency", value, backend, len(slow), details)
