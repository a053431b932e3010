"""Keeps the biases of a window at fixed addresses, so that a recording reads whatever lambda holds in each block.

A segment's bias may differ by pass over the block, layer, row and head. A table has all of these; only its values
change from block to block, so neither another lambda nor another schedule of it needs a new recording.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from recap.types import Role, Segment


class Part(NamedTuple):
    """Describes a segment of the window, the same in all layers."""

    role: Role
    tokens: int
    # Whether each token has its own bias.
    token_bias: bool
    # Segments of one number have the same bias in every pass and layer; None is no bias anywhere.
    bias: int | None
    measured: bool


Layout = tuple[Part, ...]


def find_layout(kept: Sequence[Sequence[Segment]]) -> Layout | None:
    """Return what the segments of all layers are, without the values of biases; None if the layers differ."""
    shapes = {
        tuple((s.role, s.keys.shape[1], s.token_bias is not None, s.measured) for s in layer)
        for layer in kept
    }
    if len(shapes) != 1:
        return None
    found: list[Part] = []
    known: list[object] = []
    for segments, (role, tokens, own, measured) in zip(zip(*kept, strict=True), shapes.pop(), strict=True):
        biases = (role, *((s.log_bias, id(s.head_bias), s.bias_passes) for s in segments))
        known.append(biases)
        bias = known.index(biases) if any(s.biased for s in segments) else None
        found.append(Part(role, tokens, own, bias, measured))
    return tuple(found)


class BiasTable:
    """Stores the bias of keys that one kernel reads, by pass, layer, row and head; the clean pass is the last."""

    def __init__(self, shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device) -> None:
        self.values = torch.zeros(shape, dtype=dtype, device=device)
        # The last values of the layers' segments, and on the device, P L 1 1, the numbers and where heads count.
        self._last: tuple[list[float], list[float]] | None = None
        self._numbers = self._by_head = self.values[:, :, :1, :1]

    def fill(self, segments: Sequence[Segment]) -> None:
        """Take the biases of a segment, one object per layer."""
        steps = [*range(len(self.values) - 1), None]
        acts = [(s, s.bias_passes is None or step in s.bias_passes) for step in steps for s in segments]
        numbers = [s.log_bias if on else 0.0 for s, on in acts]
        by_head = [float(on and s.head_bias is not None) for s, on in acts]
        changed = self._last != (numbers, by_head)
        if changed:
            # Copied only then, as most schedules stay as they are all video long.
            self._numbers, self._by_head = self._on_device(numbers), self._on_device(by_head)
            self._last = numbers, by_head
        if any(by_head):
            none = self.values.new_zeros(self.values.shape[2:])
            heads = [none if s.head_bias is None else s.head_bias.to(none.dtype) for s in segments]
            self.values.copy_(self._numbers + self._by_head * torch.stack(heads))
        elif changed:
            self.values.copy_(self._numbers)

    def _on_device(self, numbers: list[float]) -> Tensor:
        """Return one number per pass and layer, P L 1 1."""
        table = torch.tensor(numbers, dtype=self.values.dtype).view(*self.values.shape[:2], 1, 1)
        # From pageable memory the copy would make the host wait for the previous block.
        table = table.pin_memory() if self.values.is_cuda else table
        return table.to(self.values.device, non_blocking=True)
