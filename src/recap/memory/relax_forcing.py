"""`relax-forcing`: sink, one chosen frame of the past, the last frame (Relax Forcing, arXiv 2603.21366).

Of the frames between sink and tail, four that lie evenly in the newer half, its newest left out, are
candidates, and one is read:

    argmax  cos(candidate, sink) - 2 cos(candidate, tail)

on unrotated keys of the first layer, averaged over a frame's tokens and over heads: like the opening, unlike
what was just seen; once per block, for all layers. Tail and current have their own time, history and sink
stand packed right before the tail. With its defaults it attends to 7 frames, as `recap` does. Only the newer
half of the past is ever a candidate, so only that half is kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from recap.contracts import Admission, State
from recap.errors import refuse
from recap.memory.checks import check_frames, own_window
from recap.memory.store import Store
from recap.memory.window import Window
from recap.types import BackboneSpec, Block, Card, MemoryTrace, Role, Segment, Tokens, frame_positions


def candidate_frames(first: int, end: int, count: int, device: torch.device | None = None) -> Tensor:
    """`count` frames evenly spaced over the newer half of first..end-1, as the released code chooses them.

    One point more than candidates, truncated, and the newest dropped. `count` shrinks to the half's length; a
    frame may still be listed twice, which changes no choice. The float32 points are those of the release: an
    integer formula would truncate elsewhere. Made on the device: a list would have to be sent there.
    """
    num = end - first
    half = num - num // 2
    points = torch.linspace(num // 2, num - 1, min(count, half) + 1, dtype=torch.float32, device=device)
    return first + points[:-1].long()


def affinity(candidates: Tensor, sink: Tensor, tail: Tensor | None, tail_weight: float) -> Tensor:
    """How much B K candidates, B K D, are like the sink and unlike the tail, both B D."""
    score = cosine_similarity(candidates, sink[:, None], dim=-1)
    if tail is not None:
        score = score - tail_weight * cosine_similarity(candidates, tail[:, None], dim=-1)
    return score


class RelaxForcing:
    def __init__(
        self,
        spec: BackboneSpec,
        *,
        sink_frames: int,
        tail_frames: int,
        candidates: int,
        tail_weight: float,
        reservoir_frames: int,
        on_host: bool,
    ):
        self._spec = spec
        self._candidates = candidates
        self._tail_weight = tail_weight
        self._window = Window(spec, sink_frames=sink_frames, prior_frames=tail_frames)
        # The release's cache has room for the current block too.
        self._middle = reservoir_frames - sink_frames - tail_frames - spec.frames_per_block
        # The newer half of the middle, the tail that will join it, and the block that is read again after a clear.
        self._ring_frames = -(-self._middle // 2) + tail_frames + spec.frames_per_block
        self._ring = Store(spec.layers, self._ring_frames * spec.frame_tokens, on_host=on_host)
        self._history = Store(spec.layers, spec.frame_tokens)
        self._num_seen = 0  # frames of the video so far
        self._means: Tensor | None = None  # B ring D: mean key of the first layer, frame by frame
        self._sink_sum: Tensor | None = None  # B D: sum of the sink's means
        self._chosen: list[Segment] = []

    def begin(self, block: Block) -> Tensor:
        window, start = self._window, self._window.start(block)
        held = self._spec.window_frames - self._spec.frames_per_block
        phases = window.begin(block, sink_phase=max(0, start - held))
        self._chosen = []
        end = block.first_frame - window.num_prior
        first = max(window.sink_frames, end - self._middle)
        # A block that is read again may lie further back than the ring, which has gone on meanwhile.
        if max(first, self._num_seen - self._ring_frames) < end:
            self._fetch(self._choose(first, end, block))
            time = start - window.prior_frames - 1
            times = torch.arange(time, time + 1, device=self._history.keys.device)
            positions = frame_positions(times, self._spec.grid)
            self._chosen = [
                Segment(Role.BANK, keys, values, positions)
                for keys, values in zip(self._history.keys, self._history.values, strict=True)
            ]
        return phases

    def arrange(self, layer: int, own: list[Segment]) -> list[Segment]:
        chosen = [self._chosen[layer]] if self._chosen else []
        return [*chosen, *self._window.segments(layer), *own]

    def write(self, layer: int, tokens: Tokens) -> None:
        self._window.write(layer, tokens)

    def commit(self, block: Block, pixels: Tensor) -> MemoryTrace:
        counts = self._window.num_tokens(block)
        if self._chosen:
            counts[Role.BANK] = self._spec.frame_tokens
        self._remember(block)
        self._window.slide(block)
        return MemoryTrace(counts)

    def reread(self, block: Block) -> None:
        self._window.slide(block)

    def clear_prior(self) -> None:
        """The tail goes; the reservoir is the memory and stays. Without a tail, likeness to the sink decides."""
        self._window.clear_prior()

    def refresh(self, first_frame: int, keys: Tensor, values: Tensor) -> None:
        self._window.refresh(first_frame, keys, values)

    def state(self) -> State:
        if self._means is None or self._sink_sum is None:
            return {**self._window.state(), "ring.frames": torch.tensor(self._num_seen)}
        return {
            **self._window.state(),
            **self._ring.state("ring"),
            "ring.means": self._means.clone(),
            "ring.sink": self._sink_sum.clone(),
            "ring.frames": torch.tensor(self._num_seen),
        }

    def load_state(self, state: State) -> None:
        self._window.load_state(state)
        self._ring.load_state("ring", state)
        self._means = self._sink_sum = None
        if "ring.means" in state:
            self._means, self._sink_sum = state["ring.means"].clone(), state["ring.sink"].clone()
        self._num_seen = int(state["ring.frames"])

    def _choose(self, first: int, end: int, block: Block) -> Tensor:
        """Per row the place in the ring, B, of the frame of first..end-1 to read."""
        assert self._means is not None and self._sink_sum is not None
        device = self._means.device
        frames = candidate_frames(first, end, self._candidates, device)
        places = frames.clamp(min=self._num_seen - self._ring_frames) % self._ring_frames
        tail = None
        if self._window.num_prior:
            last = torch.arange(block.first_frame - self._window.num_prior, block.first_frame, device=device)
            tail = self._means[:, last % self._ring_frames].mean(dim=1)
        score = affinity(self._means[:, places], self._sink_sum, tail, self._tail_weight)
        return places[score.argmax(dim=1)]

    def _fetch(self, places: Tensor) -> None:
        """Copy each row's frame out of the ring, in all layers."""
        self._history.allocate(self._window.sink.keys)
        # With the reservoir on the host its index must come over too: the one wait for the device, per block.
        index = places.to(self._ring.keys.device)
        rows = torch.arange(len(index), device=index.device)
        for to, ring in ((self._history.keys, self._ring.keys), (self._history.values, self._ring.values)):
            to.copy_(ring.unflatten(2, (self._ring_frames, -1))[:, rows, index])

    def _remember(self, block: Block) -> None:
        """Put the finished block into the ring, frame by frame."""
        current, size = self._window.current, self._spec.frame_tokens
        self._ring.allocate(current.keys)
        exact = torch.promote_types(current.keys.dtype, torch.float32)
        tokens = current.keys[0][:, : block.num_frames * size].unflatten(1, (block.num_frames, size))
        means = tokens.mean(dim=(2, 3), dtype=exact)
        if self._means is None or self._sink_sum is None:
            self._means = means.new_zeros((means.shape[0], self._ring_frames, means.shape[2]))
            self._sink_sum = torch.zeros_like(means[:, 0])
        owned = self._window.owned(block)
        if owned:
            self._sink_sum += means[:, :owned].sum(dim=1)
        for frame in range(block.num_frames):
            place = (block.first_frame + frame) % self._ring_frames
            to, since = slice(place * size, (place + 1) * size), slice(frame * size, (frame + 1) * size)
            self._ring.keys[:, :, to].copy_(current.keys[:, :, since])
            self._ring.values[:, :, to].copy_(current.values[:, :, since])
            self._means[:, place] = means[:, frame]
        self._num_seen = block.end_frame


