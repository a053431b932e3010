"""BlockContext: what one block may attend to, frozen from `begin` to `commit`.

Memory costs a backbone one line, `context.attend(layer, query, own)`. The policy returns the same kept
segments all block long, so each is rotated on its first read and the result is read by all later steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from recap.attention.attend import Attended, Readable, attend
from recap.attention.rope import Rotation, rotate, rotation
from recap.contracts import MemoryPolicy
from recap.types import Past, Role, Segment, Tokens, frame_positions


class Kernels(Protocol):
    """The arithmetic under a context. A model of other hands may bring its own, to give its own bits."""

    def table(self, positions: Tensor, like: Tensor) -> Any:
        """What `turn` needs to turn tensors such as `like` to positions B N 3: made once per block."""

    def turn(self, x: Tensor, table: Any) -> Tensor:
        """Queries or keys B N H D, rotated."""

    def read(self, query: Tensor, segments: Sequence[Readable]) -> Attended:
        """Attention; a role whose share is not measured is left out of the shares."""


class HouseKernels:
    """Rotation by angles computed on the spot, attention merged by log-sum-exp."""

    def table(self, positions: Tensor, like: Tensor) -> Rotation:
        # fp64 stays exact end to end; lower precisions rotate in fp32.
        return rotation(positions, like.shape[-1], torch.promote_types(like.dtype, torch.float32))

    def turn(self, x: Tensor, table: Rotation) -> Tensor:
        return rotate(x, table)

    def read(self, query: Tensor, segments: Sequence[Readable]) -> Attended:
        return attend(query, segments)


HOUSE = HouseKernels()


class BlockContext:
    def __init__(
        self, policy: MemoryPolicy, phases: Tensor, kernels: Kernels = HOUSE, past: Past | None = None
    ):
        self._policy = policy
        self._observed: set[int] = set()
        self._phases = phases
        self._kernels = kernels
        self._positions: Tensor | None = None
        # By identity; the value keeps the key's tensor alive, so an id cannot be reused within the block.
        self._tables: dict[int, tuple[Tensor, Any]] = {}
        self._kept: dict[int, tuple[Segment, Readable]] = {}
        self._past = past if past is not None else Past()
        self._masses: dict[int | None, dict[Role, Tensor]] = {}
        self._reads: dict[int | None, int] = {}
        self._settling = False

    @property
    def phases(self) -> Tensor:
        """Temporal phases, F, of the block's own frames."""
        return self._phases

    def positions(self, grid: tuple[int, int], device: torch.device) -> Tensor:
        """Positions 1 N 3 of the block's own tokens: one tensor all block long, so one rotary table."""
        if self._positions is None:
            # A blocking copy would wait for all work queued so far.
            self._positions = frame_positions(self._phases.to(device, non_blocking=True), grid)
        return self._positions

    def settling(self) -> BlockContext:
        """From here on the block is finished: every read hands the layer's own tokens to the memory."""
        self._settling = True
        return self

    def attend(self, layer: int, query: Tensor, own: list[Segment]) -> Tensor:
        """Queries B N H D, unrotated, at the positions of the CURRENT segment among `own`."""
        current = next(s for s in own if s.role is Role.CURRENT)
        if self._policy.needs_queries and layer not in self._observed:
            self._observed.add(layer)
            self._policy.observe(layer, query)
        mine = {id(s) for s in own}
        segments = [
            self._fresh(s) if id(s) in mine else self._once(s, query.device)
            for s in self._policy.arrange(layer, own)
        ]
        if self._settling:
            self._policy.write(layer, Tokens(query, current.keys, current.values, current.positions))
        output, shares = self._kernels.read(self._turned(query, current.positions), segments)
        self.measured(shares)
        return output

    @property
    def foreseeable(self) -> bool:
        """Whether `kept` can be asked before the first step; a memory that wants to see queries first cannot tell."""
        return not self._policy.needs_queries

    def kept(self, layer: int) -> list[Segment]:
        """What the memory adds to the layer's own tokens: for readers that bring kernels and storage of their own."""
        return self._policy.arrange(layer, [])

    def arranged(self, layer: int, own: list[Segment]) -> list[Segment]:
        """For a reader whose own sequence holds more than the block: what the memory makes of its segments."""
        return self._policy.arrange(layer, own)

    @property
    def past(self) -> Past:
        return self._past

    @property
    def wants_tokens(self) -> bool:
        """Whether the memory has a use for a clean pass."""
        return self._policy.wants_tokens

    def hand_over(self, layer: int, tokens: Tokens) -> None:
        """From such a reader, of a finished block, unturned."""
        assert self._settling, "only a finished block is remembered"
        self._policy.write(layer, tokens)

    def measured(self, shares: dict[Role, Tensor], stage: int | None = None) -> None:
        """From such a reader: shares of attention mass, B per role, of as many reads as it likes to count as one."""
        for part in {None, stage}:
            self._reads[part] = self._reads.get(part, 0) + 1
            mass = self._masses.setdefault(part, {})
            for role, share in shares.items():
                mass[role] = mass[role] + share if role in mass else share

    def shares(self, stage: int | None = None) -> dict[Role, Tensor]:
        """Role -> B: share of attention mass so far, mean over steps, layers, heads and queries."""
        return {role: mass.float() / self._reads[stage] for role, mass in self._masses.get(stage, {}).items()}

    def stage_shares(self) -> dict[int, dict[Role, Tensor]]:
        """The same by stage, where stages were named."""
        return {stage: self.shares(stage) for stage in self._masses if stage is not None}

    def _fresh(self, segment: Segment) -> Readable:
        turned = self._turned(segment.keys, segment.positions)
        return Readable(segment.role, turned, segment.values, segment.log_bias, segment.token_bias)

    def _once(self, segment: Segment, device: torch.device) -> Readable:
        if segment.keys.device != device:
            # Kept elsewhere to save room here: what is brought over is read once and let go.
            keys, values = (part.to(device, non_blocking=True) for part in (segment.keys, segment.values))
            return self._fresh(replace(segment, keys=keys, values=values))
        known = self._kept.get(id(segment))
        if known is None:
            known = self._kept[id(segment)] = (segment, self._fresh(segment))
        return known[1]

    def _turned(self, x: Tensor, positions: Tensor) -> Tensor:
        known = self._tables.get(id(positions))
        if known is None:
            known = self._tables[id(positions)] = (positions, self._kernels.table(positions, x))
        return self._kernels.turn(x, known[1])
