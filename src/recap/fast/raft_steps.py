"""Computes RAFT without its convolutions, in plain torch; `recap.fast.raft_kernels` does each step in one launch.

Tensors are N C y x with channels innermost. Convolutions leave out their bias, which is added here.

The readable code keeps four volumes of correlations with a ring of zeros each. Here the pooled features of all four
levels are concatenated, so one product writes every level of a pixel next to each other, and one kernel reads them
all. Work for 24 directed pairs of 416x240 (1,560 pixels of features, 128 channels, fp16): the product is 20 GFLOP
(0.03 ms) and writes 154 MB (0.04 ms). Transposing it for the reverse direction would save 7 GFLOP, but read the
same bytes before writing them, so it cannot pay; `benchmarks.flow` measures both.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from recap.flow.raft import HIDDEN, LEVELS, MOTION, RADIUS

# Elements: tensor cores want channels in multiples of 16 bytes, in half precision.
ALIGNED = 8


def aligned(count: int, to: int = ALIGNED) -> int:
    """Round up to a multiple."""
    return -(-count // to) * to


# Channels of a look-up, padded with zeros.
WINDOWS = aligned(LEVELS * (2 * RADIUS + 1) ** 2)
# Channels that the gates convolve, a multiple of 64 because kernels process channels by 32 or 64.
STATE = aligned(HIDDEN + MOTION, 64)
# Channels that the flow is padded to, which also pads the input of the gates to `STATE`.
MOVED = 2 + STATE - HIDDEN - MOTION


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


def read(volume: Tensor, flow: Tensor) -> Tensor:
    """Read windows N y x `WINDOWS` around the positions that flow N y x 2 points to; zero outside the picture.

    Their order is (level, dx, dy), as in training; channels after the windows are 0.
    """
    num, height, width, _ = flow.shape
    reach = torch.arange(-RADIUS, RADIUS + 2, device=flow.device)
    x = flow[..., 0] + torch.arange(width, device=flow.device)
    y = flow[..., 1] + torch.arange(height, device=flow.device)[:, None]
    found, start = [], 0
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
        found.append(whole.flatten(2))
        start += tall * wide
    windows = torch.cat(found, dim=-1).to(volume.dtype).reshape(num, height, width, -1)
    return F.pad(windows, (0, WINDOWS - windows.shape[-1]))


def _finish(x: Tensor, residual: Tensor | None, relu: bool) -> Tensor:
    """Apply ReLU if asked, then add a residual, if any, with its own ReLU."""
    x = F.relu(x) if relu else x
    return x if residual is None else F.relu(residual + x)


def normalise(x: Tensor, eps: float, residual: Tensor | None = None, *, relu: bool = True) -> Tensor:
    """Apply instance normalisation with statistics in fp32, ReLU, and a residual, if any, with its own ReLU."""
    wide = x.float()
    variance, mean = torch.var_mean(wide, dim=(2, 3), correction=0, keepdim=True)
    return _finish(((wide - mean) * torch.rsqrt(variance + eps)).to(x.dtype), residual, relu)


def add_bias(x: Tensor, bias: Tensor, residual: Tensor | None = None, *, relu: bool = True) -> Tensor:
    """Add the bias, apply ReLU, and add a residual, if any, with its own ReLU."""
    return _finish(x + bias[:, None, None], residual, relu)


def pair(of_windows: Tensor, of_flow: Tensor, bias: Tensor) -> Tensor:
    """Concatenate the features of the windows and of the flow, with bias and ReLU."""
    return add_bias(torch.cat((of_windows, of_flow), dim=1), bias)


def join(hidden: Tensor, motion: Tensor, bias: Tensor, moved: Tensor) -> Tensor:
    """Build the gates' input: hidden state, motion with bias and ReLU, and the flow padded with zeros."""
    return torch.cat((hidden, add_bias(motion, bias), moved), dim=1)


def gate(both: Tensor, share: Tensor, hidden: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Return the update gate, and the gates' input with its hidden part reset, possibly in the same storage."""
    update, reset = torch.sigmoid(both + share).chunk(2, dim=1)
    return update, torch.cat((reset * hidden, state[:, HIDDEN:]), dim=1)


def mix(hidden: Tensor, proposed: Tensor, share: Tensor, update: Tensor) -> Tensor:
    """Return the next hidden state."""
    return torch.lerp(hidden, torch.tanh(proposed + share), update)


def advance(flow: Tensor, change: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Add the first two channels of a change to flow N y x 2 in fp32; also return it as N `MOVED` y x."""
    flow = flow + (change + bias[:, None, None])[:, :2].movedim(1, -1).to(flow.dtype)
    return flow, F.pad(flow.to(change.dtype), (0, MOVED - 2)).movedim(-1, 1)
