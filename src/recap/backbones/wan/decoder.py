"""A decoder without weights: three fixed mixtures of the latent channels, blown up to picture size.

It keeps the promises of a real one about time (one picture for the first frame, several for each later one,
decoding in blocks equals decoding at once) and none about beauty.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from recap.contracts import State
from recap.errors import refuse
from recap.types import BackboneSpec


def colour_mixtures(channels: int) -> Tensor:
    """3 C: three cosines of a DCT over the channels, orthonormal, so that unit latents give unit colours."""
    waves = torch.arange(1, 4, dtype=torch.float64).unsqueeze(1)
    places = torch.arange(channels, dtype=torch.float64) + 0.5
    return (math.sqrt(2 / channels) * torch.cos(math.pi / channels * waves * places)).to(torch.float32)


class UpsampleDecoder:
    """Streams latents to pixels; each frame fades in from the one before."""

    def __init__(self, spec: BackboneSpec) -> None:
        self.spec = spec
        self._mixtures = colour_mixtures(spec.latent_channels)
        self._last: Tensor | None = None  # B C rows columns: the frame the next one fades in from

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """B F C rows columns -> B T 3 Y X, fp32 in 0..1."""
        self._check(latents)
        self._mixtures = self._mixtures.to(latents.device)
        pictures = []
        # Frame by frame, so that every kernel sees the same shapes however the stream is cut: bit-identical.
        for frame in latents.unbind(1):
            pictures.append(self._pictures(frame))
            self._last = frame.clone()
        return torch.cat(pictures, dim=1)

    def state(self) -> State:
        return {} if self._last is None else {"last": self._last.clone()}

    def load_state(self, state: State) -> None:
        if state.keys() - {"last"}:
            limit = "an UpsampleDecoder keeps one tensor, 'last', or none"
            raise refuse("decoder state", sorted(state), limit, "load the state of an UpsampleDecoder")
        last = state.get("last")
        frame = (self.spec.latent_channels, *self.spec.latent_size)
        if last is not None and last.shape[1:] != frame:
            limit = f"backbone {self.spec.name!r} has frames of shape {frame}"
            raise refuse(
                "decoder state last.shape", tuple(last.shape), limit, "load a state of the same backbone"
            )
        self._last = None if last is None else last.clone()

    def _pictures(self, frame: Tensor) -> Tensor:
        """B C rows columns -> B P 3 Y X: one picture for the first frame of the stream, then fades."""
        colours = self._colours(frame).unsqueeze(1)
        if self._last is not None:
            count = self.spec.pictures_per_frame
            weights = torch.arange(1, count + 1, device=frame.device, dtype=colours.dtype) / count
            colours = torch.lerp(self._colours(self._last).unsqueeze(1), colours, weights.view(-1, 1, 1, 1))
        large = functional.interpolate(colours.flatten(0, 1), size=self.spec.picture_size, mode="bilinear")
        return torch.sigmoid(large).reshape(*colours.shape[:3], *self.spec.picture_size)

    def _colours(self, frame: Tensor) -> Tensor:
        """B C rows columns -> B 3 rows columns, not yet squeezed into 0..1."""
        return torch.einsum("kc,bcyx->bkyx", self._mixtures, frame.to(torch.float32))

    def _check(self, latents: Tensor) -> None:
        frame = (self.spec.latent_channels, *self.spec.latent_size)
        if latents.dim() != 5 or latents.shape[2:] != frame or latents.shape[1] == 0:
            limit = f"backbone {self.spec.name!r} has frames of shape {frame}"
            raise refuse("latents.shape", tuple(latents.shape), limit, "pass B F C rows columns, F > 0")
        if self._last is not None and self._last.shape[0] != latents.shape[0]:
            limit = f"this stream began with {self._last.shape[0]} rows"
            raise refuse("latents.shape", tuple(latents.shape), limit, "open a decoder per batch")
