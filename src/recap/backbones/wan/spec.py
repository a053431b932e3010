"""This module states the sizes of the Wan family."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from recap.errors import refuse
from recap.types import BackboneSpec

NUM_TRAIN_STEPS = 1000
"""The family was trained on a schedule of this many points; model time runs from 0 (clean) to this."""


@dataclass(frozen=True, slots=True)
class WanSpec:
    """Holds architecture, geometry and sampler of one model. The defaults are Wan2.1 1.3B with the paper's window."""

    name: str = "wan-1.3b"
    dim: int = 1536
    ffn_dim: int = 8960
    heads: int = 12
    layers: int = 30
    # Channels of the sinusoidal embedding of the time.
    freq_dim: int = 256
    text_dim: int = 4096
    text_len: int = 512
    in_channels: int = 16
    out_channels: int = 16
    # Frames, rows and columns of latents in one token.
    patch: tuple[int, int, int] = (1, 2, 2)
    eps: float = 1e-6
    # Rows and columns of one latent frame.
    latent_size: tuple[int, int] = (60, 104)
    # Side of a token's square of pixels.
    token_pixels: int = 16
    frames_per_block: int = 3
    window_frames: int = 6
    pictures_per_frame: int = 4
    pictures_per_second: int = 16
    shift: float = 5.0
    # Points of the unshifted schedule at which the sampler runs the model.
    steps: tuple[int, ...] = (1000, 750, 500, 250)
    phases: Literal["window", "absolute"] = "window"

    def __post_init__(self) -> None:
        if self.heads < 1 or self.dim % self.heads or self.head_dim % 2:
            limit = f"{self.heads} heads need an even, whole number of channels each"
            raise refuse("WanSpec.dim", self.dim, limit, "use an even multiple of heads")
        if self.freq_dim % 2:
            raise refuse("WanSpec.freq_dim", self.freq_dim, "half is cosines, half sines", "make it even")
        frames, rows, columns = self.patch
        if frames != 1 or rows != columns:
            raise refuse("WanSpec.patch", self.patch, "a token is a square of one frame", "use (1, n, n)")
        if self.latent_size[0] % rows or self.latent_size[1] % columns:
            limit = f"a frame must split into patches of {rows} x {columns}"
            raise refuse("WanSpec.latent_size", self.latent_size, limit, "use multiples of the patch")
        if self.token_pixels % rows:
            limit = f"each of the {rows} latents along a token's side covers a whole number of pixels"
            raise refuse("WanSpec.token_pixels", self.token_pixels, limit, "use a multiple of the patch")
        if self.in_channels != self.out_channels:
            limit = f"the predicted flow is subtracted from latents of {self.in_channels} channels"
            raise refuse("WanSpec.out_channels", self.out_channels, limit, "use in_channels")
        if not 1 <= self.frames_per_block <= self.window_frames:
            limit = f"a block has a frame at least, and the window of {self.window_frames} must hold it"
            raise refuse("WanSpec.frames_per_block", self.frames_per_block, limit, "use for instance 3 of 6")
        if not all(isinstance(step, int) and not isinstance(step, bool) for step in self.steps):
            remedy = "use for instance (1000, 500)"
            raise refuse("WanSpec.steps", self.steps, "steps are whole numbers", remedy)
        falling = all(a > b for a, b in zip(self.steps, self.steps[1:], strict=False))
        if not falling or self.steps[:1] != (NUM_TRAIN_STEPS,) or self.steps[-1] < 1:
            limit = f"steps start at {NUM_TRAIN_STEPS}, where a block is pure noise, and fall to 1 at least"
            raise refuse("WanSpec.steps", self.steps, limit, "use for instance (1000, 750, 500, 250)")

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads

    @property
    def grid(self) -> tuple[int, int]:
        """Return the token rows and columns of a frame."""
        return self.latent_size[0] // self.patch[1], self.latent_size[1] // self.patch[2]

    def backbone_spec(self) -> BackboneSpec:
        """Return the part of the sizes that the rest of the package needs."""
        return BackboneSpec(
            name=self.name,
            layers=self.layers,
            heads=self.heads,
            head_dim=self.head_dim,
            grid=self.grid,
            token_pixels=self.token_pixels,
            latent_channels=self.in_channels,
            latent_size=self.latent_size,
            frames_per_block=self.frames_per_block,
            window_frames=self.window_frames,
            pictures_per_frame=self.pictures_per_frame,
            pictures_per_second=self.pictures_per_second,
            phases=self.phases,
            num_steps=len(self.steps),
        )


WAN_1_3B = WanSpec()
"""All public models of the family have this size; it is not itself a checkpoint."""

UNTRAINED = WanSpec(
    name="untrained",
    dim=96,
    ffn_dim=192,
    heads=4,
    layers=3,
    freq_dim=64,
    text_dim=32,
    text_len=16,
    latent_size=(8, 12),
)
"""This is the same architecture at a size that a laptop runs in milliseconds, for random weights."""

EMBEDDED = WanSpec(
    name="embedded",
    dim=384,
    ffn_dim=1408,
    heads=6,
    layers=6,
    text_dim=128,
    text_len=5,
    latent_size=(16, 26),
    shift=3.0,
)
"""This model is in the package, trained on a world of sprites: 128 x 208 pixels, a block in a second on a CPU."""


class Released(NamedTuple):
    """Holds the settings of a model's public code that differ from the paper's shared ones."""

    window_frames: int
    sink_frames: int
    phases: Literal["window", "absolute"]


RELEASED = {
    # Its cache has room for the 21 frames it was trained on and does not slide; ours slides instead of stopping.
    "self-forcing": Released(window_frames=21, sink_frames=0, phases="absolute"),
    "infinite-forcing": Released(window_frames=6, sink_frames=1, phases="window"),
    "longlive": Released(window_frames=12, sink_frames=3, phases="absolute"),
    # These were trained in Self-Forcing's code and replace its weights there: its window and phases.
    "causal-forcing": Released(window_frames=21, sink_frames=0, phases="absolute"),
    "causal-forcing-2step": Released(window_frames=21, sink_frames=0, phases="absolute"),
    "causal-forcing-1step": Released(window_frames=21, sink_frames=0, phases="absolute"),
}

PUBLIC = (
    WanSpec(name="self-forcing"),
    WanSpec(name="infinite-forcing"),
    WanSpec(name="longlive"),
    WanSpec(name="causal-forcing"),
    # Blocks of one frame. Two steps are known to be two; that they divide the schedule evenly is assumed.
    WanSpec(name="causal-forcing-2step", frames_per_block=1, steps=(1000, 500)),
    WanSpec(name="causal-forcing-1step", frames_per_block=1, steps=(1000,)),
)

ROWS = {spec.name: spec for spec in (EMBEDDED, UNTRAINED, *PUBLIC)}
"""These models of the family can be chosen by name."""
