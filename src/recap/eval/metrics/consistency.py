"""Measures subject and background consistency of VBench-Long: slow within clips, fast between clips, and both fused.

Slow is, per clip of 2 s, the mean likeness of each picture to the previous and to the first one. Fast is the same
formula over the first pictures of all clips. The fast value c is mapped by VBench's table of 101 quantiles, and
fused = (slow + mapped c) / 2. The table maps most of 0..1 to its top tenth, so the raw c is reported too.
VBench embeds subjects with DINO (fast: DINOv2) and backgrounds with CLIP (fast: DreamSim).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib import resources

import numpy as np
from numpy.typing import NDArray

from recap.errors import refuse
from recap.eval.sampling import Footage, cut_clips
from recap.eval.scores import Score
from recap.eval.witnesses import Embedder, Vectors


def sequence_consistency(vectors: Vectors) -> float:
    """Average [max(0, cos to k - 1) + max(0, cos to 0)] / 2 over pictures k >= 1 of unit vectors N D, N >= 2."""
    if len(vectors) < 2:
        raise refuse("pictures", len(vectors), "consistency needs at least 2", "give a longer clip")
    v = vectors.astype(np.float64)
    before = np.maximum(0, (v[1:] * v[:-1]).sum(axis=1))
    first = np.maximum(0, v[1:] @ v[0])
    return float((before + first).mean() / 2)


@cache
def _table() -> NDArray[np.void]:
    path = resources.files("recap.eval.metrics").joinpath("slow_fast.csv")
    return np.genfromtxt(path.read_text(encoding="utf-8").splitlines(), delimiter=",", names=True)


def mapped(similarity: float, kind: str) -> float:
    """Map a similarity of `subject` or `background` by VBench's quantile table, with linear interpolation."""
    return float(np.interp(similarity, _table()["similarity"], _table()[kind]))


def fused(slow: float, fast: float, kind: str) -> float:
    """Average slow and mapped fast; return slow if the table has 0."""
    high = mapped(fast, kind)
    return slow if high == 0 else (slow + high) / 2


def consistency(clip: Footage, kind: str, embedder: Embedder) -> Score:
    """Measure a long video; one of a single clip has no fast value, and its score is the slow one."""
    slow, firsts = embedded_clips(clip, embedder)
    mean = float(np.mean(slow))
    if len(firsts) == 1:
        details = {"slow": mean, "fast_raw": None, "clips": slow}
        return Score(f"{kind}_consistency", mean, embedder.backend, 1, details)
    fast = sequence_consistency(firsts)
    details = {"slow": mean, "fast_raw": fast, "clips": slow, "fast_mapped": mapped(fast, kind)}
    return Score(f"{kind}_consistency", fused_mean(slow, firsts, kind), embedder.backend, len(slow), details)


def embedded_clips(clip: Footage, embedder: Embedder) -> tuple[list[float], Vectors]:
    """Return the slow value of every clip of a long video, and the vectors of their first pictures."""
    slow, firsts = [], []
    for part in cut_clips(clip):
        slow.append(sequence_consistency(embedder.embed(list(part))))
        firsts.append(part[0])
    return slow, embedder.embed(firsts)


def fused_mean(slow: Sequence[float], firsts: Vectors, kind: str) -> float:
    """Return the score of a video of these clips, of their slow values and first pictures; it needs at least 2."""
    fast = sequence_consistency(firsts)
    return float(np.mean([fused(each, fast, kind) for each in slow]))
