"""This is the causal Wan transformer: it takes noisy latents, their time and a prompt, and predicts the flow.

It predicts v = noise - clean. The past enters only through the context; nothing is kept between calls.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from recap.backbones.wan.layers import Head, TransformerBlock, sinusoid
from recap.backbones.wan.spec import WanSpec
from recap.contracts import Context
from recap.errors import refuse
from recap.io.weights import without_storage
from recap.types import widest


@dataclass(frozen=True, slots=True)
class TextConditioning:
    """Holds the prompts' keys and values for the cross attention of each layer, B L H D, computed once per prompt."""

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]

    @property
    def rows(self) -> int:
        return self.keys[0].shape[0]


class CausalWan(nn.Module):
    """Predicts the flow with Wan's diffusion transformer; a context does its self-attention."""

    def __init__(self, spec: WanSpec) -> None:
        super().__init__()
        self.spec = spec
        self.patch_embedding = nn.Conv3d(spec.in_channels, spec.dim, spec.patch, stride=spec.patch)
        self.text_embedding = nn.Sequential(
            nn.Linear(spec.text_dim, spec.dim), nn.GELU(approximate="tanh"), nn.Linear(spec.dim, spec.dim)
        )
        self.time_embedding = nn.Sequential(
            nn.Linear(spec.freq_dim, spec.dim), nn.SiLU(), nn.Linear(spec.dim, spec.dim)
        )
        self.time_projection = nn.Sequential(nn.SiLU(), nn.Linear(spec.dim, 6 * spec.dim))
        self.blocks = nn.ModuleList(TransformerBlock(spec, layer) for layer in range(spec.layers))
        self.head = Head(spec)

    @property
    def device(self) -> torch.device:
        return self.head.modulation.device

    @property
    def dtype(self) -> torch.dtype:
        return self.head.modulation.dtype

    def condition(self, embeddings: Tensor) -> TextConditioning:
        """Compute the keys and values of every layer from text embeddings B L text_dim."""
        slots = (self.spec.text_len, self.spec.text_dim)
        if embeddings.dim() != 3 or embeddings.shape[1:] != slots:
            limit = f"this model reads rows of {slots[0]} slots of {slots[1]} channels"
            raise refuse("embeddings.shape", tuple(embeddings.shape), limit, "pad or cut the text to that")
        text = self.text_embedding(embeddings.to(self.device, self.dtype))
        pairs = [block.cross_attn.keys_values(text) for block in self.layers()]
        return TextConditioning(tuple(keys for keys, _ in pairs), tuple(values for _, values in pairs))

    def forward(
        self, latents: Tensor, timestep: float | Tensor, conditioning: TextConditioning, context: Context
    ) -> Tensor:
        """Predict the flow of latents B F C rows columns; `timestep` is one time for all, or B F."""
        self.check(latents, timestep, conditioning, context)
        embedded, projected = self.embed_time(timestep)
        # One tensor for all layers and steps, because the context caches rotary tables by the identity of positions.
        positions = context.positions(self.spec.grid, latents.device)
        x = self.pass_layers(self.embed_patches(latents), projected, conditioning, positions, context)
        return self.unpatchify(self.head(x, embedded))

    def settle(
        self, latents: Tensor, timestep: float | Tensor, conditioning: TextConditioning, context: Context
    ) -> None:
        """Show the context all that `forward` would, and leave out what only the flow needs."""
        self.check(latents, timestep, conditioning, context)
        _, projected = self.embed_time(timestep)
        positions = context.positions(self.spec.grid, latents.device)
        x = self.embed_patches(latents)
        self.pass_layers(x, projected, conditioning, positions, context, settles=True)

    def pass_layers(
        self,
        x: Tensor,
        time: Tensor,
        conditioning: TextConditioning,
        positions: Tensor,
        context: Context,
        settles: bool = False,
    ) -> Tensor:
        """Pass x B F S M through all layers; with `settles` the last one ends with its self-attention."""
        layers = list(zip(self.layers(), conditioning.keys, conditioning.values, strict=True))
        for block, *text in layers[: -1 if settles else None]:
            x = block(x, time, text, positions, context)
        return layers[-1][0].attend(x, time, positions, context) if settles else x

    def embed_patches(self, latents: Tensor) -> Tensor:
        """Turn latents B F C rows columns into tokens B F S M."""
        patches: Tensor = self.patch_embedding(latents.transpose(1, 2))
        return patches.flatten(3).permute(0, 2, 3, 1).contiguous()

    def unpatchify(self, patches: Tensor) -> Tensor:
        """Rearrange B F S (rows columns channels of a patch, channels fastest) to B F C rows columns."""
        _, rows, columns = self.spec.patch
        split = patches.reshape(*patches.shape[:2], *self.spec.grid, rows, columns, self.spec.out_channels)
        return split.permute(0, 1, 6, 2, 4, 3, 5).flatten(5, 6).flatten(3, 4)

    def layers(self) -> Iterator[TransformerBlock]:
        """Return the transformer blocks in order."""
        return cast(Iterator[TransformerBlock], iter(self.blocks))

    def embed_time(self, timestep: float | Tensor) -> tuple[Tensor, Tensor]:
        """Embed the time for the head, B F M, and for the blocks, B F 6 M; B and F are 1 for a scalar."""
        if isinstance(timestep, Tensor):
            time = timestep.to(self.device)
        else:
            time = torch.full((1, 1), timestep, dtype=widest(self.device), device=self.device)
        embedded: Tensor = self.time_embedding(sinusoid(time, self.spec.freq_dim).to(self.dtype))
        projected: Tensor = self.time_projection(embedded)
        return embedded, projected.reshape(*time.shape, 6, self.spec.dim)

    def check(
        self, latents: Tensor, timestep: float | Tensor, conditioning: TextConditioning, context: Context
    ) -> None:
        """Refuse arguments of `forward` whose sizes do not fit each other or the model."""
        frame = (self.spec.in_channels, *self.spec.latent_size)
        if latents.dim() != 5 or latents.shape[2:] != frame:
            limit = f"this model generates frames of shape {frame}"
            raise refuse("latents.shape", tuple(latents.shape), limit, "pass B F C rows columns of that")
        rows, frames = latents.shape[:2]
        if tuple(context.phases.shape) != (frames,):
            limit = f"the latents have {frames} frames"
            raise refuse("context.phases.shape", tuple(context.phases.shape), limit, "give each one phase")
        if conditioning.rows != rows:
            limit = f"the latents have {rows} rows"
            raise refuse("conditioning.rows", conditioning.rows, limit, "condition on one prompt per row")
        if isinstance(timestep, Tensor) and timestep.shape != (rows, frames):
            limit = f"the latents have {rows} rows of {frames} frames"
            raise refuse("timestep.shape", tuple(timestep.shape), limit, "give each frame a time, or a float")


def empty_model(spec: WanSpec) -> CausalWan:
    """Return a model without storage, to be filled; the global random generator does not advance."""
    with without_storage():
        return CausalWan(spec)
