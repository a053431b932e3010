"""Mini-batch k-means on unit vectors, row by row of a batch, and the points nearest to the centres.

It is deterministic: random numbers come from a seeded generator on the CPU, are the same for all rows,
and sums are matrix products. Nothing waits for the device.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def spread_centres(points: Tensor, num_centres: int, draws: torch.Generator) -> Tensor:
    """Choose centres B k D among unit points B P D, each far from the ones before (k-means++)."""
    uniform = torch.rand(num_centres, generator=draws)
    centres = [points[:, int(uniform[0] * points.shape[1]), None]]
    nearest = _distance(points, centres[0]).squeeze(-1)
    for share in uniform[1:].tolist():
        reach = nearest.cumsum(dim=1)
        index = torch.searchsorted(reach, reach[:, -1:] * share).clamp_(max=points.shape[1] - 1)
        centres.append(take(points, index))
        nearest = torch.minimum(nearest, _distance(points, centres[-1]).squeeze(-1))
    return torch.cat(centres, dim=1)


def refine_centres(
    points: Tensor, centres: Tensor, draws: torch.Generator, *, num_steps: int, batch_points: int
) -> Tensor:
    """Return the centres after `num_steps` mini-batches; one that owns nothing moves to the farthest point."""
    count = points.new_zeros(centres.shape[:2])
    for _ in range(num_steps):
        picked = torch.randint(points.shape[1], (batch_points,), generator=draws).to(points.device)
        some = points[:, picked]
        owner = functional.one_hot(_distance(some, centres).argmin(dim=-1), centres.shape[1]).to(points.dtype)
        members = owner.sum(dim=1)
        count = count + members
        # Every centre is the mean of all points it has owned, which is a learning rate of 1 / count.
        pull = owner.transpose(1, 2) @ some - members[..., None] * centres
        centres = functional.normalize(centres + pull / count.clamp(min=1)[..., None], dim=-1)
    return _move_idle(points, centres)


def nearest_to_centres(points: Tensor, centres: Tensor, capacity: int) -> Tensor:
    """Return indices B min(capacity, P): of every centre its nearest point, then its second, until there are enough.

    With enough points everywhere each centre has capacity / k of them. Ties: the earlier point first.
    """
    distance, owner = _distance(points, centres).min(dim=-1)
    by_distance = distance.argsort(dim=1, stable=True)
    by_owner = owner.gather(1, by_distance).argsort(dim=1, stable=True)
    grouped = by_distance.gather(1, by_owner)  # centre by centre, the nearest first
    owners = owner.gather(1, grouped)
    labels = torch.arange(centres.shape[1], device=points.device).expand(points.shape[0], -1).contiguous()
    begins = torch.searchsorted(owners, labels)
    rank = torch.arange(points.shape[1], device=points.device) - begins.gather(1, owners)
    rank_of = torch.empty_like(rank).scatter_(1, grouped, rank)
    order = rank_of.gather(1, by_distance).argsort(dim=1, stable=True)
    return by_distance.gather(1, order)[:, :capacity]


def _distance(points: Tensor, centres: Tensor) -> Tensor:
    """Return 1 - cosine, B P k, of unit vectors."""
    return (1 - points @ centres.transpose(1, 2)).clamp_(min=0)


def take(points: Tensor, index: Tensor) -> Tensor:
    """Return the points B P D at indices B K."""
    return points.gather(1, index[..., None].expand(-1, -1, points.shape[-1]))


def _move_idle(points: Tensor, centres: Tensor) -> Tensor:
    """Move every centre that owns nothing to one of the points farthest from their centres."""
    distance, owner = _distance(points, centres).min(dim=-1)
    idle = functional.one_hot(owner, centres.shape[1]).sum(dim=1) == 0
    far = distance.argsort(dim=1, descending=True, stable=True)
    turn = (idle.cumsum(dim=1) - 1).clamp_(0, points.shape[1] - 1)
    return torch.where(idle[..., None], take(points, far.gather(1, turn)), centres)
