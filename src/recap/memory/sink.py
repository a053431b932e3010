"""`none` and `sink`: the plain window, without and with a permanent first frame.

The sink is the memory of the opening scene: its tokens stay cached, their phase is re-applied at retrieval,
and eq. (sink) multiplies their unnormalised weight by lambda (`reinforcement`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from recap.contracts import Admission, State
from recap.memory.carried import AnyWindow, make_window
from recap.types import BackboneSpec, Block, Card, MemoryTrace, Segment, Tokens


class WindowMemory:
    """Sink, prior and current, nothing else; `none` is the case of a sink of no frames."""

    def __init__(self, window: AnyWindow):
        self._window = window

    def begin(self, block: Block) -> Tensor:
        return self._window.begin(block)

    def arrange(self, layer: int, own: list[Segment]) -> list[Segment]:
        return self._window.arrange(layer, own)

    @property
    def wants_tokens(self) -> bool:
        return self._window.wants_tokens

    def write(self, layer: int, tokens: Tokens) -> None:
        self._window.write(layer, tokens)

    def commit(self, block: Block, pixels: Tensor) -> MemoryTrace:
        trace = MemoryTrace(self._window.num_tokens(block))
        self._window.slide(block)
        return trace

    def reread(self, block: Block) -> None:
        self._window.slide(block)

    def clear_prior(self) -> None:
        self._window.clear_prior()

    def refresh(self, first_frame: int, keys: Tensor, values: Tensor) -> None:
        self._window.refresh(first_frame, keys, values)

    def state(self) -> State:
        return self._window.state()

    def load_state(self, state: State) -> None:
        self._window.load_state(state)


@dataclass(frozen=True, slots=True)
class NoMemoryConfig:
    """The sliding window as the backbone has it, no sink."""

    card: ClassVar[Card] = Card("the last frames", "none", "Self-Forcing, arXiv 2506.08009", "Apache-2.0")

    def build(self, spec: BackboneSpec, admission: Callable[[], Admission]) -> WindowMemory:
        return WindowMemory(make_window(spec))

    def attended_frames(self, spec: BackboneSpec) -> tuple[int, ...]:
        return (spec.window_frames,)


@dataclass(frozen=True, slots=True)
class SinkConfig:
    """The first `sink_frames` frames stay for good; lambda 1 is the plain sink."""

    sink_frames: int = 1
    reinforcement: float = 1.0

    card: ClassVar[Card] = Card(
        "the first frame; the last ones", "none", "LongLive, arXiv 2509.22622", "Apache-2.0"
    )

    def build(self, spec: BackboneSpec, admission: Callable[[], Admission]) -> WindowMemory:
        return WindowMemory(make_window(spec, sink_frames=self.sink_frames, reinforcement=self.reinforcement))

    def attended_frames(self, spec: BackboneSpec) -> tuple[int, ...]:
        return (spec.window_frames,)
