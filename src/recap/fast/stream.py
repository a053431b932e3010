"""Decoding streams over storage that stays where it is, so that a block's kernels can be recorded and replayed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from recap.contracts import State
from recap.errors import refuse
from recap.fast.graphs import Graphed

Size = tuple[int, int, int]
"""Rows of the batch, and rows and columns of a latent frame."""


class FastStream(ABC):
    """Latents to pixels, block by block.

    What is kept moves on while a block is decoded. After an error within one the stream refuses to go on, for
    some of its layers would be a block ahead of others, until it is given a state.
    """

    def __init__(self, channels: int, like: Tensor) -> None:
        """Storage will be on the device and in the precision of `like`."""
        self._channels, self._like = channels, like
        self._size: Size | None = None
        self._kept: list[Tensor] = []
        self._frames = 0  # so far, counted to 2: the first is not like the others, and the second is
        self._torn = False
        self._steady: Graphed[Tensor]  # of as long as the storage is in its place

    @abstractmethod
    def _shapes(self, size: Size) -> list[tuple[int, ...]]:
        """Of all that is kept; zeros are the beginning of a video."""

    @abstractmethod
    def _begin(self, latents: Tensor) -> Tensor:
        """The first block's pixels, which nothing overwrites."""

    @abstractmethod
    def _later(self, kept: list[Tensor]) -> Callable[[Tensor], Tensor]:
        """A later block's latents -> pixels, over such storage.

        It must not hold the stream: in a circle, gigabytes would outlive their last user until somebody collects.
        """

    @abstractmethod
    def state(self) -> State: ...

    @abstractmethod
    def load_state(self, state: State) -> None: ...

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """B F C rows columns, normalised -> B T 3 Y X, fp32 in 0..1; the first frame is one picture."""
        self._refuse_torn()
        self._check(latents)
        latents = latents.to(self._like.device, torch.float32)
        self._make_room((latents.shape[0], latents.shape[3], latents.shape[4]))
        self._torn = True
        with torch.cuda.device_of(latents):  # on which kernels are compiled and started
            # What is handed out must outlive the next block.
            pixels = self._steady(latents).clone() if self._frames else self._begin(latents)
        self._torn = False
        self._frames = min(2, self._frames + latents.shape[1])
        return pixels

    @torch.no_grad()
    def _restore(self, size: Size | None, frames: int, kept: Mapping[int, Tensor]) -> None:
        """Go on from tensors of the right shapes, or, in time, the last of them; where there is none, from zeros."""
        if size is not None:
            self._make_room(size)
        for place, room in enumerate(self._kept):
            room.zero_()
            if place in kept:
                room[:, room.shape[1] - kept[place].shape[1] :].copy_(kept[place])
        self._frames, self._torn = frames, False

    def _make_room(self, size: Size) -> None:
        """What is there stays in its place if it fits, and recordings with it."""
        if size != self._size:
            self._kept = [self._like.new_zeros(shape) for shape in self._shapes(size)]
            self._size, self._steady = size, Graphed(self._later(self._kept))

    def _refuse_torn(self) -> None:
        if self._torn:
            raise RuntimeError(
                "an error within a block left this decoding stream between two states: "
                "load one of before, or {} to begin anew"
            )

    def _check(self, latents: Tensor) -> None:
        if latents.dim() != 5 or latents.shape[2] != self._channels or latents.shape[1] == 0:
            limit = f"this decoder reads frames of {self._channels} channels"
            raise refuse("latents.shape", tuple(latents.shape), limit, "pass B F C rows columns, F > 0")
        if self._frames and (latents.shape[0], *latents.shape[3:]) != self._size:
            assert self._size is not None
            batch, rows, columns = self._size
            limit = f"this stream began with {batch} rows of frames of {rows} x {columns}"
            raise refuse("latents.shape", tuple(latents.shape), limit, "open a decoder per batch and size")
