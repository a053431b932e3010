"""This module has what both fast decoders share: streams over storage at fixed addresses, and a cheap way to enlarge.

A block's kernels can be recorded and replayed because what they read and write stays at its address.

A picture is enlarged and convolved without writing the enlarged picture. If every pixel is repeated in a cell of
2 x 2, a 3 x 3 kernel meets the same pixel with several of its weights. Four 2 x 2 kernels, one for each pixel of the
cell, compute the same: 16 products per pixel instead of 36, and the repeated picture is never written. One
convolution with a margin of 1 computes all four on a grid that has one row and one column more, and each of the four
uses its own part of that grid.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from recap.backbones.wan.decoder import check_latents, check_stream, size_of
from recap.contracts import Entry, State
from recap.fast.graphs import Graphed
from recap.types import state_copy

Size = tuple[int, int, int]
"""Rows of the batch, and rows and columns of a latent frame."""


class FastStream(ABC):
    """Decodes latents to pixels, block by block. Its states are those of the readable decoder's stream.

    Decoding a block changes what the stream keeps. After an error in the middle of a block some layers would be a
    block ahead of others, so the stream refuses to continue until a state is loaded.
    """

    def __init__(self, channels: int, like: Tensor) -> None:
        """Keep storage on the device and in the precision of `like`."""
        self._channels, self._like = channels, like
        self._size: Size | None = None
        # B Y X C each, or B T Y X C of the last T frames.
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
    def _names(self, frames: int) -> dict[str, int]:
        """Return the names in a state after one frame or more, each with the index of a kept tensor."""

    def _marks(self, frames: int) -> State:
        """Return what else is in a state after one frame or more."""
        return {}

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

    def state(self) -> State:
        """Return copies of all that is kept, channels second and without gaps; nothing before the first block."""
        self._refuse_torn()
        if self._frames == 0:
            return {}
        state = self._marks(self._frames)
        for name, index in self._names(self._frames).items():
            state[name] = state_copy(self._kept[index].movedim(-1, 1))
        return state

    def load_state(self, state: State) -> None:
        """Resume from a state of either stream; an empty one begins again."""
        if not state:
            return self._restore(None, 0, {})
        # After one frame fewer names may be there.
        frames = 1 if state.keys() < self._expected(state, 2).keys() else 2
        check_stream(state, self._expected(state, frames))
        kept = {index: state[name].movedim(1, -1) for name, index in self._names(frames).items()}
        self._restore((kept[0].shape[0], kept[0].shape[-3], kept[0].shape[-2]), frames, kept)

    def _expected(self, state: State, frames: int) -> dict[str, Entry]:
        """Return what a state after one frame or more must consist of; after one, times may be shorter."""
        names, expected = self._names(frames), {}
        for name, mark in self._marks(frames).items():
            expected[name] = Entry(tuple(mark.shape), mark.dtype, mark.tolist(), mark.tolist())
        shapes = self._shapes((1, *size_of(state, next(iter(names)))))
        for name, index in names.items():
            _, *times, rows, columns, channels = shapes[index]
            lengths = (range(1, most + 1) for most in times)
            expected[name] = Entry(("B", channels, *lengths, rows, columns), "floats")
        return expected

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


def fuse(weight: Tensor) -> Tensor:
    """Turn a kernel O C 3 3 over repeated pixels into 4·O C 2 2 over the pixels themselves."""
    # In fp64, because products of fp32 may be allowed a lower precision.
    exact = weight.to(torch.float64)
    # For the cell's upper pixel the kernel's rows meet the source rows y - 1, y, y; for the lower one y, y, y + 1.
    meet = exact.new_tensor([[[1, 0, 0], [0, 1, 1]], [[1, 1, 0], [0, 0, 1]]])
    fused = torch.einsum("aiy,bjx,ocyx->abocij", meet, meet, exact).flatten(0, 2)
    return fused.to(weight.dtype)


def weave(made: Tensor, bias: Tensor | None = None, pictures: int = 1) -> Tensor:
    """Interleave N Y+1 X+1 P·4·O, the output of fused kernels for each of P pictures, into N·P 2Y 2X O."""
    cells = made.unflatten(-1, (pictures, 2, 2, -1))
    batch, height, width = made.shape[0], made.shape[1] - 1, made.shape[2] - 1
    whole = made.new_empty(batch, pictures, height, 2, width, 2, cells.shape[-1])
    for down in (0, 1):
        for right in (0, 1):
            part = cells[:, down : down + height, right : right + width, :, down, right].movedim(3, 1)
            target = whole[:, :, :, down, :, right]
            if bias is None:
                target.copy_(part)
            else:
                torch.add(part, bias, out=target)
    return whole.flatten(4, 5).flatten(2, 3).flatten(0, 1)
