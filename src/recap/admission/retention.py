"""The paper's retention: top-K by frozen score."""

from __future__ import annotations

from torch import Tensor

from recap.types import Candidates


def retain_top(pool: Candidates, capacity: int) -> Tensor:
    """Indices, B min(capacity, pool), of the highest scores; ties: older first, then row-major.

    Newcomers stand behind the bank's entries and are younger, so a zero score can only fill an empty slot.
    """
    frame, row, column = pool.source.unbind(-1)
    place = (frame << 40) + (row << 20) + column
    by_age = place.argsort(dim=1)
    by_score = pool.score.gather(1, by_age).argsort(dim=1, descending=True, stable=True)
    return by_age.gather(1, by_score)[:, :capacity]
