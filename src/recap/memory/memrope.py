"""`memrope`: two running means of what leaves the window, at two rates (MemRoPE, arXiv 2603.12513).

Layout [ sink | long mean | short mean | recent | current ], read at window-relative times 0, 1, 2, ... Whatever
leaves the recent frames is averaged over all of its tokens to one key and one value per head and layer, and

    mean <- (1 - rate) mean + rate average      rate 0.01 (long), 0.1 (short); the first average starts both

A mean stands in the window as a whole frame of equal tokens, told apart by their place in the picture alone.
The fold happens when a block is committed: the release does it at the next block's first pass, on the same data.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from recap.contracts import Admission, State
from recap.errors import refuse, unknown_name
from recap.memory.checks import check_frames, own_window
from recap.memory.window import Window
from recap.types import BackboneSpec, Block, Card, MemoryTrace, Role, Segment, Tokens, frame_positions

ACCUMULATIONS = ("float32", "bfloat16")
NUM_MEANS = 2


class MemRope:
    def __init__(
        self,
        spec: BackboneSpec,
        *,
        sink_frames: int,
        rates: tuple[float, float],
        half: bool = False,
        drops_first: bool = False,
    ):
        # Until something is folded the prior also has the places of the means: a plain window.
        self._window = Window(spec, sink_frames=sink_frames)
        self._recent = self._window.prior_frames - NUM_MEANS
        self._rates = rates
        self._half = half
        self._drops_first = drops_first
        self._keys: Tensor | None = None  # long and short, L, B, 1, H, D
        self._values: Tensor | None = None
        self._summaries: list[list[Segment]] = []

    def begin(self, block: Block) -> Tensor:
        phases = self._window.begin(block)
        self._summaries = [[] for _ in range(self._window.spec.layers)]
        if self._keys is not None and self._values is not None:
            tokens = self._window.prior.keys  # of the dtype in which tokens are kept
            for which in range(NUM_MEANS):
                time = self._window.sink_frames + which
                times = torch.arange(time, time + 1, device=tokens.device)
                positions = frame_positions(times, self._window.spec.grid)
                keys, values = (means[which].to(tokens.dtype) for means in (self._keys, self._values))
                for layer, kept in enumerate(self._summaries):
                    shape = (-1, positions.shape[1], -1, -1)
                    parts = keys[layer].expand(shape), values[layer].expand(shape)
                    kept.append(Segment(Role.SUMMARY, *parts, positions))
        return phases

    def arrange(self, layer: int, own: list[Segment]) -> list[Segment]:
        return [*self._window.segments(layer), *self._summaries[layer], *own]

    def write(self, layer: int, tokens: Tokens) -> None:
        self._window.write(layer, tokens)

    def commit(self, block: Block, pixels: Tensor) -> MemoryTrace:
        counts = self._window.num_tokens(block)
        if self._summaries[0]:
            counts[Role.SUMMARY] = NUM_MEANS * self._window.spec.frame_tokens
        folded, dropped = self._fold(block)
        self._window.slide(block)
        self._window.keep_prior(self._room)
        notes: dict[str, bool | int | str] = {"folded_frames": folded}
        if dropped:
            notes["dropped_frames"] = dropped
        return MemoryTrace(counts, notes=notes)

    def reread(self, block: Block) -> None:
        self._window.slide(block)
        self._window.keep_prior(self._room)

    def clear_prior(self) -> None:
        """The recent frames go, and are not folded; sink and means stay."""
        self._window.clear_prior()

    def refresh(self, first_frame: int, keys: Tensor, values: Tensor) -> None:
        self._window.refresh(first_frame, keys, values)

    def state(self) -> State:
        state = self._window.state()
        if self._keys is not None and self._values is not None:
            state |= {"means.keys": self._keys.clone(), "means.values": self._values.clone()}
        return state

    def load_state(self, state: State) -> None:
        self._window.load_state(state)
        self._keys = self._values = None
        if "means.keys" in state:
            self._keys, self._values = state["means.keys"].clone(), state["means.values"].clone()

    @property
    def _room(self) -> int:
        """Frames the prior may hold: once there are means, they take the place of two."""
        return self._window.prior_frames if self._keys is None else self._recent

    def _fold(self, block: Block) -> tuple[int, int]:
        """Average what the finished block pushes out of the recent frames; returns frames folded and dropped."""
        window, size = self._window, self._window.spec.frame_tokens
        owned, held = window.owned(block), window.num_prior
        total = held + block.num_frames - owned
        if total <= self._room:
            return 0, 0
        leaving = total - self._recent
        # In the release the means are put over the two oldest of the frames that leave first.
        dropped = min(NUM_MEANS, leaving - 1) if self._drops_first and self._keys is None else 0
        oldest = window.prior_frames - held  # where the prior begins in its store
        past = slice((oldest + min(dropped, held)) * size, (oldest + min(leaving, held)) * size)
        new = slice((owned + max(dropped - held, 0)) * size, (owned + max(leaving - held, 0)) * size)
        count = (leaving - dropped) * size
        averages = []
        for store in ("keys", "values"):
            # The prior's store is made by the first slide, the current one's by the first write.
            parts = [getattr(window.current, store)[:, :, new]]
            if held:
                parts.append(getattr(window.prior, store)[:, :, past])
            averages.append(self._average(parts, count))
        if self._keys is None or self._values is None:
            self._keys, self._values = (torch.stack([mean] * NUM_MEANS) for mean in averages)
        else:
            for means, average in zip((self._keys, self._values), averages, strict=True):
                for mean, rate in zip(means, self._rates, strict=True):
                    # Two roundings and a third: in half precision as the release's three operations have them.
                    mean.mul_(1 - rate).add_(average * rate)
        return leaving - dropped, dropped

    def _average(self, parts: list[Tensor], count: int) -> Tensor:
        """Mean over all tokens, L B 1 H D, in the dtype of the means."""
        exact = torch.promote_types(parts[0].dtype, torch.float32)
        sums = [part.sum(dim=2, keepdim=True, dtype=exact) for part in parts]
        average = torch.stack(sums).sum(dim=0) / count
        return average.to(torch.bfloat16) if self._half else average


@dataclass(frozen=True, slots=True)
class MemRopeConfig:
    """Sink, a slow and a fast running mean of what left the window, recent frames (MemRoPE).

    `accumulation`: "float32" as the paper means it; "bfloat16" as the release runs, which rounds small changes away.
    """

    window_frames: int = 12  # sink, two means, recent and current
    sink_frames: int = 3
    long_rate: float = 0.01  # weight of the new average in the long mean
    short_rate: float = 0.1
    accumulation: str = "float32"
    drops_first_frames: bool = False  # the release loses the two frames whose place the means take

    card: ClassVar[Card] = Card(
        keeps="first 3 frames; a slow and a fast running mean of all that left, as a frame each; 4 recent frames",
        extra_memory="none",
        paper="MemRoPE, arXiv 2603.12513",
        licence="Apache-2.0, one file tagged CC-BY-NC-SA-4.0",
    )

    def build(self, spec: BackboneSpec, admission: Callable[[], Admission]) -> MemRope:
        # Its own rule: time is counted in the window, whatever the row's phases are.
        spec = replace(own_window(spec, self.window_frames), phases="window")
        block = spec.frames_per_block
        least = block + NUM_MEANS
        if self.window_frames < least:
            limit = f"{NUM_MEANS} means and a block of {block} frames need {least}"
            raise refuse("window_frames", self.window_frames, limit, f"use {least} or more")
        beside = f"what fits beside {NUM_MEANS} means and a block of {block} in {self.window_frames} frames"
        check_frames("sink_frames", self.sink_frames, 0, self.window_frames - least, beside)
        for name in ("long_rate", "short_rate"):
            rate = getattr(self, name)
            if not 0 <= rate <= 1:
                raise refuse(name, rate, "must be 0 to 1", "the paper has 0.01 (long) and 0.1 (short)")
        if self.accumulation not in ACCUMULATIONS:
            raise unknown_name("accumulation", self.accumulation, ACCUMULATIONS)
        return MemRope(
            spec,
            sink_frames=self.sink_frames,
            rates=(self.long_rate, self.short_rate),
            half=self.accumulation == "bfloat16",
            drops_first=self.drops_first_frames,
        )

    def attended_frames(self, spec: BackboneSpec) -> tuple[int, ...]:
        """Frames' worth of tokens that a block sees once the window is full."""
        return (self.window_frames,)
