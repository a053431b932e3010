"""Stores what a transformer may see at fixed addresses, so that recordings can read it there."""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from recap.attention.context import BlockContext
from recap.attention.rope import Rotation, rotation
from recap.backbones.wan.model import CausalWan
from recap.fast.biases import BiasTable, Layout
from recap.fast.graphs import Graphed
from recap.types import Role, Segment

Pair = tuple[Tensor, Tensor]


class Group(NamedTuple):
    """Names keys that one kernel reads together. A role of None stands for keys of any role."""

    role: Role | None
    # See `recap.fast.biases.Part`.
    bias: int | None = None
    token_bias: bool = False
    measured: bool = False


class WindowStorage:
    """Stores what every layer may see at fixed addresses: one group of keys per bias, the block's own tokens last.

    A recording reads from here, so blocks whose windows have the same layout share it. `num_passes` counts the
    denoising steps and the clean pass. `room` is where keys and values are stored, and may be longer than they are.
    """

    def __init__(
        self, model: CausalWan, layout: Layout, rows: int, frames: int, num_passes: int, room: Tensor
    ) -> None:
        spec = model.spec
        self.own = frames * spec.grid[0] * spec.grid[1]
        # On a GPU a kernel per role is too slow, so the roles of keys without a bias are not distinguished.
        by_role = model.device.type != "cuda"
        sizes: dict[Group, int] = {}
        slots = []
        for part in layout:
            alone = part.bias is not None or part.token_bias or part.measured
            group = Group(part.role if by_role or alone else None, part.bias, part.token_bias, part.measured)
            start = sizes.get(group, 0)
            sizes[group] = start + part.tokens
            slots.append((group, slice(start, sizes[group])))
        # The block's own tokens have no bias and are at the end of the last group.
        last = Group(Role.CURRENT if by_role else None)
        sizes[last] = sizes.pop(last, 0) + self.own
        self.groups: list[Group] = list(sizes)
        # The group of each segment, and its tokens there.
        self._slots = [(self.groups.index(group), tokens) for group, tokens in slots]
        shapes = [(spec.layers, rows, size, spec.heads, spec.head_dim) for size in sizes.values()]
        lengths = [math.prod(shape) for shape in shapes]
        used = room[: 2 * sum(lengths)].split(lengths * 2)
        stored = [part.view(shape) for part, shape in zip(used, shapes * 2, strict=True)]
        self.keys, self.values = stored[: len(shapes)], stored[len(shapes) :]
        self.token_bias = [
            torch.zeros(rows, size, device=model.device) if group.token_bias else None
            for group, size in sizes.items()
        ]
        wide = torch.promote_types(model.dtype, torch.float32)
        shape = (num_passes, spec.layers, rows, spec.heads)
        self.biases = [
            None if group.bias is None else BiasTable(shape, wide, model.device) for group in self.groups
        ]
        # The group whose share by head is measured in the clean pass.
        self.measured = next((index for index, group in enumerate(self.groups) if group.measured), None)
        table = torch.empty(1, self.own, 1, spec.head_dim // 2, dtype=wide, device=model.device)
        self.rope = Rotation(table, table.clone())
        self._copying: tuple[tuple[int, ...], Graphed[None]] | None = None

    @staticmethod
    def elements(model: CausalWan, layout: Layout, rows: int, frames: int) -> int:
        """Return how long a room must be for the keys and values of a window."""
        spec = model.spec
        tokens = sum(part.tokens for part in layout) + frames * spec.grid[0] * spec.grid[1]
        return 2 * spec.layers * rows * tokens * spec.dim

    def own_slices(self, layer: int) -> Pair:
        """Return where a step writes the layer's own rotated keys and its values."""
        return self.keys[-1][layer][:, -self.own :], self.values[-1][layer][:, -self.own :]

    def leave(self, layer: int, queries: Tensor, keys: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Store a layer's unrotated queries and keys where they were read; returns both, and its values.

        The clean pass does this: nobody reads the layer again before the next block fills the window.
        """
        own, values = self.own_slices(layer)
        own.copy_(keys)
        place = self.keys[-1][layer][:, : -self.own][:, : self.own]
        if place.shape == queries.shape:
            queries = place.copy_(queries)
        return queries, own, values

    def fill(self, context: BlockContext, positions: Tensor, kernels: Any) -> None:
        """Copy in everything the memory keeps, and the positions 1 N 3 of the block's own tokens."""
        device, head_dim, wide = self.rope.cos.device, self.keys[0].shape[-1], self.rope.cos.dtype
        for target, table in zip(self.rope, rotation(positions, head_dim, wide), strict=True):
            target.copy_(table)
        kept = [context.kept(layer) for layer in range(len(self.keys[0]))]
        if not kept[0]:
            return
        for segment, (group, tokens) in zip(kept[0], self._slots, strict=True):
            # All layers share the biases: whether a slot of a bank is empty is the same in every layer.
            if (biases := self.token_bias[group]) is not None and segment.token_bias is not None:
                biases[:, tokens].copy_(segment.token_bias, non_blocking=True)
        for segments, (group, _) in zip(zip(*kept, strict=True), self._slots, strict=True):
            if (added := self.biases[group]) is not None:
                added.fill(segments)
        # Layers usually share positions, so few tables are computed.
        positions_of = {id(s.positions): s.positions for layer in kept for s in layer}
        tables = {name: index for index, name in enumerate(positions_of)}
        order = [[tables[id(s.positions)] for s in layer] for layer in kept]
        ropes = [rotation(each.to(device), head_dim, wide) for each in positions_of.values()]
        # Kept keys stay at their addresses unless the memory is still growing.
        addresses = tuple(
            part.data_ptr() for layer in kept for segment in layer for part in (segment.keys, segment.values)
        )
        if self._copying is None or self._copying[0] != addresses:
            # A function instead of a method, as a reference cycle would keep a dropped window alive.
            copying = partial(_copy, kept, order, (self.keys, self.values), self._slots, kernels)
            self._copying = (addresses, Graphed(copying))
        self._copying[1](*(part for rope in ropes for part in rope))


def _copy(
    kept: list[list[Segment]],
    order: list[list[int]],
    stores: tuple[list[Tensor], list[Tensor]],
    slots: list[tuple[int, slice]],
    kernels: Any,
    *ropes: Tensor,
) -> None:
    """Copy all layers' segments into their groups; `order` has the index of each one's cosines and sines."""
    for layer, segments in enumerate(kept):
        for index, segment, (group, tokens) in zip(order[layer], segments, slots, strict=True):
            keys, values = (
                part.to(ropes[0].device, non_blocking=True) for part in (segment.keys, segment.values)
            )
            rope = Rotation(*ropes[2 * index : 2 * index + 2])
            targets = (store[group][layer][:, tokens] for store in stores)
            kernels.fill(keys, values, rope, *targets)
