"""The window every memory shares: a permanent sink and a prior that slides, around the current block.

Layout of the paper, eq. (layout_base): [ sink s | prior L-s-b | current b ]. Keys are stored unrotated and
get their phases at retrieval: sink 0..s-1, the current block right behind a full window, the prior
just before it. The layout fills up over the first blocks and then never changes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from recap.contracts import State
from recap.errors import refuse
from recap.memory.store import Store
from recap.types import BackboneSpec, Block, Role, Segment, Tokens, frame_positions


def check_window(spec: BackboneSpec) -> None:
    """Refuse a backbone without a window of keys and values to choose from."""
    if spec.carries_history:
        limit = "it carries its history in its own sequence, and this memory keeps keys and values of it"
        raise refuse("backbone", spec.name, limit, "choose none, sink or recap")


def count_tokens(segments: Iterable[Segment]) -> dict[Role, int]:
    """Keys by role."""
    counts: dict[Role, int] = {}
    for segment in segments:
        counts[segment.role] = counts.get(segment.role, 0) + segment.keys.shape[1]
    return counts


class Window:
    wants_tokens = True
    """Whether the clean pass is needed: sink and prior are made of what it writes."""

    def __init__(
        self,
        spec: BackboneSpec,
        *,
        sink_frames: int = 0,
        prior_frames: int | None = None,
        reinforcement: float = 1.0,
    ):
        """By default the prior gets all that sink and block leave; a memory that fills a part itself passes less."""
        self._check(spec, sink_frames)
        rest = spec.window_frames - spec.frames_per_block - sink_frames
        self.spec = spec
        self.sink_frames = sink_frames
        self.prior_frames = rest if prior_frames is None else prior_frames
        self.reinforce(reinforcement)
        self.current = Store(spec.layers, spec.block_tokens)
        self.sink = Store(spec.layers, sink_frames * spec.frame_tokens)
        self.prior = Store(spec.layers, self.prior_frames * spec.frame_tokens)
        # Frames stored; host integers, so no step ever waits for the device.
        self.num_sink = 0
        self.num_prior = 0
        self._segments: list[list[Segment]] = []

    def _check(self, spec: BackboneSpec, sink_frames: int) -> None:
        check_window(spec)
        most = spec.window_frames - spec.frames_per_block
        if not 0 <= sink_frames <= most:
            limit = f"0 to {most} fit next to a block in {spec.name}'s window"
            raise refuse("sink_frames", sink_frames, limit, "choose a smaller sink")

    def reinforce(self, factor: float) -> None:
        """Multiply the sink's unnormalised weight by this factor (lambda) from the next block on."""
        if not (factor > 0 and math.isfinite(factor)):
            raise refuse("reinforcement", factor, "must be above 0 and finite", "1 leaves the sink as it is")
        self._log_bias = math.log(factor)

    def start(self, block: Block) -> int:
        """Temporal phase of the block's first frame."""
        full = self.spec.window_frames - self.spec.frames_per_block
        return block.first_frame if self.spec.phases == "absolute" else min(block.first_frame, full)

    def phases(self, block: Block) -> Tensor:
        """Temporal phases, F, of the block's own frames."""
        start = self.start(block)
        return torch.arange(start, start + block.num_frames, dtype=torch.float64)

    def begin(self, block: Block, *, sink_phase: int = 0) -> Tensor:
        """Lay the window out for a block; returns the block's own phases."""
        spec, start = self.spec, self.start(block)
        parts = [
            # A block that is read again must not see itself as its own sink.
            (Role.SINK, self.sink, slice(0, min(self.num_sink, block.first_frame)), sink_phase, self._log_bias),
            # The prior ends at its store's end, so that sliding is the same copy at every fill.
            (Role.PRIOR, self.prior, slice(self.prior_frames - self.num_prior, self.prior_frames),
             start - self.num_prior, 0.0),
        ]  # fmt: skip
        self._segments = [[] for _ in range(spec.layers)]
        for role, store, frames, phase, bias in parts:
            if frames.stop == frames.start:
                continue
            tokens = slice(frames.start * spec.frame_tokens, frames.stop * spec.frame_tokens)
            times = torch.arange(phase, phase + frames.stop - frames.start, device=store.keys.device)
            positions = frame_positions(times, spec.grid)
            for layer, kept in enumerate(self._segments):
                keys, values = store.keys[layer][:, tokens], store.values[layer][:, tokens]
                kept.append(Segment(role, keys, values, positions, bias))
        return self.phases(block)

    def arrange(self, layer: int, own: list[Segment]) -> list[Segment]:
        """What is kept for this layer, the same objects from `begin` to `slide`, and the backbone's own."""
        return [*self._segments[layer], *own]

    def own_tokens(self, block: Block) -> dict[Role, int]:
        """Keys by role that the backbone itself brings."""
        return {Role.CURRENT: block.num_frames * self.spec.frame_tokens}

    def write(self, layer: int, tokens: Tokens) -> None:
        """Take the clean keys and values of the current block."""
        self.current.allocate(tokens.keys)
        # A first block of given frames may be shorter than a block.
        count = tokens.keys.shape[1]
        self.current.keys[layer][:, :count].copy_(tokens.keys)
        self.current.values[layer][:, :count].copy_(tokens.values)

    def owned(self, block: Block) -> int:
        """How many leading frames of the block belong to the sink."""
        return min(max(self.sink_frames - block.first_frame, 0), block.num_frames)

    def leaving(self, block: Block) -> tuple[Tensor, Tensor, Tensor]:
        """Source B N 3, keys and values L B N H D of what `slide` will drop, oldest first."""
        owned, size, room = self.owned(block), self.spec.frame_tokens, self.prior_frames
        taken = min(block.num_frames - owned, room)
        stay = min(self.num_prior, room - taken)
        parts = [(self.current, slice(owned * size, (block.num_frames - taken) * size))]
        if self.num_prior > stay:
            parts.insert(0, (self.prior, slice((room - self.num_prior) * size, (room - stay) * size)))
        frames = [
            *range(block.first_frame - self.num_prior, block.first_frame - stay),
            *range(block.first_frame + owned, block.end_frame - taken),
        ]
        keys = torch.cat([store.keys[:, :, part] for store, part in parts], dim=2)
        values = torch.cat([store.values[:, :, part] for store, part in parts], dim=2)
        source = frame_positions(torch.tensor(frames, device=keys.device), self.spec.grid).long()
        return source.expand(keys.shape[1], -1, -1), keys, values

    def slide(self, block: Block) -> None:
        """Move the finished block into sink and prior."""
        owned = self.owned(block)
        if owned:
            self._fill_sink(block.first_frame, owned)
        if self.prior_frames:
            self._slide_prior(owned, block.num_frames - owned)
        self._segments = []

    def keep_prior(self, frames: int) -> None:
        """Forget all of the prior but its newest frames."""
        self.num_prior = min(self.num_prior, frames)

    def clear_prior(self) -> None:
        self.keep_prior(0)

    def refresh(self, first_frame: int, keys: Tensor, values: Tensor) -> None:
        """Replace the newest frames of the prior, and the sink if the new frames begin with it.

        The sink is the opening scene, which only its own frames may replace.
        """
        size = self.spec.frame_tokens
        prior = min(self.num_prior * size, keys.shape[2])
        sink = min(self.num_sink * size, keys.shape[2]) if first_frame == 0 else 0
        if prior:
            self.prior.keys[:, :, -prior:].copy_(keys[:, :, -prior:])
            self.prior.values[:, :, -prior:].copy_(values[:, :, -prior:])
        if sink:
            self.sink.keys[:, :, :sink].copy_(keys[:, :, :sink])
            self.sink.values[:, :, :sink].copy_(values[:, :, :sink])

    def _fill_sink(self, first: int, frames: int) -> None:
        size = self.spec.frame_tokens
        self.sink.allocate(self.current.keys)
        to, since = slice(first * size, (first + frames) * size), slice(0, frames * size)
        self.sink.keys[:, :, to].copy_(self.current.keys[:, :, since])
        self.sink.values[:, :, to].copy_(self.current.values[:, :, since])
        self.num_sink = first + frames

    def _slide_prior(self, owned: int, arriving: int) -> None:
        size, room = self.spec.frame_tokens, self.prior_frames
        taken = min(arriving, room)
        stay = min(self.num_prior, room - taken)
        self.prior.allocate(self.current.keys)
        for store, fresh in (
            (self.prior.keys, self.current.keys),
            (self.prior.values, self.current.values),
        ):
            if stay:
                # A copy, since source and target overlap.
                moved = store[:, :, (room - stay) * size :].clone()
                store[:, :, (room - taken - stay) * size : (room - taken) * size].copy_(moved)
            end = (owned + arriving) * size
            store[:, :, (room - taken) * size :].copy_(fresh[:, :, end - taken * size : end])
        self.num_prior = stay + taken

    def state(self) -> State:
        return {
            **self.sink.state("sink"),
            **self.prior.state("prior"),
            "window.frames": torch.tensor([self.num_sink, self.num_prior]),
        }

    def load_state(self, state: State) -> None:
        self.sink.load_state("sink", state)
        self.prior.load_state("prior", state)
        self.num_sink, self.num_prior = state["window.frames"].tolist()
