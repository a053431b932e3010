# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# Triton evaluates annotations and knows none but its own.
"""Computes the Wan decoder's layers in half precision by Triton kernels.

`recap.fast.vae` defines what they compute. Around every frame is a margin of one pixel of zeros. If all
pixels of all frames are one list, the neighbour of pixel p is then at p plus a constant, and a causal convolution is
the sum of 27 matrix products of shifted lists. Its output has the same layout, with two unused rows and columns.
"""

from __future__ import annotations

from importlib import import_module
from typing import NamedTuple

from torch import Tensor

from recap.fast.triton_import import tl, triton
from recap.fast.vae import MARGIN, PAST, TINY

# Elements of a tile: enough loads in flight for each of 128 threads, and few enough for their registers.
ELEMENTS = 4096


class Tile(NamedTuple):
    """Describes the work of one program of `shifted_kernel`."""

    rows: int
    columns: int
    # Columns of a second sum, because a tile's sides are powers of 2 and 192 is not.
    more: int
    depth: int
    warps: int
    # Number of loads in flight.
    stages: int


# Tiles where 64 divides the input channels, where only 32 does, and where there are very few output channels.
WIDE, NARROW, THIN = Tile(256, 128, 0, 64, 8, 4), Tile(256, 64, 32, 32, 8, 5), Tile(256, 16, 0, 32, 4, 6)
# Where another tile is faster, by (channels, out). Measured for the published decoder on an H200 by
# `benchmarks.vae --layers`; only (384, 384) has a better one in its smallest size, by 0.1 ms a layer.
FASTER = {(192, 192): Tile(128, 128, 64, 64, 8, 4)}


def tile_for(channels: int, out: int) -> Tile | None:
    """Choose a tile by shape only, never by timing: results must not depend on how busy a machine is.

    There is none if the channels do not fill it.
    """
    if channels % NARROW.depth or out % THIN.columns:
        return None
    if out == THIN.columns:
        return THIN
    return FASTER.get((channels, out), NARROW if channels % WIDE.depth else WIDE)


@triton.jit
def activation_kernel(
    x, bias, gamma, past, out, frames, height, width, pitch, frame_pitch, tiny, channels: tl.constexpr,
    biased: tl.constexpr, margin: tl.constexpr, rows: tl.constexpr, columns: tl.constexpr,
):  # fmt: skip
    """Process a tile of pixels through all frames, so that no other program reads the past that it replaces."""
    cell = tl.program_id(0) * rows + tl.arange(0, rows)
    wide = width + 2 * margin
    area = (height + 2 * margin) * wide
    y, x_ = cell // wide - margin, cell % wide - margin
    channel = tl.arange(0, columns)
    kept = (channel < channels)[None, :]
    # Margins are read as zeros, and norm and SiLU of zeros are zeros.
    inside = ((y >= 0) & (y < height) & (x_ >= 0) & (x_ < width))[:, None] & kept
    written = (cell < area)[:, None] & kept
    source = (y * pitch + x_).to(tl.int64)[:, None] * channels + channel[None, :]
    before = (y * width + x_).to(tl.int64)[:, None] * channels + channel[None, :]
    target = cell.to(tl.int64)[:, None] * channels + channel[None, :]
    source_step = frame_pitch.to(tl.int64) * channels
    before_step = (height * width).to(tl.int64) * channels
    target_step = area.to(tl.int64) * channels
    batch = tl.program_id(1).to(tl.int64)
    past += batch * 2 * before_step
    x += batch * frames * source_step
    out += batch * (frames + 2) * target_step
    older = tl.load(past + before, mask=inside, other=0.0)
    newer = tl.load(past + before_step + before, mask=inside, other=0.0)
    tl.store(out + target, older, mask=written)
    tl.store(out + target_step + target, newer, mask=written)
    # Other threads than those of the loads above may do the stores to the past below.
    tl.debug_barrier()
    if frames == 1:
        tl.store(past + before, newer, mask=inside)
    scale = tl.load(gamma + channel, mask=channel < channels, other=0.0).to(tl.float32)
    scale *= tl.sqrt(channels * 1.0)
    shift = tl.zeros((columns,), tl.float32)
    if biased:
        shift = tl.load(bias + channel, mask=channel < channels, other=0.0).to(tl.float32)
    for t in range(frames):
        value = tl.load(x + t * source_step + source, mask=inside, other=0.0).to(tl.float32)
        value = tl.where(inside, value + shift[None, :], 0.0)
        norm = tl.maximum(tl.sqrt(tl.sum(value * value, axis=1)), tiny)
        value = value / norm[:, None] * scale[None, :]
        made = (value / (1.0 + tl.exp(-value))).to(out.dtype.element_ty)
        tl.store(out + (t + 2) * target_step + target, made, mask=written)
        if t + 2 >= frames:
            tl.store(past + (t - frames + 2) * before_step + before, made, mask=inside)


