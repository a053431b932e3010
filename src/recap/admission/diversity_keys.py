"""`diversity-keys`: k-means on the backbone's own keys, where there are no DINOv2 weights. Not the paper's.

A token's descriptor is its key in one layer, all heads, unrotated, so that it does not depend on the position.
Keys share a large part, so the mean of the first block is always subtracted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor
from torch.nn import functional

from recap.admission.diversity import ClusterConfig, Diversity
from recap.contracts import FlowEstimator, State
from recap.errors import refuse
from recap.types import BackboneSpec, Block


@dataclass(frozen=True, slots=True)
class DiversityKeysConfig(ClusterConfig):
    """Tokens as different as can be, by the backbone's own keys and k-means; not the paper's rule."""

    needs: ClassVar[str] = "a memory that passes on keys, as `recap` does; no weights"

    layer: int = -1  # whose keys describe a token; -1: the middle one

    def build(self, spec: BackboneSpec, flow: FlowEstimator) -> KeyDiversity:
        if not -1 <= self.layer < spec.layers:
            limit = f"{spec.name} has layers 0 to {spec.layers - 1}"
            raise refuse("layer", self.layer, limit, "-1 is the middle one")
        return KeyDiversity(self, spec)


class KeyDiversity(Diversity):
    reads_keys = True

    def __init__(self, config: DiversityKeysConfig, spec: BackboneSpec):
        super().__init__(config, spec.grid)
        self._layer = spec.layers // 2 if config.layer < 0 else config.layer
        self._keys: Tensor | None = None  # B N H*D of the block being proposed
        self._common: Tensor | None = None  # B 1 H*D

    def read_keys(self, keys: Tensor) -> None:
        self._keys = keys[self._layer].flatten(2).float()

    def describe(self, block: Block, pixels: Tensor) -> Tensor:
        if self._keys is None:
            limit = "the memory passes no keys to it"
            raise refuse("admission", "diversity-keys", limit, "choose memory `recap`, or another admission")
        if self._common is None:
            self._common = self._keys.mean(dim=1, keepdim=True)
        descriptor, self._keys = functional.normalize(self._keys - self._common, dim=-1), None
        return descriptor

    def state(self) -> State:
        common = {} if self._common is None else {"common": self._common.clone()}
        return {**super().state(), **common}

    def load_state(self, state: State) -> None:
        super().load_state(state)
        self._common, self._keys = state.get("common"), None
