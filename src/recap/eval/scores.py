"""Scores say how they were measured, and intervals respect which values belong together."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from recap.errors import refuse

Floats = NDArray[np.float64]

FEWEST_CLUSTERS = 5
"""Fewer prompts give no interval and no p: resampling two of two gives a narrow one that means nothing."""

EXACT_CLUSTERS = 20
"""Up to this many prompts every choice of signs is tried, 2^19 by symmetry; beyond, `NUM_DRAWS` random ones are."""

NUM_DRAWS = 50_000

OUTSIDE = [0.025, 0.975]
"""Intervals are 95 %."""


@dataclass(frozen=True, slots=True)
class Score:
    """Holds one measure of one clip, over `n` samples; `value` is None if there was nothing to measure.

    `backend` names the model or flow estimator that was used, or is "native" for plain arithmetic.
    """

    name: str
    value: float | None
    backend: str
    n: int = 0
    details: dict[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def one_backend(scores: Iterable[Score]) -> str:
    """Return the backend of a column; refuse a column that mixes judges, whose numbers do not compare."""
    names = sorted({score.backend for score in scores})
    if len(names) != 1:
        limit = "one column must have one judge"
        raise refuse("backend", ", ".join(names) or "none", limit, "score all its clips with the same one")
    return names[0]


class Estimate(NamedTuple):
    """Holds a mean of `n` values and its interval, which is nan with too few clusters."""

    mean: float
    low: float
    high: float
    n: int
    clusters: int


def cluster_interval(
    values: Sequence[float | None], clusters: Sequence[object], *, fewest: int = FEWEST_CLUSTERS
) -> Estimate:
    """Average the values that are not None; the bootstrap interval resamples whole clusters (prompts).

    With fewer clusters than `fewest` there is no interval.
    """
    if len(values) != len(clusters):
        limit = f"there are {len(values)} values"
        raise refuse("clusters", len(clusters), limit, "name a cluster for each value")
    x = as_floats(values)
    measured = np.isfinite(x)
    if not measured.any():
        return Estimate(math.nan, math.nan, math.nan, 0, 0)
    labels = np.array([str(label) for label in clusters])[measured]
    x = x[measured]
    names, index = np.unique(labels, return_inverse=True)
    if len(names) < fewest:
        return Estimate(float(x.mean()), math.nan, math.nan, len(x), len(names))
    sums, counts = np.bincount(index, weights=x), np.bincount(index)
    # A fixed seed: the same values give the same interval in each run.
    generator = np.random.default_rng(0)
    picks = generator.multinomial(len(names), np.full(len(names), 1 / len(names)), 10_000)
    low, high = np.quantile((picks @ sums) / (picks @ counts), OUTSIDE)
    return Estimate(float(x.mean()), float(low), float(high), len(x), len(names))


def cluster_statistic(
    statistic: Callable[[Floats], float], values: Sequence[float], clusters: Sequence[object]
) -> Estimate:
    """Estimate a statistic of all values; its bootstrap interval resamples whole clusters."""
    x, labels = np.array(values, np.float64), np.array([str(label) for label in clusters])
    groups = [x[labels == name] for name in np.unique(labels)]
    whole = float(statistic(x))
    if len(groups) < FEWEST_CLUSTERS:
        return Estimate(whole, math.nan, math.nan, len(x), len(groups))
    picks = np.random.default_rng(0).integers(0, len(groups), (2000, len(groups)))
    resampled = [statistic(np.concatenate([groups[i] for i in pick])) for pick in picks]
    low, high = np.quantile(resampled, OUTSIDE)
    return Estimate(whole, float(low), float(high), len(x), len(groups))


def paired_interval(
    ours: Sequence[float | None], theirs: Sequence[float | None], clusters: Sequence[object]
) -> Estimate:
    """Average ours - theirs over the pairs in which both have a value."""
    return cluster_interval(list(as_floats(ours) - as_floats(theirs)), clusters)


def as_floats(values: Sequence[float | None]) -> Floats:
    """Return the values as an array with nan for None."""
    return np.array([math.nan if value is None else value for value in values], np.float64)


def win_share(ours: Sequence[float | None], theirs: Sequence[float | None]) -> float:
    """Return the share of pairs with two values in which ours is higher; a tie counts as half a win."""
    gap = as_floats(ours) - as_floats(theirs)
    gap = gap[np.isfinite(gap)]
    return float(((gap > 0) + (gap == 0) / 2).mean()) if len(gap) else math.nan


def sign_flip_p(
    ours: Sequence[float | None], theirs: Sequence[float | None], clusters: Sequence[object]
) -> float:
    """Return the two-sided p of the mean of ours - theirs, by flipping the signs of whole clusters (prompts).

    If the two do not differ, ours and theirs may be exchanged in all pairs of a prompt together, whatever these have
    in common. p is the share of such exchanges whose mean is as far from 0; nan with fewer than five clusters.
    """
    gap = as_floats(ours) - as_floats(theirs)
    known = np.isfinite(gap)
    names, index = np.unique(np.array([str(label) for label in clusters])[known], return_inverse=True)
    if len(names) < FEWEST_CLUSTERS:
        return math.nan
    sums = np.bincount(index, weights=gap[known]).astype(np.float64)
    # Sums of the same numbers in another order differ by their last bits.
    observed = abs(sums.sum()) - 1e-9 * np.abs(sums).sum()
    return float((flipped_totals(sums) >= observed).mean())


def flipped_totals(sums: Floats) -> Floats:
    """Return how far from 0 the total of these sums is by every choice of their signs, or by many random ones.

    Equally many sums get the same choices in the same order; what was observed is the first of them.
    """
    if len(sums) <= EXACT_CLUSTERS:
        totals = sums[:1]
        for each in sums[1:]:
            totals = np.concatenate((totals + each, totals - each))
    else:
        signs = np.random.default_rng(0).integers(0, 2, (NUM_DRAWS, len(sums))) * 2.0 - 1
        # What was observed is one of the possible choices, so that no p is 0.
        totals = np.concatenate((sums.sum(keepdims=True), signs @ sums))
    far: Floats = np.abs(totals)
    return far


def corrected_p(gaps: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Return the p of every row, corrected for the number of rows that were looked at.

    `gaps` are sums of ours - theirs by row and prompt. p is the share of choices of signs, the same for all rows, by
    which any row at all lies as far from 0 as this one, in units of its own spread (Westfall and Young's max T): of
    rows that are all alike, the chance that one is below 0.05 is 0.05. nan with fewer than five prompts.
    """
    prompts = sorted({prompt for own in gaps.values() for prompt in own})
    if len(prompts) < FEWEST_CLUSTERS:
        return dict.fromkeys(gaps, math.nan)
    observed: dict[str, float] = {}
    farthest = np.zeros(0)
    for row, own in gaps.items():
        sums = np.array([own.get(prompt, 0.0) for prompt in prompts])
        totals = flipped_totals(sums) / max(float(np.sqrt((sums**2).sum())), 1e-12)
        observed[row] = float(totals[0]) * (1 - 1e-9)
        farthest = totals if not len(farthest) else np.maximum(farthest, totals)
    return {row: float((farthest >= value).mean()) for row, value in observed.items()}
