"""This module states the sizes of the public Helios models, which are one 14B transformer, sampled in three ways."""

from __future__ import annotations

from dataclasses import dataclass

from recap.types import BackboneSpec

VAE_STRIDE = 8
"""Pixels along the side of one latent of Wan2.1's autoencoder."""
PICTURES_PER_FRAME = 4
PICTURES_PER_SECOND = 24


@dataclass(frozen=True, slots=True)
class HeliosSpec:
    """Holds the sizes of one released checkpoint and how it is sampled. The defaults are those of Helios-Base."""

    name: str = "helios-base"
    repository: str = "BestWishYsh/Helios-Base"
    layers: int = 40
    heads: int = 40
    head_dim: int = 128
    latent_channels: int = 16
    patch: int = 2
    text_len: int = 512
    text_dim: int = 4096
    height: int = 384
    width: int = 640
    frames_per_block: int = 9
    # Long, mid and newest frames; the opening frame comes in addition.
    history_frames: tuple[int, int, int] = (16, 2, 1)
    # Per stage of the pyramid, coarsest first; a single entry means no pyramid.
    steps: tuple[int, ...] = (50,)
    # 1 means no second forward.
    guidance: float = 5.0
    # Whether the second forward is scaled to the first, and the first steps of a chunk are skipped.
    zero_star: bool = False
    distilled: bool = False
    # Whether the first chunk takes twice the steps, as in the authors' scripts.
    amplify_first: bool = False

    def backbone_spec(self) -> BackboneSpec:
        """Return the part of the sizes that the rest of the package needs."""
        side = self.patch * VAE_STRIDE
        return BackboneSpec(
            name=self.name,
            layers=self.layers,
            heads=self.heads,
            head_dim=self.head_dim,
            grid=(self.height // side, self.width // side),
            token_pixels=side,
            latent_channels=self.latent_channels,
            latent_size=(self.height // VAE_STRIDE, self.width // VAE_STRIDE),
            frames_per_block=self.frames_per_block,
            window_frames=1 + sum(self.history_frames) + self.frames_per_block,
            pictures_per_frame=PICTURES_PER_FRAME,
            pictures_per_second=PICTURES_PER_SECOND,
            carries_history=True,
            decodes_alone=True,
        )


BASE = HeliosSpec()
MID = HeliosSpec("helios-mid", "BestWishYsh/Helios-Mid", steps=(20, 20, 20), zero_star=True)
DISTILLED = HeliosSpec(
    "helios-distilled",
    "BestWishYsh/Helios-Distilled",
    steps=(2, 2, 2),
    guidance=1.0,
    distilled=True,
    amplify_first=True,
)
ROWS = {row.name: row for row in (BASE, MID, DISTILLED)}
