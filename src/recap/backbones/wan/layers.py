"""This module has the layers of the Wan transformer, with the parameter names of its public checkpoints.

Shape letters in addition to those of `recap.types`: S tokens of one frame, M channels of the model, L slots of
text. Activations are B F S M, so that a per-frame modulation B F 1 M broadcasts over the tokens of its frame;
attention flattens frames and tokens to N = F S.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from recap.backbones.wan.spec import WanSpec
from recap.contracts import Context
from recap.types import Role, Segment, widest


def sinusoid(time: Tensor, size: int) -> Tensor:
    """Embed times of any shape in `size` channels: cosines, then sines, of falling frequency, in fp64."""
    half = size // 2
    exponents = torch.arange(half, dtype=widest(time.device), device=time.device) / half
    angles = time.to(exponents.dtype).unsqueeze(-1) * torch.pow(10000.0, -exponents)
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


class RMSNorm(nn.Module):
    """Normalises by the root mean square over all channels of the model, before they are split into heads."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        # The kernel computes in fp32 and rounds back to half precision; the weight multiplies after that, as in
        # training.
        return functional.rms_norm(x, self.weight.shape, eps=self.eps) * self.weight


class Projections(nn.Module):
    """Has the four projections and two norms that self and cross attention share."""

    def __init__(self, spec: WanSpec) -> None:
        super().__init__()
        self.split = (spec.heads, spec.head_dim)
        self.q = nn.Linear(spec.dim, spec.dim)
        self.k = nn.Linear(spec.dim, spec.dim)
        self.v = nn.Linear(spec.dim, spec.dim)
        self.o = nn.Linear(spec.dim, spec.dim)
        self.norm_q = RMSNorm(spec.dim, spec.eps)
        self.norm_k = RMSNorm(spec.dim, spec.eps)

    def query(self, x: Tensor) -> Tensor:
        """Project B N M to queries B N H D."""
        query: Tensor = self.norm_q(self.q(x))
        return query.reshape(*x.shape[:-1], *self.split)

    def keys_values(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Project B N M to keys and values, B N H D each."""
        keys: Tensor = self.norm_k(self.k(x))
        values: Tensor = self.v(x)
        shape = (*x.shape[:-1], *self.split)
        return keys.reshape(shape), values.reshape(shape)

    def merge(self, x: Tensor) -> Tensor:
        """Project heads B N H D back to B N M."""
        merged: Tensor = self.o(x.flatten(-2))
        return merged


class SelfAttention(Projections):
    """Attends to the block's own tokens and those that the context adds."""

    def forward(self, x: Tensor, layer: int, positions: Tensor, context: Context) -> Tensor:
        """Attend with x B N M at positions 1 N 3; the context rotates queries and keys."""
        keys, values = self.keys_values(x)
        own = [Segment(Role.CURRENT, keys, values, positions)]
        return self.merge(context.attend(layer, self.query(x), own))


class CrossAttention(Projections):
    """Attends to the prompt. There is no mask: empty text slots take part, as in training."""

    def forward(self, x: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Attend with x B N M to the prompt's keys and values B L H D."""
        query, keys, values = (part.transpose(1, 2) for part in (self.query(x), keys, values))
        read = functional.scaled_dot_product_attention(query, keys, values)
        return self.merge(read.transpose(1, 2))


class TransformerBlock(nn.Module):
    """Applies self-attention, cross-attention and feed-forward; the time modulates the first and the last."""

    def __init__(self, spec: WanSpec, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.modulation = nn.Parameter(torch.empty(1, 6, spec.dim).normal_(std=spec.dim**-0.5))
        self.norm1 = nn.LayerNorm(spec.dim, spec.eps, elementwise_affine=False)
        self.self_attn = SelfAttention(spec)
        self.norm3 = nn.LayerNorm(spec.dim, spec.eps)
        self.cross_attn = CrossAttention(spec)
        self.norm2 = nn.LayerNorm(spec.dim, spec.eps, elementwise_affine=False)
        self.ffn = nn.Sequential(
            nn.Linear(spec.dim, spec.ffn_dim), nn.GELU(approximate="tanh"), nn.Linear(spec.ffn_dim, spec.dim)
        )

    def forward(
        self, x: Tensor, time: Tensor, text: tuple[Tensor, Tensor], positions: Tensor, context: Context
    ) -> Tensor:
        """Compute x B F S M from time B F 6 M or 1 1 6 M, text keys and values B L H D, positions 1 N 3."""
        _, _, gate1, shift2, scale2, gate2 = (self.modulation + time).chunk(6, dim=2)
        x = x + gate1 * self.attend(x, time, positions, context)
        x = x + self.cross_attn(self.norm3(x).flatten(1, 2), *text).view_as(x)
        changed: Tensor = x + gate2 * self.ffn(self.norm2(x) * (1 + scale2) + shift2)
        return changed

    def attend(self, x: Tensor, time: Tensor, positions: Tensor, context: Context) -> Tensor:
        """Compute the self-attention alone, which is all that a context sees of a layer."""
        shift, scale = (self.modulation + time)[:, :, :2].split(1, dim=2)
        hidden = self.norm1(x) * (1 + scale) + shift
        attended: Tensor = self.self_attn(hidden.flatten(1, 2), self.layer, positions, context)
        return attended.view_as(x)


class Head(nn.Module):
    """Applies the last norm, modulated by the time embedding itself, and projects to latents."""

    def __init__(self, spec: WanSpec) -> None:
        super().__init__()
        frames, rows, columns = spec.patch
        self.modulation = nn.Parameter(torch.empty(1, 2, spec.dim).normal_(std=spec.dim**-0.5))
        self.norm = nn.LayerNorm(spec.dim, spec.eps, elementwise_affine=False)
        self.head = nn.Linear(spec.dim, frames * rows * columns * spec.out_channels)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        """Project x B F S M, with time B F M or 1 1 M, to B F S (rows columns channels of a patch)."""
        shift, scale = (self.modulation + time.unsqueeze(2)).chunk(2, dim=2)
        patches: Tensor = self.head(self.norm(x) * (1 + scale) + shift)
        return patches
