"""`rolling-sink`: the opening replayed to and fro, under sliding times (Rolling Sink, arXiv 2602.07775).

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

from recap.contracts import Admission, MemoryConfig, State
from recap.errors import refuse
from recap.memory.base import WindowMemory
from recap.memory.checks import check_frames, own_window
from recap.memory.store import Store
from recap.memory.window import Window
from recap.types import BackboneSpec, Block, Card, MemoryTrace, Role, Segment, frame_positions


def replayed_frame(frame: int, period: int) -> int:
    """Which of the first `period` frames is shown in place of a frame."""
    turn, rest = divmod(frame, period)
    return period - 1 - rest if turn % 2 else rest


def replayed_runs(first: int, end: int, period: int) -> list[tuple[int, range]]:
    """Frames first..end-1 as runs of stored frames: the run's first stored frame, and the times of its frames.

    Stored frames always rise along a run; where the replay goes backward, their times fall.
    """
    runs = []
    while first < end:
        stop = min(end, (first // period + 1) * period)
        times = range(first, stop) if first // period % 2 == 0 else range(stop - 1, first - 1, -1)
        runs.append((replayed_frame(times[0], period), times))
        first = stop
    return runs


class RollingSink(WindowMemory):
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
        self._segments: list[list[Segment]] = []

    def noise_block(self, block: Block) -> int:
        """The release starts all blocks from the noise of the first."""
        self._noise_asked = block.index
        return 0 if self._tiled_noise else block.index

    def begin(self, block: Block) -> Tensor:
        first, window = block.first_frame, self.window
        shift = window.start(block) - first
        self._segments = [[] for _ in range(window.spec.layers)]
        replayed = replayed_runs(max(0, first - self._period), first - self._real_frames, self._period)
        for stored, times in replayed:
            self._show(Role.SINK, window.sink, stored, times, shift)
        real = max(0, first - self._num_real)
        # Real frames before this one are in the sink's store.
        opening = min(first, self._period)
        if real < opening:
            self._show(Role.PRIOR, window.sink, real, range(real, opening), shift)
        late = range(max(real, opening), first)
        if late:
            self._show(Role.PRIOR, window.prior, window.prior_frames - len(late), late, shift)
        return window.phases(block)

    def arrange(self, layer: int, own: list[Segment]) -> list[Segment]:
        return [*self._segments[layer], *own]

    def keep(self, block: Block, pixels: Tensor, trace: MemoryTrace) -> MemoryTrace:
        tiled = self._tiled_noise and self._noise_asked == block.index
        return replace(trace, notes={"tiled_noise": tiled})

    def slide(self, block: Block) -> None:
        super().slide(block)
        self._num_real = min(self._num_real + block.num_frames, self._real_frames)
        self._segments = []

    def clear_prior(self) -> None:
        """Forget the real frames; what is replayed is the opening, which stays."""
        super().clear_prior()
        self._num_real = 0

    def state(self) -> State:
        return {**super().state(), "real.frames": torch.tensor(self._num_real)}

    def load_state(self, state: State) -> None:
        super().load_state(state)
        self._num_real = int(state["real.frames"])

    def _show(self, role: Role, store: Store, stored: int, times: range, shift: int) -> None:
        """Add the frames from `stored` on, read at these times, to what the block sees."""
        spec = self.window.spec
        tokens = slice(stored * spec.frame_tokens, (stored + len(times)) * spec.frame_tokens)
        moments = torch.arange(times.start, times.stop, times.step, device=store.keys.device)
        positions = frame_positions(moments + shift, spec.grid)
        for keys, values, seen in zip(store.keys, store.values, self._segments, strict=True):
            seen.append(Segment(role, keys[:, tokens], values[:, tokens], positions))


@dataclass(frozen=True, slots=True)
class RollingSinkConfig(MemoryConfig):
    """The opening replayed forward and backward behind the last real block (Rolling Sink).

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
