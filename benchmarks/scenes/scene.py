"""The parts of a synthetic clip: a panorama, a camera that shows part of it, and actors in front of it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.scenes.texture import panorama, two_tone
from benchmarks.scenes.weather import CLEAR, Weather
from recap.errors import refuse

Outline = Callable[[Tensor, Tensor, float], Tensor]
"""A function from (x, y, radius) to the distance in pixels to the outline of a shape, negative inside."""


def _disc(x: Tensor, y: Tensor, radius: float) -> Tensor:
    return torch.hypot(x, y) - radius


def _square(x: Tensor, y: Tensor, radius: float) -> Tensor:
    return torch.maximum(x.abs(), y.abs()) - radius


def _ring(x: Tensor, y: Tensor, radius: float) -> Tensor:
    return (torch.hypot(x, y) - 0.7 * radius).abs() - 0.3 * radius


def _star(x: Tensor, y: Tensor, radius: float) -> Tensor:
    # Five tips; between them the outline is at six tenths of the radius.
    lobe = torch.cos(5 * torch.atan2(x, -y)) * 0.5 + 0.5
    return torch.hypot(x, y) - radius * (0.6 + 0.4 * lobe)


SHAPES: dict[str, Outline] = {"disc": _disc, "square": _square, "ring": _ring, "star": _star}


@dataclass(frozen=True, slots=True)
class Actor:
    """A painted shape.

    `path` T 2 has its centre (x, y) in pixels of the panorama for every picture, `paint` is 3 side side, `visible` T
    is bool, and a smaller `depth` is nearer to the camera.
    """

    shape: str
    radius: float
    path: Tensor
    paint: Tensor
    visible: Tensor
    depth: float = 1.0

    def outline(self, x: Tensor, y: Tensor) -> Tensor:
        return SHAPES[self.shape](x, y, self.radius)


def make_actor(
    shape: str,
    radius: float,
    path: Tensor,
    *,
    hue: float,
    seed: int = 0,
    visible: Tensor | None = None,
    depth: float = 1.0,
) -> Actor:
    """Make an actor with a paint of its own."""
    shown = torch.ones(path.shape[0], dtype=torch.bool) if visible is None else visible
    return Actor(shape, radius, path, two_tone(2 * math.ceil(radius) + 5, hue, seed), shown, depth)


@dataclass(frozen=True, slots=True)
class Scene:
    """A clip before it is rendered; actor i of the list has number i + 1 in the identity map.

    `size` is (rows, columns) of a picture, `background` 3 Y X is larger, and `camera` T 2 is the position (x, y) of
    each picture's first pixel in it. `edge_px` is the width of the blended edge of actors: 0 gives every pixel one
    owner, so that flow is exact at edges too; 1 looks better.
    """

    size: tuple[int, int]
    background: Tensor
    camera: Tensor
    actors: tuple[Actor, ...] = ()
    edge_px: float = 0.0
    fps: int = 16
    weather: Weather = CLEAR

    @property
    def num_pictures(self) -> int:
        return self.camera.shape[0]

    def __post_init__(self) -> None:
        for number, actor in enumerate(self.actors, start=1):
            if actor.path.shape != self.camera.shape or actor.visible.shape != self.camera.shape[:1]:
                limit = f"the camera has {self.num_pictures} pictures"
                remedy = "give one position for each"
                raise refuse(f"path of actor {number}", tuple(actor.path.shape), limit, remedy)
        rows, columns = self.background.shape[1:]
        spare = torch.tensor([columns - self.size[1], rows - self.size[0]])
        if bool((self.camera < 0).any()) or bool((self.camera > spare).any()):
            limit = f"the background has {spare.tolist()} spare pixels"
            raise refuse("camera", self.camera.aminmax(), limit, "keep the camera inside or enlarge it")


def piece(scene: Scene, start: int, stop: int) -> Scene:
    """Return pictures start to stop as a scene, so that a long clip can be rendered in parts."""
    actors = tuple(
        dataclasses.replace(actor, path=actor.path[start:stop], visible=actor.visible[start:stop])
        for actor in scene.actors
    )
    weather = dataclasses.replace(scene.weather, first=scene.weather.first + start)
    return dataclasses.replace(scene, camera=scene.camera[start:stop], actors=actors, weather=weather)


def make_scene_of(
    size: tuple[int, int],
    camera: Tensor,
    actors: tuple[Actor, ...] = (),
    *,
    seed: int = 0,
    edge_px: float = 0.0,
    weather: Weather = CLEAR,
) -> Scene:
    """Make a scene whose background is just large enough for the camera's path."""
    camera = camera - camera.amin(dim=0)
    reach = camera.amax(dim=0).ceil().int().tolist()
    background = panorama((size[0] + reach[1] + 1, size[1] + reach[0] + 1), seed)
    return Scene(size, background, camera, actors, edge_px, weather=weather)
