"""Pictures and flow in which something enters, leaves and comes back, and two rules that watch them."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional

from recap.admission.flow import FlowNovelty, FlowNoveltyConfig
from recap.contracts import Flow
from recap.flow.warp import pixel_grid, sample

PER_FRAME = 4


def smooth(shape: tuple[int, ...], size: tuple[int, int], coarse: int) -> Tensor:
    """Return random numbers `shape` y x, about -1 to 1, that change over `coarse` pixels."""
    small = torch.randn(1, *shape, size[0] // coarse + 2, size[1] // coarse + 2).flatten(0, -3)
    return functional.interpolate(small[None], size, mode="bicubic")[0].reshape(*shape, *size) * 0.6


class Sways:
    """Has a camera that pans away and comes back over a wide ground, rest, shake, broken flow, and a cut."""

    def __init__(self, rows: int, length: int, size: tuple[int, int], *, cut: int, seed: int = 0):
        torch.manual_seed(seed)
        height, width = size
        ground = smooth((rows, 3), (3 * height, 3 * width), max(height // 8, 3)).mul(0.6).add(0.5).clamp(0, 1)
        clock = torch.arange(length) / 4
        # Every row has its own way; a pixel and more a picture, by no whole numbers.
        ways = []
        for row in range(rows):
            x = 0.45 * width * torch.sin(clock * (1 + 0.3 * row))
            y = 0.3 * height * torch.sin(0.7 * clock + row) * (clock > 2)
            ways.append(torch.stack((x, y), dim=1))
        way = torch.stack(ways)
        # For a while the camera is at rest, but for a tremor.
        way[:, 9:12] = way[:, 9:10] + 0.2 * torch.rand(rows, 3, 2)
        at = (
            way[:, :, :, None, None] + pixel_grid(size, ground) + torch.tensor([width, height])[:, None, None]
        )
        self.pictures = sample(ground[:, None].expand(-1, length, -1, -1, -1), at)
        step = (way[:, 1:] - way[:, :-1])[:, :, :, None, None]
        wobble = smooth((rows, length - 1, 2), size, max(height // 3, 3)) * 0.3
        self.backward = step + wobble
        self.forward = -step - wobble
        # A square of which the flow knows nothing: it fires once, and claims travel with it.
        side = height // 4
        self.forward[:, 3:6, :, side : 2 * side, side : 2 * side] += 9.0
        self.pictures[:, 8:, :, side : 2 * side, side : 2 * side] += 0.4
        # One row of several is elsewhere from here on, so that rows differ in what they forget.
        self.forward[-1, cut] += 40.0
        # A wild flow points nowhere at all.
        self.backward[0, 6, :, 0, 0], self.backward[0, 7, :, 1, 1] = 1e9, -1e9

    def to(self, device: str) -> Sways:
        for name in ("pictures", "forward", "backward"):
            setattr(self, name, getattr(self, name).to(device))
        return self

    def blocks(self) -> list[Tensor]:
        """Return the pictures of one block after the other, the first of them the opening."""
        ends = [0, 1 + PER_FRAME, *range(1 + 3 * PER_FRAME, self.pictures.shape[1] + 1, 2 * PER_FRAME)]
        return [self.pictures[:, start:end] for start, end in pairwise(ends)]

    def flow(self, start: int = 0) -> ReplayedFlow:
        return ReplayedFlow(self, start)


class ReplayedFlow:
    """Returns the scene's flow, pair by pair, whatever the pictures are."""

    def __init__(self, scene: Sways, start: int):
        self._scene, self._pair = scene, start

    def __call__(self, pictures: Tensor) -> Flow:
        pairs = slice(self._pair, self._pair + pictures.shape[1] - 1)
        self._pair = pairs.stop
        return Flow(self._scene.forward[:, pairs], self._scene.backward[:, pairs])


def watcher(
    scene: Sways, kind: type[FlowNovelty], config: FlowNoveltyConfig, token_pixels: int
) -> FlowNovelty:
    height, width = scene.pictures.shape[-2:]
    return kind(
        config, scene.flow(), (height // token_pixels, width // token_pixels), token_pixels, PER_FRAME
    )
