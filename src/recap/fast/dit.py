"""Computes the causal Wan transformer on a GPU: one recording per block, and nothing is computed twice.

The parameters are those of the readable model. The forward differs from the readable one in that
- everything that depends only on the time is computed once, for all steps of the sampler;
- one product computes queries, keys and values;
- kept keys are rotated once per block into fixed storage, and every step writes its own keys behind them;
- keys with a bias are read separately and merged by log-sum-exp; one kernel reads all others, at the same time;
- the element-wise work between two products is one kernel, and all steps of a block are one CUDA graph.

Rounding differs from the readable path; `recap bench --compare` measures by how much.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from recap.attention.attend import plain_share, read_group
from recap.attention.rope import Rotation, rotate
from recap.backbones.wan.layers import TransformerBlock
from recap.backbones.wan.model import CausalWan, TextConditioning
from recap.backbones.wan.quantised import Float8Linear, Float8Tokens, join_linears, quantise_tokens
from recap.contracts import Aside
from recap.fast.graphs import SideStream
from recap.fast.windows import Pair, WindowStorage
from recap.rollout import at_once

Hidden = Tensor | Float8Tokens
"""The input of a linear layer; kernels write it in 8 bits where the layer multiplies in 8 bits."""


class FastLayer(NamedTuple):
    """Keeps a transformer block, and those of its parameters that are used in another form."""

    block: TransformerBlock
    # The linear layer of queries, keys and values together.
    qkv: Callable[[Hidden], Tensor]
    # In fp32.
    norm_text: Pair


def read_layer(block: TransformerBlock) -> FastLayer:
    """Prepare a block; its three projections become parts of one, so that nothing is stored twice."""
    own, norm = block.self_attn, block.norm3
    qkv = join_linears((own.q, own.k, own.v))
    return FastLayer(block, qkv, (norm.weight.detach().float(), norm.bias.detach().float()))


# Element-wise work: these functions define what each kernel computes. x B N M passes from layer to layer.


def norm(
    x: Tensor,
    affine: Pair,
    eps: float,
    added: Tensor | None = None,
    gate: Tensor | None = None,
    float8: bool = False,
) -> tuple[Tensor, Hidden]:
    """Return x + gate added, and its norm over channels, scaled and shifted by the fp32 vectors of `affine`."""
    if added is not None:
        x = x + (added if gate is None else (gate * added).to(x.dtype))
    normed = (functional.layer_norm(x, x.shape[-1:], eps=eps) * affine[0] + affine[1]).to(x.dtype)
    return x, quantise_tokens(normed) if float8 else normed


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise by the root mean square over channels."""
    normed: Tensor = functional.rms_norm(x, x.shape[-1:], eps=eps) * weight
    return normed


