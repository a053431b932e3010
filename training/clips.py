"""Rendered clips for training: what a world must offer, and pools that keep rendering off the critical path."""

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
EMPTY_OPENINGS = 0.3  # weight of one that shows nobody beside one that shows somebody: it teaches least


@dataclass(frozen=True, slots=True)
class Clips:
    """A batch of rendered clips."""

    pixels: Tensor  # B T 3 Y X, 0..1
    words: Tensor  # B blocks L, int64: the caption of every block
    novelty: (
        Tensor  # B F rows columns of tokens, 0..1: how much of a token shows somebody who is just entering
    )
    actors: Tensor  # B F rows columns of tokens, 0..1: how much of a token shows anybody


class World(Protocol):
    """Renders clips from a seed: the same clips for the same seed."""

    def __call__(self, num_clips: int, seed: int) -> Clips: ...


def open_world(device: str) -> World:
    """The sprite world, rendering on that device."""
    sprites = SpriteWorld(load_atlas(), device)

    def render(num_clips: int, seed: int) -> Clips:
        made = sprites.sample(seed, range(num_clips))
        present = most_of_frames((made.instances > 0).float())
        return Clips(made.pictures, made.tokens, entering(made.instances, made.visibility), present)

    return render


def entering(instances: Tensor, visibility: Tensor) -> Tensor:
    """How much of each token shows an actor of whom more is seen than a picture before: B F rows columns.

    Instances B T Y X (slot + 1, 0 for the scene) and visibility B slots T. A stand-in, known for certain, for
    what optical flow notices at inference.
    """
    rise = visibility.diff(dim=2, prepend=visibility[:, :, :1]) > 0.03
    per_picture = torch.zeros(instances.shape, device=instances.device)
    for slot in range(visibility.shape[1]):
        per_picture += (instances == slot + 1) * rise[:, slot, :, None, None]
    return most_of_frames(per_picture)


def most_of_frames(mask: Tensor) -> Tensor:
    """Share of each token that a mask B T Y X covers in the frame's picture that shows most: B F rows columns."""
    tokens = functional.avg_pool2d(mask, TOKEN_PIXELS)
    later = tokens[:, 1:].unflatten(1, (-1, PICTURES_PER_FRAME)).amax(dim=2)
    return torch.cat([tokens[:, :1], later], dim=1)


class PixelPool:
    """A few hundred clips in bytes on the device, some replaced at every draw."""

    def __init__(self, world: World, *, capacity: int, fresh: int, seed: int) -> None:
        self._world = world
        self._fresh = fresh
        self._seed = seed
        first = self._render()
        self._pixels = first.new_empty((capacity, *first.shape[1:]))
        self._held = self._next = 0
        self._store(first)

    @property
    def num_pictures(self) -> int:
        """Pictures of a whole clip."""
        return self._pixels.shape[1]

    def fill(self, num_clips: int) -> None:
        """Render until so many clips are held."""
        while self._held < min(num_clips, len(self._pixels)):
            self._store(self._render())

    def draw(self, num_clips: int, num_pictures: int) -> Tensor:
        """B T 3 Y X in 0..1: pieces that begin anywhere in clips drawn at random."""
        self._store(self._render())
        rows = torch.randint(self._held, (num_clips,)).tolist()
        starts = torch.randint(self._pixels.shape[1] - num_pictures + 1, (num_clips,)).tolist()
        pieces = [self._pixels[r, s : s + num_pictures] for r, s in zip(rows, starts, strict=True)]
        return torch.stack(pieces).float().div_(255)

    def _render(self) -> Tensor:
        self._seed += 1
        return to_bytes(self._world(self._fresh, self._seed).pixels)

    def _store(self, pixels: Tensor) -> None:
        capacity = len(self._pixels)
        places = (torch.arange(len(pixels)) + self._next) % capacity
        self._pixels[places.to(pixels.device)] = pixels
        self._next = (self._next + len(pixels)) % capacity
        self._held = min(capacity, self._held + len(pixels))


def to_bytes(pixels: Tensor) -> Tensor:
    return pixels.clamp(0, 1).mul(255).round().to(torch.uint8)


@dataclass(frozen=True, slots=True)
class LatentClips:
    """Encoded clips, as the transformer is trained on them."""

    latents: Tensor  # B F C rows columns, normalised
    words: Tensor  # B blocks L
    novelty: Tensor  # B F rows columns of tokens
    actors: Tensor  # B F rows columns of tokens


class LatentPool:
    """Thousands of encoded clips on the device; every few draws a batch of new ones takes the oldest places."""

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
        self._world = world
        self._encode = encode
        self._fresh = fresh
        self._every = every
        self._seed = seed
        self._draws = self._held = self._next = 0
        first = self._render()
        self._clips = LatentClips(
            *(part.new_empty((capacity, *part.shape[1:]), dtype=_stored(part)) for part in _parts(first))
        )
        self._store(first)

    def fill(self, num_clips: int) -> None:
        """Render until so many clips are held: a run that starts on a handful learns the handful first."""
        while self._held < min(num_clips, len(self._clips.words)):
            self._store(self._render())

    def draw(self, num_clips: int) -> LatentClips:
        if self._draws % self._every == 0:
            self._store(self._render())
        self._draws += 1
        return self.again(num_clips)

    def again(self, num_clips: int) -> LatentClips:
        """Some of the clips that are held, at random; renders nothing."""
        return self._rows(torch.randint(self._held, (num_clips,), device=self._clips.words.device))

    def openings(self, num_clips: int) -> LatentClips:
        """The same for the sake of their openings: half of them name two actors or more, few name none."""
        first, second = (self._clips.words[: self._held, 0, place] for place in (2, 3))
        # The smallest weight is for pools that hold none of the kind wanted.
        crowded = (second != PAD).float().clamp(min=1e-6)
        fewer = torch.where(first == EMPTY, EMPTY_OPENINGS, 1.0).masked_fill(second != PAD, 1e-6)
        half = num_clips // 2
        parts = ((crowded, half), (fewer, num_clips - half))
        rows = [weights.multinomial(num, replacement=True) for weights, num in parts if num]
        return self._rows(torch.cat(rows)[torch.randperm(num_clips, device=first.device)])

    def _rows(self, rows: Tensor) -> LatentClips:
        held = self._clips
        return LatentClips(
            held.latents[rows].float(), held.words[rows], held.novelty[rows], held.actors[rows]
        )

    def _render(self) -> LatentClips:
        self._seed += 1
        clips = self._world(self._fresh, self._seed)
        return LatentClips(self._encode(clips.pixels), clips.words, clips.novelty, clips.actors)

    def _store(self, clips: LatentClips) -> None:
        capacity, count = len(self._clips.words), len(clips.words)
        places = (torch.arange(count, device=clips.words.device) + self._next) % capacity
        for held, part in zip(_parts(self._clips), _parts(clips), strict=True):
            held[places] = part.to(held.dtype)
        self._next = (self._next + count) % capacity
        self._held = min(capacity, self._held + count)


def _parts(clips: LatentClips) -> tuple[Tensor, ...]:
    return clips.latents, clips.words, clips.novelty, clips.actors


def _stored(part: Tensor) -> torch.dtype:
    """Thousands of clips are held in half precision; words stay whole numbers."""
    return torch.bfloat16 if part.is_floating_point() else part.dtype
