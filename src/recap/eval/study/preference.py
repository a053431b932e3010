"""This module says what votes mean: win rates, the Davidson model with ties, and intervals.

Two answers of one rater are alike, and so are two answers about one prompt. Intervals are by the variance of Cameron,
Gelbach and Miller (2011), which adds up what raters share and what prompts share, with quantiles of Student's t for
the fewer of the two.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from recap.eval.scores import FEWEST_CLUSTERS, Estimate, Floats

Indices = NDArray[np.int64]

NORMAL_95 = 1.959963984540054
# Keeps the strengths finite where one side always wins: a normal prior this wide, in units of log odds.
PRIOR_WIDTH = 10.0
MOST_STEPS = 50


class Outcomes(NamedTuple):
    """Holds votes on one question; `won` is 1 where ours was chosen, 1/2 where it was "hard to say", else 0."""

    won: Floats
    raters: Indices
    prompts: Indices
    rivals: Indices
    on_a: NDArray[np.bool_]

    def where(self, chosen: NDArray[np.bool_]) -> Outcomes:
        """Return some of the votes."""
        kept = (self.raters[chosen], self.prompts[chosen], self.rivals[chosen], self.on_a[chosen])
        return Outcomes(self.won[chosen], *kept)


class WinRate(NamedTuple):
    """Holds wins, ties and losses of ours, and (W + T / 2) / N with its interval."""

    wins: int
    ties: int
    losses: int
    rate: Estimate


class Strength(NamedTuple):
    """Holds by how much ours is preferred under the Davidson model: the chance that it is chosen by who decides."""

    chance: float
    low: float
    high: float


class Davidson(NamedTuple):
    """Holds a fitted Davidson model: a strength per rival, the chance of a tie between equals, and that of side A.

    `side_a` is the chance that who decides between equals chooses side A: 1/2 without a side effect.
    """

    strengths: list[Strength]
    tie: float
    side_a: Strength


def win_rate(votes: Outcomes) -> WinRate:
    """Count as the paper does; the interval is symmetric in log odds, so that it stays between 0 and 1."""
    won = votes.won
    n = len(won)
    wins, ties = int((won == 1.0).sum()), int((won == 0.5).sum())
    counts = wins, ties, n - wins - ties
    clusters = _clusters(votes)
    if n == 0:
        return WinRate(*counts, Estimate(math.nan, math.nan, math.nan, 0, 0))
    rate = float(won.mean())
    if clusters < FEWEST_CLUSTERS:
        return WinRate(*counts, Estimate(rate, math.nan, math.nan, n, clusters))
    variance = float(two_way((won - rate)[:, None] / n, votes.raters, votes.prompts)[0])
    inside = (float(won.sum()) + 0.5) / (n + 1)
    if variance <= 0:
        # All votes are alike: as much is known as from one vote of every rater, or on every prompt.
        inside = (clusters * rate + 0.5) / (clusters + 1)
        variance = inside * (1 - inside) / clusters
    middle = math.log(inside / (1 - inside))
    width = student_95(clusters - 1) * math.sqrt(variance) / (inside * (1 - inside))
    return WinRate(
        *counts,
        Estimate(rate, min(_share(middle - width), rate), max(_share(middle + width), rate), n, clusters),
    )


def fit_davidson(votes: Outcomes, rivals: int) -> Davidson:
    """Fit the model to all votes on a question, with a side effect, by Newton's steps.

    With x half the difference of log strengths in favour of the video on side A, plus half the side effect, A, a tie
    and B are chosen in proportion to exp(x), exp(t) and exp(-x).
    """
    n = len(votes.won)
    # Columns: a strength per rival, the side effect; the tie's own parameter comes last.
    halves = np.zeros((n, rivals + 1))
    halves[np.arange(n), votes.rivals] = np.where(votes.on_a, 0.5, -0.5)
    halves[:, rivals] = 0.5
    chosen = np.where(votes.on_a, 1.0, -1.0) * (2 * votes.won - 1)
    tied = (votes.won == 0.5).astype(float)
    values = np.zeros(rivals + 2)
    prior = np.full(rivals + 2, PRIOR_WIDTH**-2)
    for _ in range(MOST_STEPS):
        scores, curvature, equal = _derivatives(values, halves, chosen, tied)
        step = np.linalg.solve(curvature + np.diag(prior), scores.sum(axis=0) - prior * values)
        # A long step is cut: far out the likelihood is flat.
        values = values + step * min(1.0, 4.0 / max(float(np.abs(step).max()), 1e-12))
        if np.abs(step).max() < 1e-9:
            break
    scores, curvature, equal = _derivatives(values, halves, chosen, tied)
    inverse = np.linalg.inv(curvature + np.diag(prior))
    variances = two_way(scores @ inverse, votes.raters, votes.prompts)
    # Where one side always wins, votes do not vary, and the model alone says how little is known.
    errors = np.sqrt(np.maximum(variances, np.diag(inverse)))
    few = _clusters(votes) < FEWEST_CLUSTERS
    widths = errors * (math.nan if few else student_95(_clusters(votes) - 1))
    found = [
        Strength(_share(value), _share(value - width), _share(value + width))
        for value, width in zip(values.tolist(), widths.tolist(), strict=True)
    ]
    return Davidson(found[:rivals], equal, found[rivals])


def _derivatives(
    values: Floats, halves: Floats, chosen: Floats, tied: Floats
) -> tuple[Floats, Floats, float]:
    """Return the score of every vote, the curvature of all, and the chance of a tie between equals."""
    x, t = halves @ values[:-1], values[-1]
    top = np.maximum(np.abs(x), t)
    weights = np.exp(np.stack([x - top, np.full_like(x, t) - top, -x - top]))
    a, tie, b = weights / weights.sum(axis=0)
    scores = np.column_stack([halves * (chosen - (a - b))[:, None], tied - tie])
    own = (halves * (a + b - (a - b) ** 2)[:, None]).T @ halves
    cross = -(halves * (tie * (a - b))[:, None]).sum(axis=0)
    last = float((tie * (1 - tie)).sum())
    curvature = np.block([[own, cross[:, None]], [cross[None], np.array([[last]])]])
    return scores, curvature, float(math.exp(t) / (math.exp(t) + 2)) if t < 700 else 1.0


def two_way(scores: Floats, raters: Indices, prompts: Indices) -> Floats:
    """Return the variances of a sum of scores, N by k, whose votes share raters and prompts."""
    both = raters * (int(prompts.max()) + 1) + prompts
    by_rater, by_prompt = _between(scores, raters), _between(scores, prompts)
    # By chance the sum is below one of its parts, which cannot be meant.
    return np.maximum(by_rater + by_prompt - _between(scores, both), np.maximum(by_rater, by_prompt))


def _between(scores: Floats, groups: Indices) -> Floats:
    _, index = np.unique(groups, return_inverse=True)
    sums = np.stack([np.bincount(index, weights=column) for column in scores.T])
    count = sums.shape[1]
    variances: Floats = (sums**2).sum(axis=1) * (count / max(count - 1, 1))
    return variances


def _clusters(votes: Outcomes) -> int:
    return min(len(np.unique(votes.raters)), len(np.unique(votes.prompts)))


def student_95(freedom: int) -> float:
    """Return the quantile of Student's t that leaves 2.5 % above it, by its expansion; within 0.5 % from 4 on."""
    z, v = NORMAL_95, float(freedom)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / v**power for power, term in enumerate(terms, 1))


