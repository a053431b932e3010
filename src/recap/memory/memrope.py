"""`memrope` keeps two running means of what leaves the window, at two rates (MemRoPE, arXiv 2603.12513).

Layout [ sink | long mean | short mean | recent | current ], read at window-relative times 0, 1, 2, ... Whatever
leaves the recent frames is averaged over all of its tokens to one key and one value per head and layer, and

    mean <- (1 - rate) mean + rate average      rate 0.01 (long), 0.1 (short); the first average starts both

A mean is read as a whole frame of equal tokens that differ only in their row and column. The fold happens when a
block is committed: the release does it at the next block's first pass, on the same data. A cut drops the recent
frames without folding them; sink and means stay.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from recap.contracts import Admission, Entry, MemoryConfig, State, copies, copy_of, together
from recap.errors import check_settings, refuse, unknown_name
from recap.memory.base import WindowMemory
from recap.memory.window import Window, check_frames, own_window
from recap.types import BackboneSpec, Block, Card, MemoryTrace, Role, frame_positions

ACCUMULATIONS = ("float32", "bfloat16")
NUM_MEANS = 2


class MemRope(WindowMemory):
    """Keeps the sink, a slow and a fast running mean of what left, and recent frames."""

    def __init__(self, spec: BackboneSpec, config: MemRopeConfig):
        # Until something is folded the prior also fills the two frames of the means: a plain window.
        super().__init__(Window(spec, sink_frames=config.sink_frames))
        self._config = config
        self._recent = self.window.prior_frames - NUM_MEANS
        # Long and short mean, each L B 1 H D.
        self._keys: Tensor | None = None
        self._values: Tensor | None = None

    def begin(self, block: Block) -> Tensor:
        window, spec = self.window, self.window.spec
        phases = super().begin(block)
        if self._keys is not None and self._values is not None:
            # The prior has the dtype in which tokens are kept.
            like = window.prior.keys
            whole_frame = (-1, -1, spec.frame_tokens, -1, -1)
            for time, means in enumerate(zip(self._keys, self._values, strict=True), window.sink_frames):
                positions = frame_positions(torch.arange(time, time + 1, device=like.device), spec.grid)
                keys, values = (mean.to(like.dtype).expand(whole_frame) for mean in means)
                window.add(Role.SUMMARY, keys, values, positions)
        return phases

    def keep(self, block: Block, pixels: Tensor, trace: MemoryTrace) -> MemoryTrace:
        folded, dropped = self._fold(block)
        notes: dict[str, bool | int | str] = {"folded_frames": folded}
        if dropped:
            notes["dropped_frames"] = dropped
        return replace(trace, notes=notes)

    def slide(self, block: Block) -> None:
        super().slide(block)
        self.window.keep_prior(self._room)

    def state(self) -> State:
        return {**super().state(), **copies({"means.keys": self._keys, "means.values": self._values})}

    def expected(self, state: State) -> dict[str, Entry]:
        window = super().expected(state)
        entry = Entry((NUM_MEANS, self.window.spec.layers, "B", 1, "H", "D"), "means")
        means = together(state, {"means.keys": entry, "means.values": entry})
        # They are made of what leaves the window.
        return {**window, **(means if len(window) > 1 else {})}

    def load_state(self, state: State) -> None:
        super().load_state(state)
        self._keys, self._values = (copy_of(state.get(f"means.{name}")) for name in ("keys", "values"))

    @property
    def _room(self) -> int:
        """Return how many frames the prior may have: once there are means, they take the room of two."""
        return self.window.prior_frames if self._keys is None else self._recent

    def _fold(self, block: Block) -> tuple[int, int]:
        """Average what the finished block pushes out of the recent frames; returns frames folded and dropped."""
        window, size = self.window, self.window.spec.frame_tokens
        owned, before = window.owned(block), window.num_prior
        total = before + block.num_frames - owned
        if total <= self._room:
            return 0, 0
        leaving = total - self._recent
        # In the release the means are put over the two oldest of the frames that leave first.
        drops_first = self._config.drops_first_frames and self._keys is None
        dropped = min(NUM_MEANS, leaving - 1) if drops_first else 0
        # Where the prior begins in its store.
        oldest = window.prior_frames - before
        past = slice((oldest + min(dropped, before)) * size, (oldest + min(leaving, before)) * size)
        new = slice((owned + max(dropped - before, 0)) * size, (owned + max(leaving - before, 0)) * size)
        count = (leaving - dropped) * size
        averages = []
        for store in ("keys", "values"):
            # The prior's store is made by the first slide, the current one's by the first write.
            parts = [getattr(window.current, store)[:, :, new]]
            if before:
                parts.append(getattr(window.prior, store)[:, :, past])
            averages.append(self._average(parts, count))
        if self._keys is None or self._values is None:
            self._keys, self._values = (torch.stack([mean] * NUM_MEANS) for mean in averages)
            return leaving - dropped, dropped
        for which, rate in enumerate((self._config.long_rate, self._config.short_rate)):
            for means, average in zip((self._keys, self._values), averages, strict=True):
                # Two roundings and a third: in half precision as the release's three operations have them.
                means[which].mul_(1 - rate).add_(average * rate)
        return leaving - dropped, dropped

    def _average(self, parts: list[Tensor], count: int) -> Tensor:
        """Return the mean over all tokens, L B 1 H D, in the dtype of the means."""
        exact = torch.promote_types(parts[0].dtype, torch.float32)
        sums = [part.sum(dim=2, keepdim=True, dtype=exact) for part in parts]
        average = torch.stack(sums).sum(dim=0) / count
        return average.to(torch.bfloat16) if self._config.accumulation == "bfloat16" else average


@dataclass(frozen=True, slots=True)
class MemRopeConfig(MemoryConfig):
    """Keeps a sink, a slow and a fast running mean of what left the window, recent frames (MemRoPE).

    `accumulation`: "float32" as the paper means it; "bfloat16" as the release runs, which rounds small changes away.
    """

    # Sink, two means, recent and current.
    window_frames: int = 12
    sink_frames: int = 3
    # Weights of the new average in the long and in the short mean.
    long_rate: float = 0.01
    short_rate: float = 0.1
    accumulation: str = "float32"
    # The release loses the two frames that the means replace.
    drops_first_frames: bool = False

    card: ClassVar[Card] = Card(
        keeps="first 3 frames; a slow and a fast running mean of all that left, as a frame each; 4 recent frames",
        extra_memory="none",
        paper="MemRoPE, arXiv 2603.12513",
        licence="Apache-2.0, one file tagged CC-BY-NC-SA-4.0",
    )

    def build(self, spec: BackboneSpec, admission: Callable[[], Admission]) -> MemRope:
        # Its own rule: time is counted in the window, whatever the backbone's phases are.
        spec = replace(own_window(spec, self.window_frames), phases="window")
        block = spec.frames_per_block
        least = block + NUM_MEANS
        if self.window_frames < least:
            limit = f"{NUM_MEANS} means and a block of {block} frames need {least}"
            raise refuse("window_frames", self.window_frames, limit, f"use {least} or more")
        room = f"what fits next to {NUM_MEANS} means and a block of {block} in {self.window_frames} frames"
        check_frames("sink_frames", self.sink_frames, 0, self.window_frames - least, room)
        remedy = "the paper has 0.01 (long) and 0.1 (short)"
        check_settings(self, ["long_rate", "short_rate"], 0, 1, "must be 0 to 1", remedy)
        if self.accumulation not in ACCUMULATIONS:
            raise unknown_name("accumulation", self.accumulation, ACCUMULATIONS)
        return MemRope(spec, self)

    def attended_frames(self, spec: BackboneSpec) -> tuple[int, ...]:
        return (self.window_frames,)
