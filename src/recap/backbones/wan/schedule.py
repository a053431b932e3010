"""This is the few-step sampler of the distilled Wan models: each step estimates clean latents, then adds new noise.

A noisy latent is x = (1 - sigma) clean + sigma noise and the model predicts v = noise - clean, hence
clean = x - sigma v. Model time is NUM_TRAIN_STEPS sigma.
"""

from __future__ import annotations

import torch
from torch import Tensor

from recap.backbones.wan.spec import NUM_TRAIN_STEPS
from recap.types import widest


def warp(steps: tuple[int, ...], shift: float) -> tuple[float, ...]:
    """Return the noise levels of steps, which count points of the unshifted schedule from the clean end.

    A shift above 1 stays noisy longer.
    """
    plain = (1 - (NUM_TRAIN_STEPS - step) / NUM_TRAIN_STEPS for step in steps)
    return tuple(shift * s / (1 + (shift - 1) * s) for s in plain)


def model_time(sigma: float) -> float:
    """Return the model time of a noise level."""
    return NUM_TRAIN_STEPS * sigma


def clean_estimate(noisy: Tensor, flow: Tensor, sigma: float) -> Tensor:
    """Compute clean = x - sigma v in fp64 and round back: half precision loses the difference of near equals."""
    wide = widest(noisy.device)
    return (noisy.to(wide) - sigma * flow.to(wide)).to(noisy.dtype)


def renoise(clean: Tensor, noise: Tensor, sigma: float) -> Tensor:
    """Compute (1 - sigma) clean + sigma noise in at least fp32 and round back."""
    wide = torch.promote_types(clean.dtype, torch.float32)
    return ((1 - sigma) * clean.to(wide) + sigma * noise.to(wide)).to(clean.dtype)
