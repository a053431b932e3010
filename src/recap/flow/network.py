"""This module has what networks that estimate flow share: layers, pairs of pictures, padding, and loading a file."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import ClassVar, Generic, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recap.contracts import Flow
from recap.errors import refuse
from recap.io.weights import Stored, fill, without_storage

STRIDE = 8  # pixels between neighbouring features, where these are fewest
VOLUME_BYTES = 2**31


def conv(channels: int, out: int, size: int, stride: int = 1) -> nn.Conv2d:
    """Make a convolution that keeps the size, up to its stride."""
    return nn.Conv2d(channels, out, size, stride, padding=size // 2)


def stage(channels: int, out: int, size: int, stride: int = 1, *, norm: bool = False) -> nn.Sequential:
    """Make a convolution, perhaps an instance normalisation, and a ReLU."""
    normed = [nn.InstanceNorm2d(out)] if norm else []
    return nn.Sequential(conv(channels, out, size, stride), *normed, nn.ReLU())


Encoding = TypeVar("Encoding", bound=NamedTuple)
"""All that a network reads of N pictures: named tensors N ..."""


def select(encoded: Encoding, pictures: Tensor) -> Encoding:
    """Return the encodings of the pictures with these indices."""
    return encoded._make(part[pictures] for part in encoded)


class NetworkFlow(ABC, Generic[Encoding]):
    """Estimates both directions of all pairs of a block, every picture encoded once."""

    smallest: ClassVar[int]
    """Pixels of the smallest side that the network takes."""

    def __init__(self, model: nn.Module, volume_bytes: int = VOLUME_BYTES) -> None:
        """Take the network; a block whose correlations need more than `volume_bytes` is done in parts."""
        self.model = model.eval().requires_grad_(False)
        self.volume_bytes = volume_bytes

    @torch.inference_mode()
    def __call__(self, pictures: Tensor) -> Flow:
        """Estimate the flow of pictures B T 3 Y X, 0..1, on any device; it is on theirs, float32."""
        flow = self._find(pictures, both=True)
        return Flow(*flow.unflatten(0, (2, len(pictures), -1)))

    @torch.inference_mode()
    def forward(self, pictures: Tensor) -> Tensor:
        """Return only the flow from every picture to the next, B T-1 2 Y X: half the work."""
        flow: Tensor = self._find(pictures, both=False).unflatten(0, (len(pictures), -1))
        return flow

    def _find(self, pictures: Tensor, *, both: bool) -> Tensor:
        """Return N 2 Y X of all pairs, row by row; then, if asked for, of the same pairs backwards."""
        weight = next(self.model.parameters())
        here, there = pair_indices(pictures, weight.device, both=both)
        padded, crop = pad_to_network(pictures.flatten(0, 1).to(weight) * 2 - 1, self.smallest)
        encoded = self._encode(padded)
        num = max(1, int(self.volume_bytes / self._pair_bytes(encoded)))
        parts = zip(here.split(num), there.split(num), strict=True)
        flow = torch.cat([self._track(select(encoded, a), select(encoded, b)) for a, b in parts])
        return flow[(..., *crop)].to(pictures.device)

    @abstractmethod
    def _encode(self, pictures: Tensor) -> Encoding:
        """Encode pictures N 3 Y X in -1..1."""

    @abstractmethod
    def _pair_bytes(self, encoded: Encoding) -> float:
        """Return how much memory one direction of a pair takes."""

    @abstractmethod
    def _track(self, here: Encoding, there: Encoding) -> Tensor:
        """Return flow N 2 Y X in pixels from each picture of `here` to that of `there`."""


def check_clip(pictures: Tensor) -> None:
    """Refuse fewer than two pictures B T 3 Y X."""
    if pictures.shape[1] < 2:
        raise refuse("pictures", tuple(pictures.shape), "flow needs at least 2", "pass B T 3 Y X with T >= 2")


def pair_indices(pictures: Tensor, device: torch.device, *, both: bool) -> tuple[Tensor, Tensor]:
    """Return which of B x T pictures each flow leaves and reaches: all pairs row by row, perhaps then backwards."""
    check_clip(pictures)
    rows, num = pictures.shape[:2]
    index = torch.arange(rows * num, device=device).reshape(rows, num)
    earlier, later = index[:, :-1].flatten(), index[:, 1:].flatten()
    if not both:
        return earlier, later
    return torch.cat((earlier, later)), torch.cat((later, earlier))


def pad_to_network(pictures: Tensor, smallest: int) -> tuple[Tensor, tuple[slice, slice]]:
    """Repeat border pixels on all sides up to a size the network takes; also the slices that undo it."""
    height, width = pictures.shape[-2:]
    more_y, more_x = (max(smallest, -(-side // STRIDE) * STRIDE) - side for side in (height, width))
    top, left = more_y // 2, more_x // 2
    padded = F.pad(pictures, (left, more_x - left, top, more_y - top), mode="replicate")
    return padded, (slice(top, top + height), slice(left, left + width))


Network = TypeVar("Network", bound=nn.Module)


def load_network(
    kind: Callable[[], Network],
    found: Mapping[str, Stored],
    path: Path,
    device: torch.device | str,
    *,
    remedy: str,
    what: str | None = None,
    rename: Callable[[str], str] = str,
) -> Network:
    """Make a network with the tensors found at a path, which must be exactly its own, as fp32.

    `rename` turns the network's names into those of the file.
    """
    with without_storage():
        model = kind()
    names = {name: rename(name) for name in model.state_dict()}
    fill(model, found, path=path, field="weights", dtype=torch.float32, names=names, what=what, remedy=remedy)
    return model.to(device)
