"""`Described` is the base of rules that compare tokens by descriptors, and so remember those of the bank."""

from __future__ import annotations

import torch
from torch import Tensor

from recap.admission.base import ScoredAdmission, sources
from recap.contracts import Entry, State, copies, together
from recap.errors import refuse
from recap.types import Block, Candidates, sort_key


class Described(ScoredAdmission):
    """Keeps the descriptors of the block that is proposed, and of the bank; they are found by the tokens' sources."""

    def __init__(self, grid: tuple[int, int]):
        super().__init__(grid)
        # Sort keys B N and descriptors B N D of the block last proposed.
        self._fresh: tuple[Tensor, Tensor] | None = None
        # Sort keys B K and descriptors B K D of what the bank keeps.
        self._sort_keys: Tensor | None = None
        self._descriptor: Tensor | None = None

    def take_fresh(self, block: Block, pixels: Tensor, descriptor: Tensor) -> None:
        """Remember the descriptors of a block that is being proposed."""
        self._fresh = (sort_key(sources(block, self._grid, pixels)), descriptor)

    def look_up(self, pool: Candidates) -> Tensor:
        """Return descriptors B P D of a pool or a part of it, in whatever order the bank has them."""
        assert self._fresh is not None, "retained before it was proposed"
        sort_keys, descriptor = self._fresh
        if self._sort_keys is not None and self._descriptor is not None:
            sort_keys = torch.cat([self._sort_keys, sort_keys], dim=1)
            descriptor = torch.cat([self._descriptor, descriptor], dim=1)
        ordered, by_key = sort_keys.sort(dim=1)
        return take(descriptor, by_key.gather(1, torch.searchsorted(ordered, sort_key(pool.source))))

    def keep(self, kept: Candidates, descriptor: Tensor) -> None:
        """Remember the descriptors B K D of those that stay, and forget all others."""
        self._sort_keys, self._descriptor = sort_key(kept.source), descriptor
        self._fresh = None

    def state(self) -> State:
        return copies({"place": self._sort_keys, "descriptor": self._descriptor})

    def entries(self) -> dict[str, Entry]:
        """Return what a state has once something was retained."""
        return {
            "place": Entry(("B", "K"), torch.int64, 0, torch.iinfo(torch.int64).max),
            "descriptor": Entry(("B", "K", "E"), torch.float32),
        }

    def expected(self, state: State) -> dict[str, Entry]:
        return together(state, self.entries())

    def load_state(self, state: State) -> None:
        super().load_state(state)
        self._sort_keys, self._descriptor, self._fresh = state.get("place"), state.get("descriptor"), None


def take(points: Tensor, index: Tensor) -> Tensor:
    """Return the points B P D at indices B K."""
    return points.gather(1, index[..., None].expand(-1, -1, points.shape[-1]))


def refuse_keyless(name: str) -> Exception:
    """Return the error of a rule by keys under a memory that does not pass them on."""
    limit = "the memory passes no keys to it"
    return refuse("admission", name, limit, "choose memory `recap`, or another admission")
