# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# Triton evaluates annotations and knows none but its own.
"""Computes the feed-forward's wide layer in 8 bits, its GELU included, by one Triton kernel.

What follows reads its output in 8 bits, too. A scale by a token's largest value would be known only after the
product; this one is known before: no output exceeds the token's largest value times the square root of its channels
times the length of the longest weight. That is some forty times what is needed, where e4m3 numbers are as precise.
"""

from __future__ import annotations

from importlib import import_module
from typing import NamedTuple

import torch

from recap.backbones.wan.quantised import E4M3, LARGEST_FLOAT8, Float8Linear, Float8Tokens
from recap.fast.dit_kernels import gelu_of
from recap.fast.triton_import import tl, triton


class ProductTile(NamedTuple):
    """Describes the work of one program."""

    rows: int
    columns: int
    depth: int
    warps: int
    # Number of loads in flight.
    stages: int


WIDE = ProductTile(128, 256, 128, 8, 4)


class Reach(NamedTuple):
    """Bounds what a layer makes of tokens in 8 bits: its output's scale is `factor` times theirs plus `least`."""

    factor: float
    least: float


def reach_of(linear: Float8Linear) -> Reach:
    """Return the reach of a layer, from its longest weight and its largest bias."""
    longest = (linear.values.float() * linear.scale).norm(dim=1).max()
    factor = longest * linear.values.shape[1] ** 0.5
    return Reach(float(factor), float(linear.bias.float().abs().max()) / LARGEST_FLOAT8)


@triton.jit
def widen_kernel(
    x_tiles, weight_tiles, out_tiles, x_scale, weight_scale, bias, out_scale, tokens, factor, least,
    size: tl.constexpr, depth: tl.constexpr, rows: tl.constexpr, columns: tl.constexpr, fast: tl.constexpr,
):  # fmt: skip
    first, column = tl.program_id(0) * rows, tl.program_id(1) * columns
    total = tl.zeros((rows, columns), tl.float32)
    for k in range(0, size, depth):
        total = tl.dot(x_tiles.load([first, k]), weight_tiles.load([column, k]).T, total)
    token, channel = first + tl.arange(0, rows), column + tl.arange(0, columns)
    inside = token < tokens
    own = tl.load(x_scale + token, inside, 1.0)
    scale = own * factor + least
    if tl.program_id(1) == 0:
        tl.store(out_scale + token, scale, inside)
    value = total * own[:, None] * tl.load(weight_scale + channel)[None, :]
    value += tl.load(bias + channel).to(tl.float32)[None, :]
    fitted = gelu_of(value, fast) * (1 / scale)[:, None]
    out_tiles.store([first, column], fitted.to(out_tiles.dtype))


def widen(x: Float8Tokens, linear: Float8Linear, reach: Reach, tile: ProductTile = WIDE) -> Float8Tokens:
    """Compute a linear layer of tokens B N M and its GELU, in 8 bits."""
    descriptor = import_module("triton.tools.tensor_descriptor").TensorDescriptor.from_tensor
    values = x.values.flatten(0, -2)
    (tokens, size), columns = values.shape, len(linear.values)
    assert size % tile.depth == 0 and columns % tile.columns == 0
    out = torch.empty((*x.values.shape[:-1], columns), dtype=E4M3, device=values.device)
    scale = torch.empty_like(x.scale)
    widen_kernel[(triton.cdiv(tokens, tile.rows), columns // tile.columns)](
        descriptor(values, [tile.rows, tile.depth]),
        descriptor(linear.values, [tile.columns, tile.depth]),
        descriptor(out.flatten(0, -2), [tile.rows, tile.columns]),
        x.scale, linear.scale, linear.bias, scale, tokens, *reach, size, tile.depth, tile.rows, tile.columns,
        values.is_cuda, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return Float8Tokens(out, scale)
