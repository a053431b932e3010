"""Synthetic clips with known answers: still, shifted, with one moving square, and with a swap at a known second."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from recap.eval.sampling import Sampled
from recap.eval.witnesses import Box
from recap.io.video import ClipWriter

SIZE = (96, 160)


def texture(seed: int = 0, size: tuple[int, int] = (160, 320)) -> np.ndarray:
    """Make a picture Y X 3, uint8, with detail everywhere, so that flow is well defined."""
    generator = torch.Generator().manual_seed(seed)
    layers = [
        torch.nn.functional.interpolate(
            torch.rand(1, 3, size[0] // step, size[1] // step, generator=generator), size=size, mode="bicubic"
        )
        for step in (4, 8, 16)
    ]
    mixed = sum(layers) / 3
    mixed = (mixed - mixed.mean()) * 1.8 + 0.5
    return (mixed[0].clamp(0, 1) * 255).byte().permute(1, 2, 0).numpy()


def still(count: int, seed: int = 0) -> np.ndarray:
    picture = texture(seed)[: SIZE[0], : SIZE[1]]
    return np.repeat(picture[None], count, axis=0)


def shifting(count: int, across: int, down: int = 0, seed: int = 0) -> np.ndarray:
    """Move the camera by whole pixels per picture, without interpolation; long clips turn back."""
    background = texture(seed, (256, 512))
    steps = [abs((index + 20) % 40 - 20) for index in range(count)]
    corners = [(i * down, i * across) for i in steps]
    return np.stack([background[y : y + SIZE[0], x : x + SIZE[1]] for y, x in corners])


def one_mover(count: int, step: int, side: int = 40) -> tuple[np.ndarray, list[Box]]:
    """Move one textured square to the right over a still background."""
    frames = still(count).copy()
    actor = texture(7)[:side, :side]
    boxes = []
    for index, frame in enumerate(frames):
        left = 10 + (index * step) % (SIZE[1] - side - 20)
        frame[20 : 20 + side, left : left + side] = actor
        boxes.append(Box(left, 20, left + side, 20 + side))
    return frames, boxes


def swap(seconds: float, at: float, per_second: float = 2.0) -> Sampled:
    """Show a coloured square on a still background that turns into another at a known second."""
    count = round(seconds * per_second)
    frames = still(count).copy()
    times = np.arange(count) / per_second
    for frame, second in zip(frames, times, strict=True):
        frame[30:70, 60:100] = (220, 40, 30) if second < at else (30, 60, 220)
    return Sampled(times, frames, seconds)


def write(path: Path, pictures: np.ndarray, fps: float = 16) -> Path:
    with ClipWriter(path, SIZE, fps, quality=1) as clip:
        clip.write(torch.from_numpy(pictures).permute(0, 3, 1, 2))
    return path
