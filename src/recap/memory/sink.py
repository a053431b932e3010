"""`none` and `sink` keep the plain window, without and with a permanent first frame.

The sink is the memory of the opening scene: its tokens stay cached, their phase is re-applied at retrieval,
and eq. (sink) multiplies their unnormalised weight by lambda (`reinforcement`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from recap.contracts import Admission, MemoryConfig
from recap.memory.base import WindowMemory
from recap.memory.reinforcement import read_reinforcement
from recap.memory.window import make_window
from recap.types import BackboneSpec, Card


@dataclass(frozen=True, slots=True)
class NoMemoryConfig(MemoryConfig):
    """Keeps the sliding window as the backbone has it, no sink."""

    card: ClassVar[Card] = Card("the last frames", "none", "Self-Forcing, arXiv 2506.08009", "Apache-2.0")

    def build(self, spec: BackboneSpec, admission: Callable[[], Admission]) -> WindowMemory:
        return WindowMemory(make_window(spec))


@dataclass(frozen=True, slots=True)
class SinkConfig(MemoryConfig):
    """Keeps the first `sink_frames` frames for good; lambda 1 is the plain sink."""

    sink_frames: int = 1
    # A number, or a text that says where it acts: see `recap.memory.reinforcement`.
    reinforcement: float | str = 1.0

    card: ClassVar[Card] = Card(
        "the first frame; the last ones", "none", "LongLive, arXiv 2509.22622", "Apache-2.0"
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "reinforcement", read_reinforcement(self.reinforcement).plain)

    def build(self, spec: BackboneSpec, admission: Callable[[], Admission]) -> WindowMemory:
        return WindowMemory(make_window(spec, sink_frames=self.sink_frames, reinforcement=self.reinforcement))
