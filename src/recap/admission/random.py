"""`random`: a uniform sample of everything generated so far. Random History of the paper's ablation.

Every token gets a uniform score once; the K highest of all scores so far are a uniform sample without
replacement: reservoir sampling, expressed with a bank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from recap.admission.base import ScoredAdmission
from recap.contracts import AdmissionConfig, FlowEstimator
from recap.types import BackboneSpec, Block, seeded


@dataclass(frozen=True, slots=True)
class RandomHistoryConfig(AdmissionConfig):
    """A uniform sample of all tokens generated so far; the ablation's Random History."""

    keeps: ClassVar[str] = "every past token with equal chance"
    needs: ClassVar[str] = "nothing"
    needs_flow: ClassVar[bool] = False

    seed: int = 0

    def build(self, spec: BackboneSpec, flow: FlowEstimator) -> RandomHistory:
        return RandomHistory(self.seed, spec.grid)


class RandomHistory(ScoredAdmission):
    def __init__(self, seed: int, grid: tuple[int, int]):
        super().__init__(grid)
        self._seed = seed

    def score(self, block: Block, pixels: Tensor) -> Tensor:
        """All rows get the same numbers, so a row's sample does not depend on the rest of the batch.

        They come from seed and frame alone: how frames are grouped into blocks changes nothing, and no state is
        needed.
        """
        frames = range(block.first_frame, block.end_frame)
        tokens = self._grid[0] * self._grid[1]
        return torch.cat([torch.rand(tokens, generator=seeded(self._seed, frame)) for frame in frames])
