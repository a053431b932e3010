"""This module makes Wan a `Backbone`: text encoder, transformer, sampler and decoder in one object."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor, nn

from recap.backbones.text import EncodeText, HashedWords
from recap.backbones.wan.decoder import UpsampleDecoder
from recap.backbones.wan.model import CausalWan, TextConditioning
from recap.backbones.wan.schedule import clean_estimate, model_time, renoise, warp
from recap.backbones.wan.spec import UNTRAINED, WanSpec
from recap.backbones.wan.vae import WanVae
from recap.contracts import Context, Decoder, Noise
from recap.errors import refuse
from recap.types import BackboneSpec

EncodePixels = Callable[[Tensor], Tensor]
"""Encodes pictures B T 3 Y X in 0..1 as latents B F C rows columns."""


class Transformer(Protocol):
    """Predicts the flow of latents at one time, and settles them, as `CausalWan` does."""

    def __call__(
        self, latents: Tensor, timestep: float, conditioning: TextConditioning, context: Context, /
    ) -> Tensor: ...

    def settle(
        self, latents: Tensor, timestep: float, conditioning: TextConditioning, context: Context, /
    ) -> None: ...


CLEAN_TIME = 0.0


class WanBackbone:
    """Generates with a causal Wan model; it keeps nothing between calls.

    Calls run under `no_grad`, not `inference_mode`: a memory keeps tensors created here and may change them in
    place later, which inference tensors forbid. `autoencoder` names the model behind `open_decoder`, so that
    `recap.fast` can use a faster version of it, or move it to another device.
    """

    def __init__(
        self,
        model: CausalWan,
        encode: EncodeText,
        open_decoder: Callable[[], Decoder],
        encode_pixels: EncodePixels | None = None,
        autoencoder: WanVae | nn.Module | None = None,
    ) -> None:
        self.model = model.eval().requires_grad_(False)
        self.spec: BackboneSpec = model.spec.backbone_spec()
        # What runs the model: itself, or several processes together.
        self._transformer: Transformer = self.model
        self._encode = encode
        self.open_decoder = open_decoder
        self.autoencoder = autoencoder
        self._encode_pixels = encode_pixels
        self._sigmas = warp(model.spec.steps, model.spec.shift)

    @torch.no_grad()
    def condition(self, prompts: tuple[str, ...]) -> TextConditioning:
        """Encode one prompt per row."""
        if not prompts:
            raise refuse("prompts", prompts, "a batch has at least one row", "pass one prompt per row")
        return self.model.condition(torch.cat([self._encode(prompt) for prompt in prompts]))

    @torch.no_grad()
    def denoise(self, noise: Noise, conditioning: TextConditioning, context: Context) -> Tensor:
        """Generate one block, B F C rows columns; calls `noise` once to start and once before each later step."""
        first, *later = self._sigmas
        clean = self._estimate(self._next(noise), first, conditioning, context)
        for sigma in later:
            noisy = renoise(clean, self._next(noise), sigma)
            clean = self._estimate(noisy, sigma, conditioning, context)
        return clean

    @torch.no_grad()
    def settle(self, latents: Tensor, conditioning: TextConditioning, context: Context) -> None:
        """Run the layers at the clean time, in which the context passes keys and values to the memory."""
        self._transformer.settle(self._take(latents), CLEAN_TIME, conditioning, context)

    def decoder(self) -> Decoder:
        """Open a new decoding stream."""
        return self.open_decoder()

    @torch.no_grad()
    def encode(self, pixels: Tensor) -> Tensor:
        """Encode pictures as latents."""
        if self._encode_pixels is None:
            limit = f"backbone {self.spec.name!r} cannot read pictures"
            raise refuse("opening", tuple(pixels.shape), limit, "use a backbone that has an encoder")
        return self._take(self._encode_pixels(pixels))

    def _estimate(
        self, noisy: Tensor, sigma: float, conditioning: TextConditioning, context: Context
    ) -> Tensor:
        flow = self._transformer(noisy, model_time(sigma), conditioning, context)
        return clean_estimate(noisy, flow, sigma)

    def _next(self, noise: Noise) -> Tensor:
        # A blocking copy would wait, at every step, for all work queued so far.
        return noise().to(self.model.device, self.model.dtype, non_blocking=True)

    def _take(self, latents: Tensor) -> Tensor:
        return latents.to(self.model.device, self.model.dtype)


def build_untrained(
    seed: int = 0,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    spec: WanSpec = UNTRAINED,
) -> WanBackbone:
    """Build a small model whose weights depend only on the seed; words are hashed, and the decoder mixes colours."""
    # Built with storage at once, as tensors without any make torch import half a second of algebra.
    with torch.random.fork_rng(devices=[]):
        model = CausalWan(spec)
    draw_weights(model, seed)
    text, sizes = HashedWords(spec.text_len, spec.text_dim), spec.backbone_spec()
    return WanBackbone(model.to(device=device, dtype=dtype), text, lambda: UpsampleDecoder(sizes))


@dataclass(frozen=True, slots=True)
class UntrainedConfig:
    """Builds the real layers at a small size, with random weights: for tests."""

    seed: int = 0
    # 1 generates frame by frame.
    frames_per_block: int = UNTRAINED.frames_per_block

    def build(self, *, device: str, dtype: torch.dtype, **_: object) -> WanBackbone:
        return build_untrained(
            self.seed, device, dtype, replace(UNTRAINED, frames_per_block=self.frames_per_block)
        )


@torch.no_grad()
def draw_weights(model: CausalWan, seed: int) -> None:
    """Fill every parameter with random values, in fp32 on the CPU in the order of names: the same for all devices.

    Matrices preserve the variance of their input; modulation tables are Gaussian / sqrt(dim), norms are one.
    The head is halved, so that a wrong flow stays smaller than the noise it is subtracted from.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in sorted(model.named_parameters()):
        if name.endswith("modulation"):
            scale, centre = model.spec.dim**-0.5, 0.0
        elif "norm" in name:
            scale, centre = 0.0, float(name.endswith("weight"))
        elif parameter.dim() == 1:
            scale, centre = 0.02, 0.0
        else:
            gain = 0.5 if name == "head.head.weight" else 1.0
            scale, centre = gain * parameter[0].numel() ** -0.5, 0.0
        parameter.copy_(centre + scale * torch.randn(parameter.shape, generator=generator))
