"""`random`: a uniform sample of everything drawn so far. Random History of the paper's ablation.

Every token gets a uniform score once; the K highest of all scores so far are a uniform sample without
replacement, which is reservoir sampling in the words of a bank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from recap.admission.retention import retain_top
from recap.admission.tokens import seeded, sources
from recap.contracts import FlowEstimator, State
from recap.types import BackboneSpec, Block, Candidates


@dataclass(frozen=True, slots=True)
class RandomHistoryConfig:
    """A uniform sample of all tokens drawn so far; the ablation's Random History."""

    keeps: ClassVar[str] = "every past token with equal chance"
    needs: ClassVar[str] = "nothing"
    needs_flow: ClassVar[bool] = False

    seed: int = 0

    def build(self, spec: BackboneSpec, flow: FlowEstimator) -> RandomHistory:
        return RandomHistory(self.seed, spec.grid)


class RandomHistory:
    def __init__(self, seed: int, grid: tuple[int, int]):
        self._seed = seed
        self._grid = grid

    def propose(self, block: Block, pixels: Tensor) -> Candidates:
        """All rows draw alike, so a row's sample does not depend on who else is in the batch."""
        source = sources(block, self._grid, pixels)
        count = self._grid[0] * self._grid[1]
        # From frame and seed alone: how frames are grouped into blocks changes nothing, and there is no state.
        score = torch.cat(
            [
                torch.rand(count, generator=seeded(self._seed, frame))
                for frame in range(block.first_frame, block.end_frame)
            ]
        )
        return Candidates(source, score.to(pixels.device).expand(source.shape[:2]))

    def retain(self, pool: Candidates, capacity: int) -> Tensor:
        return retain_top(pool, capacity)

    def state(self) -> State:
        return {}

    def load_state(self, state: State) -> None:
        pass
