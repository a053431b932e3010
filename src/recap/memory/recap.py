"""`recap` is the paper's memory, eq. (layout_bank): [ reinforced sink | bank K | prior | current ].

Bank keys are read at temporal phase 0 with their own row and column, next to the sink: a time-neutral memory
of how things looked when they first appeared.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor

from recap.attention.heads import Heads
from recap.contracts import Admission, Entry, MemoryConfig, MemoryPolicy, State
from recap.errors import check_settings, refuse
from recap.memory.bank import NoveltyBank, Retain, shared_scores
from recap.memory.base import WindowMemory
from recap.memory.merging import Duplicates
from recap.memory.pinned import PinnedGroup, PinnedTokens
from recap.memory.reinforcement import read_reinforcement
from recap.memory.window import Window, make_window, timeless_positions
from recap.types import BackboneSpec, Block, Candidates, Card, MemoryTrace, Role

MOST_CAPACITY_FRAMES = 1000
"""About a quarter of an hour of video kept whole; anything larger is a typing error."""

MOST_MARGIN = 100.0
"""No two tokens are that far apart."""


class RecapMemory(WindowMemory):
    """Keeps a reinforced sink, a bank that an admission rule fills, and the last frames."""

    def __init__(
        self,
        window: Window,
        bank: NoveltyBank,
        admission: Admission,
        bank_reinforcement: float = 1.0,
        share_by_block: bool = False,
    ):
        super().__init__(window)
        if admission.takes_leaving and window.spec.carries_history:
            limit = "it takes what leaves the window, and this backbone's own history is its window"
            raise refuse("admission", type(admission).__name__, limit, "choose flow or random")
        self.bank = bank
        self.pinned = PinnedTokens(window.spec)
        self._admission = admission
        # Bank and pinned tokens have the same, so that pinning a token does not change its weight.
        self._bank_bias = math.log(bank_reinforcement)
        self._share_by_block = share_by_block
        # The scores of the block's tokens, if `look` was called.
        self._proposed: Candidates | None = None

    def split_heads(self, heads: Heads) -> None:
        super().split_heads(heads)
        if self.bank.duplicates is not None:
            self.bank.duplicates.heads = heads

    def begin(self, block: Block) -> Tensor:
        phases = super().begin(block)
        if self.bank.count:
            self.window.add(
                Role.BANK,
                self.bank.keys,
                self.bank.values,
                timeless_positions(self.bank.entries.source),
                log_bias=self._bank_bias,
                token_bias=self.bank.token_bias,
                in_front=True,
            )
        self.pinned.show(self.window, block.subjects, self._bank_bias)
        return phases

    def pin(self, slots: Sequence[int], name: str) -> None:
        self.pinned.add(name, PinnedGroup(*self.bank.take(slots)))
        self.bank.release(slots)

    def forget(self, slots: Sequence[int]) -> None:
        self.bank.release(slots)

    def replace_bank(self, other: MemoryPolicy) -> None:
        assert isinstance(other, RecapMemory), "a memory is replaced by one of its kind"
        # The rule continues with what it has seen.
        other._admission.load_state(self._admission.state())
        other.bank.take_over(self.bank)
        self.bank, self._admission = other.bank, other._admission

    def take_cast(self, name: str, keys: Tensor, values: Tensor, entries: Candidates) -> None:
        self.pinned.add(name, PinnedGroup(keys, values, entries))

    def drop_cast(self, name: str) -> None:
        self.pinned.drop(name)

    @property
    def wants_tokens(self) -> bool:
        return self.bank.capacity > 0 or self.window.wants_tokens

    @property
    def needs_pixels(self) -> bool:
        return self.bank.capacity > 0 and self._admission.needs_pixels

    def look(self, block: Block, pixels: Tensor) -> None:
        if self.bank.capacity == 0:
            return
        # A rule that scores by keys must wait for the clean pass, which makes them.
        if self._admission.reads_keys:
            self._admission.look(block, pixels)
        else:
            self._proposed = self._admission.propose(block, pixels)

    def keep(self, block: Block, pixels: Tensor, trace: MemoryTrace) -> MemoryTrace:
        if self.bank.capacity == 0:
            return trace
        if self.bank.duplicates is not None:
            self.bank.duplicates.calibrate(self.window.current.keys[:, :, : self.window.spec.frame_tokens])
        if self._admission.reads_keys:
            tokens = block.num_frames * self.window.spec.frame_tokens
            self._admission.read_keys(self.window.current.keys[:, :, :tokens])
        proposed = self._proposed if self._proposed is not None else self._admission.propose(block, pixels)
        self._proposed = None
        # A rule answers where the pictures are, which may be a decoder's own device.
        proposed = proposed.to(self.window.current.keys.device)
        fired = (proposed.score > 0).unflatten(1, (block.num_frames, -1)).sum(dim=-1)
        trace = replace(trace, fired=fired)
        offered, keys, values = self._offer(block, proposed)
        if offered.count:
            admitted, evicted = self.bank.admit(offered, keys, values, self._retain_after(block))
            trace = replace(trace, admitted=admitted, evicted=evicted, offered=offered)
        return replace(trace, edge_share=self._edge_share())

    def _retain_after(self, block: Block) -> Retain:
        """Return how the bank chooses after this block."""
        if not self._share_by_block:
            return self._admission.retain
        sizes = block.first_frame, self.window.spec.frames_per_block
        return lambda pool, capacity: self._admission.retain(shared_scores(pool, *sizes), capacity)

    def _edge_share(self) -> Tensor | None:
        """Return the share of border columns among the bank's new tokens; a swaying camera fills a bank with them."""
        if self.bank.count == 0:
            return None
        new, column = self.bank.entries.score > 0, self.bank.entries.source[..., 2]
        edge = (column == 0) | (column == self.window.spec.grid[1] - 1)
        return (new & edge).sum(dim=1) / new.sum(dim=1).clamp(min=1)

    def _offer(self, block: Block, proposed: Candidates) -> tuple[Candidates, Tensor, Tensor]:
        """Return what the bank may take after this block, with its keys and values, L B N H D."""
        if self._admission.takes_leaving:
            source, keys, values = self.window.leaving(block)
            return self._admission.score_leaving(source), keys, values
        # The sink has its frames already; offering them would only double them at the same phase.
        own = slice(self.window.owned(block) * self.window.spec.frame_tokens, proposed.count)
        current = self.window.current
        return proposed.part(own), current.keys[:, :, own], current.values[:, :, own]

    def state(self) -> State:
        admission = {f"admission.{name}": value for name, value in self._admission.state().items()}
        return {**super().state(), **self.bank.state(), **self.pinned.state(), **admission}

    def expected(self, state: State) -> dict[str, Entry]:
        bank = self.bank.expected(state, self.window.spec.grid)
        admission = self._admission.expected(_of_admission(state))
        return {
            **super().expected(state),
            **bank,
            **self.pinned.expected(state),
            **{f"admission.{name}": entry for name, entry in admission.items()},
        }

    def load_state(self, state: State) -> None:
        super().load_state(state)
        self._proposed = None
        self.bank.load_state(state)
        self.pinned.load_state(state)
        self._admission.load_state(_of_admission(state))


