"""The steps between RAFT's convolutions, in plain torch; `recap.fast.raft_kernels` does each in one launch.

Tensors are N C y x with channels innermost. Convolutions leave out their bias, which is added here.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from recap.fast.correlation import aligned
from recap.flow.raft import HIDDEN, MOTION

# Channels that the gates convolve, a multiple of 64 because kernels process channels by 32 or 64.
STATE = aligned(HIDDEN + MOTION, 64)
# Channels that the flow is padded to, which also pads the input of the gates to `STATE`.
MOVED = 2 + STATE - HIDDEN - MOTION


def _column(bias: Tensor) -> Tensor:
    return bias[:, None, None]


def _finish(x: Tensor, residual: Tensor | None, relu: bool) -> Tensor:
    x = F.relu(x) if relu else x
    return x if residual is None else F.relu(residual + x)


def normalise(x: Tensor, eps: float, residual: Tensor | None = None, *, relu: bool = True) -> Tensor:
    """Apply instance normalisation with statistics in fp32, ReLU, and a residual, if any, with its own ReLU."""
    wide = x.float()
    variance, mean = torch.var_mean(wide, dim=(2, 3), correction=0, keepdim=True)
    return _finish(((wide - mean) * torch.rsqrt(variance + eps)).to(x.dtype), residual, relu)


def add_bias(x: Tensor, bias: Tensor, residual: Tensor | None = None, *, relu: bool = True) -> Tensor:
    """Add the bias, apply ReLU, and add a residual, if any, with its own ReLU."""
    return _finish(x + _column(bias), residual, relu)


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
    flow = flow + (change + _column(bias))[:, :2].movedim(1, -1).to(flow.dtype)
    return flow, F.pad(flow.to(change.dtype), (0, MOVED - 2)).movedim(-1, 1)
