"""The causal Wan transformer as the GPU likes it: one recording per block, nothing computed twice.

A transformation of the finished model: the same parameters, read by other code. Against the readable forward
- what depends on the time alone is made once, for all steps of the sampler;
- queries, keys and values come from one product;
- the kept keys are turned once per block into a window of fixed storage, behind which every step writes its own;
- keys with a log-bias are read apart and merged by log-sum-exp, all others by one kernel;
- element-wise work between two products is one compiled kernel, and all steps of a block are one CUDA graph.

Rounding differs from the readable path's; `recap bench --compare` says by how much.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn import functional

from recap.attention.attend import fused_kernel
from recap.attention.rope import Rotation, rotate, rotation
from recap.backbones.wan.layers import Block
from recap.backbones.wan.model import CausalWan, Conditioning
from recap.contracts import OpenContext
from recap.types import Role, Segment

F = TypeVar("F", bound=Callable[..., object])


class Layer(NamedTuple):
    """The parameters of one block, as they are read."""

    qkv: tuple[Tensor, Tensor]  # weight (3 M) M and bias
    norm_q: Tensor
    norm_k: Tensor
    merge: tuple[Tensor, Tensor]
    norm_text: tuple[Tensor, Tensor]
    text_query: tuple[Tensor, Tensor]
    text_norm_q: Tensor
    text_merge: tuple[Tensor, Tensor]
    widen: tuple[Tensor, Tensor]
    narrow: tuple[Tensor, Tensor]


def read_layer(block: Block) -> Layer:
    """Only the three projections are copied, into one."""
    mine, text = block.self_attn, block.cross_attn
    linear = (mine.q, mine.k, mine.v)
    joined = torch.cat([p.weight for p in linear]), torch.cat([p.bias for p in linear])
    return Layer(
        qkv=(joined[0].detach(), joined[1].detach()),
        norm_q=mine.norm_q.weight.detach(),
        norm_k=mine.norm_k.weight.detach(),
        merge=_pair(mine.o),
        norm_text=_pair(block.norm3),
        text_query=_pair(text.q),
        text_norm_q=text.norm_q.weight.detach(),
        text_merge=_pair(text.o),
        widen=_pair(block.ffn[0]),
        narrow=_pair(block.ffn[2]),
    )


def _pair(module: torch.nn.Module) -> tuple[Tensor, Tensor]:
    assert isinstance(module.weight, Tensor) and isinstance(module.bias, Tensor)
    return module.weight.detach(), module.bias.detach()


# Element-wise work, each function one kernel once compiled. x B N M is the stream between layers, M channels.


def modulate(x: Tensor, shift: Tensor, scale: Tensor, eps: float) -> Tensor:
    return functional.layer_norm(x, x.shape[-1:], eps=eps) * (1 + scale) + shift


def split_turn(
    qkv: Tensor, norms: tuple[Tensor, Tensor], turn: Rotation, own: tuple[Tensor, Tensor], eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Norm and turn; turned keys and values go to their places in the window. Returns query turned, query, keys."""
    heads = own[0].shape[-2]
    query, keys, values = qkv.chunk(3, dim=-1)
    query, keys = (
        (functional.rms_norm(x, x.shape[-1:], eps=eps) * weight).unflatten(-1, (heads, -1))
        for x, weight in zip((query, keys), norms, strict=True)
    )
    own[0].copy_(rotate(keys, turn))
    own[1].copy_(values.unflatten(-1, (heads, -1)))
    return rotate(query, turn), query, keys


def merge_parts(
    outputs: Sequence[Tensor], masses: Sequence[Tensor], biases: Sequence[float]
) -> tuple[Tensor, Tensor]:
    """Parts B H N D with log-sum-exps B H N -> B N (H D), and the mass of all parts but the last."""
    biased = torch.stack([mass.float() + bias for mass, bias in zip(masses, biases, strict=True)])
    weights = biased.softmax(dim=0)
    merged = sum(
        weight.unsqueeze(-1) * output.float() for weight, output in zip(weights, outputs, strict=True)
    )
    assert isinstance(merged, Tensor)
    joined = merged.to(outputs[0].dtype).transpose(1, 2).flatten(2)
    return joined, weights[:-1].mean(dim=(2, 3))


def after_attention(
    x: Tensor, attended: Tensor, gate: Tensor, norm: tuple[Tensor, Tensor], eps: float
) -> tuple[Tensor, Tensor]:
    x = x + gate * attended
    return x, functional.layer_norm(x, x.shape[-1:], *norm, eps=eps)


