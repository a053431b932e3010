"""A number that says what it rests on, and intervals that respect which numbers belong together."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from recap.errors import refuse

Floats = NDArray[np.float64]

FEWEST_CLUSTERS = 5
"""Of fewer prompts no interval is given: drawing two of two anew gives a narrow one that means nothing."""


@dataclass(frozen=True, slots=True)
class Score:
    """One measure of one clip. `value` is None where there is nothing to say."""

    name: str
    value: float | None
    backend: str  # what judged: a model, a flow estimator, or "native" for arithmetic alone
    n: int = 0  # samples it rests on
    details: dict[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def one_backend(scores: Iterable[Score]) -> str:
    """The backend of a column; columns that mix judges are refused, since their numbers do not compare."""
    names = sorted({score.backend for score in scores})
    if len(names) != 1:
        limit = "one column must have one judge"
        raise refuse("backend", ", ".join(names) or "none", limit, "score all its clips with the same one")
    return names[0]


class Estimate(NamedTuple):
    """A mean and its interval."""

    mean: float
    low: float  # nan with fewer than FEWEST_CLUSTERS
    high: float
    n: int  # values it rests on
    clusters: int


def cluster_interval(
    values: Sequence[float | None], clusters: Sequence[object], *, draws: int = 10_000, level: float = 0.95
) -> Estimate:
    """Mean of the known values and its bootstrap interval, whole clusters (prompts) drawn with replacement."""
    if len(values) != len(clusters):
        limit = f"there are {len(values)} values"
        raise refuse("clusters", len(clusters), limit, "name a cluster for every value")
    x = as_floats(values)
    known = np.isfinite(x)
    if not known.any():
        return Estimate(math.nan, math.nan, math.nan, 0, 0)
    labels = np.array([str(label) for label in clusters])[known]
    x = x[known]
    names, index = np.unique(labels, return_inverse=True)
    if len(names) < FEWEST_CLUSTERS:
        return Estimate(float(x.mean()), math.nan, math.nan, len(x), len(names))
    sums, counts = np.bincount(index, weights=x), np.bincount(index)
    dice = np.random.default_rng(0)  # the same numbers give the same interval, run after run
    drawn = dice.multinomial(len(names), np.full(len(names), 1 / len(names)), draws)
    low, high = np.quantile((drawn @ sums) / (drawn @ counts), [(1 - level) / 2, (1 + level) / 2])
    return Estimate(float(x.mean()), float(low), float(high), len(x), len(names))


def cluster_statistic(
    statistic: Callable[[Floats], float],
    values: Sequence[float],
    clusters: Sequence[object],
    *,
    draws: int = 2000,
) -> Estimate:
    """As `cluster_interval`, of anything that is said of all values at once; what it rests on is drawn anew too."""
    x, labels = np.array(values, np.float64), np.array([str(label) for label in clusters])
    groups = [x[labels == name] for name in np.unique(labels)]
    whole = float(statistic(x))
    if len(groups) < FEWEST_CLUSTERS:
        return Estimate(whole, math.nan, math.nan, len(x), len(groups))
    dice = np.random.default_rng(0)
    picks = dice.integers(0, len(groups), (draws, len(groups)))
    drawn = [statistic(np.concatenate([groups[i] for i in pick])) for pick in picks]
    low, high = np.quantile(drawn, [0.025, 0.975])
    return Estimate(whole, float(low), float(high), len(x), len(groups))


def paired_interval(
    ours: Sequence[float | None], theirs: Sequence[float | None], clusters: Sequence[object]
) -> Estimate:
    """Mean of ours - theirs over the pairs in which both are known."""
    return cluster_interval(list(as_floats(ours) - as_floats(theirs)), clusters)


def as_floats(values: Sequence[float | None]) -> Floats:
    """Values as an array, nan for None."""
    return np.array([math.nan if value is None else value for value in values], np.float64)


class Wins(NamedTuple):
    """How often one arm beats the other; a tie is half a win for each."""

    won: int
    tied: int
    lost: int
    share: float
    low: float  # Wilson's 95 % interval, which takes the pairs for independent
    high: float
    sign_p: float  # two-sided sign test on won against lost


def count_wins(ours: Sequence[float | None], theirs: Sequence[float | None]) -> Wins:
    """Pair by pair, over the pairs in which both are known."""
    gap = as_floats(ours) - as_floats(theirs)
    gap = gap[np.isfinite(gap)]
    won, lost = int((gap > 0).sum()), int((gap < 0).sum())
    num = len(gap)
    if num == 0:
        return Wins(0, 0, 0, math.nan, math.nan, math.nan, math.nan)
    tied = num - won - lost
    share = (won + tied / 2) / num
    return Wins(won, tied, lost, share, *_wilson(share, num), _sign_test(won, lost))


def wilcoxon(ours: Sequence[float | None], theirs: Sequence[float | None]) -> float:
    """Two-sided p of the signed-rank test on pairs, by its normal approximation with ties; nan below 6 pairs."""
    gap = as_floats(ours) - as_floats(theirs)
    gap = gap[np.isfinite(gap) & (gap != 0)]
    if len(gap) < 6:
        return math.nan
    _, place, counts = np.unique(np.abs(gap), return_inverse=True, return_counts=True)
    ends = counts.cumsum()
    ranks = (ends - (counts - 1) / 2)[place]
    num = len(gap)
    variance = num * (num + 1) * (2 * num + 1) / 24 - (counts**3 - counts).sum() / 48
    distance = abs(ranks[gap > 0].sum() - num * (num + 1) / 4)
    z = max(0.0, distance - 0.5) / math.sqrt(variance)
    return math.erfc(z / math.sqrt(2))


def _wilson(share: float, num: int) -> tuple[float, float]:
    z = 1.959963984540054
    middle = share + z * z / (2 * num)
    reach = z * math.sqrt(share * (1 - share) / num + z * z / (4 * num * num))
    return (middle - reach) / (1 + z * z / num), (middle + reach) / (1 + z * z / num)


def _sign_test(won: int, lost: int) -> float:
    num = won + lost
    if num == 0:
        return 1.0
    tail: int = sum(math.comb(num, k) for k in range(min(won, lost) + 1))
    return float(min(1.0, 2 * tail / 2**num))
