"""This module shows the memories of several videos as rows of one batch.

Each memory keeps what it always would, and never sees another's tokens. Rows beyond the last video repeat the first
one, and what is made of them is dropped.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from recap.contracts import MemoryPolicy, State
from recap.types import Block, MemoryTrace, Segment, Tokens


def layout_of(memory: MemoryPolicy, layers: int) -> Hashable:
    """Return what the segments are that a memory shows in a block that has begun; equal ones can be joined."""
    return tuple(tuple(map(_kind_of, memory.arrange(layer, []))) for layer in range(layers))


def _kind_of(segment: Segment) -> Hashable:
    biases = segment.log_bias, segment.bias_passes, segment.token_bias is None, segment.head_bias is None
    return segment.role, segment.keys.shape[1:], segment.keys.device, biases, segment.measured


class JoinedMemory(MemoryPolicy):
    """Is the memory of a joint block: of one video per row, in blocks that have begun and are laid out alike."""

    def __init__(
        self, members: Sequence[MemoryPolicy], blocks: Sequence[Block], phases: Tensor, width: int
    ) -> None:
        self._members = members
        self._blocks = blocks
        self._phases = phases
        # Which member each row shows.
        self.rows = [row if row < len(members) else 0 for row in range(width)]
        self._shown: dict[int, list[Segment]] = {}
        # Layers share positions and biases, so these are joined once.
        self._joined: dict[tuple[Tensor, ...], Tensor] = {}
        self.traces: list[MemoryTrace] = []
        # Whether rows that show the same member were the same, bit for bit; None where that is not checked.
        self.even: bool | None = None

    @property
    def sink_frames(self) -> int:
        return self._members[0].sink_frames

    @property
    def wants_tokens(self) -> bool:
        return any(member.wants_tokens for member in self._members)

    @property
    def needs_pixels(self) -> bool:
        return any(member.needs_pixels for member in self._members)

    def begin(self, block: Block) -> Tensor:
        return self._phases

    def arrange(self, layer: int, own: list[Segment]) -> list[Segment]:
        if layer not in self._shown:
            kept = [member.arrange(layer, []) for member in self._members]
            self._shown[layer] = [self._join(rows) for rows in zip(*kept, strict=True)]
        return [*self._shown[layer], *own]

    def _join(self, members: Sequence[Segment]) -> Segment:
        """Return one segment with the tokens of every row."""
        return replace(
            members[0],
            keys=torch.cat([members[row].keys for row in self.rows]),
            values=torch.cat([members[row].values for row in self.rows]),
            positions=self._join_once([s.positions for s in members]),
            token_bias=self._join_some([s.token_bias for s in members]),
            head_bias=self._join_some([s.head_bias for s in members]),
        )

    def _join_some(self, parts: Sequence[Tensor | None]) -> Tensor | None:
        there = [part for part in parts if part is not None]
        return self._join_once(there) if there else None

    def _join_once(self, parts: Sequence[Tensor]) -> Tensor:
        # Tensors are equal as keys only if they are the same object, which the key keeps alive.
        key = tuple(parts)
        if key not in self._joined:
            self._joined[key] = torch.cat([parts[row] for row in self.rows])
        return self._joined[key]

    def write(self, layer: int, tokens: Tokens) -> None:
        if self.even is not None:
            self.even &= self.is_even(tokens.keys) and self.is_even(tokens.values)
        for row, member in enumerate(self._members):
            queries, keys, values = (
                part[row : row + 1] for part in (tokens.queries, tokens.keys, tokens.values)
            )
            member.write(layer, Tokens(queries, keys, values, tokens.positions))

    def is_even(self, rows: Tensor) -> bool:
        """Tell whether rows that show the same member are the same, bit for bit; waits for the device."""
        return torch.equal(rows, rows[self.rows])

    def measure(self, layer: int, share: Tensor) -> None:
        for row, member in enumerate(self._members):
            member.measure(layer, share[row : row + 1])

    def take_sink_share(self, share: Tensor) -> None:
        for row, member in enumerate(self._members):
            member.take_sink_share(share[row : row + 1])

    def look(self, block: Block, pixels: Tensor) -> None:
        for row, (member, own) in enumerate(zip(self._members, self._blocks, strict=True)):
            member.look(own, pixels[row : row + 1])

    def commit(self, block: Block, pixels: Tensor) -> MemoryTrace:
        """Let every memory choose what stays; `traces` has what each of them did."""
        self.traces = [
            member.commit(own, pixels[row : row + 1])
            for row, (member, own) in enumerate(zip(self._members, self._blocks, strict=True))
        ]
        return self.traces[0]

    def clear_prior(self) -> None:
        """Do nothing: each memory was asked before the blocks were joined."""

    def state(self) -> State:
        """Return nothing: it lasts for one block, and its members have their own states."""
        return {}

    def load_state(self, state: State) -> None:
        """Do nothing: there is no state."""
