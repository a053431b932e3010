"""This module samples one chunk by diffusers' own schedulers: one stage (Base) or a pyramid of three (the others).

The pyramid begins at a quarter of the resolution and doubles it twice. What enters a finer stage is the coarser one's
result with each latent repeated 2 x 2, and noise that is correlated within those cells so that the sum looks like a
noisy picture again:  x <- a up(x) + b n,  cov(n) = (1 + g) I - g 11'  in every cell.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from recap.backbones.helios.spec import HeliosSpec
from recap.contracts import Noise

Predict = Callable[[Tensor, Tensor, int, int], Tensor]
"""Takes latents B C F rows columns, time B, stage and step; returns the guided flow of the same shape."""

FIRST_SIGMA = 0.999
SHIFT = {"base_image_seq_len": 256, "max_image_seq_len": 4096, "base_shift": 0.5, "max_shift": 1.15}
"""These are diffusers' defaults for the shift of the times, where a scheduler's config says nothing else."""


class Sampler:
    """Samples one chunk; its scheduler counts steps, so that it serves no other."""

    def __init__(self, spec: HeliosSpec, scheduler: Any, device: torch.device, dtype: torch.dtype) -> None:
        self._spec = spec
        self._scheduler = scheduler
        self._device = device
        self._dtype = dtype

    def run(self, noise: Noise, predict: Predict, *, first: bool) -> Tensor:
        """Return one chunk, B C F rows columns; `first` says whether it is the video's first one."""
        latents = self._taken(noise())
        if len(self._spec.steps) == 1:
            return self._sample_flat(latents, predict)
        return self._sample_pyramid(latents, noise, predict, first=first)

    def _sample_flat(self, latents: Tensor, predict: Predict) -> Tensor:
        (steps,) = self._spec.steps
        sigmas = np.linspace(FIRST_SIGMA, 0.0, steps + 1)[:-1]
        scheduler = self._scheduler
        scheduler.set_timesteps(steps, device=self._device, sigmas=sigmas, mu=self._shift(latents))
        for step, time in enumerate(scheduler.timesteps):
            flow = predict(latents, time.expand(latents.shape[0]), 0, step)
            latents = scheduler.step(flow, time, latents, return_dict=False)[0]
        return latents

    def _sample_pyramid(self, latents: Tensor, noise: Noise, predict: Predict, *, first: bool) -> Tensor:
        spec, scheduler = self._spec, self._scheduler
        for _ in spec.steps[1:]:
            # Averages of four have half the deviation, hence the 2.
            latents = _resized(latents, 0.5, "bilinear") * 2
        for stage, steps in enumerate(spec.steps):
            # The shift is that of the grid before it is doubled, as diffusers' loop and the authors' script sample.
            # Their training shifts by the stage's own grid instead; we follow the published sampling.
            amplify, shift = first and spec.amplify_first, self._shift(latents)
            scheduler.set_timesteps(
                steps, stage, device=self._device, mu=shift, is_amplify_first_chunk=amplify
            )
            if stage > 0:
                latents = self._enter(latents, noise, stage)
            start = latents
            for step, time in enumerate(scheduler.timesteps):
                flow = predict(latents, time.expand(latents.shape[0]).to(torch.int64), stage, step)
                extra = self._distilled(start, step) if spec.distilled else {}
                latents = scheduler.step(flow, time, latents, return_dict=False, **extra)[0]
        return latents

    def _distilled(self, start: Tensor, step: int) -> dict[str, Any]:
        """Return the further arguments of a distilled step, which goes back towards where its stage began."""
        times = self._scheduler.timesteps
        return {
            "cur_sampling_step": step,
            "dmd_noisy_tensor": start,
            "dmd_sigmas": self._scheduler.sigmas,
            "dmd_timesteps": times,
            "all_timesteps": times,
        }

    def _enter(self, latents: Tensor, noise: Noise, stage: int) -> Tensor:
        """Return the start of this stage, made from the coarser one's result."""
        finer = _resized(latents, 2, "nearest")
        signal = 1 - self._scheduler.ori_start_sigmas[stage]
        gamma = self._scheduler.config.gamma
        keep = 1 / (math.sqrt(1 + 1 / gamma) * (1 - signal) + signal)
        rows, columns = finer.shape[-2:]
        # Any corner of unit noise is unit noise, and `noise` returns whole frames.
        fresh = self._taken(noise()[..., :rows, :columns])
        cells = correlated(fresh, self._spec.patch, gamma).to(self._dtype)
        entered: Tensor = keep * finer + keep * (1 - signal) / math.sqrt(gamma) * cells
        return entered

    def _shift(self, latents: Tensor) -> float:
        """Return the shift of the times, which depends on the number of tokens."""
        config, tokens = self._scheduler.config, latents[0, 0].numel() // self._spec.patch**2
        low, high, base, most = (config.get(name, default) for name, default in SHIFT.items())
        slope = (most - base) / (high - low)
        return float(tokens * slope + (base - slope * low))

    def _taken(self, noise: Tensor) -> Tensor:
        """Return B F C rows columns of the contract as B C F rows columns, fp32 as in the released loop."""
        return noise.to(self._device, torch.float32, non_blocking=True).transpose(1, 2)


def correlated(noise: Tensor, side: int, gamma: float) -> Tensor:
    """Correlate unit noise ... rows columns within cells of side x side: cov = (1 + gamma) I - gamma 11'."""
    factor = _cell_factor(side * side, gamma, noise.device)
    rows, columns = noise.shape[-2] // side, noise.shape[-1] // side
    cells: Tensor = noise.unflatten(-1, (columns, side)).unflatten(-3, (rows, side)).transpose(-3, -2)
    mixed = (cells.reshape(-1, side * side) @ factor.T).view(cells.shape)
    return mixed.transpose(-3, -2).reshape(noise.shape)


@cache
def _cell_factor(size: int, gamma: float, device: torch.device) -> Tensor:
    """Return L with L L' = cov, as diffusers computes it; cached, since the check of success waits for the device."""

    def covariance(dtype: torch.dtype) -> Tensor:
        one = torch.eye(size, device=device, dtype=dtype)
        # The 1e-8 is theirs: at gamma 1/3 the sum of a cell has no variance at all.
        return one * (1 + gamma) - torch.ones_like(one) * gamma + one * 1e-8

    factor: Tensor
    factor, failed = torch.linalg.cholesky_ex(covariance(torch.float32))
    # fp32 on a CPU finds less than no variance.
    if int(failed):
        factor = torch.linalg.cholesky(covariance(torch.float64)).float()
    return factor


def _resized(latents: Tensor, factor: float, mode: str) -> Tensor:
    """Return every frame of B C F rows columns on a grid `factor` times as fine."""
    batch, _, frames, rows, columns = latents.shape
    size = (int(rows * factor), int(columns * factor))
    flat = functional.interpolate(latents.transpose(1, 2).flatten(0, 1), size=size, mode=mode)
    resized: Tensor = flat.unflatten(0, (batch, frames)).transpose(1, 2)
    return resized
