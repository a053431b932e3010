"""This module draws the noise of every block, and shapes it where motion shall come from elsewhere than the memory.

Noise of block n depends on (seed, n) alone. It can also come from outside.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count

import torch
from torch import Tensor

from recap.contracts import Noise
from recap.errors import refuse
from recap.types import BackboneSpec, Block, seeded

NoiseSource = Callable[[Block, int], Tensor]
"""Provides noise from outside: (block, draw) -> B F C rows columns, floats of any dtype and device.

Draw 0 starts the block, draw n is asked for before its n-th later step (Helios: at its n-th later stage). The
answer must depend on these two alone: a resumed rollout asks from the middle, and a block may be asked for twice.
"""


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sets up the noise; the defaults are that of the models, bit for bit."""

    # How strongly the noise of a frame opposes that of the frame before it in its block.
    antiphase: float = 0.0
    # The share of noise in the frames of the sink when their keys and values are made.
    sink_noise: float = 0.0

    def __post_init__(self) -> None:
        for name in ("antiphase", "sink_noise"):
            value = getattr(self, name)
            if not 0 <= value < 1:
                raise refuse(name, value, "must be 0 or more and below 1", "0 switches it off")


PLAIN = Sampling()


def block_noise(spec: BackboneSpec, seeds: Sequence[int], block: Block, first: int | None = None) -> Noise:
    """Make the noise of one block, row by row from (seed, block); made on the CPU so that every device agrees.

    With `first` the first call returns that of the block of this index, as some memories want it.
    """
    shape = (block.num_frames, spec.latent_channels, *spec.latent_size)
    own = [seeded(seed, block.index) for seed in seeds]
    other = None if first is None or first == block.index else replace(block, index=first)
    start = [] if other is None else [block_noise(spec, seeds, other)()]

    def draw() -> Tensor:
        fresh = torch.stack([torch.randn(shape, generator=g) for g in own])
        # The block's own first draw is made in any case: later steps then draw what they always do.
        return start.pop() if start else fresh

    return draw


def noise_from_outside(source: NoiseSource, spec: BackboneSpec, block: Block, first: int) -> Noise:
    """Take the noise of one block from another program; its first draw is that of the block of index `first`."""
    shape = (len(block.prompts), block.num_frames, spec.latent_channels, *spec.latent_size)
    earlier = replace(
        block, index=first, first_frame=block.first_frame - (block.index - first) * block.num_frames
    )
    draws = count()

    def draw() -> Tensor:
        index = next(draws)
        asked = block if index else earlier
        found = source(asked, index)
        if not isinstance(found, Tensor) or tuple(found.shape) != shape or not found.is_floating_point():
            is_tensor = isinstance(found, Tensor)
            about = f"{found.dtype} {tuple(found.shape)}" if is_tensor else type(found).__name__
            limit = f"draw {index} of block {asked.index} must be floats of shape {shape}"
            raise refuse("noise", about, limit, "return rows, frames, channels, rows and columns of latents")
        # Where the seeds' own noise is made too.
        return found.detach().cpu()

    return draw


def opposed(noise: Noise, antiphase: float) -> Noise:
    """Let every frame of a draw oppose the one before it: n'_f = -a n'_{f-1} + sqrt(1 - a^2) n_f.

    Each frame alone stays unit Gaussian; neighbours in a block have the correlation -a, so that what the noise moves
    moves fast. It is a chain in the manner of FLEX's antiphase noise (arXiv 2602.14027).
    """
    if antiphase == 0:
        return noise

    def draw() -> Tensor:
        frames = list(noise().unbind(1))
        for index in range(1, len(frames)):
            frames[index] = -antiphase * frames[index - 1] + (1 - antiphase**2) ** 0.5 * frames[index]
        return torch.stack(frames, dim=1)

    return draw


def blur_opening(latents: Tensor, num_frames: int, share: float, seeds: Sequence[int], index: int) -> Tensor:
    """Return latents B F C rows columns with noise in the first frames: (1 - s) x + s n, n by (seed, block) alone.

    Noise covers fine detail first, so that a sink made of such frames holds layout and colours more than edges.
    """
    if num_frames == 0 or share == 0:
        return latents
    shape = (num_frames, *latents.shape[2:])
    # Negative numbers are no blocks, so that no other draw has this stream.
    drawn = torch.stack([torch.randn(shape, generator=seeded(seed, -1 - index)) for seed in seeds])
    noise = drawn.to(latents.device, latents.dtype, non_blocking=True)
    noisy = (1 - share) * latents[:, :num_frames] + share * noise
    return torch.cat([noisy, latents[:, num_frames:]], dim=1)
