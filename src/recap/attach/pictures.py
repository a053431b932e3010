"""Pictures of an upstream video: decoded block by block for the memory, kept for the pipeline's last step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from recap.contracts import Decoder
from recap.errors import refuse


class Pictures:
    """One stream of pictures per video.

    The pipeline's own autoencoder keeps the state of its one stream in itself, so while attached nobody else may
    stream through it; whole videos may be decoded by it between videos.
    """

    def __init__(self, vae: Any, open_decoder: Callable[[], Decoder] | None, keep: bool):
        self._vae = vae
        self._decode: Callable[..., Tensor] = vae.decode_to_pixel  # ours may take its place later
        self._open_decoder = open_decoder
        self._stream: Decoder | None = None
        self._keep = keep and open_decoder is None
        self._latents: list[Tensor] = []
        self._pictures: list[Tensor] = []  # -1..1, as the autoencoder gives them

    def restart(self) -> None:
        """A new video begins."""
        self._latents, self._pictures = [], []
        if self._open_decoder is not None:
            self._stream = self._open_decoder()
        else:
            self._vae.model.clear_cache()

    def decode(self, latents: Tensor) -> Tensor:
        """The next block, B F C rows columns -> B T 3 Y X in 0..1."""
        if self._stream is not None:
            return self._stream.decode(latents)
        if latents.shape[0] != 1:
            limit = "the pipeline's autoencoder streams one row at a time"
            raise refuse("batch", latents.shape[0], limit, "generate rows one by one, or pass decoder=")
        pictures = self._decode(latents, use_cache=True)
        if self._keep:
            self._latents.append(latents.clone())
            self._pictures.append(pictures)
        return (pictures.float() * 0.5 + 0.5).clamp(0, 1)

    def decode_to_pixel(self, latents: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Stands in for the autoencoder's method: a whole video that was decoded on the way is not decoded again."""
        known = torch.cat(self._latents, dim=1) if self._latents else None
        if known is None or known.shape != latents.shape or not torch.equal(known.to(latents), latents):
            return self._decode(latents, *args, **kwargs)
        video = torch.cat(self._pictures, dim=1)
        self._latents, self._pictures = [], []  # a long video is gigabytes
        return video
