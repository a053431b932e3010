"""The training world: captioned clips of recoloured actors in front of panoramas, rendered in batches by torch.

    world = World(load_atlas(), device="cuda")
    clips = world.sample(seed=1, indices=range(24))
    clips = world.film([Script.from_segments([("a fox on a beach", 69), ("an empty beach", 60)])], seed=1)

A clip depends only on (seed, index), not on its batch; on another device it differs only by rounding. Its pictures
come with ground truth: which actors are where, in which colours, and the motion of every pixel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from recap.backbones.tiny.vocabulary import (
    ACTORS,
    EMPTY,
    FIRST_ACTOR,
    FIRST_SCENE,
    FIRST_TIME,
    MAX_ACTORS,
    PAD,
    TEXT_LENGTH,
    prompt_from_ids,
    prompt_text,
    token_ids,
)
from recap.errors import refuse
from training.backgrounds import Backgrounds
from training.dice import Dice
from training.script import Script, timetable
from training.sprites import prefilter, recolour, roll_looks
from training.staging import HEIGHT, STAGE_HEIGHT, STAGE_WIDTH, WIDTH, Paths, Staging, roll_staging

PICTURES = 81
"""The pictures of a clip: 21 latent frames, 7 blocks."""

FIRST_BLOCK, LATER_BLOCKS = 9, 12
"""The pictures of a block of three frames; the very first frame is one picture."""

NAMED_SHARE = 0.25
"""A caption names an actor if more than this share of it is visible."""

AHEAD = 2
"""A caption looks this many blocks ahead, about as long as an actor takes to walk out."""


@dataclass(frozen=True, slots=True)
class Clips:
    """A batch of clips and their ground truth; the K = MAX_ACTORS slots are drawn from first to last."""

    pictures: Tensor  # B T 3 HEIGHT WIDTH, 0..1
    tokens: Tensor  # B blocks TEXT_LENGTH, int64
    kinds: Tensor  # B K, index in ACTORS, -1 for nobody
    colours: Tensor  # B K 3, mean colour of the instance as drawn in this light
    visibility: Tensor  # B K T, share of the instance that is visible
    boxes: Tensor  # B K T 4, x0 y0 x1 y1 inside the picture, zeros when outside
    scene: Tensor  # B
    time: Tensor  # B
    instances: Tensor  # B T HEIGHT WIDTH uint8: slot + 1 of the actor on top, 0 for the scene
    forward_flow: Tensor | None = None  # B T-1 2 HEIGHT WIDTH: picture t to t + 1, on the pixels of t
    backward_flow: Tensor | None = None  # B T-1 2 HEIGHT WIDTH: picture t + 1 to t, on the pixels of t + 1

    def captions(self, row: int) -> list[str]:
        """Return the prompt of every block of one clip."""
        return [prompt_text(prompt_from_ids(ids)) for ids in self.tokens[row].tolist()]


@dataclass(frozen=True, slots=True)
class _Layer:
    """A sprite B 4 S S and its motion.

    `inverse` has a to f, B T each, that map pixels to the sprite: (a x + b y + c, d x + e y + f) in -1..1.
    """

    sprite: Tensor
    inverse: tuple[Tensor, ...]


class World:
    """A renderer of clips on one device."""

    def __init__(self, atlas: Tensor, device: torch.device | str = "cpu") -> None:
        """Take the atlas len(ACTORS) 4 S S of `load_atlas`: premultiplied sprites that face left."""
        if atlas.ndim != 4 or atlas.shape[:2] != (len(ACTORS), 4):
            limit = f"it must be {len(ACTORS)} 4 S S, one sprite per actor"
            raise refuse("atlas", tuple(atlas.shape), limit, "make it with training.atlas")
        self.device = torch.device(device)
        self._atlas = atlas.to(self.device, torch.float32)
        self._area = (self._atlas[:, 3] > 0.5).float().mean((1, 2))
        self._extent = _extents(self._atlas[:, 3])
        self._backgrounds = Backgrounds((STAGE_HEIGHT, STAGE_WIDTH), self.device)
        # Enough to fill a GPU without running out of memory; on a CPU, few enough for its cache.
        self._at_once = 2048 if self.device.type == "cuda" else 48

    def sample(
        self, seed: int, indices: Sequence[int], num_pictures: int = PICTURES, *,
        span: tuple[int, int] | None = None, flow: bool = False,
    ) -> Clips:  # fmt: skip
        """Render random clips; `span` renders only the pictures [first, last), with the captions of whole blocks."""
        return self._shoot(Dice(seed, indices, self.device), num_pictures, None, span, flow)

    def film(
        self, scripts: Sequence[Script], seed: int, num_pictures: int = PICTURES, *,
        first_index: int = 0, span: tuple[int, int] | None = None, flow: bool = False,
    ) -> Clips:  # fmt: skip
        """Render clips by script; colours, panorama and speeds depend on (seed, first_index + row)."""
        dice = Dice(seed, range(first_index, first_index + len(scripts)), self.device)
        return self._shoot(dice, num_pictures, list(scripts), span, flow)

    @torch.no_grad()
    def _shoot(
        self,
        dice: Dice,
        num_pictures: int,
        scripts: list[Script] | None,
        span: tuple[int, int] | None,
        flow: bool,
    ) -> Clips:
        first, last = span or (0, num_pictures)
        if not 0 <= first < last <= num_pictures:
            limit = f"outside the {num_pictures} pictures of a clip"
            raise refuse("span", span, limit, "keep first < last inside")
        hue = timetable(scripts, self.device).hue if scripts is not None else None
        looks = roll_looks(dice, MAX_ACTORS, hue)
        staging = roll_staging(dice, num_pictures, scripts)
        light = self._backgrounds.actor_light(staging.time)
        sprites, colours = recolour(self._atlas[staging.kinds.clamp(min=0)], looks, light)
        size = staging.paths.size[:, :, 0]
        sprites = prefilter(sprites.flatten(0, 1), size.flatten()).unflatten(0, size.shape)
        panorama = self._backgrounds.draw(dice, staging.scene, staging.time, staging.horizon)
        layers = [
            _Layer(sprites[:, slot], _inverse(_slot(staging.paths, slot))) for slot in range(MAX_ACTORS)
        ]
        layers.append(self._front(dice, staging))
        step = max(1, self._at_once // dice.rows)
        parts = [
            self._render(panorama, staging.camera, layers, at, min(at + step, last))
            for at in range(first, last, step)
        ]
        pictures, instances = (torch.cat(part, dim=1) for part in zip(*parts, strict=True))
        visibility = self._visibility(instances, staging, first, last)
        forward, backward = _flows(instances, staging, first, last) if flow else (None, None)
        return Clips(
            pictures=pictures,
            tokens=self._tokens(staging, visibility, first, scripts),
            kinds=staging.kinds,
            colours=colours,
            visibility=visibility,
            boxes=self._boxes(staging, first, last),
            scene=staging.scene,
            time=staging.time,
            instances=instances,
            forward_flow=forward,
            backward_flow=backward,
        )

    def _front(self, dice: Dice, staging: Staging) -> _Layer:
        """Return the object in front, as one more layer that moves with the panorama."""
        sprite = self._backgrounds.front_sprite(dice, staging.scene, staging.time, staging.front_size)
        sprite = sprite * staging.front[:, None, None, None]
        x, y = (staging.front_place[:, None] - staging.camera).unbind(-1)
        still = torch.zeros_like(x)
        path = Paths(x, y, staging.front_size[:, None] + still, still, still + 1)
        return _Layer(sprite, _inverse(path))

    def _render(
        self, panorama: Tensor, camera: Tensor, layers: list[_Layer], first: int, last: int
    ) -> tuple[Tensor, Tensor]:
        """Render the pictures [first, last), B t 3 HEIGHT WIDTH, and their instance map."""
        rows, num = len(panorama), last - first
        x = torch.arange(WIDTH, device=self.device, dtype=torch.float32)
        y = torch.arange(HEIGHT, device=self.device, dtype=torch.float32)
        grid = torch.empty(rows, num, HEIGHT, WIDTH, 2, device=self.device)
        corner = camera[:, first:last, :, None]
        grid[..., 0] = ((corner[:, :, 0] + x + 0.5) * (2 / STAGE_WIDTH) - 1)[:, :, None]
        grid[..., 1] = ((corner[:, :, 1] + y + 0.5) * (2 / STAGE_HEIGHT) - 1)[..., None]
        read = _read(panorama, grid, padding="border")
        instances = torch.zeros(rows, num, HEIGHT, WIDTH, device=self.device, dtype=torch.uint8)
        for number, layer in enumerate(layers, start=1):
            a, b, c, d, e, f = (each[:, first:last, None] for each in layer.inverse)
            torch.add((a * x + c)[:, :, None], (b * y)[..., None], out=grid[..., 0])
            torch.add((d * x + f)[:, :, None], (e * y)[..., None], out=grid[..., 1])
            drawn = _read(layer.sprite, grid, padding="zeros")
            alpha = drawn[:, 3]
            read.mul_((1 - alpha)[:, None]).add_(drawn[:, :3])
            # The object in front belongs to the scene: it moves with the camera.
            instances.masked_fill_(alpha > 0.5, number if number <= MAX_ACTORS else 0)
        return read.clamp_(0, 1).transpose(1, 2).contiguous(), instances

    def _visibility(self, instances: Tensor, staging: Staging, first: int, last: int) -> Tensor:
        visible = torch.stack([(instances == slot + 1).sum((-2, -1)) for slot in range(MAX_ACTORS)], dim=1)
        size, facing = staging.paths.size[:, :, first:last], staging.paths.facing[:, :, first:last]
        whole = self._area[staging.kinds.clamp(min=0)][..., None] * size**2 * facing.abs()
        share = (visible / whole.clamp(min=1)).clamp(0, 1)
        return torch.where((staging.kinds >= 0)[..., None], share, 0.0)

    def _boxes(self, staging: Staging, first: int, last: int) -> Tensor:
        """Return the bounds of the opaque part of every tilted sprite, cut to the picture."""
        x0, y0, x1, y1 = self._extent[staging.kinds.clamp(min=0)][:, :, None].unbind(-1)
        corners = torch.stack((torch.stack((x0, x1, x0, x1), -1), torch.stack((y0, y0, y1, y1), -1)), -2)
        path = Paths(*(getattr(staging.paths, name)[:, :, first:last] for name in Paths.__slots__))
        a, b, c, d, e, f = (each[..., None] for each in _forward(path))
        x = (a * corners[..., 0, :] + b * corners[..., 1, :] + c).clamp(-0.5, WIDTH - 0.5)
        y = (d * corners[..., 0, :] + e * corners[..., 1, :] + f).clamp(-0.5, HEIGHT - 0.5)
        boxes = torch.stack((x.amin(-1), y.amin(-1), x.amax(-1), y.amax(-1)), dim=-1)
        empty = (boxes[..., 2] <= boxes[..., 0]) | (boxes[..., 3] <= boxes[..., 1])
        return boxes.masked_fill((empty | (staging.kinds < 0)[..., None])[..., None], 0.0)

    def _tokens(
        self, staging: Staging, visibility: Tensor, first: int, scripts: list[Script] | None
    ) -> Tensor:
        """Return captions B blocks TEXT_LENGTH: the visible actors from left to right, or the script's prompt."""
        names = named_in_blocks(visibility, first)
        num_blocks = names.shape[-1]
        named = torch.where(names, staging.kinds[..., None] + FIRST_ACTOR, PAD)
        # From left to right; slots without a name come last.
        named = named.gather(1, staging.order.argsort(1)[..., None].expand_as(named)).transpose(1, 2)
        actors = named.gather(2, (named == PAD).int().argsort(dim=2, stable=True))
        actors[..., 0] = torch.where(actors[..., 0] == PAD, EMPTY, actors[..., 0])
        setting = torch.stack((staging.scene + FIRST_SCENE, staging.time + FIRST_TIME), dim=-1)
        tokens = torch.cat((setting[:, None].expand(-1, num_blocks, -1), actors), dim=-1)
        for row, script in enumerate(scripts or ()):
            for picture, text in script.prompts or ():
                ids = torch.tensor(token_ids(text, as_named=True))
                tokens[row, int(block_of(torch.tensor(picture))) :] = ids
        assert tokens.shape[-1] == TEXT_LENGTH
        return tokens


