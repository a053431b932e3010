"""Computes all correlations of RAFT-small as one matrix product, and reads windows of them.

The readable code keeps four volumes with a ring of zeros each. Here the pooled features of all four levels are
concatenated, so one product writes every level of a pixel next to each other, and one kernel reads them all.

Work for 24 directed pairs of 416x240 (1,560 pixels of features, 128 channels, fp16): the product is 20 GFLOP
(0.03 ms) and writes 154 MB (0.04 ms). Transposing it for the reverse direction would save 7 GFLOP, but read the
same bytes before writing them, so it cannot pay; `benchmarks.flow` measures both.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from recap.flow.raft import LEVELS, RADIUS

WINDOW = LEVELS * (2 * RADIUS + 1) ** 2
# Elements: tensor cores want channels in multiples of 16 bytes, in half precision.
ALIGNED = 8


def aligned(count: int, to: int = ALIGNED) -> int:
    return -(-count // to) * to


# Channels of a look-up.
READ_CHANNELS = aligned(WINDOW)


def pool_levels(features: Tensor) -> Tensor:
    """Concatenate all levels of features N C y x, row-major and padded with zeros: N S C."""
    levels = [features]
    for _ in range(LEVELS - 1):
        levels.append(F.avg_pool2d(levels[-1], 2))
    table = torch.cat([level.flatten(2).mT for level in levels], dim=1)
    return F.pad(table, (0, 0, 0, aligned(table.shape[1]) - table.shape[1]))


def correlate(source: Tensor, pooled: Tensor) -> Tensor:
    """Correlate source features N (y x) C with pooled ones N S C: a volume N (y x) S."""
    volume: Tensor = (source * source.shape[-1] ** -0.5) @ pooled.mT
    return volume


def read_plain(volume: Tensor, flow: Tensor, channels: int) -> Tensor:
    """Read windows N y x channels around the positions that flow N y x 2 points to; zero outside the picture.

    Their order is (level, dx, dy), as in training; channels after the windows are 0.
    """
    num, height, width, _ = flow.shape
    reach = torch.arange(-RADIUS, RADIUS + 2, device=flow.device)
    x = flow[..., 0] + torch.arange(width, device=flow.device)
    y = flow[..., 1] + torch.arange(height, device=flow.device)[:, None]
    read, start = [], 0
    for level in range(LEVELS):
        tall, wide = height >> level, width >> level
        # Beyond these bounds everything read is outside; an extreme flow must not overflow the integers below.
        at_x = (x / 2**level).clamp(-RADIUS - 2, wide + RADIUS + 1).flatten(1)
        at_y = (y / 2**level).clamp(-RADIUS - 2, tall + RADIUS + 1).flatten(1)
        columns = at_x.floor().long()[..., None, None] + reach[:, None]
        rows = at_y.floor().long()[..., None, None] + reach
        inside = (columns >= 0) & (columns < wide) & (rows >= 0) & (rows < tall)
        index = start + rows.clamp(0, tall - 1) * wide + columns.clamp(0, wide - 1)
        taps = volume.gather(2, index.flatten(2)).reshape(index.shape).to(flow.dtype) * inside
        across = torch.lerp(taps[..., :-1, :], taps[..., 1:, :], (at_x - at_x.floor())[..., None, None])
        whole = torch.lerp(across[..., :-1], across[..., 1:], (at_y - at_y.floor())[..., None, None])
        read.append(whole.flatten(2))
        start += tall * wide
    windows = torch.cat(read, dim=-1).to(volume.dtype).reshape(num, height, width, -1)
    return F.pad(windows, (0, channels - windows.shape[-1]))


def fused_reader() -> bool:
    """Tell whether `read_fused` can run; called only on CUDA, because importing Triton takes time."""
    from recap.fast.triton_import import AVAILABLE

    return AVAILABLE


def read_fused(volume: Tensor, flow: Tensor, channels: int) -> Tensor:
    """Compute `read_plain` in one launch."""
    from recap.fast import correlation_kernel

    return correlation_kernel.launch(volume, flow, channels)
