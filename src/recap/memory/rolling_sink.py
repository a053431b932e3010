"""`rolling-sink`: the opening replayed to and fro, under sliding times (Rolling Sink, arXiv 2602.07775).

Of a window of n past frames all but the last R are not what was drawn there but the first n frames of the video,
read forward and backward in turn. The place of frame p shows

    r if q is even, else n - 1 - r      with q, r = divmod(p, n)

at the time of p itself, so times run on without a gap. The release writes replayed frames into its cache; here
the first n frames are kept once, unrotated, and a block's view of them is slices of that store: a backward run
is the same slice with falling times, since attention does not care for order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from recap.contracts import Admission, State
from recap.errors import refuse
from recap.memory.checks import check_frames, own_window
from recap.memory.store import Store
from recap.memory.window import Window
from recap.types import BackboneSpec, Block, Card, MemoryTrace, Role, Segment, Tokens, frame_positions


def replayed_frame(frame: int, period: int) -> int:
    """Which of the first `period` frames stands in the place of a frame."""
    turn, rest = divmod(frame, period)
    return period - 1 - rest if turn % 2 else rest


def replayed_runs(first: int, end: int, period: int) -> list[tuple[int, range]]:
    """The places first..end-1 as runs of stored frames: the run's first stored frame, and the times of its frames.

    Stored frames always rise along a run; where the replay goes backward, their times fall.
    """
    runs = []
    while first < end:
        stop = min(end, (first // period + 1) * period)
        times = range(first, stop) if first // period % 2 == 0 else range(stop - 1, first - 1, -1)
        runs.append((replayed_frame(times[0], period), times))
        first = stop
    return runs


class RollingSink:
    def __init__(self, spec: BackboneSpec, *, replayed_frames: int, tiled_noise: bool = False):
        self._spec = spec
        self._period = spec.window_frames - spec.frames_per_block
        self._real_frames = self._period - replayed_frames
        self._tiled_noise = tiled_noise
        self._noise_asked = -1  # the last block whose noise we were asked about
        # The window's sink are the first frames, its prior the real ones that come after them.
        self._window = Window(spec, sink_frames=self._period, prior_frames=self._real_frames)
        self._num_real = 0  # frames before the block that are read as they were drawn
        self._segments: list[list[Segment]] = []

    def noise_block(self, block: Block) -> int:
        """The release starts all blocks from the noise of the first."""
        self._noise_asked = block.index
        return 0 if self._tiled_noise else block.index

    def begin(self, block: Block) -> Tensor:
        first, start = block.first_frame, self._window.start(block)
        self._segments = [[] for _ in range(self._spec.layers)]
        window, shift = self._window, start - first
        for stored, times in replayed_runs(
            max(0, first - self._period), first - self._real_frames, self._period
        ):
            self._see(Role.SINK, window.sink, stored, times, shift)
        real = max(0, first - self._num_real)
        opening = min(first, self._period)  # real frames before it lie in the sink's store
        if real < opening:
            self._see(Role.PRIOR, window.sink, real, range(real, opening), shift)
        late = range(max(real, opening), first)
        if late:
            self._see(Role.PRIOR, window.prior, window.prior_frames - len(late), late, shift)
        return torch.arange(start, start + block.num_frames, dtype=torch.float64)

    def arrange(self, layer: int, own: list[Segment]) -> list[Segment]:
        return [*self._segments[layer], *own]

    def write(self, layer: int, tokens: Tokens) -> None:
        self._window.write(layer, tokens)

    def commit(self, block: Block, pixels: Tensor) -> MemoryTrace:
        counts: dict[Role, int] = {}
        for segment in self._segments[0]:
            counts[segment.role] = counts.get(segment.role, 0) + segment.keys.shape[1]
        counts[Role.CURRENT] = block.num_frames * self._spec.frame_tokens
        self._slide(block)
        tiled = self._tiled_noise and self._noise_asked == block.index
        return MemoryTrace(counts, notes={"tiled_noise": tiled})

    def reread(self, block: Block) -> None:
        self._slide(block)

    def clear_prior(self) -> None:
        """The real frames go; what is replayed is the opening, which stays."""
        self._num_real = 0
        self._window.clear_prior()

    def refresh(self, first_frame: int, keys: Tensor, values: Tensor) -> None:
        self._window.refresh(first_frame, keys, values)

    def state(self) -> State:
        return {**self._window.state(), "real.frames": torch.tensor(self._num_real)}

    def load_state(self, state: State) -> None:
        self._window.load_state(state)
        self._num_real = int(state["real.frames"])

    def _slide(self, block: Block) -> None:
        self._window.slide(block)
        self._num_real = min(self._num_real + block.num_frames, self._real_frames)
        self._segments = []

    def _see(self, role: Role, store: Store, stored: int, times: range, shift: int) -> None:
        size = self._spec.frame_tokens
        tokens = slice(stored * size, (stored + len(times)) * size)
        moments = torch.arange(times.start, times.stop, times.step, device=store.keys.device)
        positions = frame_positions(moments + shift, self._spec.grid)
        for layer, kept in enumerate(self._segments):
            kept.append(
                Segment(role, store.keys[layer][:, tokens], store.values[layer][:, tokens], positions)
            )


@dataclass(frozen=True, slots=True)
class RollingSinkConfig:
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
        beside = f"what fits beside a block of {block} in a window of {self.window_frames}"
        check_frames("replayed_frames", self.replayed_frames, block, self.window_frames - block, beside)
        return RollingSink(spec, replayed_frames=self.replayed_frames, tiled_noise=self.tiled_noise)

    def attended_frames(self, spec: BackboneSpec) -> tuple[int, ...]:
        """Frames' worth of tokens that a block sees once the window is full."""
        return (self.window_frames,)