def named_in_blocks(visibility: Tensor, first: int) -> Tensor:
    """Return which actors the caption of a block names, B K blocks, from the visibility from `first` on, B K T.

    The first caption names every actor that is visible. Later ones name those that will still be visible AHEAD blocks
    later. So an actor that walks out is not named, and a prompt that keeps naming an actor asks it to stay.
    """
    pictures = torch.arange(first, first + visibility.shape[-1], device=visibility.device)
    last_block = int(block_of(torch.tensor(first + visibility.shape[-1] - 1)))
    numbers = torch.arange(last_block + 1, device=visibility.device)
    last_shown = torch.searchsorted(block_of(pictures), numbers, right=True).sub_(1).clamp_(min=0)
    visible = visibility[..., last_shown] > NAMED_SHARE
    named = visible.clone()
    for ahead in range(1, AHEAD + 1):
        named &= visible[..., (numbers + ahead).clamp(max=len(numbers) - 1)]
    if first < FIRST_BLOCK:
        named[..., 0] = visibility[..., : FIRST_BLOCK - first].amax(-1) > NAMED_SHARE
    return named


def block_of(picture: Tensor) -> Tensor:
    """Return the block of a picture: the first has nine pictures, every later one twelve."""
    return (picture - FIRST_BLOCK + LATER_BLOCKS).div(LATER_BLOCKS, rounding_mode="floor").clamp(min=0)


