"""Shared by the tests of training: its import path, and a world whose actors need no font."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

# training/ is not installed with the package.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from recap.backbones.tiny.vocabulary import ACTORS


def drawn_atlas(side: int = 48) -> Tensor:
    """Draw one sprite per actor: blobs of different outline, each with a light and a dark half."""
    axis = torch.linspace(-1, 1, side)
    y, x = axis[:, None], axis[None, :]
    sprites = []
    for number in range(len(ACTORS)):
        power = 1.2 + number % 4
        width, height = 0.9 - 0.1 * (number % 3), 0.9 - 0.12 * (number // 3 % 3)
        radius = (x / width).abs() ** power + (y / height).abs() ** power
        alpha = ((1 - radius) * 8).clamp(0, 1)
        light = 0.4 + 0.4 * torch.sigmoid(6 * (x * (number % 2) + y * (1 - number % 2)))
        colour = torch.stack((light, 0.6 * light, 0.3 * light))
        sprites.append(torch.cat((colour * alpha, alpha[None])))
    return torch.stack(sprites)


@pytest.fixture(scope="session")
def atlas() -> Tensor:
    return drawn_atlas()


@pytest.fixture(scope="session")
def world(atlas):
    from training.world import World

    return World(atlas)
