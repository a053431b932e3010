"""This module makes Helios a `Backbone`: text encoder, diffusers' transformer, its schedulers and autoencoder."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from recap.attention.context import BlockContext
from recap.backbones.helios.history import clean_arguments, denoising_arguments, slices
from recap.backbones.helios.processor import MemoryProcessor, Reading, check_transformer
from recap.backbones.helios.sampler import Sampler
from recap.backbones.helios.spec import HeliosSpec
from recap.backbones.text import EncodeText
from recap.contracts import Context, Decoder, Noise, State, check_state
from recap.errors import refuse
from recap.types import BackboneSpec

ZERO_STEPS = 2
"""CFG-Zero* leaves out this many steps at the beginning of a chunk."""


@dataclass(frozen=True, slots=True)
class HeliosConditioning:
    """Holds prompts as the model reads them, B text_len text_dim; without guidance there is no negative one."""

    prompt: Tensor
    negative: Tensor | None


class HeliosBackbone:
    """Generates with a Helios model; it has no state: what was generated before comes with the context.

    Rollouts may take turns; two calls must not overlap, since the processors of all layers share one `Reading`.
    """

    def __init__(
        self,
        spec: HeliosSpec,
        transformer: Any,
        scheduler: Any,
        encode: EncodeText,
        vae: Any,
        *,
        negative_prompt: str = "",
        stage_reinforcement: Sequence[float] = (),
        device: torch.device | str | None = None,
    ) -> None:
        """Put processors into the transformer, which computes on `device`, wherever its weights are kept."""
        check_transformer(transformer)
        self.row = spec
        self.spec: BackboneSpec = spec.backbone_spec()
        self.transformer = transformer.eval().requires_grad_(False)
        self.device = torch.device(device) if device is not None else transformer.device
        self.vae = vae
        self._scheduler = scheduler
        self._encode = encode
        self._negative = negative_prompt
        self._stages = check_stages(stage_reinforcement, len(spec.steps))
        self._reading = Reading(transformer.rope)
        for layer, block in enumerate(transformer.blocks):
            block.attn1.set_processor(MemoryProcessor(block.attn1.processor, layer, self._reading))

    @torch.no_grad()
    def condition(self, prompts: tuple[str, ...]) -> HeliosConditioning:
        """Encode one prompt per row."""
        if not prompts:
            raise refuse("prompts", prompts, "a batch has at least one row", "pass one prompt per row")
        place = {"device": self.device, "dtype": self.transformer.dtype}
        text = torch.cat([self._encode(prompt) for prompt in prompts]).to(**place)
        if self.row.guidance <= 1:
            return HeliosConditioning(text, None)
        negative = self._encode(self._negative).to(**place)
        return HeliosConditioning(text, negative.expand(len(prompts), -1, -1))

    @torch.no_grad()
    def denoise(self, noise: Noise, conditioning: HeliosConditioning, context: Context) -> Tensor:
        """Generate one chunk, B F C rows columns; calls `noise` once, and once per finer stage of the pyramid."""
        assert isinstance(context, BlockContext), "Helios reads its past from the context"
        row, spec, past = self.row, self.spec, context.past
        dtype, rows = self.transformer.dtype, conditioning.prompt.shape[0]
        shape = (rows, spec.latent_channels, spec.frames_per_block, *spec.latent_size)
        fixed = denoising_arguments(past, row.history_frames, shape, dtype, self.device)

        def predict(latents: Tensor, time: Tensor, stage: int, step: int) -> Tensor:
            current = latents[0, 0].numel() // row.patch**2
            places = slices(spec.grid, row.history_frames, current, real=past.opening is not None)
            bias = self._stages[stage] if self._stages else None
            with self._reading.denoising(context, places, spec.grid, stage=stage, reinforcement=bias):
                asked = {"hidden_states": latents.to(dtype), "timestep": time, **fixed}
                flow = self._forward(asked, conditioning.prompt)
                if conditioning.negative is None:
                    return flow
                other = self._forward(asked, conditioning.negative)
            return self._guided(flow, other, skipped=stage == 0 and step < ZERO_STEPS)

        # A scheduler counts its steps in itself; a copy per chunk keeps this object without state.
        sampler = Sampler(row, copy.deepcopy(self._scheduler), self.device, dtype)
        try:
            generated = sampler.run(noise, predict, first=past.opening is None)
        finally:
            self._reading.forget()
        return generated.transpose(1, 2)

    @torch.no_grad()
    def settle(self, latents: Tensor, conditioning: HeliosConditioning, context: Context) -> None:
        """Run the clean pass: the finished frames as short history at time 0, for a memory that has a use for it."""
        assert isinstance(context, BlockContext), "Helios reads its past from the context"
        if not context.wants_tokens:
            return
        row, past, dtype = self.row, context.past, self.transformer.dtype
        finished = latents.transpose(1, 2).to(self.device)
        denoising = denoising_arguments(past, row.history_frames, finished.shape, dtype, self.device)
        opening = None if past.opening is None else past.opening.transpose(1, 2)
        asked = clean_arguments(denoising, finished, opening)
        history = (*row.history_frames[:2], finished.shape[2])
        places = slices(self.spec.grid, history, 0, real=True)
        with self._reading.settled(context, places, self.spec.grid):
            self._forward(asked, conditioning.prompt)

    def decoder(self) -> Decoder:
        """Open a new decoding stream, in which every chunk is alone."""
        return ChunkDecoder(self.vae)

    def encode(self, pixels: Tensor) -> Tensor:
        """Refuse: there is no way to begin from pictures."""
        limit = f"backbone {self.spec.name!r} begins from text only here: it was trained on noised openings"
        remedy = "pass image= or video= to diffusers' own pipeline inside recap.attach"
        raise refuse("opening", tuple(pixels.shape), limit, remedy)

    def _forward(self, asked: dict[str, Any], text: Tensor) -> Tensor:
        found: Tensor = self.transformer(encoder_hidden_states=text, return_dict=False, **asked)[0]
        return found

    def _guided(self, flow: Tensor, other: Tensor, *, skipped: bool) -> Tensor:
        guidance = self.row.guidance
        if not self.row.zero_star:
            return other + guidance * (flow - other)
        if skipped:
            return flow * 0.0
        positive, negative = flow.flatten(1).float(), other.flatten(1).float()
        power = (negative**2).sum(dim=1, keepdim=True) + 1e-8
        scale = (positive * negative).sum(dim=1, keepdim=True) / power
        scale = scale.view(-1, *[1] * (flow.dim() - 1)).to(flow.dtype)
        return other * scale + guidance * (flow - other * scale)


class ChunkDecoder:
    """Decodes with diffusers' `AutoencoderKLWan`, started again at every chunk, as Helios is decoded."""

    def __init__(self, vae: Any) -> None:
        self._vae = vae

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """Decode B F C rows columns to B T 3 Y X in 0..1; the first frame is one picture."""
        vae = self._vae
        weight = next(vae.parameters())
        shape = (1, -1, 1, 1, 1)
        mean = torch.tensor(vae.config.latents_mean).view(shape).to(weight.device, vae.dtype)
        scale = 1.0 / torch.tensor(vae.config.latents_std).view(shape).to(weight.device, vae.dtype)
        raw = latents.transpose(1, 2).to(weight.device, vae.dtype) / scale + mean
        pictures: Tensor = vae.decode(raw, return_dict=False)[0]
        return (pictures.transpose(1, 2).float() * 0.5 + 0.5).clamp(0, 1)

    def state(self) -> State:
        return {}

    def load_state(self, state: State) -> None:
        """Refuse anything: no chunk depends on another."""
        check_state(state, {}, "decoder state")


def check_stages(reinforcement: Sequence[float], stages: int | None = None) -> tuple[float, ...]:
    """Return lambda of every stage, coarsest first; an empty tuple leaves the memory's own everywhere."""
    values = tuple(reinforcement)
    if stages is not None and values and len(values) != stages:
        limit = f"one value for each of the {stages} stages is needed, the coarsest first"
        raise refuse("stage_reinforcement", values, limit, "leave it out for the memory's own everywhere")
    for value in values:
        if not isinstance(value, (int, float)) or not 0 < value < float("inf"):
            limit = "each must be a number above 0 and finite"
            raise refuse("stage_reinforcement", values, limit, "1 leaves the sink as it is")
    return values
