"""`flow+keys` keeps what is new here, by flow, and new at all, by keys.

Flow notices whatever it cannot trace to the previous picture: also what was hidden for a moment, what it lost in fast
motion, and background at the border. Keys know what the memory has already. A token scores as `flow` says if its key
is unlike everything kept, as `keys` says, and 0 otherwise. What `flow` claims is its own: keys change no claim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from recap.admission.flow import FlowNovelty, FlowNoveltyConfig
from recap.admission.keys import KeyNovelty, KeyNoveltyConfig
from recap.contracts import Entry, FlowEstimator, State
from recap.types import BackboneSpec, Block

PREFIX = "flow."
"""What the names of flow's state begin with in the state of both."""


@dataclass(frozen=True, slots=True)
class FlowKeysConfig(FlowNoveltyConfig):
    """Finds optical-flow novelty that no key resembles; not the paper's rule. It has the settings of both."""

    keeps: ClassVar[str] = "what `flow` keeps, if no key of sink, bank and block resembles it"
    needs: ClassVar[str] = "optical flow, and a memory that passes on keys, as `recap` does"

    # As in `keys`.
    num_layers: int = 3
    margin: float = 4.0

    def __post_init__(self) -> None:
        FlowNoveltyConfig.__post_init__(self)
        self.by_keys()

    def by_keys(self) -> KeyNoveltyConfig:
        """Return the settings of `keys` among these."""
        return KeyNoveltyConfig(self.num_layers, self.margin)

    def build(self, spec: BackboneSpec, flow: FlowEstimator) -> FlowKeys:
        return FlowKeys(self, spec, flow)


class FlowKeys(KeyNovelty):
    """Scores a token by flow if its key is far from all that is known."""

    needs_pixels = True
    name = "flow+keys"

    def __init__(self, config: FlowKeysConfig, spec: BackboneSpec, flow: FlowEstimator):
        super().__init__(config.by_keys(), spec)
        self.by_flow = FlowNovelty.on(spec, config, flow)
        # What flow made of the block, B F n, if `look` was called.
        self._noticed: Tensor | None = None

    def look(self, block: Block, pixels: Tensor) -> None:
        self._noticed = self.by_flow.notice(pixels).score.flatten(2)

    def _worth(self, block: Block, pixels: Tensor) -> Tensor:
        if self._noticed is None:
            self.look(block, pixels)
        assert self._noticed is not None
        noticed, self._noticed = self._noticed, None
        return noticed

    def state(self) -> State:
        return {**super().state(), **{f"{PREFIX}{name}": each for name, each in self.by_flow.state().items()}}

    def expected(self, state: State) -> dict[str, Entry]:
        flow = self.by_flow.expected(_of_flow(state))
        return {**super().expected(state), **{f"{PREFIX}{name}": entry for name, entry in flow.items()}}

    def load_state(self, state: State) -> None:
        super().load_state(state)
        self.by_flow.load_state(_of_flow(state))
        self._noticed = None


def _of_flow(state: State) -> State:
    return {name.removeprefix(PREFIX): each for name, each in state.items() if name.startswith(PREFIX)}
