"""This module rotates positions on three axes (RoPE), by explicit phases.

A head of D channels is D/2 pairs of adjacent channels, each one complex number. The pairs are split into
bands: D/2 // 3 for rows, as many for columns, the rest for time (64 pairs: 22 t, 21 h, 21 w). Pair j of a
band of n pairs turns by `phase * theta^(-j/n)`. Angles are computed from the phases themselves, so a phase
may be fractional, negative or beyond any table.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from recap.types import widest

THETA = 10000.0


class Rotation(NamedTuple):
    """Carries the cosines and sines of every pair, B N 1 D/2, ready to broadcast over heads."""

    cos: Tensor
    sin: Tensor


def bands(head_dim: int) -> tuple[int, int, int]:
    """Return how many pairs turn with time, row and column."""
    pairs = head_dim // 2
    side = pairs // 3
    return pairs - 2 * side, side, side


def frequencies(pairs: int, device: torch.device | None = None) -> Tensor:
    """Return the angle per unit of phase for each pair of a band."""
    exponent = torch.arange(pairs, dtype=widest(device or "cpu"), device=device) / max(pairs, 1)
    return torch.pow(THETA, -exponent)


def rotation(positions: Tensor, head_dim: int, dtype: torch.dtype = torch.float32) -> Rotation:
    """Return the turn of every pair at positions B N 3; in fp32 the angles would be off by 3e-5 at phase 1,000."""
    phases = positions.to(widest(positions.device)).unbind(-1)
    parts = zip(phases, bands(head_dim), strict=True)
    turns = [phase[..., None] * frequencies(pairs, positions.device) for phase, pairs in parts]
    angles = torch.cat(turns, dim=-1)[..., None, :]
    return Rotation(angles.cos().to(dtype), angles.sin().to(dtype))


def rotate(x: Tensor, turn: Rotation) -> Tensor:
    """Turn queries or keys B N H D; computed in the rotation's dtype, returned in that of x."""
    pairs = x.to(turn.cos.dtype).unflatten(-1, (-1, 2))
    real, imaginary = pairs.unbind(-1)
    turned = (real * turn.cos - imaginary * turn.sin, real * turn.sin + imaginary * turn.cos)
    return torch.stack(turned, dim=-1).flatten(-2).to(x.dtype)
