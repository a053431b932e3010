"""k-means is deterministic under a seed and finds what is there; the choice near its centres is the plain one."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from recap.admission.diversity import nearest_to_centres, refine_centres, spread_centres


def unit(*shape):
    return functional.normalize(torch.randn(*shape), dim=-1)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def cluster(points, k, seed):
    random = generator(seed)
    return refine_centres(points, spread_centres(points, k, random), random, num_steps=8, batch_points=64)


def test_the_same_seed_gives_the_same_centres_bit_for_bit():
    points = unit(2, 200, 8)
    first = cluster(points, 6, 3)
    torch.rand(100)  # the global generator is not asked
    assert torch.equal(first, cluster(points, 6, 3))
    assert not torch.equal(first, cluster(points, 6, 4))


def test_separate_groups_get_a_centre_each():
    middles = unit(1, 5, 16)
    points = functional.normalize(middles.repeat(1, 40, 1) + 0.05 * torch.randn(1, 200, 16), dim=-1)
    found = cluster(points, 5, 0)
    assert (middles @ found.transpose(1, 2)).amax(dim=2).min() > 0.99
    assert (middles @ found.transpose(1, 2)).argmax(dim=2).unique().numel() == 5


def test_a_centre_that_owns_nothing_moves_to_the_farthest_point():
    points = unit(1, 30, 4)
    idle = torch.cat([points[:, :1], points[:, :1]], dim=1)  # the second never wins a tie
    centres = refine_centres(points, idle, generator(), num_steps=0, batch_points=8)
    farthest = (1 - points[0] @ points[0, 0]).argmax()
    assert torch.equal(centres[0, 0], points[0, 0]) and torch.equal(centres[0, 1], points[0, farthest])


@pytest.mark.parametrize("capacity", [1, 7, 16, 40, 100])
def test_the_choice_near_centres_equals_plain_loops(capacity):
    points, centres = unit(2, 40, 6), unit(2, 5, 6)
    chosen = nearest_to_centres(points, centres, capacity)
    assert chosen.shape == (2, min(capacity, 40))
    for row in range(2):
        distance = 1 - points[row] @ centres[row].T
        groups = [[] for _ in range(5)]
        for index in sorted(range(40), key=lambda i: distance[i].min().item()):
            groups[int(distance[index].argmin())].append(index)
        want = []
        for rank in range(40):
            layer = [group[rank] for group in groups if len(group) > rank]
            want += sorted(layer, key=lambda i: distance[i].min().item())
        assert chosen[row].tolist() == want[:capacity]


def test_fewer_points_than_centres_are_all_kept():
    points = unit(1, 3, 4)
    assert sorted(nearest_to_centres(points, cluster(points, 8, 0), 10)[0].tolist()) == [0, 1, 2]
