"""`keys` keeps what looks unlike everything the memory has: a token is new if its key is far from all keys kept.

It needs no optical flow, no picture and no weights. A token is compared, by the cosine of its keys, with the tokens
of the first frame, those of the bank, and the new ones of earlier frames of its block; what is left to the nearest of
them is its score. Keys are those of the clean pass, unrotated, so that the position does not count, with all heads
joined, in a few layers spread evenly over the model; cosines are averaged over these.

How far is far is read from the opening itself: for every token of the first frame, how near is the nearest other one?
Three quarters of them have one within some distance, and what lies beyond a multiple of it from everything known is
new. The strangest tokens do not count, since an opening may have many of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from recap.admission.described import Described, refuse_keyless
from recap.attention.likeness import (
    describe_keys,
    for_products,
    nearest_distance,
    spread_layers,
    usual_distance,
)
from recap.contracts import AdmissionConfig, Entry, FlowEstimator, State, copies, together
from recap.errors import check_settings
from recap.types import BackboneSpec, Block, Candidates


@dataclass(frozen=True, slots=True)
class KeyNoveltyConfig(AdmissionConfig):
    """Finds novelty by the model's own keys; not the paper's rule."""

    keeps: ClassVar[str] = "what no key of sink, bank and block resembles"
    needs: ClassVar[str] = "a memory that passes on keys, as `recap` does; no flow, no weights"
    needs_flow: ClassVar[bool] = False

    # Layers that are compared, spread evenly.
    num_layers: int = 3
    # Something new is this many times farther from all that is known than tokens of the opening are from each other.
    margin: float = 4.0

    def __post_init__(self) -> None:
        check_settings(self, ("num_layers",), 1, 1000, "must be 1 to 1000", "3 is the default")
        check_settings(self, ("margin",), 0.0, 100.0, "must be 0 to 100", "4 is the default")

    def build(self, spec: BackboneSpec, flow: FlowEstimator) -> KeyNovelty:
        return KeyNovelty(self, spec)


class KeyNovelty(Described):
    """Scores a token by its distance to the nearest one that is known."""

    reads_keys = True
    needs_pixels = False
    name: ClassVar[str] = "keys"

    def __init__(self, config: KeyNoveltyConfig, spec: BackboneSpec):
        super().__init__(spec.grid)
        self._margin = config.margin
        self._layers = spread_layers(config.num_layers, spec.layers)
        # Unit vectors B N E of the block being proposed.
        self._keys: Tensor | None = None
        # Those of the first frame, B n E, and the distance beyond which something is new, B 1.
        self._first: Tensor | None = None
        self._limit: Tensor | None = None

    def read_keys(self, keys: Tensor) -> None:
        self._keys = describe_keys(keys, self._layers, to_compare=True)

    def score(self, block: Block, pixels: Tensor) -> Tensor:
        if self._keys is None:
            raise refuse_keyless(self.name)
        tokens, self._keys = self._keys, None
        self.take_fresh(block, pixels, tokens)
        by_frame = (block.num_frames, -1)
        if self._first is None or self._limit is None:
            self._first = tokens[:, : tokens.shape[1] // block.num_frames]
            self._limit = self._margin * usual_distance(self._first)
        kept = [self._first] if self._descriptor is None else [self._first, self._descriptor]
        frames = tokens.unflatten(1, by_frame).unbind(1)
        # One product for all frames; what is new in earlier ones comes frame by frame.
        known = torch.cat(kept, dim=1)
        apart = nearest_distance(tokens, known).unflatten(1, by_frame).unbind(1)
        worth = self._worth(block, pixels)
        scores: list[Tensor] = []
        new: list[Tensor] = []
        for index, (frame, distance) in enumerate(zip(frames, apart, strict=True)):
            if new:
                distance = distance.minimum(nearest_distance(frame, torch.cat(new, dim=1)))
            value = distance if worth is None else worth[:, index]
            scores.append(torch.where(distance > self._limit, value, 0.0))
            new.append(frame * (scores[-1] > 0)[..., None])
        return torch.cat(scores, dim=1)

    def _worth(self, block: Block, pixels: Tensor) -> Tensor | None:
        """Return what new tokens score, B F n, or None for their distance; a subclass may know better."""
        return None

    @torch.no_grad()
    def retain(self, pool: Candidates, capacity: int) -> Tensor:
        stays = super().retain(pool, capacity)
        kept = pool.at(stays)
        # What only fills the bank is no example of anything: as zero it is like nothing.
        self.keep(kept, self.look_up(kept) * (kept.score > 0)[..., None])
        return stays

    def state(self) -> State:
        # In files they are fp32 on any device.
        made = {**super().state(), **copies({"first": self._first, "limit": self._limit})}
        return {name: value.float() if value.is_floating_point() else value for name, value in made.items()}

    def expected(self, state: State) -> dict[str, Entry]:
        opening = {
            "first": Entry(("B", self._grid[0] * self._grid[1], "E"), torch.float32),
            "limit": Entry(("B", 1), torch.float32, 0.0),
        }
        # It is read before the first token is retained.
        retained = super().expected(state)
        return {**retained, **(opening if retained else together(state, opening))}

    def load_state(self, state: State) -> None:
        super().load_state(state)
        self._first, self._limit, self._keys = state.get("first"), state.get("limit"), None
        self._first, self._descriptor = (
            None if each is None else for_products(each) for each in (self._first, self._descriptor)
        )
