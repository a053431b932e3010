"""This module finds near-duplicates among tokens, so that a bank can keep one of them and count the others.

Two tokens are duplicates if their keys are nearer to each other than a multiple of what is usual between tokens of
the first frame. A token that stands for n has ln(n) added to its logits, which equals n tokens of the same key and
value at one place: exact for exact duplicates, and for near ones as good as they are near.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from recap.attention.heads import ALL_HEADS, Heads
from recap.attention.likeness import describe_keys, spread_layers, usual_distance
from recap.contracts import Entry, State, copies, together
from recap.types import Candidates

NUM_LAYERS = 3
"""Layers whose keys are compared."""

SAME = 1e-5
"""A distance that counts as none: rounding makes the cosine of a key with itself differ from 1 by this much."""


class Merged(NamedTuple):
    """Says what newcomers become when duplicates are merged, M newcomers next to K tokens that are kept."""

    gone: Tensor  # B M, bool: the newcomer is counted elsewhere
    copies: Tensor  # B M: how many each newcomer stands for
    gained: Tensor  # B K: how many more each kept token stands for
    best: Tensor  # B K: the highest score among what it gained, -inf if nothing


class Duplicates:
    """Merges newcomers with what is kept and with each other; only tokens of positive score take part."""

    def __init__(self, num_layers: int, margin: float = 1.0):
        self._layers = spread_layers(NUM_LAYERS, num_layers)
        self._margin = margin
        self.heads: Heads = ALL_HEADS
        # The distance B 1 within which two tokens are the same.
        self._limit: Tensor | None = None

    def calibrate(self, keys: Tensor) -> None:
        """Read from a frame's keys, L B N H D, what is near; only the first frame counts."""
        if self._limit is None:
            usual = usual_distance(self._describe(keys))
            self._limit = (self._margin * usual).clamp(min=SAME)

    def merge(self, kept_keys: Tensor, kept: Tensor, keys: Tensor, offered: Candidates) -> Merged:
        """Merge newcomers, keys L B M H D, with kept tokens, keys L B K H D of scores B K, and each other.

        A newcomer that is near a kept token is counted there. Of the others, one leads if no near one has a higher
        score, or the same and is older; what is near a leader is counted there. All others stay as they are.
        """
        assert self._limit is not None, "merged before it was calibrated"
        score, count = offered.score, kept.shape[1]
        tokens, known = self._describe(keys), self._describe(kept_keys)
        cosine = tokens @ torch.cat([known, tokens], dim=1).transpose(1, 2)
        new = score > 0
        near = (1 - cosine <= self._limit[..., None]) & new[..., None]
        at_kept = near[..., :count] & (kept > 0)[:, None]
        is_kept = at_kept.any(dim=-1)
        # Newcomers come oldest first, so that a stable sort lists older ones first among equals.
        rest = new & ~is_kept
        rank = torch.where(rest, score, -1.0).argsort(dim=1, descending=True, stable=True).argsort(dim=1)
        among = near[..., count:] & rest[:, None] & rest[..., None]
        leads = rest & ~(among & (rank[:, None] < rank[..., None])).any(dim=-1)
        at_leader = among & leads[:, None] & ~leads[..., None]
        target = torch.where(torch.cat([at_kept, at_leader], dim=-1), cosine, -2.0).argmax(dim=-1)
        gone = is_kept | at_leader.any(dim=-1)
        gained = torch.zeros_like(cosine[:, 0]).scatter_add_(1, target, gone.to(cosine.dtype))
        best = torch.full_like(cosine[:, 0], -torch.inf)
        best = best.scatter_reduce_(1, target, torch.where(gone, score, -torch.inf), "amax")
        merged = (gone, 1 + gained[:, count:], gained[:, :count], best[:, :count])
        return Merged(*map(self.heads.agree, merged))

    def _describe(self, keys: Tensor) -> Tensor:
        """Return unit vectors B N E of keys L B N H D, with all heads joined."""
        some = self.heads.join(keys[self._layers], 3)
        return describe_keys(some, list(range(len(self._layers))))

    def state(self) -> State:
        return copies({"bank.limit": self._limit})

    def expected(self, state: State, admitted: bool) -> dict[str, Entry]:
        """Return what a state must have of it: the limit is read before the first token is admitted."""
        own = {"bank.limit": Entry(("B", 1), torch.float32, 0.0)}
        return own if admitted else together(state, own)

    def load_state(self, state: State) -> None:
        self._limit = state.get("bank.limit")
