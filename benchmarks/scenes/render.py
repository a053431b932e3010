"""Draw a scene and record for every pixel which object it shows and its exact motion."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.scenes.scene import Actor, Scene
from benchmarks.scenes.weather import FLEETING, flood, wet
from recap.flow.warp import backtrace, inside, pixel_grid, sample


@dataclass(frozen=True, slots=True)
class Rendered:
    """A rendered scene. Flow follows the object that a pixel shows, even to where it is hidden or outside.

    `pictures` are T 3 Y X in 0..1. `forward`, T-1 2 Y X, leads from the pixels of picture i to picture i + 1,
    `backward` from those of picture i + 1 to picture i. `actor`, T Y X int16, is the number of the actor shown: 0 for
    the background, -1 for rain and water.
    """

    pictures: Tensor
    forward: Tensor
    backward: Tensor
    actor: Tensor

    @property
    def traceable(self) -> Tensor:
        """Return T-1 Y X, bool: whether the content of a pixel of picture i + 1 was visible in picture i."""
        lasting = self.actor[1:] != FLEETING
        return _visible(self.actor[1:], self.actor[:-1], self.backward) & lasting


def draw(scene: Scene, picture: int) -> tuple[Tensor, Tensor]:
    """Draw one picture 3 Y X and the numbers Y X of the actors it shows."""
    drawn = _read(scene.background, scene.camera[picture], scene.size)
    numbers = torch.zeros(scene.size, dtype=torch.int64)
    flood(scene.weather, picture, drawn, numbers)
    order = sorted(range(len(scene.actors)), key=lambda index: -scene.actors[index].depth)
    for index in order:
        if bool(scene.actors[index].visible[picture]):
            _paint(scene, index, picture, drawn, numbers)
    wet(scene.weather, picture, drawn, numbers)
    return drawn, numbers


def render(scene: Scene) -> Rendered:
    """Draw the whole clip and its exact flow."""
    count, (rows, columns) = scene.num_pictures, scene.size
    pictures = torch.empty(count, 3, rows, columns)
    forward, backward = torch.empty(count - 1, 2, rows, columns), torch.empty(count - 1, 2, rows, columns)
    numbers = torch.empty(count, rows, columns, dtype=torch.int16)
    steps = _steps(scene)
    for picture in range(count):
        pictures[picture], shown = draw(scene, picture)
        numbers[picture] = shown
        for axis in (0, 1):
            if picture + 1 < count:
                forward[picture, axis] = steps[picture, :, axis][shown]
            if picture > 0:
                backward[picture - 1, axis] = -steps[picture - 1, :, axis][shown]
    return Rendered(pictures, forward, backward, numbers)


def half(flow: Tensor) -> Tensor:
    """Return exact flow `... 2 Y X` on a grid of half the resolution.

    It uses every other pixel instead of averages: an average across an edge would be the motion of no object.
    """
    return flow[..., ::2, ::2] / 2


def _steps(scene: Scene) -> Tensor:
    """Return the motion on screen to the next picture, T-1 A 2: of the background, every actor, and the weather.

    The weather comes last, because its number is -1.
    """
    camera = scene.camera.diff(dim=0)
    weather = torch.zeros_like(camera)
    weather[:, 1] = scene.weather.fall
    actors = [actor.path.diff(dim=0) - camera for actor in scene.actors]
    return torch.stack([-camera, *actors, weather], dim=1)


def _read(texture: Tensor, corner: Tensor, size: tuple[int, int]) -> Tensor:
    """Sample a window of a texture whose first pixel is at corner (x, y), with interpolation."""
    return sample(texture, pixel_grid(size, texture) + corner[:, None, None].to(texture.dtype))


def _paint(scene: Scene, index: int, picture: int, drawn: Tensor, numbers: Tensor) -> None:
    """Draw one actor onto a picture and its numbers, inside the rectangle that it can cover."""
    actor: Actor = scene.actors[index]
    x, y = (actor.path[picture] - scene.camera[picture]).tolist()
    reach = actor.radius + 2
    top, left = max(0, int(y - reach)), max(0, int(x - reach))
    bottom, right = min(scene.size[0], int(y + reach) + 1), min(scene.size[1], int(x + reach) + 1)
    if bottom <= top or right <= left:
        return
    grid = pixel_grid((bottom - top, right - left), drawn)
    across, down = grid[0] + (left - x), grid[1] + (top - y)
    distance = actor.outline(across, down)
    middle = (actor.paint.shape[-1] - 1) / 2
    paint = sample(actor.paint, torch.stack((across, down)) + middle)
    cover = (distance <= 0).to(drawn.dtype)
    if scene.edge_px > 0:
        cover = (0.5 - distance / scene.edge_px).clamp(0, 1)
    window = drawn[:, top:bottom, left:right]
    window.lerp_(paint, cover.expand_as(paint))
    numbers[top:bottom, left:right].masked_fill_(cover >= 0.5, index + 1)


def _visible(shown: Tensor, other: Tensor, flow: Tensor) -> Tensor:
    """Say whether the four pixels around the target of a flow all show the same object as its origin."""
    at = backtrace(flow)
    same = inside(at, (shown.shape[-2], shown.shape[-1]))
    rows, columns = shown.shape[-2:]
    for nudge_x in (torch.floor, torch.ceil):
        for nudge_y in (torch.floor, torch.ceil):
            x = nudge_x(at[:, 0]).long().clamp(0, columns - 1)
            y = nudge_y(at[:, 1]).long().clamp(0, rows - 1)
            same &= other.flatten(1).gather(1, (y * columns + x).flatten(1)).view_as(shown) == shown
    return same
