"""The causal Wan transformer as the GPU likes it: one recording per block, nothing computed twice.

A transformation of the finished model: the same parameters, read by other code. Against the readable forward
- what depends on the time alone is made once, for all steps of the sampler;
- queries, keys and values come from one product;
- the kept keys are turned once per block into a window of fixed storage, behind which every step writes its own;
- keys with a log-bias are read apart and merged by log-sum-exp, all others by one kernel;
- element-wise work between two products is one kernel, and all steps of a block are one CUDA graph.

Rounding differs from the readable path's; `recap bench --compare` says by how much.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from recap.attention.attend import read_group
from recap.attention.rope import Rotation, rotate, rotation
from recap.backbones.wan.layers import Block
from recap.backbones.wan.model import CausalWan, Conditioning
from recap.contracts import OpenContext
from recap.fast.graphs import Graphed
from recap.types import Role, Segment


class Layer(NamedTuple):
    """The parameters of one block, as they are read."""

    qkv: tuple[Tensor, Tensor]  # weight (3 M) M and bias
    norm_q: Tensor
    norm_k: Tensor
    merge: tuple[Tensor, Tensor]
    norm_text: tuple[Tensor, Tensor]  # fp32
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
        norm_text=(_pair(block.norm3)[0].float(), _pair(block.norm3)[1].float()),
        text_query=_pair(text.q),
        text_norm_q=text.norm_q.weight.detach(),
        text_merge=_pair(text.o),
        widen=_pair(block.ffn[0]),
        narrow=_pair(block.ffn[2]),
    )


def _pair(module: torch.nn.Module) -> tuple[Tensor, Tensor]:
    assert isinstance(module.weight, Tensor) and isinstance(module.bias, Tensor)
    return module.weight.detach(), module.bias.detach()


# Element-wise work: what each kernel means. x B N M is the stream between layers, M channels.


def norm(
    x: Tensor,
    scale: Tensor,
    shift: Tensor,
    eps: float,
    added: Tensor | None = None,
    gate: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """x + gate added, and its norm over channels, scaled and shifted by fp32 vectors."""
    if added is not None:
        x = x + (added if gate is None else (gate * added).to(x.dtype))
    return x, (functional.layer_norm(x, x.shape[-1:], eps=eps) * scale + shift).to(x.dtype)


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root mean square norm over channels."""
    normed: Tensor = functional.rms_norm(x, x.shape[-1:], eps=eps) * weight
    return normed


