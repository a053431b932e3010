"""The window of a backbone that carries its history in its own sequence, and the choice between the two kinds.

Such a backbone (Helios) reads latents of its past anew at every step and hands their keys and values over as
segments of its own, by role. So nothing is kept here but the block just finished, for a bank to choose from; the
sink is reinforced where it lies.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import torch
from torch import Tensor

from recap.contracts import State
from recap.errors import refuse
from recap.memory.store import Store
from recap.memory.window import Window, check_reinforcement
from recap.types import BackboneSpec, Block, Role, Segment, Tokens


class CarriedWindow:
    def __init__(self, spec: BackboneSpec, *, sink_frames: int = 0, reinforcement: float = 1.0):
        if sink_frames not in (0, 1):
            limit = f"{spec.name} carries one frame of the opening in its sequence"
            raise refuse("sink_frames", sink_frames, limit, "1 reinforces it, 0 leaves it as it is")
        check_reinforcement(reinforcement)
        self.spec = spec
        self.sink_frames = sink_frames
        self._log_bias = math.log(reinforcement) if sink_frames else 0.0
        self.current = Store(spec.layers, spec.block_tokens)
        self._seen: Counter[Role] = Counter()

    def begin(self, block: Block) -> Tensor:
        """Temporal phases, F: every block lies behind a full window, as the model has it."""
        self._seen = Counter()
        start = self.spec.window_frames - self.spec.frames_per_block
        return torch.arange(start, start + block.num_frames, dtype=torch.float64)

    def arrange(self, layer: int, own: list[Segment]) -> list[Segment]:
        if layer == 0:
            self._seen = Counter()
            for segment in own:
                self._seen[segment.role] += segment.keys.shape[1]
        if not self._log_bias:
            return own
        return [replace(s, log_bias=self._log_bias) if s.role is Role.SINK else s for s in own]

    @property
    def wants_tokens(self) -> bool:
        return False

    def num_tokens(self, block: Block) -> dict[Role, int]:
        """Keys by role that the queries of the block's last step could see."""
        return dict(self._seen)

    def write(self, layer: int, tokens: Tokens) -> None:
        self.current.allocate(tokens.keys)
        count = tokens.keys.shape[1]
        self.current.keys[layer][:, :count].copy_(tokens.keys)
        self.current.values[layer][:, :count].copy_(tokens.values)

    def owned(self, block: Block) -> int:
        """How many leading frames of the block belong to the sink."""
        return min(max(self.sink_frames - block.first_frame, 0), block.num_frames)

    def slide(self, block: Block) -> None:
        """Nothing: the backbone is given its past by the loop."""

    def clear_prior(self) -> None:
        """Nothing, for the same reason."""

    def refresh(self, first_frame: int, keys: Tensor, values: Tensor) -> None:
        """Nothing: the past is read anew anyway."""

    def state(self) -> State:
        return {}

    def load_state(self, state: State) -> None:
        """There is none."""


AnyWindow = Window | CarriedWindow


def make_window(spec: BackboneSpec, *, sink_frames: int = 0, reinforcement: float = 1.0) -> AnyWindow:
    """The window of a memory that asks for sink and prior and leaves the rest to it."""
    kind = CarriedWindow if spec.carries_history else Window
    return kind(spec, sink_frames=sink_frames, reinforcement=reinforcement)