def block_pictures(block: int) -> tuple[int, int]:
    """Return the pictures [first, last) of a block."""
    last = FIRST_BLOCK + block * LATER_BLOCKS
    return (0 if block == 0 else last - LATER_BLOCKS), last


def _read(texture: Tensor, grid: Tensor, padding: str) -> Tensor:
    """Sample B C S S at B t Y X 2 -> B C t Y X; the pictures of a clip share one copy of its texture."""
    rows, num, height, width, _ = grid.shape
    read = F.grid_sample(
        texture, grid.view(rows, num * height, width, 2), padding_mode=padding, align_corners=False
    )
    return read.view(rows, -1, num, height, width)


def _slot(paths: Paths, slot: int) -> Paths:
    return Paths(*(getattr(paths, name)[:, slot] for name in Paths.__slots__))


def _forward(path: Paths) -> tuple[Tensor, ...]:
    """Return a to f that map sprite (-1..1) to pixel: x' = a x + b y + c, y' = d x + e y + f."""
    half, cos, sin = path.size / 2, path.tilt.cos(), path.tilt.sin()
    return half * path.facing * cos, -half * sin, path.x, half * path.facing * sin, half * cos, path.y


def _inverse(path: Paths) -> tuple[Tensor, ...]:
    """Return a to f that map pixel to sprite, the inverse of `_forward`."""
    half, cos, sin = path.size / 2, path.tilt.cos(), path.tilt.sin()
    a, b = cos / (half * path.facing), sin / (half * path.facing)
    d, e = -sin / half, cos / half
    return a, b, -a * path.x - b * path.y, d, e, -d * path.x - e * path.y