def _share(log_odds: float) -> float:
    return math.nan if math.isnan(log_odds) else 0.5 * (1 + math.tanh(log_odds / 2))


def alpha_of(won: Sequence[float], pairs: Sequence[int]) -> tuple[float, float]:
    """Return how far raters agree: the share of equal answers to the same pair, and Krippendorff's alpha.

    Alpha takes answers as 1, 1/2 and 0 and compares squared differences: 1 is full agreement, 0 that of chance.
    """
    values, (_, unit) = np.asarray(won, float), np.unique(pairs, return_inverse=True)
    if len(values) == 0:
        return math.nan, math.nan
    # Units by answers: how many raters gave which.
    counts = np.stack([np.bincount(unit, weights=values == each) for each in (1.0, 0.5, 0.0)], axis=1)
    several = counts.sum(axis=1) >= 2
    counts = counts[several]
    n = counts.sum(axis=1)
    if not several.any():
        return math.nan, math.nan
    apart = np.subtract.outer([1.0, 0.5, 0.0], [1.0, 0.5, 0.0]) ** 2
    observed = float((np.einsum("ui,ij,uj->u", counts, apart, counts) / (n - 1)).sum() / n.sum())
    total = counts.sum(axis=0)
    expected = float(total @ apart @ total / (n.sum() * (n.sum() - 1)))
    equal = float((counts * (counts - 1)).sum() / (n * (n - 1)).sum())
    return equal, 1 - observed / expected if expected else math.nan
