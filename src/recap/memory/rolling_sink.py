"""`rolling-sink` replays the opening forward and backward, under sliding times (Rolling Sink, arXiv 2602.07775).

Of a window of n past frames all but the last R are not what was generated there but the first n frames of the
video, read forward and backward in turn. In place of frame p the window shows

    r if q is even, else n - 1 - r      with q, r = divmod(p, n)

at the time of p itself, so times continue without a gap. The release writes replayed frames into its cache; here
the first n frames are kept once, unrotated, and a block's view of them is slices of that store: a backward run
is the same slice with falling times, since attention ignores order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from recap.contracts import Admission, Entry, MemoryConfig, State
from recap.errors import refuse
from recap.memory.base import WindowMemory
from recap.memory.window import Window, check_frames, own_window
from recap.types import BackboneSpec, Block, Card, MemoryTrace, Role


def replayed_frame(frame: int, period: int) -> int:
    """Return which of the first `period` frames is shown in place of a frame."""
    turn, rest = divmod(frame, period)
    return period - 1 - rest if turn % 2 else rest


def replayed_runs(first: int, end: int, period: int) -> list[tuple[int, range]]:
    """Split frames first..end-1 into runs of stored frames: each run's first stored frame, and its frames' times.

    Stored frames always rise along a run; where the replay goes backward, their times fall.
    """
    runs = []
    while first < end:
        stop = min(end, (first // period + 1) * period)
        times = range(first, stop) if first // period % 2 == 0 else range(stop - 1, first - 1, -1)
        runs.append((replayed_frame(times[0], period), times))
        first = stop
    return runs


def _shifted(times: range, shift: int) -> range:
    return range(times.start + shift, times.stop + shift, times.step)


class RollingSink(WindowMemory):
    """Keeps the opening, shown to and fro, and the last real frames."""

    def __init__(self, spec: BackboneSpec, config: RollingSinkConfig):
        self._period = spec.window_frames - spec.frames_per_block
        self._real_frames = self._period - config.replayed_frames
        # The window's sink are the first frames, its prior the real ones that come after them.
        super().__init__(Window(spec, sink_frames=self._period, prior_frames=self._real_frames))
        self._tiled_noise = config.tiled_noise
        # The last block for which `noise_block` was called.
        self._noise_asked = -1
        # Frames before the block that are read as they were generated.
        self._num_real = 0

    def noise_block(self, block: Block) -> int:
        """Return the first block, with whose noise the release starts all blocks, or the block itself."""
        self._noise_asked = block.index
        return 0 if self._tiled_noise else block.index

    def begin(self, block: Block) -> Tensor:
        first, window = block.first_frame, self.window
        phases, shift = window.begin_empty(block), window.start(block) - first
        replayed = replayed_runs(max(0, first - self._period), first - self._real_frames, self._period)
        for stored, times in replayed:
            window.show(Role.SINK, window.sink, stored, _shifted(times, shift))
        real = max(0, first - self._num_real)
        # Real frames before this one are in the sink's store.
        opening = min(first, self._period)
        window.show(Role.PRIOR, window.sink, real, _shifted(range(real, opening), shift))
        late = range(max(real, opening), first)
        window.show(Role.PRIOR, window.prior, window.prior_frames - len(late), _shifted(late, shift))
        return phases

    def keep(self, block: Block, pixels: Tensor, trace: MemoryTrace) -> MemoryTrace:
        tiled = self._tiled_noise and self._noise_asked == block.index
        return replace(trace, notes={"tiled_noise": tiled})

    def slide(self, block: Block) -> None:
        super().slide(block)
        self._num_real = min(self._num_real + block.num_frames, self._real_frames)

    def clear_prior(self) -> None:
        """Forget the real frames; what is replayed is the opening, which stays."""
        super().clear_prior()
        self._num_real = 0

    def state(self) -> State:
        return {**super().state(), "real.frames": torch.tensor(self._num_real)}

    def expected(self, state: State) -> dict[str, Entry]:
        window = super().expected(state)
        most = self._real_frames if len(window) > 1 else 0
        return {**window, "real.frames": Entry((), torch.int64, 0, most)}

    def load_state(self, state: State) -> None:
        super().load_state(state)
        self._num_real = int(state["real.frames"])


@dataclass(frozen=True, slots=True)
class RollingSinkConfig(MemoryConfig):
    """Replays the opening forward and backward behind the last real block (Rolling Sink).

    `tiled_noise`: every block starts from the first block's noise, as the release does; it changes motion by itself.
    """

    window_frames: int = 21  # replayed, real and current
    replayed_frames: int = 15
    tiled_noise: bool = False

    card: ClassVar[Card] = Card(
        keeps="first 18 frames, 15 of them in view, to and fro in time; the last 3 frames",
        extra_memory="3 frames that are kept and not in view: 0.9 GB at 1.3B",
        paper="Rolling Sink, arXiv 2602.07775",
        licence="Apache-2.0",
    )

    def build(self, spec: BackboneSpec, admission: Callable[[], Admission]) -> RollingSink:
        spec = own_window(spec, self.window_frames)
        block = spec.frames_per_block
        for name in ("window_frames", "replayed_frames"):
            frames = getattr(self, name)
            if frames % block:
                limit = f"not divisible by {block}, the frames of a block, which are replayed together"
                raise refuse(
                    name, frames, limit, f"use {frames // block * block} or {-(-frames // block) * block}"
                )
        if self.window_frames < 2 * block:
            limit = f"a block of {block} needs at least one other to replay"
            raise refuse("window_frames", self.window_frames, limit, f"use {2 * block} or more")
        room = f"what fits next to a block of {block} in a window of {self.window_frames}"
        check_frames("replayed_frames", self.replayed_frames, block, self.window_frames - block, room)
        return RollingSink(spec, self)

    def attended_frames(self, spec: BackboneSpec) -> tuple[int, ...]:
        return (self.window_frames,)
