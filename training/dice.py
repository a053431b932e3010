"""Random numbers per clip: the same (seed, index) gives the same clip in any batch and on any device."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from recap.errors import refuse

# A clip of the world uses about a thousand.
NUM_DRAWS = 2048
_MASK = (1 << 64) - 1


class Dice:
    """Uniform numbers for a batch of clips, one row each, returned in the order of the calls."""

    def __init__(self, seed: int, indices: Sequence[int], device: torch.device | str = "cpu") -> None:
        if not indices:
            raise refuse("indices", list(indices), "there is no clip", "pass at least one index")
        rows = []
        for index in indices:
            generator = torch.Generator().manual_seed(_mix(seed, index))
            rows.append(torch.rand(NUM_DRAWS, generator=generator))
        self._draws = torch.stack(rows).to(device, non_blocking=True)
        self._next = 0

    @property
    def rows(self) -> int:
        return self._draws.shape[0]

    @property
    def device(self) -> torch.device:
        return self._draws.device

    def uniform(self, low: float, high: float, *shape: int) -> Tensor:
        """Return B x shape, uniform between low and high."""
        count = math.prod(shape)
        assert self._next + count <= NUM_DRAWS, "a clip needs more random numbers than NUM_DRAWS"
        draws = self._draws[:, self._next : self._next + count]
        self._next += count
        return low + (high - low) * draws.reshape(self.rows, *shape)

    def flag(self, share: float | Tensor, *shape: int) -> Tensor:
        """Return B x shape, true with probability `share`."""
        return self.uniform(0, 1, *shape) < share

    def normal(self, deviation: float, *shape: int) -> Tensor:
        """Return B x shape, Gaussian around 0, cut at 4 deviations."""
        even = self.uniform(-1, 1, *shape).clamp(-0.9999, 0.9999)
        return deviation * math.sqrt(2) * torch.erfinv(even)

    def choice(self, shares: Sequence[float], *shape: int) -> Tensor:
        """Return B x shape, int64: indices with probabilities in proportion to `shares`."""
        bounds = torch.tensor(shares, device=self.device).cumsum(0)
        draws = self.uniform(0, 1, *shape) * bounds[-1]
        return (draws[..., None] >= bounds[:-1]).sum(-1)

    def distinct(self, num: int, of: int) -> Tensor:
        """Return B num, int64: different indices below `of`."""
        return self.uniform(0, 1, of).argsort(dim=1)[:, :num]


def _mix(seed: int, index: int) -> int:
    """Mix a generator seed (splitmix64), because similar seeds start the Mersenne twister in similar states."""
    value = (seed * 0x9E3779B97F4A7C15 + index * 0xD1B54A32D192ED03 + 0x632BE59BD9B4E019) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return (value ^ (value >> 31)) >> 1