def text_norm(query: Tensor, weight: Tensor, heads: int, eps: float) -> Tensor:
    normed = functional.rms_norm(query, query.shape[-1:], eps=eps) * weight
    return normed.unflatten(-1, (heads, -1)).transpose(1, 2)


def after_text(x: Tensor, read: Tensor, shift: Tensor, scale: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    x = x + read
    return x, modulate(x, shift, scale, eps)


def after_feed(
    x: Tensor, fed: Tensor, gate: Tensor, shift: Tensor, scale: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    x = x + gate * fed
    return x, modulate(x, shift, scale, eps)


def turn_into(place: Tensor, keys: Tensor, turn: Rotation) -> None:
    place.copy_(rotate(keys, turn))


class Kernels:
    """The functions above, compiled where that pays, and attention with its log-sum-exp."""

    def __init__(self, device: torch.device, *, compiled: bool) -> None:
        def ready(function: F) -> F:
            return torch.compile(function, dynamic=False, fullgraph=True) if compiled else function

        self.modulate = ready(modulate)
        self.split_turn = ready(split_turn)
        self.merge_parts = ready(merge_parts)
        self.after_attention = ready(after_attention)
        self.text_norm = ready(text_norm)
        self.after_text = ready(after_text)
        self.after_feed = ready(after_feed)
        self.turn_into = ready(turn_into)
        self._cuda = device.type == "cuda"

    def widen(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """A product and its GELU."""
        if self._cuda:  # the library's product does it before it writes
            wide: Tensor = torch._addmm_activation(bias, x.flatten(0, 1), weight.t(), use_gelu=True)
            return wide.unflatten(0, x.shape[:2])
        return functional.gelu(functional.linear(x, weight, bias), approximate="tanh")

    def read(self, query: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Queries B N H D over keys and values B N H D -> B H N D and log-sum-exp B H N."""
        q, k, v = (x.transpose(1, 2) for x in (query, keys, values))
        if self._cuda and q.dtype in (torch.bfloat16, torch.float16):
            # 0.61 ms where flash takes 1.04 (H200, 4,680 x 10,920, 12 heads of 128).
            found = torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True)
            return found[0], found[1].reshape(q.shape[:-1])
        return fused_kernel(q, k, v)


class Group(NamedTuple):
    """Keys that one kernel reads: all without a bias, or those of one role with one."""

    role: Role | None
    log_bias: float


PLAIN = Group(None, 0.0)


def group_of(segment: Segment) -> Group:
    return Group(segment.role, segment.log_bias) if segment.log_bias else PLAIN


class Window:
    """Fixed storage of what every layer may see: one group of keys per bias, the block's own tokens last of all.

    A recording reads from here, so blocks whose windows are laid out alike share it.
    """

    def __init__(self, model: CausalWan, kept: Sequence[Segment], rows: int, frames: int) -> None:
        spec = model.spec
        self.own = frames * spec.grid[0] * spec.grid[1]
        sizes: dict[Group, int] = {}
        for segment in kept:
            sizes[group_of(segment)] = sizes.get(group_of(segment), 0) + segment.keys.shape[1]
        plain = sizes.pop(PLAIN, 0)
        # The own tokens end the last group; they have no bias.
        self.groups: list[Group] = [*sizes, PLAIN]
        shape = (spec.layers, rows, -1, spec.heads, spec.head_dim)
        self.keys, self.values = (
            [
                torch.empty(*shape[:2], size, *shape[3:], dtype=model.dtype, device=model.device)
                for size in (*sizes.values(), plain + self.own)
            ]
            for _ in range(2)
        )
        wide = torch.promote_types(model.dtype, torch.float32)
        self.turn = Rotation(
            *(
                torch.empty(1, self.own, 1, spec.head_dim // 2, dtype=wide, device=model.device)
                for _ in range(2)
            )
        )

    def own_places(self, layer: int) -> tuple[Tensor, Tensor]:
        """Where a step writes the layer's own turned keys and its values."""
        return self.keys[-1][layer][:, -self.own :], self.values[-1][layer][:, -self.own :]

    def fill(self, context: OpenContext, positions: Tensor, kernels: Kernels) -> None:
        """Bring in all that is kept, and the positions 1 N 3 of the block's own tokens."""
        layers, head_dim = len(self.keys[0]), self.keys[0].shape[-1]
        tables: dict[int, Rotation] = {}
        device, wide = self.turn.cos.device, self.turn.cos.dtype
        own = rotation(positions, head_dim, wide)
        self.turn.cos.copy_(own.cos)
        self.turn.sin.copy_(own.sin)
        for layer in range(layers):
            starts = [0] * len(self.groups)
            for segment in context.kept(layer):
                group = self.groups.index(group_of(segment))
                size = segment.keys.shape[1]
                places = slice(starts[group], starts[group] + size)
                starts[group] += size
                # Positions are one tensor for all layers.
                turn = tables.get(id(segment.positions))
                if turn is None:
                    turn = rotation(segment.positions.to(device), head_dim, wide)
                    tables[id(segment.positions)] = turn
                keys = segment.keys.to(device, non_blocking=True)
                kernels.turn_into(self.keys[group][layer][:, places], keys, turn)
                self.values[group][layer][:, places].copy_(segment.values, non_blocking=True)


class Made(NamedTuple):
    """What a layer made of the block, nothing turned: B N H D each."""

    queries: Tensor
    keys: Tensor
    values: Tensor


class Step(NamedTuple):
    """All that depends on the time alone."""

    layers: Tensor  # L 6 M: shift, scale, gate of attention, then of the feed-forward
    head: Tensor  # 2 M: shift, scale


class FastWan:
    """The model's forward over a filled window, at times known beforehand."""

    def __init__(self, model: CausalWan, times: Sequence[float], *, compiled: bool) -> None:
        self.model = model
        self.kernels = Kernels(model.device, compiled=compiled)
        blocks = [block for block in model.blocks if isinstance(block, Block)]
        self.layers = [read_layer(block) for block in blocks]
        tables = torch.cat([block.modulation for block in blocks])
        self.steps = []
        for time in times:
            embedded, projected = model._embed_time(time)
            head = (model.head.modulation + embedded).squeeze(0)
            self.steps.append(Step((tables + projected.squeeze(0)).detach(), head.detach()))

    def forward(
        self, latents: Tensor, step: int, text: Conditioning, window: Window, made: list[Made] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Flow B F C rows columns, and the mass each biased group got, groups-1 B; `made` is added to."""
        model, eps, kernels = self.model, self.model.spec.eps, self.kernels
        table, head = self.steps[step]
        x = model.patch_embedding(latents.transpose(1, 2)).flatten(2).transpose(1, 2).contiguous()
        hidden = kernels.modulate(x, table[0, 0], table[0, 1], eps)
        masses = []
        for index, layer in enumerate(self.layers):
            _, _, gate1, shift2, scale2, gate2 = table[index]
            following = table[index + 1] if index + 1 < len(self.layers) else head
            attended, mass, tokens = self._attend(index, hidden, window)
            masses.append(mass)
            if made is not None:
                made.append(tokens)
            merged = functional.linear(attended, *layer.merge)
            x, hidden = kernels.after_attention(x, merged, gate1, layer.norm_text, eps)
            x, hidden = kernels.after_text(x, self._read_text(index, hidden, text), shift2, scale2, eps)
            fed = functional.linear(kernels.widen(hidden, *layer.widen), *layer.narrow)
            x, hidden = kernels.after_feed(x, fed, gate2, following[0], following[1], eps)
        patches = model.head.head(hidden).unflatten(1, (latents.shape[1], -1))
        return model.unpatchify(patches), torch.stack(masses).mean(dim=0)

    def _attend(self, index: int, hidden: Tensor, window: Window) -> tuple[Tensor, Tensor, Made]:
        layer, kernels = self.layers[index], self.kernels
        own = window.own_places(index)
        qkv = functional.linear(hidden, *layer.qkv)
        turned, query, keys = kernels.split_turn(
            qkv, (layer.norm_q, layer.norm_k), window.turn, own, self.model.spec.eps
        )
        parts = [
            kernels.read(turned, k[index], v[index]) for k, v in zip(window.keys, window.values, strict=True)
        ]
        made = Made(query, keys, own[1])
        if len(parts) == 1:
            read = parts[0][0].transpose(1, 2).flatten(2)
            return read, read.new_zeros((0, len(read)), dtype=torch.float32), made
        outputs, masses = zip(*parts, strict=True)
        joined, mass = kernels.merge_parts(outputs, masses, [group.log_bias for group in window.groups])
        return joined, mass, made

    def _read_text(self, index: int, hidden: Tensor, text: Conditioning) -> Tensor:
        layer, spec = self.layers[index], self.model.spec
        asked = functional.linear(hidden, *layer.text_query)
        query = self.kernels.text_norm(asked, layer.text_norm_q, spec.heads, spec.eps)
        keys, values = text.keys[index].transpose(1, 2), text.values[index].transpose(1, 2)
        read = functional.scaled_dot_product_attention(query, keys, values)
        return functional.linear(read.transpose(1, 2).flatten(2), *layer.text_merge)
