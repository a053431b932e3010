# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# Triton evaluates annotations and knows none but its own.
"""Does the work of 8-bit linear layers by Triton kernels; `recap.backbones.wan.quantised` defines what they compute.

The feed-forward's wide layer and its GELU are one kernel, whose output is read in 8 bits, too. A scale by a token's
largest value would be known only after the product; `Float8Linear.reach` bounds it before. The bound is 25 to 100
times what is needed (the embedded model, medians by layer), and e4m3 numbers are nearly as precise there: 2.7 instead
of 2.5 %. Over 30 layers of 4,680 tokens it takes 4.0 ms, where the library's product, then GELU and scale take 5.7
(H200, `benchmarks.products`, 2026-11-17).
"""

from __future__ import annotations

from importlib import import_module
from typing import NamedTuple

import torch
from torch import Tensor

from recap.backbones.wan.quantised import (
    E4M3,
    LARGEST_FLOAT8,
    SMALLEST,
    Float8Linear,
    Float8Tokens,
    Int8Linear,
)
from recap.fast.triton_import import tl, triton

# Numbers that kernels read.
LARGEST: tl.constexpr = tl.constexpr(LARGEST_FLOAT8)
NEARLY_ZERO: tl.constexpr = tl.constexpr(SMALLEST)
# Compute capability of the first GPUs that copy whole tiles.
TILE_COPIES = (9, 0)


class ProductTile(NamedTuple):
    """Describes the work of one program of `widen_kernel`."""

    rows: int
    columns: int
    depth: int
    warps: int
    # Number of loads in flight.
    stages: int


WIDE = ProductTile(128, 128, 128, 8, 3)


@triton.jit
def store_float8(value, out, scale, inside):
    """Write one token in 8 bits at the addresses `out`, and its scale; the conversion ends at the largest number."""
    largest = tl.maximum(tl.max(tl.abs(value)), NEARLY_ZERO)
    tl.store(out, (value * (LARGEST / largest)).to(out.dtype.element_ty), inside)
    tl.store(scale, largest / LARGEST)


@triton.jit
def gelu_of(value, fast: tl.constexpr):
    """Return the GELU of fp32 values, by the hardware's own tanh (11 bits) where it can be fast."""
    inner = value * (0.7978845608028654 + 0.035677408136300125 * value * value)
    if fast:
        tanh = tl.inline_asm_elementwise(
            "tanh.approx.f32 $0, $1;", "=f,f", [inner], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        tanh = 2 * tl.sigmoid(2 * inner) - 1
    half = 0.5 * value
    return half + half * tanh


@triton.jit
def quantise_kernel(
    x, out, scale, size, gelu: tl.constexpr, fast: tl.constexpr, width: tl.constexpr, rest: tl.constexpr,
):  # fmt: skip
    """Quantise one token, in two parts: their sizes are powers of 2, and 8,960 would fill half of the next one."""
    token = tl.program_id(0).to(tl.int64) * size
    channel, more = tl.arange(0, width), width + tl.arange(0, rest)
    inside = more < size
    first = tl.load(x + token + channel).to(tl.float32)
    second = tl.load(x + token + more, inside, 0.0).to(tl.float32)
    if gelu:
        first = gelu_of(first, fast)
        second = gelu_of(second, fast)
    largest = tl.maximum(tl.max(tl.abs(first)), tl.max(tl.abs(second)))
    largest = tl.maximum(largest, NEARLY_ZERO)
    tl.store(out + token + channel, (first * (LARGEST / largest)).to(out.dtype.element_ty))
    tl.store(out + token + more, (second * (LARGEST / largest)).to(out.dtype.element_ty), inside)
    tl.store(scale + tl.program_id(0), largest / LARGEST)


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


@triton.jit
def restore_kernel(values, scale, out, size, outputs, rows: tl.constexpr, columns: tl.constexpr):
    row = tl.program_id(0) * rows + tl.arange(0, rows)
    column = tl.program_id(1) * columns + tl.arange(0, columns)
    inside = (row < outputs)[:, None] & (column < size)[None, :]
    place = row[:, None] * size + column[None, :]
    value = tl.load(values + place, inside, 0).to(tl.float32)
    step = tl.load(scale + row, row < outputs, 0.0)
    tl.store(out + place, (value * step[:, None]).to(out.dtype.element_ty), inside)


def quantise_tokens(x: Tensor, *, gelu: bool = False) -> Float8Tokens:
    """Compute `recap.backbones.wan.quantised.quantise_tokens`, of the tokens' GELU where asked."""
    x = x.contiguous()
    made = empty_tokens(x, x.shape)
    size = x.shape[-1]
    # The largest power of 2 that is filled, and what is left.
    width = triton.next_power_of_2(size + 1) // 2
    rest = triton.next_power_of_2(max(size - width, 1))
    quantise_kernel[(x.numel() // size,)](x, *made, size, gelu, x.is_cuda, width, rest, num_warps=8)
    return made


def empty_tokens(like: Tensor, shape: tuple[int, ...] | torch.Size) -> Float8Tokens:
    """Return storage for tokens of a shape."""
    scale = like.new_empty((*shape[:-1], 1), dtype=torch.float32)
    return Float8Tokens(like.new_empty(shape, dtype=E4M3), scale)


def widen(x: Float8Tokens, linear: Float8Linear) -> Float8Tokens:
    """Compute a linear layer of tokens B N M and its GELU, in 8 bits: by one kernel where that can be."""
    (*_, size), outputs = x.values.shape, len(linear.values)
    fits = size % WIDE.depth == 0 and outputs % WIDE.columns == 0 and linear.bias.dtype == torch.bfloat16
    if not fits or torch.cuda.get_device_capability(x.values.device) < TILE_COPIES:
        return quantise_tokens(linear(x), gelu=True)
    return widen_at_once(x, linear, WIDE)


def widen_at_once(x: Float8Tokens, linear: Float8Linear, tile: ProductTile) -> Float8Tokens:
    """Compute a linear layer of tokens B N M and its GELU by one kernel."""
    descriptor = import_module("triton.tools.tensor_descriptor").TensorDescriptor.from_tensor
    values = x.values.flatten(0, -2)
    (tokens, size), outputs = values.shape, len(linear.values)
    made = empty_tokens(values, (*x.values.shape[:-1], outputs))
    widen_kernel[(triton.cdiv(tokens, tile.rows), outputs // tile.columns)](
        descriptor(values, [tile.rows, tile.depth]),
        descriptor(linear.values, [tile.columns, tile.depth]),
        descriptor(made.values.flatten(0, -2), [tile.rows, tile.columns]),
        x.scale, linear.scale, linear.bias, made.scale, tokens, *linear.reach, size, tile.depth, tile.rows,
        tile.columns, values.is_cuda, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return made


def restore(linear: Int8Linear) -> Tensor:
    """Compute `Int8Linear.weight`: torch's own kernel takes some four times as long."""
    outputs, size = linear.values.shape
    out = torch.empty_like(linear.values, dtype=linear.bias.dtype)
    rows, columns = 4, 512
    grid = (triton.cdiv(outputs, rows), triton.cdiv(size, columns))
    restore_kernel[grid](linear.values, linear.scale, out, size, outputs, rows, columns, num_warps=4)
    return out
