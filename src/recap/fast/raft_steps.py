"""What stands between RAFT's convolutions, said plainly; `recap.fast.raft_kernels` does each in one launch.

Tensors are N C y x with channels innermost. Convolutions come without their bias, which is added here.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from recap.fast.correlation import aligned
from recap.flow.raft import HIDDEN, MOTION

STATE = aligned(HIDDEN + MOTION, 64)  # channels the gates convolve; kernels take channels by 32 or 64
MOVED = 2 + STATE - HIDDEN - MOTION  # channels the flow is filled up to, which fills up the gates' as well


def _column(bias: Tensor) -> Tensor:
    return bias[:, None, None]


def _finish(x: Tensor, residual: Tensor | None, relu: bool) -> Tensor:
    x = F.relu(x) if relu else x
    return x if residual is None else F.relu(residual + x)


def normalise(x: Tensor, eps: float, residual: Tensor | None = None, *, relu: bool = True) -> Tensor:
    """Instance normalisation with statistics in fp32, ReLU, and perhaps a residual with a ReLU of its own."""
    wide = x.float()
    variance, mean = torch.var_mean(wide, dim=(2, 3), correction=0, keepdim=True)
    return _finish(((wide - mean) * torch.rsqrt(variance + eps)).to(x.dtype), residual, relu)


def add_bias(x: Tensor, bias: Tensor, residual: Tensor | None = None, *, relu: bool = True) -> Tensor:
    """Bias, ReLU, and perhaps a residual with a ReLU of its own."""
    return _finish(x + _column(bias), residual, relu)


def pair(seen: Tensor, told: Tensor, bias: Tensor) -> Tensor:
    """What the windows and what the flow say, side by side, with bias and ReLU."""
    return add_bias(torch.cat((seen, told), dim=1), bias)


def join(hidden: Tensor, motion: Tensor, bias: Tensor, moved: Tensor) -> Tensor:
    """The gates' input: hidden state, motion with bias and ReLU, and the flow, with the zeros behind it."""
    return torch.cat((hidden, add_bias(motion, bias), moved), dim=1)


def gate(both: Tensor, share: Tensor, hidden: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """The update gate, and the gates' input with its hidden part reset; that may be the old one, overwritten."""
    update, reset = torch.sigmoid(both + share).chunk(2, dim=1)
    return update, torch.cat((reset * hidden, state[:, HIDDEN:]), dim=1)


def mix(hidden: Tensor, proposed: Tensor, share: Tensor, update: Tensor) -> Tensor:
    """The next hidden state."""
    return torch.lerp(hidden, torch.tanh(proposed + share), update)


def advance(flow: Tensor, change: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Flow N y x 2 in fp32 after a change, whose first two channels count; and the same as N `MOVED` y x."""
    flow = flow + (change + _column(bias))[:, :2].movedim(1, -1).to(flow.dtype)
    return flow, F.pad(flow.to(change.dtype), (0, MOVED - 2)).movedim(-1, 1)
