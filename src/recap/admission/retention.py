"""The paper's retention: top-K by frozen score."""

from __future__ import annotations

from torch import Tensor

from recap.types import Candidates


def sort_key(source: Tensor) -> Tensor:
    """One whole number B N per token of source B N 3: it orders by age and then row-major."""
    frame, row, column = source.unbind(-1)
    return (frame << 40) + (row << 20) + column


def retain_top(pool: Candidates, capacity: int) -> Tensor:
    """Indices, B min(capacity, pool), of the highest scores; ties: older first, then row-major.

    Newcomers stand behind the bank's entries and are younger, so a zero score can only fill an empty slot.
    """
    by_age = sort_key(pool.source).argsort(dim=1)
    by_score = pool.score.gather(1, by_age).argsort(dim=1, descending=True, stable=True)
    return by_age.gather(1, by_score)[:, :capacity]