@dataclass(frozen=True, slots=True)
class RelaxForcingConfig:
    """Sink, one past frame like the sink and unlike the last one, the last frame (Relax Forcing)."""

    sink_frames: int = 2
    tail_frames: int = 1
    num_candidates: int = 4
    tail_weight: float = 2.0
    reservoir_frames: int = 120  # how far back a frame can be chosen, sink, tail and current included
    reservoir_on_host: bool = False  # what is not in view lies in the CPU's memory

    card: ClassVar[Card] = Card(
        keeps="first 2 frames; 1 of 4 earlier frames, like the opening and unlike the last; the last frame",
        extra_memory="a reservoir of the newer 61 frames: 17.5 GB at 1.3B, on the host with reservoir_on_host",
        paper="Relax Forcing, arXiv 2603.21366",
        licence="Apache-2.0",
    )

    def build(self, spec: BackboneSpec, admission: Callable[[], Admission]) -> RelaxForcing:
        block = spec.frames_per_block
        for name in ("sink_frames", "tail_frames", "num_candidates"):
            value = getattr(self, name)
            if value < 1:
                raise refuse(name, value, "must be 1 or more", "the release has sink 2, tail 1, candidates 4")
        if self.tail_frames > block:
            limit = f"at most a block of {block} frames"
            raise refuse("tail_frames", self.tail_frames, limit, "the release has 1")
        if not math.isfinite(self.tail_weight):
            raise refuse("tail_weight", self.tail_weight, "must be finite", "the release has 2.0")
        least = self.sink_frames + 1 + self.tail_frames + block
        reason = "sink, a frame between, tail and current"
        check_frames("reservoir_frames", self.reservoir_frames, least, 10_000, reason)
        return RelaxForcing(
            own_window(spec, self.attended_frames(spec)[0]),
            sink_frames=self.sink_frames,
            tail_frames=self.tail_frames,
            candidates=self.num_candidates,
            tail_weight=self.tail_weight,
            reservoir_frames=self.reservoir_frames,
            on_host=self.reservoir_on_host,
        )

    def attended_frames(self, spec: BackboneSpec) -> tuple[int, ...]:
        """Frames' worth of tokens that a block sees: sink, history, tail, current."""
        return (self.sink_frames + 1 + self.tail_frames + spec.frames_per_block,)
