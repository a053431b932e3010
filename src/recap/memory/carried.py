"""The window of a backbone that carries its history in its own sequence, and the choice between the two kinds.

Such a backbone (Helios) reads latents of its past again at every step and brings their keys and values as
segments of its own, by role. So this window stores only the finished block, for a bank to choose from, and
reinforces the sink inside the backbone's sequence.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from recap.contracts import State
from recap.errors import refuse
from recap.memory.window import Window, count_tokens
from recap.types import BackboneSpec, Block, Role, Segment


class CarriedWindow(Window):
    """A window without a sink or prior of its own: nothing of it fills, slides or needs saving."""

    wants_tokens = False

    def __init__(self, spec: BackboneSpec, *, sink_frames: int = 0, reinforcement: float = 1.0):
        super().__init__(spec, sink_frames=sink_frames, prior_frames=0, reinforcement=reinforcement)
        self._seen: dict[Role, int] = {}

    def _check(self, spec: BackboneSpec, sink_frames: int) -> None:
        if sink_frames not in (0, 1):
            limit = f"{spec.name} carries one frame of the opening in its sequence"
            raise refuse("sink_frames", sink_frames, limit, "1 reinforces it, 0 leaves it as it is")

    def start(self, block: Block) -> int:
        """Every block lies behind a full window, as the model has it."""
        return self.spec.window_frames - self.spec.frames_per_block

    def begin(self, block: Block, *, sink_phase: int = 0) -> Tensor:
        self._seen = {}
        return self.phases(block)

    def arrange(self, layer: int, own: list[Segment]) -> list[Segment]:
        if layer == 0 and own:
            self._seen = count_tokens(own)
        if not (self.sink_frames and self._log_bias):
            return own
        return [replace(s, log_bias=self._log_bias) if s.role is Role.SINK else s for s in own]

    def own_tokens(self, block: Block) -> dict[Role, int]:
        """Keys by role of the backbone's own sequence at the block's last step."""
        return self._seen

    def slide(self, block: Block) -> None:
        """The rollout passes past latents to the backbone directly."""

    def state(self) -> State:
        return {}

    def load_state(self, state: State) -> None:
        """There is none."""


def make_window(spec: BackboneSpec, *, sink_frames: int = 0, reinforcement: float = 1.0) -> Window:
    """The window of a memory that needs a sink and leaves all the rest to the prior."""
    kind = CarriedWindow if spec.carries_history else Window
    return kind(spec, sink_frames=sink_frames, reinforcement=reinforcement)