@triton.jit
def join_kernel(
    kept, y, bias, height, width, pitch, frame_pitch, channels: tl.constexpr, rows: tl.constexpr,
    columns: tl.constexpr,
):  # fmt: skip
    cell = tl.program_id(0) * rows + tl.arange(0, rows)
    frame = tl.program_id(1).to(tl.int64)
    channel = tl.arange(0, columns)
    inside = (cell < height * width)[:, None] & (channel < channels)[None, :]
    packed = (frame * height * width + cell)[:, None] * channels + channel[None, :]
    pixel = frame * frame_pitch + cell // width * pitch + cell % width
    spread = pixel[:, None] * channels + channel[None, :]
    total = tl.load(kept + packed, mask=inside).to(tl.float32) + tl.load(y + spread, mask=inside)
    total += tl.load(bias + channel, mask=channel < channels).to(tl.float32)[None, :]
    tl.store(kept + packed, total.to(kept.dtype.element_ty), mask=inside)


@triton.jit
def shifted_kernel(
    x_tiles, weight_tiles, more_weight_tiles, out_tiles, more_out_tiles, width, area, channels: tl.constexpr,
    depth: tl.constexpr, rows: tl.constexpr, columns: tl.constexpr, more: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) * rows
    column = tl.program_id(1) * (columns + more)
    total = tl.zeros((rows, columns), tl.float32)
    if more > 0:
        more_total = tl.zeros((rows, more), tl.float32)
    chunks: tl.constexpr = channels // depth
    for step in range(27 * chunks):
        tap = step // chunks
        k = step % chunks * depth
        shift = tap // 9 * area + tap // 3 % 3 * width + tap % 3
        pixels = x_tiles.load([first + shift, k])
        weights = weight_tiles.load([column, tap * channels + k])
        total = tl.dot(pixels, weights.T, total)
        if more > 0:
            more_weights = more_weight_tiles.load([column + columns, tap * channels + k])
            more_total = tl.dot(pixels, more_weights.T, more_total)
    out_tiles.store([first, column], total.to(out_tiles.dtype))
    if more > 0:
        more_out_tiles.store([first, column + columns], more_total.to(out_tiles.dtype))


def _spread(x: Tensor) -> tuple[Tensor, int, int]:
    """Return features with dense columns and channels, and the pixels from one row and one frame to the next."""
    batch, frames, _, _, channels = x.shape
    if x.stride()[3:] != (channels, 1) or (batch > 1 and x.stride(0) != frames * x.stride(1)):
        x = x.contiguous()
    return x, x.stride(2) // channels, x.stride(1) // channels


def _pixels(channels: int) -> tuple[int, int]:
    """Return the pixels of one program in a pass over all features, and its channels, rounded to a power of 2."""
    columns = triton.next_power_of_2(channels)
    return max(1, ELEMENTS // columns), columns


def activated(x: Tensor, bias: Tensor | None, gamma: Tensor, past: Tensor) -> Tensor:
    """Compute `Activation` in one pass."""
    x, pitch, frame_pitch = _spread(x)
    batch, frames, height, width, channels = x.shape
    out = x.new_empty(batch, PAST + frames, height + 2 * MARGIN, width + 2 * MARGIN, channels)
    rows, columns = _pixels(channels)
    grid = (triton.cdiv(out.shape[2] * out.shape[3], rows), batch)
    shift, biased = (gamma, False) if bias is None else (bias, True)
    activation_kernel[grid](
        x, shift, gamma, past, out, frames, height, width, pitch, frame_pitch, TINY, channels, biased, MARGIN, rows,
        columns,
    )  # fmt: skip
    return out


def joined(kept: Tensor, y: Tensor, bias: Tensor) -> Tensor:
    """Add a block's output and its bias to the shortcut, in place and in one pass."""
    (y, pitch, frame_pitch), kept = _spread(y), kept.contiguous()
    batch, frames, height, width, channels = y.shape
    rows, columns = _pixels(channels)
    grid = (triton.cdiv(height * width, rows), batch * frames)
    join_kernel[grid](kept, y, bias, height, width, pitch, frame_pitch, channels, rows, columns)
    return kept


def shifted(x: Tensor, weight: Tensor, tile: Tile | None = None) -> Tensor:
    """Convolve B 2+T Y+2 X+2 C, with margins, by weights O 27C to B T Y X O without a bias, a strided view."""
    descriptor = import_module("triton.tools.tensor_descriptor").TensorDescriptor.from_tensor
    batch, frames, height, width, channels = x.shape
    tile = tile or tile_for(channels, len(weight))
    assert tile is not None
    out = x.new_empty(batch, frames - PAST, height, width, len(weight))
    grid = (
        triton.cdiv(out[0, ..., 0].numel(), tile.rows),
        triton.cdiv(len(weight), tile.columns + tile.more),
    )
    # A descriptor needs columns even where the second sum is not used.
    more = tile.more or tile.columns
    for source, target in zip(x, out, strict=True):
        flat = target.view(-1, len(weight))
        shifted_kernel[grid](
            descriptor(source.view(-1, channels), [tile.rows, tile.depth]),
            descriptor(weight, [tile.columns, tile.depth]),
            descriptor(weight, [more, tile.depth]),
            descriptor(flat, [tile.rows, tile.columns]),
            descriptor(flat, [tile.rows, more]),
            width, height * width, channels, tile.depth, tile.rows, tile.columns, tile.more,
            num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
    return out[:, :, : height - 2, : width - 2]
