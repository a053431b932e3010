"""This module has a decoder without weights, and the checks that all decoders share.

`UpsampleDecoder` enlarges three fixed mixtures of the latent channels to picture size. It keeps the promises of a
real decoder about time: one picture for the first frame, several for each later one, and decoding in blocks equals
decoding at once. Its pictures mean nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional

from recap.contracts import Entry, State, check_state, copy_of
from recap.errors import refuse
from recap.types import BackboneSpec


def check_latents(latents: Tensor, channels: int, begun: tuple[int, int, int] | None) -> None:
    """Refuse latents that a stream cannot decode.

    `begun` is the batch, rows and columns of the latents that the stream has decoded so far, if any.
    """
    shape = tuple(latents.shape)
    if latents.dim() != 5 or shape[2] != channels or shape[1] == 0:
        limit = f"this decoder reads frames of {channels} channels"
        raise refuse("latents.shape", shape, limit, "pass B F C rows columns, F > 0")
    if begun is not None and (shape[0], *shape[3:]) != begun:
        limit = f"this stream began with {begun[0]} rows of frames of {begun[1]} x {begun[2]}"
        raise refuse("latents.shape", shape, limit, "open a decoder per batch and size")


def check_clip(pixels: Tensor, cell: int, pictures_per_frame: int) -> None:
    """Refuse pictures that are not whole latent frames: 1 picture for the first, several for each later one."""
    if pixels.dim() != 5 or pixels.shape[2] != 3 or pixels.shape[3] % cell or pixels.shape[4] % cell:
        limit = f"pictures are RGB with sides that {cell} divides"
        raise refuse("pixels.shape", tuple(pixels.shape), limit, "pass B T 3 Y X")
    if pixels.shape[1] % pictures_per_frame != 1:
        limit = f"a clip is 1 picture and then {pictures_per_frame} per latent frame"
        raise refuse("pixels.shape", tuple(pixels.shape), limit, f"pass 1 + n {pictures_per_frame} pictures")


def check_stream(state: State, expected: Mapping[str, Entry]) -> None:
    """Refuse a state that is neither empty nor that of an open stream of this decoder."""
    check_state(state, expected if state else {}, "decoder state")


def size_of(state: State, name: str) -> tuple[int, int]:
    """Return the rows and columns of a tensor of a state; (0, 0), which fits nothing, where it has none."""
    tensor = state.get(name)
    return (tensor.shape[-2], tensor.shape[-1]) if isinstance(tensor, Tensor) and tensor.dim() > 3 else (0, 0)


def colour_mixtures(channels: int) -> Tensor:
    """Return 3 C: three cosines of a DCT over the channels, orthonormal, so unit latents give unit colours."""
    waves = torch.arange(1, 4, dtype=torch.float64).unsqueeze(1)
    points = torch.arange(channels, dtype=torch.float64) + 0.5
    return (math.sqrt(2 / channels) * torch.cos(math.pi / channels * waves * points)).to(torch.float32)


class UpsampleDecoder:
    """Streams latents to pixels; each frame fades in from the previous one."""

    def __init__(self, spec: BackboneSpec) -> None:
        self.spec = spec
        self._mixtures = colour_mixtures(spec.latent_channels)
        # B C rows columns: the frame that the next one fades in from.
        self._last: Tensor | None = None

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """Decode B F C rows columns to B T 3 Y X, fp32 in 0..1."""
        rows = latents.shape[0] if self._last is None else self._last.shape[0]
        check_latents(latents, self.spec.latent_channels, (rows, *self.spec.latent_size))
        self._mixtures = self._mixtures.to(latents.device)
        pictures = []
        # Frame by frame: every kernel sees the same shapes however the stream is cut, so results are bit-identical.
        for frame in latents.unbind(1):
            pictures.append(self._pictures(frame))
            self._last = frame.clone()
        return torch.cat(pictures, dim=1)

    def state(self) -> State:
        return {} if self._last is None else {"last": self._last.clone()}

    def load_state(self, state: State) -> None:
        check_stream(
            state, {"last": Entry(("B", self.spec.latent_channels, *self.spec.latent_size), "floats")}
        )
        self._last = copy_of(state.get("last"))

    def _pictures(self, frame: Tensor) -> Tensor:
        """Decode B C rows columns to B P 3 Y X: one picture for the first frame of the stream, then fades."""
        colours = self._colours(frame).unsqueeze(1)
        if self._last is not None:
            count = self.spec.pictures_per_frame
            weights = torch.arange(1, count + 1, device=frame.device, dtype=colours.dtype) / count
            colours = torch.lerp(self._colours(self._last).unsqueeze(1), colours, weights.view(-1, 1, 1, 1))
        large = functional.interpolate(colours.flatten(0, 1), size=self.spec.picture_size, mode="bilinear")
        return torch.sigmoid(large).reshape(*colours.shape[:3], *self.spec.picture_size)

    def _colours(self, frame: Tensor) -> Tensor:
        """Mix B C rows columns to B 3 rows columns, not yet mapped to 0..1."""
        return torch.einsum("kc,bcyx->bkyx", self._mixtures, frame.to(torch.float32))
