"""A `BlockContext` is what one block may attend to, frozen from `begin` to `commit`.

Memory costs a backbone one line, `context.attend(layer, query, own)`. The policy is asked for a layer's kept segments
once per block: they are rotated on the layer's first read, and all later steps read the result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from recap.attention.attend import Attended, Readable, attend
from recap.attention.rope import rotate, rotation
from recap.contracts import MemoryPolicy
from recap.types import Past, Role, Segment, Tokens, frame_positions, widest


class ContextKernels:
    """Does the arithmetic of a context; a subclass may reproduce that of another implementation, bit for bit."""

    def table(self, positions: Tensor, like: Tensor) -> Any:
        """Return the rotary table by which `turn` rotates tensors such as `like` to positions B N 3."""
        # fp64 stays exact end to end; lower precisions rotate in fp32.
        return rotation(positions, like.shape[-1], torch.promote_types(like.dtype, torch.float32))

    def turn(self, x: Tensor, table: Any) -> Tensor:
        """Rotate queries or keys B N H D."""
        return rotate(x, table)

    def read(self, query: Tensor, segments: Sequence[Readable]) -> Attended:
        """Compute attention; a role whose share is not measured is left out of the shares."""
        self.see(lambda: (query, segments))
        return attend(query, segments)

    def see(self, read: Callable[[], tuple[Tensor, Sequence[Readable]]]) -> None:
        """Observe a read that is made here; only a subclass has a use for it."""

    def watch(self, layer: int, read: Callable[[], tuple[Tensor, Sequence[Readable]]]) -> None:
        """Observe a read of the clean pass that was not made here; only a subclass has a use for it.

        `read` makes the query and the segments, rotated, as `read` above gets them.
        """


OWN_KERNELS = ContextKernels()


@dataclass(slots=True, eq=False)
class _BlockReads:
    """Keeps what is made once per block, whichever of its passes comes first."""

    positions: Tensor | None = None  # of the block's own tokens
    tables: dict[Tensor, Any] = field(default_factory=dict)  # by positions, which layers share
    # By layer, each segment and what the kernels read of it, unless it is stored elsewhere.
    kept: dict[int, list[tuple[Segment, Readable | None]]] = field(default_factory=dict)


class BlockContext:
    """Reads memory for one block in its denoising steps; `clean_pass` returns the context of its clean pass."""

    def __init__(
        self,
        policy: MemoryPolicy,
        phases: Tensor,
        kernels: ContextKernels = OWN_KERNELS,
        past: Past | None = None,
    ):
        self._policy = policy
        # Temporal phases, F, of the block's own frames, and the latents generated before it.
        self.phases = phases
        self.past = past if past is not None else Past()
        self._kernels = kernels
        self._reads = _BlockReads()
        self._writes = False
        # How often each layer was read: which denoising step comes next.
        self._steps: dict[int, int] = {}
        self._masses: dict[int | None, dict[Role, Tensor]] = {}
        self._counts: dict[int | None, int] = {}

    def clean_pass(self) -> BlockContext:
        """Return a context of the same block for its clean pass: every read hands the layer's tokens to the memory.

        What it measures is its own, so the shares of the denoising steps stay what they are.
        """
        clean = BlockContext(self._policy, self.phases, self._kernels, self.past)
        clean._reads = self._reads
        clean._writes = True
        return clean

    @property
    def block_key(self) -> object:
        """Return what stands for this block of this rollout: the same object in both of its passes."""
        return self._reads

    def positions(self, grid: tuple[int, int], device: torch.device) -> Tensor:
        """Return positions 1 N 3 of the block's own tokens: one tensor all block long, so one rotary table."""
        if self._reads.positions is None:
            # A blocking copy would wait for all work queued so far.
            phases = self.phases.to(device, widest(device), non_blocking=True)
            self._reads.positions = frame_positions(phases, grid)
        return self._reads.positions

    def attend(self, layer: int, query: Tensor, own: list[Segment]) -> Tensor:
        """Attend with queries B N H D, unrotated, at the positions of the CURRENT segment among `own`."""
        current = next(s for s in own if s.role is Role.CURRENT)
        segments = [*self._read_kept(layer, query), *map(self._rotated, own)]
        if self._writes:
            self._policy.write(layer, Tokens(query, current.keys, current.values, current.positions))
        output, shares, plain = self._kernels.read(self._turned(query, current.positions), segments)
        self.measured(shares)
        if self._writes and plain is not None:
            self._policy.measure(layer, plain)
        return output

    @property
    def foreseeable(self) -> bool:
        """Tell whether `kept` can be asked before the first step: not if the memory chooses by the first queries."""
        return not self._policy.needs_queries

    def kept(self, layer: int) -> list[Segment]:
        """Return what the memory adds to a layer, for readers that bring kernels and storage of their own."""
        return self._policy.arrange(layer, [])

    def arranged(self, layer: int, own: list[Segment]) -> list[Segment]:
        """Return a reader's own sequence as the memory changes it, if it has more than the block."""
        return self._policy.arrange(layer, own)

    @property
    def wants_tokens(self) -> bool:
        """Tell whether the memory has a use for a clean pass."""
        return self._policy.wants_tokens

    def hand_over(self, layer: int, tokens: Tokens) -> None:
        """Receive from such a reader what the layer made of the finished block, unrotated."""
        assert self._writes, "only the clean pass writes: hand over to the context of `clean_pass()`"
        self._policy.write(layer, tokens)

    def hand_share(self, layer: int, plain: Tensor) -> None:
        """Receive from such a reader the share without bias, B H, of the segment that the memory wants measured."""
        assert self._writes, "only the clean pass writes: hand over to the context of `clean_pass()`"
        self._policy.measure(layer, plain)

    def show_read(self, layer: int, tokens: Tokens) -> None:
        """Let the kernels watch the clean pass of such a reader, if it reads `kept` and the block itself."""

        def read() -> tuple[Tensor, list[Readable]]:
            own = Segment(Role.CURRENT, tokens.keys, tokens.values, tokens.positions)
            segments = [*self._read_kept(layer, tokens.queries), self._rotated(own)]
            return self._turned(tokens.queries, tokens.positions), segments

        self._kernels.watch(layer, read)

    def measured(self, shares: dict[Role, Tensor], stage: int | None = None) -> None:
        """Receive from such a reader shares of attention mass, B per role; one call counts as one read."""
        for part in {None, stage}:
            self._counts[part] = self._counts.get(part, 0) + 1
            mass = self._masses.setdefault(part, {})
            for role, share in shares.items():
                mass[role] = mass[role] + share if role in mass else share

    def shares(self, stage: int | None = None) -> dict[Role, Tensor]:
        """Return, B per role, the share of attention mass so far: the mean over steps, layers, heads and queries."""
        masses = self._masses.get(stage, {})
        return {role: mass.float() / self._counts[stage] for role, mass in masses.items()}

    def stage_shares(self) -> dict[int, dict[Role, Tensor]]:
        """Return the same by stage, where stages were named."""
        return {stage: self.shares(stage) for stage in self._masses if stage is not None}

    def _read_kept(self, layer: int, query: Tensor) -> list[Readable]:
        """Return the layer's kept segments as the kernels read them in this pass."""
        step = None if self._writes else self._steps.get(layer, 0)
        self._steps[layer] = self._steps.get(layer, 0) + 1
        kept = self._reads.kept.get(layer)
        if kept is None:
            if self._policy.needs_queries:
                self._policy.observe(layer, query)
            # What is stored elsewhere to save room here is brought over at every read, and let go.
            kept = self._reads.kept[layer] = [
                (segment, self._rotated(segment) if segment.keys.device == query.device else None)
                for segment in self.kept(layer)
            ]
        return [
            _in_pass(segment, ready or self._rotated(_moved(segment, query.device)), step)
            for segment, ready in kept
        ]

    def forget_rotated(self) -> None:
        """Forget the rotated past: the clean pass rotates it again, and the decoder gets the room."""
        rotated = self._reads.kept
        rotated.update({layer: [(segment, None) for segment, _ in kept] for layer, kept in rotated.items()})

    def _rotated(self, segment: Segment) -> Readable:
        """Return a segment with its keys rotated."""
        turned = self._turned(segment.keys, segment.positions)
        biases = (segment.log_bias, segment.token_bias, segment.head_bias)
        return Readable(segment.role, turned, segment.values, *biases, segment.measured)

    def _turned(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotate queries or keys by a table that is made once per block."""
        table = self._reads.tables.get(positions)
        if table is None:
            table = self._reads.tables[positions] = self._kernels.table(positions, x)
        return self._kernels.turn(x, table)


def _in_pass(segment: Segment, ready: Readable, step: int | None) -> Readable:
    """Return what is read in a pass, without the segment's bias where that does not act."""
    if segment.bias_passes is None or step in segment.bias_passes:
        return ready
    return ready._replace(log_bias=0.0, head_bias=None)


def _moved(segment: Segment, device: torch.device) -> Segment:
    keys, values = (part.to(device, non_blocking=True) for part in (segment.keys, segment.values))
    return replace(segment, keys=keys, values=values)