def split_rotate(
    qkv: Tensor, norms: Pair, rope: Rotation, own: Pair, eps: float, keep: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Split, normalise and rotate: rotated keys and the values are written to `own`.

    Returns rotated queries, then queries and keys without rotation; `keep` matters only to the kernel version.
    """
    heads = own[0].shape[-2]
    query, keys, values = qkv.chunk(3, dim=-1)
    query, keys = (
        rms(x, weight, eps).unflatten(-1, (heads, -1)) for x, weight in zip((query, keys), norms, strict=True)
    )
    own[0].copy_(rotate(keys, rope))
    own[1].copy_(values.unflatten(-1, (heads, -1)))
    return rotate(query, rope), query, keys


def merge(
    outputs: Sequence[Tensor],
    masses: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    float8: bool = False,
) -> tuple[Hidden, Tensor]:
    """Merge parts B H N D by log-sum-exps B H N and biases B H into B N (H D); also return each share, parts B N."""
    parts = zip(masses, biases, strict=True)
    biased = torch.stack([mass if bias is None else mass + bias.unsqueeze(-1) for mass, bias in parts])
    weights = biased.softmax(dim=0)
    merged = weights[0].unsqueeze(-1) * outputs[0]
    for weight, output in zip(weights[1:], outputs[1:], strict=True):
        merged.addcmul_(weight.unsqueeze(-1), output.to(merged.dtype))
    read = merged.to(outputs[0].dtype).transpose(1, 2).flatten(2)
    return quantise_tokens(read) if float8 else read, weights.mean(dim=2)


def fill(keys: Tensor, values: Tensor, rope: Rotation, new_keys: Tensor, new_values: Tensor) -> None:
    """Write keys B N H D, rotated, and values into a window."""
    new_keys.copy_(rotate(keys, rope))
    new_values.copy_(values)


def linear(x: Hidden, layer: Callable[[Hidden], Tensor]) -> Tensor:
    """Compute a linear layer."""
    return layer(x)


def widen(x: Hidden, layer: torch.nn.Module) -> Hidden:
    """Compute a linear layer and its GELU; a kernel may choose another scale for 8 bits."""
    wide = functional.gelu(layer(x), approximate="tanh")
    return quantise_tokens(wide) if isinstance(x, Float8Tokens) else wide


def choose_kernels(device: torch.device) -> Any:
    """Return the module whose functions do the element-wise work: Triton's on a GPU, else this one."""
    # Imported by name because it needs Triton, which comes with CUDA builds only.
    return sys.modules[__name__] if device.type != "cuda" else import_module("recap.fast.dit_kernels")


class LayerTokens(NamedTuple):
    """Names what a layer computed for the block: queries, keys and values B N H D, without rotation."""

    queries: Tensor
    keys: Tensor
    values: Tensor
    # B H: the share of the measured group without any bias.
    plain: Tensor | None


class TimeTables(NamedTuple):
    """Keeps everything that depends only on the time, in fp32."""

    # L 6 M: shift, 1 + scale and gate of attention, then of feed-forward.
    layers: Tensor
    # 2 M: shift and 1 + scale.
    head: Tensor


class FastWan:
    """Computes the model's forward over a filled window, at times that are known in advance."""

    def __init__(self, model: CausalWan, times: Sequence[float]) -> None:
        self.model = model
        self.kernels = choose_kernels(model.device)
        self.aside: Aside = SideStream(model.device, first=True) if model.device.type == "cuda" else at_once
        blocks = [block for block in model.blocks if isinstance(block, TransformerBlock)]
        self.layers = [read_layer(block) for block in blocks]
        # Whether linear layers multiply in 8 bits: kernels then write their inputs so.
        self.float8 = isinstance(blocks[0].self_attn.q, Float8Linear)
        self.steps = []
        ones = torch.zeros(6, 1, device=model.device)
        ones[[1, 4]] = 1
        for time in times:
            embedded, projected = model.embed_time(time)
            tables = torch.cat([block.modulation + projected[0] for block in blocks]).float() + ones
            head = (model.head.modulation + embedded).squeeze(0).float() + ones[:2]
            self.steps.append(TimeTables(tables, head))

    def forward(self, latents: Tensor, step: int, text: TextConditioning, window: WindowStorage) -> Pair:
        """Return flow B F C rows columns and each group's share of attention, groups B."""
        model, shares = self.model, []
        x, hidden = self._begin(latents, step)
        for index in range(len(self.layers)):
            attended, share = self._attend(index, step, hidden, window)
            shares.append(share)
            x, hidden = self._finish(index, step, x, attended, text)
        patches = model.head.head(hidden).unflatten(1, (latents.shape[1], -1))
        return model.unpatchify(patches), torch.stack(shares).mean(dim=(0, 3))

    def settle(
        self, latents: Tensor, step: int, text: TextConditioning, window: WindowStorage
    ) -> list[LayerTokens]:
        """Return what every layer makes of the block; of the last layer nothing else is computed."""
        found: list[LayerTokens] = []
        x, hidden = self._begin(latents, step)
        for index in range(len(self.layers)):
            tokens, attended = self._leave(index, step, hidden, window)
            found.append(tokens)
            if attended is not None:
                x, hidden = self._finish(index, step, x, attended, text)
        return found

    def _begin(self, latents: Tensor, step: int) -> tuple[Tensor, Hidden]:
        """Return the tokens B N M of latents, and their norm for the first layer."""
        x = self.model.patch_embedding(latents.transpose(1, 2)).flatten(2).transpose(1, 2).contiguous()
        shift, scale = self.steps[step].layers[0, :2]
        _, hidden = self.kernels.norm(x, (scale, shift), self.model.spec.eps, float8=self.float8)
        return x, hidden

    def _attend(self, index: int, step: int, hidden: Hidden, window: WindowStorage) -> tuple[Hidden, Tensor]:
        """Read the window; returns B N M, before its projection, and each group's share, groups B N."""
        rotated, *_ = self._own(index, hidden, window)
        return self._join(index, step, self._read_groups(index, rotated, window), window)

    def _leave(
        self, index: int, step: int, hidden: Hidden, window: WindowStorage
    ) -> tuple[LayerTokens, Hidden | None]:
        """Return the layer's tokens and what it read, B N M; None of the last layer, which reads for no other."""
        rotated, query, keys = self._own(index, hidden, window, keep=True)
        asked, last = window.measured, index + 1 == len(self.layers)
        parts = [] if last and asked is None else self._read_groups(index, rotated, window)
        plain = None if asked is None else plain_share([mass for _, mass in parts], asked)
        tokens = LayerTokens(*window.leave(index, query, keys), plain)
        return tokens, None if last else self._join(index, step, parts, window)[0]

    def _own(
        self, index: int, hidden: Hidden, window: WindowStorage, keep: bool = False
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Write the block's own keys and values into the window; returns rotated queries, then both unrotated.

        Queries are B H N D for reading; the unrotated ones, only with `keep`, and keys are B N H D.
        """
        layer, kernels = self.layers[index], self.kernels
        norms = layer.block.self_attn.norm_q.weight, layer.block.self_attn.norm_k.weight
        qkv = kernels.linear(hidden, layer.qkv)
        rotated, query, keys = kernels.split_rotate(
            qkv, norms, window.rope, window.own_slices(index), self.model.spec.eps, keep
        )
        return rotated.transpose(1, 2), query, keys

    def _join(self, index: int, step: int, parts: list[Pair], window: WindowStorage) -> tuple[Hidden, Tensor]:
        """Merge what was read of each group."""
        kernels = self.kernels
        if len(parts) == 1:
            read = parts[0][0].transpose(1, 2).flatten(2)
            share = read.new_ones((1, *read.shape[:2]), dtype=torch.float32)
            return kernels.quantise_tokens(read) if self.float8 else read, share
        outputs, masses = zip(*parts, strict=True)
        biases = [None if table is None else table.values[step, index] for table in window.biases]
        joined: tuple[Hidden, Tensor] = kernels.merge(outputs, masses, biases, self.float8)
        return joined

    def _finish(
        self, index: int, step: int, x: Tensor, attended: Hidden, text: TextConditioning
    ) -> tuple[Tensor, Hidden]:
        """Compute a layer after its self-attention; also returns the norm for the next layer, or for the head."""
        eps, kernels, float8 = self.model.spec.eps, self.kernels, self.float8
        table, head = self.steps[step]
        _, _, gate1, shift2, scale2, gate2 = table[index]
        last = index + 1 == len(self.layers)
        following = head if last else table[index + 1]
        layer = self.layers[index]
        merged = kernels.linear(attended, layer.block.self_attn.o)
        x, hidden = kernels.norm(x, layer.norm_text, eps, merged, gate1, float8)
        read = self._read_text(index, hidden, text)
        x, hidden = kernels.norm(x, (scale2, shift2), eps, read, None, float8)
        fed = kernels.linear(kernels.widen(hidden, layer.block.ffn[0]), layer.block.ffn[2])
        # The head is no layer of 8 bits.
        x, hidden = kernels.norm(x, (following[1], following[0]), eps, fed, gate2, float8 and not last)
        return x, hidden

    def _read_groups(self, index: int, query: Tensor, window: WindowStorage) -> list[Pair]:
        """Read every group of keys with queries B H N D; returns each one's output and log-sum-exp.

        The last group has by far the most keys. Its kernel leaves many processors idle at its end, since all programs
        take equally long and their number is no multiple of the processors'; the small groups run there.
        """

        def read(group: int) -> Pair:
            keys, values = (store[group][index].transpose(1, 2) for store in (window.keys, window.values))
            return read_group(query, keys, values, window.token_bias[group])

        *small, last = range(len(window.keys))
        if not small:
            return [read(last)]
        large: list[Pair] = []
        # First in line, so that the small ones fill its gaps instead of delaying it.
        wait = self.aside(lambda: large.append(read(last)))
        parts = [read(group) for group in small]
        wait()
        return parts + large

    def _read_text(self, index: int, hidden: Hidden, text: TextConditioning) -> Tensor:
        """Compute the cross attention on hidden B N M."""
        attention, spec, kernels = self.layers[index].block.cross_attn, self.model.spec, self.kernels
        normed = kernels.rms(kernels.linear(hidden, attention.q), attention.norm_q.weight, spec.eps)
        query = normed.unflatten(-1, (spec.heads, -1)).transpose(1, 2)
        keys, values = text.keys[index].transpose(1, 2), text.values[index].transpose(1, 2)
        read = functional.scaled_dot_product_attention(query, keys, values).transpose(1, 2).flatten(2)
        merged: Tensor = kernels.linear(kernels.quantise_tokens(read) if self.float8 else read, attention.o)
        return merged
