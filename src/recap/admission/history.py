"""`random` samples everything generated so far, `recent` takes the last that left the window.

They are Random History and Recent History of the paper's ablation, expressed with a bank. The K highest of uniform
scores, each drawn once, are a uniform sample without replacement. With the clock as score the bank keeps the latest;
tokens are offered as they leave the window, since what is still in the prior would only be there twice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from recap.admission.base import ScoredAdmission, sources
from recap.contracts import AdmissionConfig, FlowEstimator
from recap.types import BackboneSpec, Block, Candidates, seeded


@dataclass(frozen=True, slots=True)
class RandomHistoryConfig(AdmissionConfig):
    """Keeps a uniform sample of all tokens generated so far: the ablation's Random History."""

    keeps: ClassVar[str] = "every past token with equal chance"
    needs: ClassVar[str] = "nothing"
    needs_flow: ClassVar[bool] = False

    seed: int = 0

    def build(self, spec: BackboneSpec, flow: FlowEstimator) -> RandomHistory:
        return RandomHistory(self.seed, spec.grid)


class RandomHistory(ScoredAdmission):
    """Gives every token a uniform score."""

    needs_pixels = False

    def __init__(self, seed: int, grid: tuple[int, int]):
        super().__init__(grid)
        self._seed = seed

    def score(self, block: Block, pixels: Tensor) -> Tensor:
        """Return the same numbers for all rows, so a row's sample does not depend on the rest of the batch.

        They come from seed and frame alone: how frames are grouped into blocks changes nothing, and no state is
        needed.
        """
        frames = range(block.first_frame, block.end_frame)
        tokens = self._grid[0] * self._grid[1]
        return torch.cat([torch.rand(tokens, generator=seeded(self._seed, frame)) for frame in frames])


@dataclass(frozen=True, slots=True)
class RecentHistoryConfig(AdmissionConfig):
    """Keeps the last tokens that left the window: the ablation's Recent History."""

    keeps: ClassVar[str] = "as many tokens as fit of those that left the window last"
    needs: ClassVar[str] = "nothing"
    needs_flow: ClassVar[bool] = False

    def build(self, spec: BackboneSpec, flow: FlowEstimator) -> RecentHistory:
        return RecentHistory(spec.grid)


class RecentHistory(ScoredAdmission):
    """Scores tokens by their frame; a memory that does not offer leaving tokens keeps the last ones generated."""

    takes_leaving = True
    needs_pixels = False

    def score(self, block: Block, pixels: Tensor) -> Tensor:
        return self.score_leaving(sources(block, self._grid, pixels)).score

    def score_leaving(self, source: Tensor) -> Candidates:
        # One more than the frame, since a score of 0 means nothing new; exact up to 2^24 frames.
        return Candidates(source, (source[..., 0] + 1).float())
