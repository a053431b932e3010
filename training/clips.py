"""Rendered clips for training: the interface of a world, and pools that keep rendering off the critical path."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from recap.backbones.tiny.vocabulary import EMPTY, PAD
from training.atlas import load_atlas
from training.world import World as SpriteWorld

TOKEN_PIXELS = 16
PICTURES_PER_FRAME = 4
# The weight of an opening that shows nobody, relative to one that shows somebody: it teaches least.
EMPTY_OPENINGS = 0.3


@dataclass(frozen=True, slots=True)
class Clips:
    """A batch of rendered clips.

    `pixels` are B T 3 Y X in 0..1, `words` B blocks L, int64, the caption of every block. `novelty` and `actors`, B F
    rows columns in 0..1, are the share of a token that shows an actor who is just entering, and any actor.
    """

    pixels: Tensor
    words: Tensor
    novelty: Tensor
    actors: Tensor


class World(Protocol):
    """A function that renders clips from a seed: the same clips for the same seed."""

    def __call__(self, num_clips: int, seed: int) -> Clips: ...


def open_world(device: str) -> World:
    """Open the sprite world, which renders on that device."""
    sprites = SpriteWorld(load_atlas(), device)

    def render(num_clips: int, seed: int) -> Clips:
        made = sprites.sample(seed, range(num_clips))
        present = most_of_frames((made.instances > 0).float())
        return Clips(made.pictures, made.tokens, entering(made.instances, made.visibility), present)

    return render


def entering(instances: Tensor, visibility: Tensor) -> Tensor:
    """Return the share of each token that shows an actor who is more visible than a picture before, B F rows columns.

    Instances are B T Y X (slot + 1, 0 for the scene), visibility B slots T. It is exact and stands in for what
    optical flow finds at inference.
    """
    rise = visibility.diff(dim=2, prepend=visibility[:, :, :1]) > 0.03
    per_picture = torch.zeros(instances.shape, device=instances.device)
    for slot in range(visibility.shape[1]):
        per_picture += (instances == slot + 1) * rise[:, slot, :, None, None]
    return most_of_frames(per_picture)


def most_of_frames(mask: Tensor) -> Tensor:
    """Return the share of each token that a mask B T Y X covers, the most of a frame's pictures, B F rows columns."""
    tokens = functional.avg_pool2d(mask, TOKEN_PIXELS)
    later = tokens[:, 1:].unflatten(1, (-1, PICTURES_PER_FRAME)).amax(dim=2)
    return torch.cat([tokens[:, :1], later], dim=1)


class RingPool:
    """Rendered clips on the device, of which new ones replace the oldest; a subclass implements `_render`."""

    def __init__(self, capacity: int) -> None:
        self._count = self._next = 0
        first = self._render()
        self._parts = [part.new_empty((capacity, *part.shape[1:])) for part in first]
        self._store(first)

    def fill(self, num_clips: int) -> None:
        """Render until there are this many clips: a run that starts on a few clips learns those first."""
        while self._count < min(num_clips, len(self._parts[0])):
            self._store(self._render())

    def _render(self) -> tuple[Tensor, ...]:
        """Render new clips; return one tensor per kind of content."""
        raise NotImplementedError

    def _store(self, parts: tuple[Tensor, ...]) -> None:
        capacity, count = len(self._parts[0]), len(parts[0])
        slots = (torch.arange(count, device=parts[0].device) + self._next) % capacity
        for stored, part in zip(self._parts, parts, strict=True):
            stored[slots] = part
        self._next = (self._next + count) % capacity
        self._count = min(capacity, self._count + count)


class PixelPool(RingPool):
    """A few hundred clips in bytes, some replaced at every draw."""

    def __init__(self, world: World, *, capacity: int, fresh: int, seed: int) -> None:
        self._world, self._fresh, self._seed = world, fresh, seed
        super().__init__(capacity)

    @property
    def num_pictures(self) -> int:
        """Return the length of a whole clip."""
        return self._parts[0].shape[1]

    def draw(self, num_clips: int, num_pictures: int) -> Tensor:
        """Draw pieces B T 3 Y X in 0..1 that begin anywhere in random clips."""
        self._store(self._render())
        rows = torch.randint(self._count, (num_clips,)).tolist()
        starts = torch.randint(self.num_pictures - num_pictures + 1, (num_clips,)).tolist()
        pieces = [self._parts[0][r, s : s + num_pictures] for r, s in zip(rows, starts, strict=True)]
        return torch.stack(pieces).float().div_(255)

    def _render(self) -> tuple[Tensor, ...]:
        self._seed += 1
        return (to_bytes(self._world(self._fresh, self._seed).pixels),)


def to_bytes(pixels: Tensor) -> Tensor:
    return pixels.clamp(0, 1).mul(255).round().to(torch.uint8)


@dataclass(frozen=True, slots=True)
class LatentClips:
    """Encoded clips, on which the transformer is trained."""

    latents: Tensor  # B F C rows columns, normalised
    words: Tensor  # B blocks L
    novelty: Tensor  # B F rows columns of tokens
    actors: Tensor  # B F rows columns of tokens


class LatentPool(RingPool):
    """Thousands of encoded clips; every few draws a batch of new ones replaces the oldest."""

    def __init__(
        self,
        world: World,
        encode: Callable[[Tensor], Tensor],
        *,
        capacity: int,
        fresh: int,
        every: int,
        seed: int,
    ) -> None:
        self._world, self._encode = world, encode
        self._fresh, self._every, self._seed = fresh, every, seed
        self._draws = 0
        super().__init__(capacity)

    def draw(self, num_clips: int) -> LatentClips:
        if self._draws % self._every == 0:
            self._store(self._render())
        self._draws += 1
        return self.again(num_clips)

    def again(self, num_clips: int) -> LatentClips:
        """Return random clips of the pool; this renders nothing."""
        return self._rows(torch.randint(self._count, (num_clips,), device=self._parts[0].device))

    def openings(self, num_clips: int) -> LatentClips:
        """Return random clips for their openings: half of them name two actors or more, few name none."""
        first, second = (self._parts[1][: self._count, 0, word] for word in (2, 3))
        # The smallest weight is for pools that have none of the kind wanted.
        crowded = (second != PAD).float().clamp(min=1e-6)
        fewer = torch.where(first == EMPTY, EMPTY_OPENINGS, 1.0).masked_fill(second != PAD, 1e-6)
        half = num_clips // 2
        parts = ((crowded, half), (fewer, num_clips - half))
        rows = [weights.multinomial(num, replacement=True) for weights, num in parts if num]
        return self._rows(torch.cat(rows)[torch.randperm(num_clips, device=first.device)])

    def _rows(self, rows: Tensor) -> LatentClips:
        latents, words, novelty, actors = (part[rows] for part in self._parts)
        return LatentClips(latents.float(), words, novelty, actors)

    def _render(self) -> tuple[Tensor, ...]:
        self._seed += 1
        clips = self._world(self._fresh, self._seed)
        latents = self._encode(clips.pixels)
        # Half precision, because there are thousands of clips; words are integers.
        return latents.bfloat16(), clips.words, clips.novelty.bfloat16(), clips.actors.bfloat16()
