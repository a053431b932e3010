"""Marks lie on the marked tokens and nowhere else."""

from __future__ import annotations

import torch

from recap.show.clips import GREEN, tint


def test_only_marked_tokens_change() -> None:
    pictures = torch.randint(0, 256, (2, 3, 64, 96), dtype=torch.uint8)
    marked = torch.zeros(2, 4, 6, dtype=torch.bool)
    marked[1, 2, 3:5] = True
    shown = tint(pictures, marked)
    assert torch.equal(shown[0], pictures[0])
    changed = (shown[1] != pictures[1]).any(dim=0)
    assert bool(changed[32:48, 48:80].float().mean() > 0.9)
    changed[32:48, 48:80] = False
    assert not bool(changed.any())


def test_neighbours_share_one_outline() -> None:
    pictures = torch.zeros(1, 3, 64, 96, dtype=torch.uint8)
    marked = torch.zeros(1, 4, 6, dtype=torch.bool)
    marked[0, 2, 3:5] = True
    shown = tint(pictures, marked)[0]
    assert shown[:, 32, 60].tolist() == list(GREEN)  # the outline
    inner = shown[:, 40, 63].tolist()  # between the two tokens
    assert 0 < inner[1] < GREEN[1] / 2


def test_tint_lets_the_picture_through() -> None:
    pictures = torch.full((1, 3, 64, 64), 200, dtype=torch.uint8)
    shown = tint(pictures, torch.ones(1, 4, 4, dtype=torch.bool))
    assert int(shown[0, 1, 32, 32]) > 200 and 100 < int(shown[0, 0, 32, 32]) < 200
