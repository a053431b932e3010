"""`WindowMemory` is the base of a memory around a window. A subclass implements what it keeps and nothing else.

It overrides `begin` to add what it keeps to what the window shows (`window.add`, `window.show`), `keep` to take it
from a finished block, and `state`, `expected` and `load_state` to save it. Everything about sink, prior and current
block is done here.
"""

from __future__ import annotations

from torch import Tensor

from recap.attention.heads import ALL_HEADS, Heads
from recap.contracts import Entry, MemoryPolicy, State, check_state
from recap.memory.window import Window, count_tokens
from recap.types import Block, MemoryTrace, Segment, Tokens


class WindowMemory(MemoryPolicy):
    """Shows sink, prior and current block, nothing else."""

    def __init__(self, window: Window):
        self.window = window
        # Which heads it gets tokens of; a subclass that looks across heads joins them by this.
        self.heads: Heads = ALL_HEADS

    def split_heads(self, heads: Heads) -> None:
        """Expect tokens of these heads only, before anything is written."""
        self.heads = self.window.bias.heads = heads

    def begin(self, block: Block) -> Tensor:
        return self.window.begin(block)

    def arrange(self, layer: int, own: list[Segment]) -> list[Segment]:
        return self.window.arrange(layer, own)

    def keep(self, block: Block, pixels: Tensor, trace: MemoryTrace) -> MemoryTrace:
        """Take what should stay of the finished block, before the prior slides; returns the trace, completed.

        The block's tokens are in `window.current`; pixels B T 3 Y X, 0..1.
        """
        return trace

    def slide(self, block: Block) -> None:
        """Move the finished block, generated or read again, into sink and prior."""
        self.window.slide(block)

    @property
    def sink_frames(self) -> int:
        return self.window.sink_frames

    @property
    def wants_tokens(self) -> bool:
        return self.window.wants_tokens

    @property
    def needs_pixels(self) -> bool:
        """Tell whether it keeps more than a window; a subclass that does so without the pixels overrides this."""
        return type(self).keep is not WindowMemory.keep

    def write(self, layer: int, tokens: Tokens) -> None:
        self.window.write(layer, tokens)

    def commit(self, block: Block, pixels: Tensor) -> MemoryTrace:
        seen = {**count_tokens(self.arrange(0, [])), **self.window.own_tokens(block)}
        self.window.bias.commit(seen)
        trace = self.keep(block, pixels, MemoryTrace(seen))
        self.slide(block)
        return trace

    def reread(self, block: Block) -> None:
        self.window.bias.drop()
        self.slide(block)

    def clear_prior(self) -> None:
        self.window.keep_prior(0)

    def reinforce(self, reinforcement: float | str) -> None:
        self.window.bias.set(reinforcement)

    @property
    def needs_steps(self) -> bool:
        return self.needs_queries or self.window.bias.needs_steps

    def measure(self, layer: int, share: Tensor) -> None:
        self.window.bias.measure(layer, share)

    def take_sink_share(self, share: Tensor) -> None:
        self.window.bias.take_share(share)

    def refresh(self, first_frame: int, keys: Tensor, values: Tensor) -> None:
        self.window.refresh(first_frame, keys, values)

    def state(self) -> State:
        return self.window.state()

    def expected(self, state: State) -> dict[str, Entry]:
        """Return what such a state must consist of."""
        return self.window.expected(state)

    def load_state(self, state: State) -> None:
        check_state(state, self.expected(state))
        self.window.load_state(state)
