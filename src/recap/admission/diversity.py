"""Diversity: the tokens of a bank should look as different as possible. DINOv2 Diversity of the paper's ablation.

With every block, k-means continues over the descriptors of what the bank has and what is new, and the bank keeps
the tokens nearest to the centres, equally many of each. A score is only a token's distance from all centres when
it arrived; it decides nothing. What describes a token is left to the rule (`diversity`, `diversity-keys`).
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from recap.admission.base import ScoredAdmission, sources
from recap.admission.kmeans import nearest_to_centres, refine_centres, spread_centres
from recap.admission.retention import sort_key
from recap.contracts import AdmissionConfig, State
from recap.errors import refuse
from recap.types import Block, Candidates, seeded


@dataclass(frozen=True, slots=True)
class ClusterConfig(AdmissionConfig):
    """The k-means behind both rules of diversity."""

    keeps: ClassVar[str] = "tokens near the centres of k-means, equally many of each"
    needs_flow: ClassVar[bool] = False

    num_centres: int = 64
    num_steps: int = 4  # mini-batches a block
    batch_points: int = 1024
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("num_centres", "num_steps", "batch_points"):
            if not 1 <= getattr(self, name) <= 65536:
                limit = "must be 1 to 65536"
                raise refuse(name, getattr(self, name), limit, "leave it out for the default")


class Diversity(ScoredAdmission):
    def __init__(self, config: ClusterConfig, grid: tuple[int, int]):
        super().__init__(grid)
        self._config = config
        # First frame of the block last proposed; it seeds the k-means.
        self._frame = 0
        # Sort keys B N and descriptors B N D of that block.
        self._fresh: tuple[Tensor, Tensor] | None = None
        # Sort keys B K and descriptors B K D of what the bank keeps.
        self._place: Tensor | None = None
        self._descriptor: Tensor | None = None
        # B k D
        self._centres: Tensor | None = None

    @abstractmethod
    def describe(self, block: Block, pixels: Tensor) -> Tensor:
        """Unit descriptors B N D of the block's tokens, frame by frame, row-major."""

    def score(self, block: Block, pixels: Tensor) -> Tensor:
        descriptor = self.describe(block, pixels)
        self._frame = block.first_frame
        self._fresh = (sort_key(sources(block, self._grid, pixels)), descriptor)
        if self._centres is None:
            return torch.ones_like(descriptor[..., 0])
        distance = 1 - (descriptor @ self._centres.transpose(1, 2)).amax(dim=-1)
        return distance.clamp(min=0)

    @torch.no_grad()
    def retain(self, pool: Candidates, capacity: int) -> Tensor:
        points, draws, config = self._look_up(pool), seeded(self._config.seed, self._frame), self._config
        centres = self._centres
        if centres is None:
            centres = spread_centres(points, config.num_centres, draws)
        self._centres = refine_centres(
            points, centres, draws, num_steps=config.num_steps, batch_points=config.batch_points
        )
        stays = nearest_to_centres(points, self._centres, capacity)
        self._place = sort_key(pool.source).gather(1, stays)
        self._descriptor = points.gather(1, stays[..., None].expand(-1, -1, points.shape[-1]))
        self._fresh = None
        return stays

    def _look_up(self, pool: Candidates) -> Tensor:
        """Descriptors B P D of a pool, whose order is the bank's business: found by source."""
        assert self._fresh is not None, "retained before it was proposed"
        place, descriptor = self._fresh
        if self._place is not None and self._descriptor is not None:
            place = torch.cat([self._place, place], dim=1)
            descriptor = torch.cat([self._descriptor, descriptor], dim=1)
        ordered, by_place = place.sort(dim=1)
        found = by_place.gather(1, torch.searchsorted(ordered, sort_key(pool.source)))
        return descriptor.gather(1, found[..., None].expand(-1, -1, descriptor.shape[-1]))

    def state(self) -> State:
        own = {"place": self._place, "descriptor": self._descriptor, "centres": self._centres}
        return {name: value.clone() for name, value in own.items() if value is not None}

    def load_state(self, state: State) -> None:
        self._place, self._descriptor = state.get("place"), state.get("descriptor")
        self._centres, self._fresh = state.get("centres"), None
