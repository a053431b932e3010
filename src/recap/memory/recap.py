"""`recap`: the paper's memory, eq. (layout_bank): [ reinforced sink | bank K | prior | current ].

Bank keys are read at temporal phase 0 with their own row and column, beside the sink: a time-neutral memory
of how things looked when they first appeared.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from recap.contracts import Admission, ReadsKeys, State, TakesLeaving
from recap.errors import refuse
from recap.memory.bank import NoveltyBank
from recap.memory.carried import AnyWindow, make_window
from recap.memory.window import Window
from recap.types import BackboneSpec, Block, Candidates, Card, MemoryTrace, Role, Segment, Tokens

MOST_CAPACITY_FRAMES = 1000
"""A quarter of an hour kept whole; beyond lies a slip of the keyboard."""


class RecapMemory:
    def __init__(self, window: AnyWindow, bank: NoveltyBank, admission: Admission):
        if isinstance(admission, TakesLeaving) and not isinstance(window, Window):
            limit = "it takes what leaves the window, and this backbone's own history is its window"
            raise refuse("admission", type(admission).__name__, limit, "choose flow or random")
        self._window = window
        self._bank = bank
        self._admission = admission
        self._remembered: list[Segment] = []  # the bank, one segment per layer, while a block is under way
        self._proposed: Candidates | None = None  # the block's tokens, where they were scored ahead

    @property
    def bank(self) -> NoveltyBank:
        return self._bank

    def begin(self, block: Block) -> Tensor:
        phases = self._window.begin(block)
        self._remembered = []
        if self._bank.count:
            source = self._bank.held.source.to(torch.float64)
            positions = torch.cat([torch.zeros_like(source[..., :1]), source[..., 1:]], dim=-1)
            bias = self._bank.token_bias
            self._remembered = [
                Segment(Role.BANK, keys, values, positions, token_bias=bias)
                for keys, values in zip(self._bank.keys, self._bank.values, strict=True)
            ]
        return phases

    def arrange(self, layer: int, own: list[Segment]) -> list[Segment]:
        bank = [self._remembered[layer]] if self._remembered else []
        return [*bank, *self._window.arrange(layer, own)]

    @property
    def wants_tokens(self) -> bool:
        return self._bank.capacity > 0 or self._window.wants_tokens

    def write(self, layer: int, tokens: Tokens) -> None:
        self._window.write(layer, tokens)

    def look(self, block: Block, pixels: Tensor) -> None:
        # Who scores by keys must wait for the clean pass, which makes them.
        if self._bank.capacity and not isinstance(self._admission, ReadsKeys):
            self._proposed = self._admission.propose(block, pixels)

    def commit(self, block: Block, pixels: Tensor) -> MemoryTrace:
        counts = self._window.num_tokens(block)
        if self._bank.capacity == 0:  # without a bank nothing needs noticing
            trace = MemoryTrace(counts)
        else:
            if self._bank.count:
                counts[Role.BANK] = self._bank.count
            trace = self._admit(block, pixels, counts)
        self._window.slide(block)
        return trace

    def _admit(self, block: Block, pixels: Tensor, counts: dict[Role, int]) -> MemoryTrace:
        if isinstance(self._admission, ReadsKeys):
            tokens = block.num_frames * self._window.spec.frame_tokens
            self._admission.read_keys(self._window.current.keys[:, :, :tokens])
        proposed = self._proposed if self._proposed is not None else self._admission.propose(block, pixels)
        self._proposed = None
        offered, keys, values = self._offer(block, proposed)
        admitted = evicted = None
        if offered.count:
            admitted, evicted = self._bank.admit(offered, keys, values, self._admission.retain)
        fired = (proposed.score > 0).unflatten(1, (block.num_frames, -1)).sum(dim=-1)
        return MemoryTrace(
            counts, admitted, evicted, fired, offered if offered.count else None, self._edge_share()
        )

    def _edge_share(self) -> Tensor | None:
        """A bank of border columns is one that a camera's sway has filled."""
        if self._bank.count == 0:
            return None
        new, column = self._bank.held.score > 0, self._bank.held.source[..., 2]
        edge = (column == 0) | (column == self._window.spec.grid[1] - 1)
        return (new & edge).sum(dim=1) / new.sum(dim=1).clamp(min=1)

    def _offer(self, block: Block, proposed: Candidates) -> tuple[Candidates, Tensor, Tensor]:
        """What the bank may take after this block, with its keys and values, L B N H D."""
        if isinstance(self._admission, TakesLeaving):
            assert isinstance(self._window, Window)
            source, keys, values = self._window.leaving(block)
            return self._admission.score_leaving(source), keys, values
        # The sink holds its frames already; offering them would only double them at the same phase.
        own = slice(self._window.owned(block) * self._window.spec.frame_tokens, proposed.count)
        current = self._window.current
        offered = Candidates(proposed.source[:, own], proposed.score[:, own])
        return offered, current.keys[:, :, own], current.values[:, :, own]

    def reread(self, block: Block) -> None:
        self._window.slide(block)

    def clear_prior(self) -> None:
        self._window.clear_prior()

    def refresh(self, first_frame: int, keys: Tensor, values: Tensor) -> None:
        self._window.refresh(first_frame, keys, values)

    def state(self) -> State:
        admission = {f"admission.{name}": value for name, value in self._admission.state().items()}
        return {**self._window.state(), **self._bank.state(), **admission}

    def load_state(self, state: State) -> None:
        self._window.load_state(state)
        self._bank.load_state(state)
        prefix = "admission."
        self._admission.load_state(
            {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
        )


@dataclass(frozen=True, slots=True)
class RecapConfig:
    """Reinforced sink and novelty bank; defaults are the paper's: sink 1, lambda 5, a bank of one frame's tokens."""

    sink_frames: int = 1
    reinforcement: float = 5.0
    capacity_frames: float = 1.0
    zero_scores_fill: bool = True  # until the bank is full, also by tokens that showed nothing new
    bank_on_host: bool = (
        False  # the bank lies in the CPU's memory and comes over layer by layer, at every step
    )

    card: ClassVar[Card] = Card(
        keeps="the first frame, reinforced; a frame's worth of tokens that showed something new; the last frames",
        extra_memory="maps of what was seen, in pixels",
        paper="RECAP-Forcing, arXiv 2608.26671",
        licence="no public code",
    )

    def attended_frames(self, spec: BackboneSpec) -> tuple[float, ...]:
        """Frames' worth of tokens that a block sees once window and bank are full."""
        return (spec.window_frames + self.capacity_frames,)

    def build(self, spec: BackboneSpec, admission: Callable[[], Admission]) -> RecapMemory:
        if not 0 <= self.capacity_frames <= MOST_CAPACITY_FRAMES:
            limit = f"must be 0 to {MOST_CAPACITY_FRAMES}, in frames' worth of tokens"
            raise refuse("capacity_frames", self.capacity_frames, limit, "0 switches the bank off")
        capacity = round(self.capacity_frames * spec.frame_tokens)
        window = make_window(spec, sink_frames=self.sink_frames, reinforcement=self.reinforcement)
        bank = NoveltyBank(
            capacity, spec.layers, on_host=self.bank_on_host, zero_scores_fill=self.zero_scores_fill
        )
        return RecapMemory(window, bank, admission())