def split_turn(
    qkv: Tensor,
    norms: tuple[Tensor, Tensor],
    turn: Rotation,
    own: tuple[Tensor, Tensor],
    eps: float,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Norm and turn; turned keys and values go to their places. Returns queries turned, queries and keys unturned."""
    heads = own[0].shape[-2]
    query, keys, values = qkv.chunk(3, dim=-1)
    query, keys = (
        rms(x, weight, eps).unflatten(-1, (heads, -1)) for x, weight in zip((query, keys), norms, strict=True)
    )
    own[0].copy_(rotate(keys, turn))
    own[1].copy_(values.unflatten(-1, (heads, -1)))
    return rotate(query, turn), query, keys


def merge(outputs: list[Tensor], masses: list[Tensor], biases: list[float]) -> tuple[Tensor, Tensor]:
    """Parts B H N D with their log-sum-exps and biases -> B N (H D), and each part's share of the mass, parts B N."""
    biased = torch.stack([mass + bias if bias else mass for mass, bias in zip(masses, biases, strict=True)])
    weights = biased.softmax(dim=0)
    merged = weights[0].unsqueeze(-1) * outputs[0]
    for weight, output in zip(weights[1:], outputs[1:], strict=True):
        merged.addcmul_(weight.unsqueeze(-1), output.to(merged.dtype))
    return merged.to(outputs[0].dtype).transpose(1, 2).flatten(2), weights.mean(dim=2)


def fill(keys: Tensor, values: Tensor, turn: Rotation, new_keys: Tensor, new_values: Tensor) -> None:
    """Keys B N H D, turned, and values into their places in a window."""
    new_keys.copy_(rotate(keys, turn))
    new_values.copy_(values)


class Kernels:
    """The functions above, by Triton where there is a GPU; products and attention by the libraries that are best."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        found: Any = sys.modules[__name__]
        if self._cuda:
            from recap.fast import dit_kernels as found  # needs Triton, which comes with CUDA builds only
        self.norm = found.norm
        self.rms = found.rms
        self.split_turn = found.split_turn
        self.merge = found.merge
        self.fill = found.fill

    def widen(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """A product and its GELU."""
        if self._cuda:  # the library's product does it before it writes
            flat = torch._addmm_activation(bias, x.flatten(0, 1), weight.t(), use_gelu=True)
            wide: Tensor = flat.unflatten(0, x.shape[:2])
            return wide
        return functional.gelu(functional.linear(x, weight, bias), approximate="tanh")

    def read(
        self, query: Tensor, keys: Tensor, values: Tensor, token_bias: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Queries B N H D over keys and values B N H D -> B H N D and log-sum-exp B H N; token_bias B N."""
        q, k, v = (x.transpose(1, 2) for x in (query, keys, values))
        return read_group(q, k, v, token_bias)


class Group(NamedTuple):
    """Keys that one kernel reads. A role of None stands for all keys without a bias."""

    role: Role | None
    log_bias: float
    token_bias: bool = False  # whether each token has one of its own


def group_of(segment: Segment, *, by_role: bool) -> Group:
    """On a GPU every kernel costs, so that keys without a bias are read at once and their roles not told apart."""
    own = segment.token_bias is not None
    return Group(segment.role if by_role or segment.log_bias or own else None, segment.log_bias, own)


class Window:
    """Fixed storage of what every layer may see: one group of keys per bias, the block's own tokens last of all.

    A recording reads from here, so blocks whose windows are laid out alike share it.
    """

    def __init__(self, model: CausalWan, kept: Sequence[Segment], rows: int, frames: int) -> None:
        spec = model.spec
        self.own = frames * spec.grid[0] * spec.grid[1]
        self._by_role = model.device.type != "cuda"
        sizes: dict[Group, int] = {}
        for segment in kept:
            group = group_of(segment, by_role=self._by_role)
            sizes[group] = sizes.get(group, 0) + segment.keys.shape[1]
        # The own tokens end the last group; they have no bias.
        last = Group(Role.CURRENT if self._by_role else None, 0.0)
        sizes[last] = sizes.pop(last, 0) + self.own
        self.groups: list[Group] = list(sizes)
        shape = (spec.layers, rows, -1, spec.heads, spec.head_dim)
        self.keys, self.values = (
            [
                torch.empty(*shape[:2], size, *shape[3:], dtype=model.dtype, device=model.device)
                for size in sizes.values()
            ]
            for _ in range(2)
        )
        self.token_bias = [
            torch.zeros(rows, size, device=model.device) if group.token_bias else None
            for group, size in sizes.items()
        ]
        wide = torch.promote_types(model.dtype, torch.float32)
        self.turn = Rotation(
            *(
                torch.empty(1, self.own, 1, spec.head_dim // 2, dtype=wide, device=model.device)
                for _ in range(2)
            )
        )

        self._copying: tuple[tuple[int, ...], Graphed[None]] | None = None

    def own_places(self, layer: int) -> tuple[Tensor, Tensor]:
        """Where a step writes the layer's own turned keys and its values."""
        return self.keys[-1][layer][:, -self.own :], self.values[-1][layer][:, -self.own :]

    def fill(self, context: OpenContext, positions: Tensor, kernels: Kernels) -> None:
        """Bring in all that is kept, and the positions 1 N 3 of the block's own tokens."""
        device, head_dim, wide = self.turn.cos.device, self.keys[0].shape[-1], self.turn.cos.dtype
        for place, made in zip(self.turn, rotation(positions, head_dim, wide), strict=True):
            place.copy_(made)
        kept = [context.kept(layer) for layer in range(len(self.keys[0]))]
        if not kept[0]:
            return
        self._fill_biases(kept[0])
        # All layers commonly share positions, so that few tables are made.
        positions_of = {id(s.positions): s.positions for layer in kept for s in layer}
        tables = {name: index for index, name in enumerate(positions_of)}
        order = [[tables[id(s.positions)] for s in layer] for layer in kept]
        turns = [rotation(where.to(device), head_dim, wide) for where in positions_of.values()]
        # Kept keys lie where they lay, unless the memory is still growing.
        places = tuple(
            part.data_ptr() for layer in kept for segment in layer for part in (segment.keys, segment.values)
        )
        if self._copying is None or self._copying[0] != places:
            self._copying = (places, Graphed(lambda *turns: self._copy(kept, order, turns, kernels)))
        self._copying[1](*(part for turn in turns for part in turn))

    def _fill_biases(self, kept: Sequence[Segment]) -> None:
        """The same in all layers: which slots of a bank are empty does not depend on the layer."""
        starts = dict.fromkeys(self.groups, 0)
        for segment in kept:
            if segment.token_bias is not None:
                group = group_of(segment, by_role=self._by_role)
                store = self.token_bias[self.groups.index(group)]
                assert store is not None
                stop = starts[group] + segment.keys.shape[1]
                store[:, starts[group] : stop].copy_(segment.token_bias, non_blocking=True)
                starts[group] = stop

    def _copy(
        self, kept: list[list[Segment]], order: list[list[int]], turns: tuple[Tensor, ...], kernels: Kernels
    ) -> None:
        """All layers' kept segments into their groups, turned by cosines and sines in the order given."""
        for layer, segments in enumerate(kept):
            starts = [0] * len(self.groups)
            for index, segment in zip(order[layer], segments, strict=True):
                group = self.groups.index(group_of(segment, by_role=self._by_role))
                place = slice(starts[group], starts[group] + segment.keys.shape[1])
                starts[group] = place.stop
                parts = (
                    part.to(turns[0].device, non_blocking=True) for part in (segment.keys, segment.values)
                )
                to = (store[group][layer][:, place] for store in (self.keys, self.values))
                kernels.fill(*parts, Rotation(*turns[2 * index : 2 * index + 2]), *to)


class Made(NamedTuple):
    """What a layer made of the block, nothing turned: B N H D each."""

    queries: Tensor
    keys: Tensor
    values: Tensor


class Step(NamedTuple):
    """All that depends on the time alone, fp32: a layer's is shift, scale, gate of attention and feed-forward."""

    layers: Tensor  # L 6 M; scales have their one added
    head: Tensor  # 2 M: shift, scale


class FastWan:
    """The model's forward over a filled window, at times known beforehand."""

    def __init__(self, model: CausalWan, times: Sequence[float]) -> None:
        self.model = model
        self.kernels = Kernels(model.device)
        blocks = [block for block in model.blocks if isinstance(block, Block)]
        self.layers = [read_layer(block) for block in blocks]
        self.steps = []
        ones = torch.zeros(6, 1, device=model.device)
        ones[[1, 4]] = 1
        for time in times:
            embedded, projected = model._embed_time(time)
            tables = torch.cat([block.modulation + projected[0] for block in blocks]).float() + ones
            head = (model.head.modulation + embedded).squeeze(0).float() + ones[:2]
            self.steps.append(Step(tables, head))

    def forward(
        self, latents: Tensor, step: int, text: Conditioning, window: Window, made: list[Made] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Flow B F C rows columns, and the share of the mass each group got, groups B; `made` is added to."""
        model, eps, kernels = self.model, self.model.spec.eps, self.kernels
        table, head = self.steps[step]
        x = model.patch_embedding(latents.transpose(1, 2)).flatten(2).transpose(1, 2).contiguous()
        _, hidden = kernels.norm(x, table[0, 1], table[0, 0], eps)
        masses = []
        for index, layer in enumerate(self.layers):
            _, _, gate1, shift2, scale2, gate2 = table[index]
            following = table[index + 1] if index + 1 < len(self.layers) else head
            attended, mass = self._attend(index, hidden, window, made)
            masses.append(mass)
            merged = functional.linear(attended, *layer.merge)
            x, hidden = kernels.norm(x, *layer.norm_text, eps, merged, gate1)
            x, hidden = kernels.norm(x, scale2, shift2, eps, self._read_text(index, hidden, text))
            fed = functional.linear(kernels.widen(hidden, *layer.widen), *layer.narrow)
            x, hidden = kernels.norm(x, following[1], following[0], eps, fed, gate2)
        patches = model.head.head(hidden).unflatten(1, (latents.shape[1], -1))
        return model.unpatchify(patches), torch.stack(masses).mean(dim=(0, 3))

    def _attend(
        self, index: int, hidden: Tensor, window: Window, made: list[Made] | None
    ) -> tuple[Tensor, Tensor]:
        layer, kernels = self.layers[index], self.kernels
        own = window.own_places(index)
        qkv = functional.linear(hidden, *layer.qkv)
        turned, query, keys = kernels.split_turn(
            qkv, (layer.norm_q, layer.norm_k), window.turn, own, self.model.spec.eps, made is not None
        )
        if made is not None:
            made.append(Made(query, keys, own[1]))
        parts = [
            kernels.read(turned, k[index], v[index], bias)
            for k, v, bias in zip(window.keys, window.values, window.token_bias, strict=True)
        ]
        if len(parts) == 1:
            read = parts[0][0].transpose(1, 2).flatten(2)
            return read, read.new_ones((1, *read.shape[:2]), dtype=torch.float32)
        outputs, masses = zip(*parts, strict=True)
        joined: tuple[Tensor, Tensor] = kernels.merge(
            outputs, masses, [group.log_bias for group in window.groups]
        )
        return joined

    def _read_text(self, index: int, hidden: Tensor, text: Conditioning) -> Tensor:
        layer, spec = self.layers[index], self.model.spec
        asked = self.kernels.rms(functional.linear(hidden, *layer.text_query), layer.text_norm_q, spec.eps)
        query = asked.unflatten(-1, (spec.heads, -1)).transpose(1, 2)
        keys, values = text.keys[index].transpose(1, 2), text.values[index].transpose(1, 2)
        read = functional.scaled_dot_product_attention(query, keys, values)
        return functional.linear(read.transpose(1, 2).flatten(2), *layer.text_merge)
