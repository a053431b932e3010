"""All correlations of RAFT-small as one matrix product, and reading windows of them.

The readable code keeps four volumes with a ring of zeros each. Here the pooled features of all four levels stand
behind one another, so that one product writes every level of a place side by side, and one kernel reads them all.

Work at 24 directed pairs of 416x240 (1,560 places, 128 channels, fp16): the product is 20 GFLOP (0.03 ms) and
writes 154 MB (0.04 ms). Making the reverse direction as a transpose would save 7 GFLOP and write the same bytes
after reading them first, so it cannot pay; `benchmarks.flow` measures both.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from recap.flow.raft import LEVELS, RADIUS

WINDOW = LEVELS * (2 * RADIUS + 1) ** 2
ALIGNED = (
    8  # elements: 16 bytes of half precision, what tensor cores want rows and channels to be multiples of
)


def aligned(count: int, to: int = ALIGNED) -> int:
    return -(-count // to) * to


READ_CHANNELS = aligned(WINDOW)  # of a look-up


def pool_levels(features: Tensor) -> Tensor:
    """Features N C y x -> N S C: all levels behind one another, row-major, filled up with zeros."""
    levels = [features]
    for _ in range(LEVELS - 1):
        levels.append(F.avg_pool2d(levels[-1], 2))
    table = torch.cat([level.flatten(2).mT for level in levels], dim=1)
    return F.pad(table, (0, 0, 0, aligned(table.shape[1]) - table.shape[1]))


def correlate(source: Tensor, pooled: Tensor) -> Tensor:
    """Volume N (y x) S of source features N (y x) C with pooled ones N S C."""
    volume: Tensor = (source * source.shape[-1] ** -0.5) @ pooled.mT
    return volume


def read_plain(volume: Tensor, flow: Tensor, channels: int) -> Tensor:
    """Windows N y x channels around the places that flow N y x 2 points to; zero outside the picture.

    Order (level, dx, dy), as trained; channels beyond the windows are 0.
    """
    num, height, width, _ = flow.shape
    reach = torch.arange(-RADIUS, RADIUS + 2, device=flow.device)
    here = torch.arange(width, device=flow.device), torch.arange(height, device=flow.device)[:, None]
    x, y = flow[..., 0] + here[0], flow[..., 1] + here[1]
    read, start = [], 0
    for level in range(LEVELS):
        tall, wide = height >> level, width >> level
        # Beyond these bounds every tap is outside; a wild flow must not overflow the integers below.
        at_x = (x / 2**level).clamp(-RADIUS - 2, wide + RADIUS + 1).flatten(1)
        at_y = (y / 2**level).clamp(-RADIUS - 2, tall + RADIUS + 1).flatten(1)
        columns = at_x.floor().long()[..., None, None] + reach[:, None]
        lines = at_y.floor().long()[..., None, None] + reach
        inside = (columns >= 0) & (columns < wide) & (lines >= 0) & (lines < tall)
        index = start + lines.clamp(0, tall - 1) * wide + columns.clamp(0, wide - 1)
        taps = volume.gather(2, index.flatten(2)).reshape(index.shape).to(flow.dtype) * inside
        across = torch.lerp(taps[..., :-1, :], taps[..., 1:, :], (at_x - at_x.floor())[..., None, None])
        whole = torch.lerp(across[..., :-1], across[..., 1:], (at_y - at_y.floor())[..., None, None])
        read.append(whole.flatten(2))
        start += tall * wide
    windows = torch.cat(read, dim=-1).to(volume.dtype).reshape(num, height, width, -1)
    return F.pad(windows, (0, channels - windows.shape[-1]))


@functools.cache
def fused_reader() -> bool:
    """Whether the one-launch reader can be had; asked only on CUDA, where importing Triton is worth its time."""
    from recap.fast import windows

    return windows.AVAILABLE


def read_fused(volume: Tensor, flow: Tensor, channels: int) -> Tensor:
    """`read_plain` in one launch."""
    from recap.fast import windows

    return windows.launch(volume, flow, channels)
