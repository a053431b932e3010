"""What attention over segments with biases means: one softmax over all keys; and segments to try it on."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from recap.attention.attend import Attended, Readable
from recap.types import Role

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]
ROLES = [Role.SINK, Role.BANK, Role.PRIOR, Role.CURRENT]


def random_segments(lengths, *, batch=2, heads=3, channels=12, dtype=torch.float64, device="cpu", bias=0.0):
    made = []
    for role, length in zip(ROLES, lengths, strict=True):
        keys, values = torch.randn(2, batch, length, heads, channels, dtype=torch.float64)
        log_bias = bias if role is Role.SINK else 0.0
        made.append(Readable(role, keys.to(device, dtype), values.to(device, dtype), log_bias))
    return made


def relative_error(got, want):
    return (got.double() - want.double()).norm() / want.double().norm()


def reference(query: Tensor, segments: Sequence[Readable]) -> Attended:
    """One softmax over all keys, in the query's own precision (hand it fp64 to check others against)."""
    keys = torch.cat([s.keys for s in segments], dim=1)
    values = torch.cat([s.values for s in segments], dim=1)
    bias = torch.cat([s.keys.new_full((s.keys.shape[1],), s.log_bias) for s in segments])
    logits = torch.einsum("bqhd,bkhd->bhqk", query, keys) * query.shape[-1] ** -0.5 + bias
    weights = logits.softmax(dim=-1)
    shares: dict[Role, Tensor] = {}
    for segment, part in zip(
        segments, weights.split([s.keys.shape[1] for s in segments], dim=-1), strict=True
    ):
        mass = part.sum(dim=-1).mean(dim=(1, 2))
        shares[segment.role] = shares.get(segment.role, torch.zeros_like(mass)) + mass
    return Attended(torch.einsum("bhqk,bkhd->bqhd", weights, values), shares)
