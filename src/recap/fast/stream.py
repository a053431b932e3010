"""Decoding streams over storage at fixed addresses, so that a block's kernels can be recorded and replayed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from recap.backbones.wan.decoder import check_latents
from recap.contracts import State
from recap.fast.graphs import Graphed

Size = tuple[int, int, int]
"""Rows of the batch, and rows and columns of a latent frame."""


class FastStream(ABC):
    """Decodes latents to pixels, block by block.

    Decoding a block changes what the stream keeps. After an error in the middle of a block some layers would be a
    block ahead of others, so the stream refuses to continue until a state is loaded.
    """

    def __init__(self, channels: int, like: Tensor) -> None:
        """Keep storage on the device and in the precision of `like`."""
        self._channels, self._like = channels, like
        self._size: Size | None = None
        self._kept: list[Tensor] = []
        # 0, 1 or 2 (saturating): the first frame decodes differently.
        self._frames = 0
        self._torn = False
        # Recorded for the present storage, and replaced with it.
        self._steady: Graphed[Tensor]

    @abstractmethod
    def _shapes(self, size: Size) -> list[tuple[int, ...]]:
        """Return the shapes of all that is kept; zeros are the beginning of a video."""

    @abstractmethod
    def _begin(self, latents: Tensor) -> Tensor:
        """Decode the first block to pixels that later blocks do not overwrite."""

    @abstractmethod
    def _later(self, kept: list[Tensor]) -> Callable[[Tensor], Tensor]:
        """Return a function that decodes a later block's latents to pixels, using this storage.

        It must not refer to the stream: a reference cycle would keep gigabytes alive until gc runs.
        """

    @abstractmethod
    def state(self) -> State: ...

    @abstractmethod
    def load_state(self, state: State) -> None: ...

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """Decode B F C rows columns, normalised, to B T 3 Y X, fp32 in 0..1; the first frame is one picture."""
        self._refuse_torn()
        check_latents(latents, self._channels, self._size if self._frames else None)
        latents = latents.to(self._like.device, torch.float32)
        self._allocate((latents.shape[0], latents.shape[3], latents.shape[4]))
        self._torn = True
        # Kernels are compiled and started on this device.
        with torch.cuda.device_of(latents):
            # A copy, because the next block overwrites the output of the recording.
            pixels = self._steady(latents).clone() if self._frames else self._begin(latents)
        self._torn = False
        self._frames = min(2, self._frames + latents.shape[1])
        return pixels

    @torch.no_grad()
    def _restore(self, size: Size | None, frames: int, kept: Mapping[int, Tensor]) -> None:
        """Resume from kept tensors, by index; a tensor that is missing, or its missing first frames, are zeros."""
        if size is not None:
            self._allocate(size)
        for index, storage in enumerate(self._kept):
            storage.zero_()
            if index in kept:
                storage[:, storage.shape[1] - kept[index].shape[1] :].copy_(kept[index])
        self._frames, self._torn = frames, False

    def _allocate(self, size: Size) -> None:
        """Allocate storage unless the present one has this size; recordings last as long as the storage."""
        if size != self._size:
            self._kept = [self._like.new_zeros(shape) for shape in self._shapes(size)]
            self._size, self._steady = size, Graphed(self._later(self._kept))

    def _refuse_torn(self) -> None:
        if self._torn:
            raise RuntimeError(
                "an error within a block left this decoding stream between two states: "
                "load an earlier state, or {} to begin again"
            )
