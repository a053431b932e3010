"""This module shares a bank out among blocks, so that a late subject cannot evict an early one.

What enters together belongs together, so a block's new tokens are a group. Every group in turn keeps its best token,
then its second, until the bank is full: a group is as large as all others allow, and small ones stay whole.
"""

from __future__ import annotations

import torch

from recap.types import Candidates, sort_key


def shared_scores(pool: Candidates, first_frame: int, num_frames: int) -> Candidates:
    """Return the pool with scores whose order is the turn in which tokens are kept; those of 0 or less stay.

    Blocks have `num_frames` frames, and one of them begins at `first_frame`. A block's tokens are offered all at once
    and the better ones of it stay longer, so that a token's rank in its block never changes: the highest of these
    scores are the highest of all that were ever offered.
    """
    source, score = pool.source, pool.score
    group = torch.div(source[..., 0] - first_frame % num_frames, num_frames, rounding_mode="floor")
    # Older tokens first among equals, as everywhere.
    order = sort_key(source).argsort(dim=1)
    order = order.gather(1, score.gather(1, order).argsort(dim=1, descending=True, stable=True))
    grouped = order.gather(1, group.gather(1, order).argsort(dim=1, stable=True))
    groups = group.gather(1, grouped).contiguous()
    rank = torch.arange(pool.count, device=score.device) - torch.searchsorted(groups, groups)
    ranks = torch.empty_like(rank).scatter_(1, grouped, rank)
    turns = order.gather(1, ranks.gather(1, order).argsort(dim=1, stable=True))
    return Candidates(
        source, torch.where(score > 0, (pool.count - turns.argsort(dim=1)).to(score.dtype), score)
    )
