"""Clips with exact flow for training a flow estimator, at the resolution that novelty uses, and a pool of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.scenes.render import half
from training.atlas import load_atlas
from training.clips import RingPool, to_bytes
from training.records import load_autoencoder
from training.world import World as SpriteWorld

Recode = Callable[[Tensor], Tensor]
"""A function that returns pictures B T 3 Y X as a decoder would show them."""


@dataclass(frozen=True, slots=True)
class FlowClips:
    """Clips with known motion, all parts of one size."""

    pictures: Tensor  # B T 3 Y X, 0..1
    forward: Tensor  # B T-1 2 Y X: picture t to t + 1
    backward: Tensor  # B T-1 2 Y X: picture t + 1 to t
    instances: Tensor  # B T Y X uint8: number of the actor on top, 0 for the scene


FlowWorld = Callable[[int, int], FlowClips]
"""A function that renders a number of clips from a seed, at full size: the same clips for the same seed."""


def open_flow_world(device: str) -> FlowWorld:
    """Open the sprite world with its motion, which renders on that device."""
    sprites = SpriteWorld(load_atlas(), device)

    def render(num_clips: int, seed: int) -> FlowClips:
        made = sprites.sample(seed, range(num_clips), flow=True)
        assert made.forward_flow is not None and made.backward_flow is not None
        return FlowClips(made.pictures, made.forward_flow, made.backward_flow, made.instances)

    return render


def halve(clips: FlowClips) -> FlowClips:
    """Halve clips as novelty does: means of four pixels, with the motion and the owner of one of them."""
    small = functional.avg_pool2d(clips.pictures.flatten(0, 1), 2).unflatten(0, clips.pictures.shape[:2])
    return FlowClips(small, half(clips.forward), half(clips.backward), clips.instances[..., ::2, ::2])


def load_recode(file: Path, device: str, *, noise: float, at_once: int = 8) -> Recode:
    """Load a function that encodes and decodes, with noise of a random level on each clip's latents."""
    autoencoder = load_autoencoder(file, device)

    @torch.no_grad()
    def recode(pictures: Tensor) -> Tensor:
        shown = []
        for part in pictures.split(at_once):
            with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
                latents = autoencoder.encode(part)
                level = noise * torch.rand(len(latents), 1, 1, 1, 1, device=latents.device)
                shown.append(autoencoder.decode(latents + level * torch.randn_like(latents)).float())
        return torch.cat(shown)

    return recode


class FlowPool(RingPool):
    """Some thousand halved clips; every few draws a batch of new ones replaces the oldest."""

    def __init__(
        self, world: FlowWorld, recode: Recode, *,
        capacity: int, fresh: int, every: int, decoded_share: float, seed: int,
    ) -> None:  # fmt: skip
        self._world, self._recode = world, recode
        self._fresh, self._every, self._seed = fresh, every, seed
        self._decoded_share = decoded_share
        self._draws = 0
        super().__init__(capacity)

    def draw(self, num_pairs: int) -> FlowClips:
        """Draw random pairs of neighbouring pictures, as clips of two."""
        if self._draws % self._every == 0:
            self._store(self._render())
        self._draws += 1
        pictures, forward, backward, instances = self._parts
        rows = torch.randint(self._count, (num_pairs,), device=pictures.device)
        first = torch.randint(forward.shape[1], (num_pairs,), device=pictures.device)
        both = torch.stack((first, first + 1), dim=1)
        return FlowClips(
            pictures[rows[:, None], both].float().div_(255),
            forward[rows, first].float().unsqueeze(1),
            backward[rows, first].float().unsqueeze(1),
            instances[rows[:, None], both],
        )

    @torch.no_grad()
    def _render(self) -> tuple[Tensor, ...]:
        """Render clips and store them compactly: fp16 keeps flow to a hundredth of a pixel."""
        self._seed += 1
        clips = self._world(self._fresh, self._seed)
        # Always the same number: a GPU searches for kernels again for every new batch size.
        if decoded := round(self._decoded_share * self._fresh):
            clips.pictures[:decoded] = self._recode(clips.pictures[:decoded])
        small = halve(clips)
        return to_bytes(small.pictures), small.forward.half(), small.backward.half(), small.instances
