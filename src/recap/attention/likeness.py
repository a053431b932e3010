"""This module says how alike tokens are, by the cosine of their keys.

Keys are compared unrotated, so that the position does not count, with all heads joined, in a few layers spread evenly
over the model; cosines are averaged over these. How far is far is a matter of the model and the scene: what is usual
is read from tokens of one frame.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

USUAL = 0.75
"""The share of a frame's tokens whose distance to the nearest other one counts as usual."""


def spread_layers(number: int, layers: int) -> list[int]:
    """Return so many layers, evenly spread, or all if there are fewer: of 30 and 3 the layers 5, 15 and 25."""
    number = min(number, layers)
    return [int((index + 0.5) * layers / number) for index in range(number)]


def describe_keys(keys: Tensor, layers: list[int]) -> Tensor:
    """Return unit vectors B N E of keys L B N H D, whose products are the mean cosine of these layers."""
    parts = [functional.normalize(keys[layer].flatten(2).float(), dim=-1) for layer in layers]
    # Joined and unit again.
    joined: Tensor = torch.cat(parts, dim=-1) / len(parts) ** 0.5
    return joined


def usual_distance(tokens: Tensor) -> Tensor:
    """Return the distance B 1 within which three quarters of unit vectors B N E have another one."""
    cosines = tokens @ tokens.transpose(1, 2)
    # A token is not its own neighbour.
    cosines.diagonal(dim1=1, dim2=2).fill_(-1.0)
    nearest = (1 - cosines.amax(dim=-1)).clamp(min=0)
    return nearest.quantile(USUAL, dim=1)[:, None]


def nearest_distance(tokens: Tensor, known: Tensor) -> Tensor:
    """Return 1 - the largest cosine, B N, of unit vectors B N E with others B M E; a zero is like nothing."""
    return (1 - (tokens @ known.transpose(1, 2)).amax(dim=-1)).clamp(min=0)