def _of_admission(state: State) -> State:
    prefix = "admission."
    return {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}


@dataclass(frozen=True, slots=True)
class RecapConfig(MemoryConfig):
    """Keeps a reinforced sink and a novelty bank; the paper's are sink 1, lambda 5, a bank of one frame's tokens."""

    sink_frames: int = 1
    # A number, or a text that says where it acts: see `recap.memory.reinforcement`.
    reinforcement: float | str = 5.0
    capacity_frames: float = 1.0
    # Until the bank is full, tokens that showed nothing new fill it too.
    zero_scores_fill: bool = True
    # Multiplies the unnormalised weight of the bank and of pinned tokens, as `reinforcement` does the sink's.
    bank_reinforcement: float = 1.0
    # A token whose key is nearer than this to one in the bank is counted there, as ln(n), and takes no slot. It is a
    # multiple of the distance between tokens of the first frame, as the margin of `keys`. 0 merges nothing.
    merge_margin: float = 0.0
    # Every block in turn keeps its best token, so that what comes late cannot evict all that came early.
    share_by_block: bool = False

    card: ClassVar[Card] = Card(
        keeps="the first frame, reinforced; a frame's worth of tokens that showed something new; the last frames",
        extra_memory="maps of what was seen, in pixels",
        paper="RECAP-Forcing, arXiv 2608.26671",
        licence="no public code",
    )
    keeps_bank: ClassVar[bool] = True
    # Kept the bank in the CPU's memory, for twice the time of a block.
    retired: ClassVar[Mapping[str, object]] = {"bank_on_host": False}

    def attended_frames(self, spec: BackboneSpec) -> tuple[float, ...]:
        return (spec.window_frames + self.capacity_frames,)

    def __post_init__(self) -> None:
        object.__setattr__(self, "reinforcement", read_reinforcement(self.reinforcement).plain)

    def build(self, spec: BackboneSpec, admission: Callable[[], Admission]) -> RecapMemory:
        if not (self.bank_reinforcement > 0 and math.isfinite(self.bank_reinforcement)):
            limit = "must be above 0 and finite"
            raise refuse("bank_reinforcement", self.bank_reinforcement, limit, "1 leaves the bank as it is")
        limit = f"must be 0 to {MOST_MARGIN:g} distances between tokens of the first frame"
        check_settings(self, ["merge_margin"], 0, MOST_MARGIN, limit, "0 merges nothing")
        limit = f"must be 0 to {MOST_CAPACITY_FRAMES}, in frames' worth of tokens"
        check_settings(self, ["capacity_frames"], 0, MOST_CAPACITY_FRAMES, limit, "0 switches the bank off")
        capacity = round(self.capacity_frames * spec.frame_tokens)
        window = make_window(spec, sink_frames=self.sink_frames, reinforcement=self.reinforcement)
        bank = NoveltyBank(
            capacity,
            spec.layers,
            zero_scores_fill=self.zero_scores_fill,
            duplicates=Duplicates(spec.layers, self.merge_margin) if self.merge_margin else None,
        )
        return RecapMemory(window, bank, admission(), self.bank_reinforcement, self.share_by_block)


@dataclass(frozen=True, slots=True)
class RecapPlusConfig(RecapConfig):
    """Is `recap` with a bank filled by keys, without flow, and lambda only in the last half of the layers.

    It is the same memory with other settings, those of our options beyond the paper that were chosen:
    docs/recap-plus.md.
    """

    reinforcement: float | str = "5@layers:last-half"

    card: ClassVar[Card] = Card(
        keeps="as `recap`; new is what has a key unlike all that are kept",
        extra_memory="keys of the first frame and the bank, in three layers",
        paper="none: ours, on top of RECAP-Forcing, arXiv 2608.26671",
        licence="this package's",
    )
    usual_admission: ClassVar[str] = "keys"
