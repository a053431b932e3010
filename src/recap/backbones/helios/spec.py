"""The public Helios rows: every size, and how each is sampled. Base, Mid and Distilled are one 14B transformer."""

from __future__ import annotations

from dataclasses import dataclass, replace

from recap.types import BackboneSpec

VAE_STRIDE = 8
"""Pixels along a side of one latent of Wan2.1's autoencoder."""
PICTURES_PER_FRAME = 4
PICTURES_PER_SECOND = 24


@dataclass(frozen=True, slots=True)
class HeliosSpec:
    """One released checkpoint. There are no defaults: BASE is stated in full, the others replace fields of it."""

    name: str
    repository: str
    layers: int
    heads: int
    head_dim: int
    latent_channels: int
    patch: int
    text_len: int
    text_dim: int
    height: int
    width: int
    frames_per_block: int
    history_frames: tuple[int, int, int]  # long, mid, newest; next to the opening frame
    steps: tuple[int, ...]  # per stage of the pyramid, coarsest first; one entry is no pyramid
    guidance: float  # 1: no second pass
    zero_star: bool  # the second pass is scaled to the first, and the first steps of a chunk are skipped
    distilled: bool
    amplify_first: bool  # twice the steps in the first chunk, as the authors' scripts have it

    def backbone_spec(self) -> BackboneSpec:
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


BASE = HeliosSpec(
    name="helios-base",
    repository="BestWishYsh/Helios-Base",
    layers=40,
    heads=40,
    head_dim=128,
    latent_channels=16,
    patch=2,
    text_len=512,
    text_dim=4096,
    height=384,
    width=640,
    frames_per_block=9,
    history_frames=(16, 2, 1),
    steps=(50,),
    guidance=5.0,
    zero_star=False,
    distilled=False,
    amplify_first=False,
)
MID = replace(
    BASE,
    name="helios-mid",
    repository="BestWishYsh/Helios-Mid",
    steps=(20, 20, 20),
    zero_star=True,
)
DISTILLED = replace(
    BASE,
    name="helios-distilled",
    repository="BestWishYsh/Helios-Distilled",
    steps=(2, 2, 2),
    guidance=1.0,
    distilled=True,
    amplify_first=True,
)
ROWS = {row.name: row for row in (BASE, MID, DISTILLED)}
