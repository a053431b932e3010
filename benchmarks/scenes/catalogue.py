"""Scenes by name, each a small story that a memory must get right.

Sizes are (rows, columns). Speeds and radii scale with the picture, so a scene is the same at every size; paths are
counted in pictures, and a longer clip gives the same motion more time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from benchmarks.scenes.scene import Actor, Scene, make_actor, make_scene_of
from benchmarks.scenes.weather import Weather
from recap.errors import refuse, unknown_name

Builder = Callable[[tuple[int, int], int, int], Scene]
"""A function of (rows, columns), the number of pictures and a seed."""


def static(size: tuple[int, int], num_pictures: int, seed: int) -> Scene:
    """Nothing moves: after the first picture nothing is new."""
    actor = make_actor("star", _radius(size), _rest(size, num_pictures, 0.5, 0.5), hue=0.02, seed=seed)
    return make_scene_of(size, torch.zeros(num_pictures, 2), (actor,), seed=seed)


def pan(size: tuple[int, int], num_pictures: int, seed: int) -> Scene:
    """The camera pans to the right and reveals a strip in every picture."""
    across = torch.arange(num_pictures) * (size[1] / 72)
    return make_scene_of(size, torch.stack((across, torch.zeros(num_pictures)), dim=1), seed=seed)


def pan_return(size: tuple[int, int], num_pictures: int, seed: int) -> Scene:
    """The camera pans to the right and back to where it began."""
    there = (num_pictures - 1) / 2
    across = (there - (torch.arange(num_pictures) - there).abs()) * (size[1] / 72)
    return make_scene_of(size, torch.stack((across, torch.zeros(num_pictures)), dim=1), seed=seed)


def entering(size: tuple[int, int], num_pictures: int, seed: int) -> Scene:
    """One actor enters from the left and walks to the far side."""
    margin = _radius(size) / size[1] + 0.02
    path = _through(size, num_pictures, [(0.15, -margin, 0.45), (1.0, 0.8, 0.55)])
    actor = make_actor("star", _radius(size), path, hue=0.02, seed=seed)
    return make_scene_of(size, torch.zeros(num_pictures, 2), (actor,), seed=seed)


def hiding(size: tuple[int, int], num_pictures: int, seed: int) -> Scene:
    """A disc, visible from the start, passes behind a square to the other side and returns."""
    stops = [(0.05, 0.16, 0.5), (0.5, 0.84, 0.5), (0.55, 0.84, 0.5), (1.0, 0.16, 0.5)]
    disc = make_actor("disc", _radius(size), _through(size, num_pictures, stops), hue=0.1, seed=seed, depth=2)
    screen = _screen(size, num_pictures, seed)
    return make_scene_of(size, torch.zeros(num_pictures, 2), (disc, screen), seed=seed)


def returning(size: tuple[int, int], num_pictures: int, seed: int) -> Scene:
    """A ring, visible from the start, leaves to the right, stays away and comes back."""
    out = 1 + _radius(size) / size[1] + 0.02
    stops = [(0.1, 0.5, 0.5), (0.4, out, 0.5), (0.6, out, 0.5), (0.9, 0.5, 0.5)]
    ring = make_actor("ring", _radius(size), _through(size, num_pictures, stops), hue=0.85, seed=seed)
    return make_scene_of(size, torch.zeros(num_pictures, 2), (ring,), seed=seed)


def burst(size: tuple[int, int], num_pictures: int, seed: int) -> Scene:
    """Two small actors enter slowly one after the other; then the camera moves ten times as fast."""
    calm = num_pictures // 2
    # The calm actors move this many pixels per picture.
    step = size[1] / 160
    clock = torch.arange(num_pictures) + 0.0
    actors = []
    for number, (begins, shape, row) in enumerate(((0.05, "disc", 0.3), (0.25, "square", 0.7))):
        across = (clock - begins * num_pictures).clamp(min=0) * step - 0.6 * _radius(size)
        path = torch.stack((across, torch.full_like(across, row * size[0])), dim=1)
        actors.append(make_actor(shape, _radius(size) / 2, path, hue=0.1 + 0.5 * number, seed=seed + number))
    across = (clock - calm).clamp(min=0) * 10 * step
    camera = torch.stack((across, torch.zeros(num_pictures)), dim=1)
    return make_scene_of(size, camera, tuple(actors), seed=seed)


def demo(size: tuple[int, int], num_pictures: int, seed: int) -> Scene:
    """A little of everything: a star enters, a disc hides and returns, a ring leaves and comes back, and the
    camera looks to the right and back."""
    rows, columns = size
    view = [(0.30, 0, 0), (0.50, 0.4, 0.04), (0.60, 0.4, 0.04), (0.82, 0, 0)]
    camera = _through(size, num_pictures, view, eased=True)
    radius = _radius(size)
    edge = radius / columns + 0.02
    star = [(0.06, -edge, 0.74), (0.3, 0.3, 0.68), (0.4, 0.36, 0.7), (0.72, 0.62, 0.78), (0.95, 0.2, 0.76)]
    disc = [(0.04, 0.28, 0.36), (0.20, 0.56, 0.36), (0.66, 0.56, 0.36), (0.84, 0.84, 0.34), (1.0, 0.66, 0.30)]
    above = -radius / rows - 0.05
    ring = [(0.08, 0.88, 0.22), (0.22, 0.92, above), (0.80, 0.34, above), (0.95, 0.38, 0.26)]
    square = [(0.42, 1.62, 0.62), (0.58, 1.10, 0.50), (0.70, 1.62, 0.40)]
    actors = (
        _mover("star", size, num_pictures, star, hue=0.99, seed=seed),
        _mover("disc", size, num_pictures, disc, hue=0.11, seed=seed + 1, depth=2),
        _mover("ring", size, num_pictures, ring, hue=0.84, seed=seed + 2, depth=3),
        _mover("square", size, num_pictures, square, hue=0.56, seed=seed + 3),
        _screen(size, num_pictures, seed + 4, column=0.56, row=0.38),
    )
    return dataclasses.replace(make_scene_of(size, camera, actors, seed=seed), edge_px=1.0)


def rain(size: tuple[int, int], num_pictures: int, seed: int) -> Scene:
    """It rains all the time; a star enters late from the left, and then a disc from the right."""
    star = _arrival("star", size, num_pictures, (0.35, 0.40, 0.34), hue=0.99, seed=seed)
    disc = _arrival("disc", size, num_pictures, (0.65, 0.28, 0.66), hue=0.11, seed=seed + 1, mirrored=True)
    weather = Weather(cover=0.05, fall=size[0] / 12, seed=seed)
    return make_scene_of(size, torch.zeros(num_pictures, 2), (star, disc), seed=seed, weather=weather)


def ripples(size: tuple[int, int], num_pictures: int, seed: int) -> Scene:
    """Water glitters below a shore; a boat enters late from the left."""
    boat = _arrival("square", size, num_pictures, (0.45, 0.45, 0.68), hue=0.02, seed=seed)
    weather = Weather(shore=0.4, swell=0.28, seed=seed)
    return make_scene_of(size, torch.zeros(num_pictures, 2), (boat,), seed=seed, weather=weather)


SCENES: dict[str, Builder] = {
    "static": static,
    "pan": pan,
    "pan-return": pan_return,
    "entering": entering,
    "hiding": hiding,
    "returning": returning,
    "burst": burst,
    "demo": demo,
    "rain": rain,
    "ripples": ripples,
}


def make_scene(
    name: str, size: tuple[int, int] = (272, 480), num_pictures: int = 161, seed: int = 0
) -> Scene:
    """Build a scene of the catalogue; the size is (rows, columns), and 161 pictures are ten seconds."""
    if name not in SCENES:
        raise unknown_name("scene", name, SCENES)
    if min(size) < 32:
        raise refuse("size", size, "a scene needs at least 32 rows and columns", "choose a larger one")
    if num_pictures < 2:
        raise refuse("num_pictures", num_pictures, "motion needs at least 2 pictures", "ask for more")
    return SCENES[name](size, num_pictures, seed)


def _radius(size: tuple[int, int]) -> float:
    return min(size) * 0.15


def _screen(
    size: tuple[int, int], num_pictures: int, seed: int, column: float = 0.5, row: float = 0.5
) -> Actor:
    """Make the square that others hide behind: wider than they are, and nearest to the camera."""
    path = _rest(size, num_pictures, column, row)
    return make_actor("square", 1.35 * _radius(size), path, hue=0.62, seed=seed + 7, depth=0)


def _mover(
    shape: str,
    size: tuple[int, int],
    num_pictures: int,
    stops: Sequence[tuple[float, float, float]],
    *,
    hue: float,
    seed: int,
    depth: float = 1.0,
) -> Actor:
    path = _through(size, num_pictures, stops, eased=True)
    return make_actor(shape, _radius(size), path, hue=hue, seed=seed, depth=depth)


def _arrival(
    shape: str,
    size: tuple[int, int],
    num_pictures: int,
    stop: tuple[float, float, float],
    *,
    hue: float,
    seed: int,
    mirrored: bool = False,
) -> Actor:
    """Make an actor that enters at a time (a share of the clip), moves to a column and row, and rests there.

    Its speed depends only on the size: a longer clip has a later entrance, not a slower one.
    """
    begins, column, row = stop
    radius = _radius(size)
    travelled = (torch.arange(num_pictures) - round(begins * num_pictures)).clamp(min=0) * (size[1] / 72)
    inward = (travelled - radius - 1).clamp(max=column * size[1])
    across = size[1] - inward if mirrored else inward
    path = torch.stack((across, torch.full_like(across, row * size[0])), dim=1)
    return make_actor(shape, radius, path, hue=hue, seed=seed)


def _rest(size: tuple[int, int], num_pictures: int, column: float, row: float) -> Tensor:
    return _through(size, num_pictures, [(0.0, column, row), (1.0, column, row)])


def _through(
    size: tuple[int, int],
    num_pictures: int,
    stops: Sequence[tuple[float, float, float]],
    eased: bool = False,
) -> Tensor:
    """Make a path T 2 through stops (time, column, row), all as shares of the clip and the picture.

    It rests before the first stop and after the last one; `eased` starts and stops gently.
    """
    clock = torch.linspace(0, 1, num_pictures, dtype=torch.float64)
    path = torch.tensor(stops[0][1:], dtype=torch.float64).expand(num_pictures, 2).clone()
    for (begin, *origin), (end, *goal) in pairwise(stops):
        share = ((clock - begin) / (end - begin)).clamp(0, 1)
        if eased:
            share = share * share * (3 - 2 * share)
        path += share[:, None] * (torch.tensor(goal) - torch.tensor(origin)).to(path)
    return (path * torch.tensor([size[1], size[0]])).float()
