"""`ScoredAdmission` is the base of a rule that gives every token a score once; the bank keeps the highest."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from recap.contracts import Admission
from recap.types import Block, Candidates, frame_positions, sort_key


def sources(block: Block, grid: tuple[int, int], like: Tensor) -> Tensor:
    """Return source B N 3 of every token of the block, frame by frame, row-major; `like` has the batch and device."""
    frames = torch.arange(block.first_frame, block.end_frame, device=like.device)
    return frame_positions(frames, grid).long().expand(like.shape[0], -1, -1)


def retain_top(pool: Candidates, capacity: int) -> Tensor:
    """Return the indices, B min(capacity, pool), of the highest scores; ties: older first, then row-major.

    This is the paper's retention. Newcomers come after the bank's entries and are younger, so a zero score can only
    fill an empty slot.
    """
    by_age = sort_key(pool.source).argsort(dim=1)
    by_score = pool.score.gather(1, by_age).argsort(dim=1, descending=True, stable=True)
    return by_age.gather(1, by_score)[:, :capacity]


class ScoredAdmission(Admission):
    """Scores every token of a finished block once.

    A subclass implements `score`; it overrides `retain` if the bank should not simply keep the highest scores.
    """

    def __init__(self, grid: tuple[int, int]):
        self._grid = grid

    @abstractmethod
    def score(self, block: Block, pixels: Tensor) -> Tensor:
        """Return how much each of the block's tokens is worth keeping: B N, or N if it is the same for all rows.

        Tokens are listed frame by frame, row-major; pixels B T 3 Y X, 0..1. A score of 0 means nothing new, and only
        fills an empty slot.
        """

    @torch.no_grad()
    def propose(self, block: Block, pixels: Tensor) -> Candidates:
        source = sources(block, self._grid, pixels)
        return Candidates(source, self.score(block, pixels).to(pixels.device).expand(source.shape[:2]))

    def retain(self, pool: Candidates, capacity: int) -> Tensor:
        return retain_top(pool, capacity)