def _flows(instances: Tensor, staging: Staging, first: int, last: int) -> tuple[Tensor, Tensor]:
    """Return forward and backward flow of the topmost objects, B T-1 2 Y X."""
    before, after = slice(first, last - 1), slice(first + 1, last)
    forward = _flow(instances[:, :-1], staging, before, after)
    return forward, _flow(instances[:, 1:], staging, after, before)


def _flow(instances: Tensor, staging: Staging, source: slice, target: slice) -> Tensor:
    """Return the motion of the source pictures' pixels to the target pictures; instances are of the source."""
    camera = staging.camera
    shift = (camera[:, source] - camera[:, target])[..., None, None]
    flow = shift.expand(*shift.shape[:3], HEIGHT, WIDTH).clone()
    x = torch.arange(WIDTH, device=camera.device, dtype=torch.float32)
    y = torch.arange(HEIGHT, device=camera.device, dtype=torch.float32)[:, None]
    for slot in range(MAX_ACTORS):
        path = _slot(staging.paths, slot)
        a, b, c, d, e, f = (each[:, source, None, None] for each in _inverse(path))
        sprite_x, sprite_y = a * x + b * y + c, d * x + e * y + f
        a, b, c, d, e, f = (each[:, target, None, None] for each in _forward(path))
        moved = torch.stack((a * sprite_x + b * sprite_y + c - x, d * sprite_x + e * sprite_y + f - y), dim=2)
        flow = torch.where((instances == slot + 1)[:, :, None], moved, flow)
    return flow


def _extents(alpha: Tensor) -> Tensor:
    """Return the bounds N 4 (x0 y0 x1 y1, in -1..1) of the opaque part of sprites N S S."""
    side = alpha.shape[-1]
    edges = torch.arange(side, device=alpha.device) * (2 / side) - 1
    bounds = []
    # Columns, then rows.
    for axis in (1, 2):
        opaque = (alpha > 0.5).any(axis)
        bounds.append(torch.where(opaque, edges, 1.0).amin(1))
        bounds.append(torch.where(opaque, edges + 2 / side, -1.0).amax(1))
    return torch.stack((bounds[0], bounds[2], bounds[1], bounds[3]), dim=-1)
