"""This module says how alike tokens are, by the cosine of their keys.

Keys are compared unrotated, so that the position does not count, with all heads joined, in a few layers spread evenly
over the model; cosines are averaged over these. How far is far is a matter of the model and the scene: what is usual
is read from tokens of one frame.

On a CPU all of it is computed in fp32. Elsewhere what is compared is rounded to fp16 and products are summed in fp32,
which is some ten times as fast; docs/admissions.md says how far off they are.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

USUAL = 0.75
"""The share of a frame's tokens whose distance to the nearest other one counts as usual."""


def spread_layers(number: int, layers: int) -> list[int]:
    """Return `number` of the layers, evenly spread, or all if there are fewer: 3 of 30 are layers 5, 15 and 25."""
    number = min(number, layers)
    return [int((index + 0.5) * layers / number) for index in range(number)]


def describe_keys(keys: Tensor, layers: list[int], *, to_compare: bool = False) -> Tensor:
    """Return unit vectors B N E of keys L B N H D, whose products are the mean cosine of these layers.

    With `to_compare` they are as `for_products` makes them, else fp32.
    """
    # Layer by layer, as one fits into a GPU's cache where all of them do not.
    each = (functional.normalize(keys[layer].flatten(2).float(), dim=-1) for layer in layers)
    # Joined they are unit again.
    parts = [part / len(layers) ** 0.5 for part in each]
    return torch.cat([for_products(part) for part in parts] if to_compare else parts, dim=-1)


def for_products(vectors: Tensor) -> Tensor:
    """Return vectors as products take them: of fp16, but on a CPU."""
    return vectors if vectors.device.type == "cpu" else vectors.half()


def distances(tokens: Tensor, known: Tensor) -> Tensor:
    """Return 1 - cosine, B N M, of unit vectors B N E and B M E."""
    others = known.transpose(1, 2)
    if tokens.dtype != torch.float16:
        return 1 - tokens @ others
    # The product subtracts from 1 before it rounds, so that small distances are as exact as large ones.
    one = torch.ones(1, dtype=torch.float16, device=tokens.device)
    return torch.baddbmm(one, tokens, others, alpha=-1)


def usual_distance(tokens: Tensor) -> Tensor:
    """Return the distance B 1 within which three quarters of unit vectors B N E have another one."""
    apart = distances(for_products(tokens), for_products(tokens))
    # A token is not its own neighbour.
    apart.diagonal(dim1=1, dim2=2).fill_(2.0)
    nearest = apart.amin(dim=-1).float().clamp(min=0)
    return nearest.quantile(USUAL, dim=1)[:, None]


def nearest_distance(tokens: Tensor, known: Tensor) -> Tensor:
    """Return the distance B N of unit vectors B N E to the nearest of others B M E; a zero is like nothing."""
    return distances(for_products(tokens), for_products(known)).amin(dim=-1).float().clamp(min=0)
