"""`relax-forcing` keeps the sink, one chosen frame of the past, the last frame (Relax Forcing, arXiv 2603.21366).

Four frames between sink and tail are candidates, evenly spaced in the newer half of them without its newest.
One is read:

    argmax  cos(candidate, sink) - 2 cos(candidate, tail)

on unrotated keys of the first layer, averaged over a frame's tokens and over heads: like the opening, unlike
what was just seen; once per block, for all layers. Tail and current keep their own time, history and sink
are packed right before the tail. With its defaults it attends to 7 frames, as `recap` does. Only the newer
half of the past is ever a candidate, so only that half is kept. A cut drops the tail and keeps the reservoir;
without a tail, likeness to the sink decides.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from recap.contracts import LAST_FRAME, Admission, Entry, MemoryConfig, State, copies, copy_of
from recap.errors import check_settings, refuse
from recap.memory.base import WindowMemory
from recap.memory.store import Store
from recap.memory.window import Window, check_frames, own_window
from recap.types import BackboneSpec, Block, Card, MemoryTrace, Role, frame_positions


def candidate_frames(first: int, end: int, count: int, device: torch.device | None = None) -> Tensor:
    """Return `count` frames evenly spaced over the newer half of first..end-1, as the released code chooses them.

    One point more than candidates, truncated, and the newest dropped. `count` shrinks to the half's length; a
    frame may still be listed twice, which changes no choice. The float32 points are those of the release: an
    integer formula would truncate elsewhere. Made on the device: a list would have to be sent there.
    """
    num = end - first
    half = num - num // 2
    points = torch.linspace(num // 2, num - 1, min(count, half) + 1, dtype=torch.float32, device=device)
    return first + points[:-1].long()


def affinity(candidates: Tensor, sink: Tensor, tail: Tensor | None, tail_weight: float) -> Tensor:
    """Score, B K, how much candidates B K D are like the sink and unlike the tail, both B D."""
    score = cosine_similarity(candidates, sink[:, None], dim=-1)
    if tail is not None:
        score = score - tail_weight * cosine_similarity(candidates, tail[:, None], dim=-1)
    return score


class RelaxForcing(WindowMemory):
    """Keeps the sink, the last frames, and a ring of earlier frames of which each block sees one."""

    def __init__(self, spec: BackboneSpec, config: RelaxForcingConfig):
        super().__init__(Window(spec, sink_frames=config.sink_frames, prior_frames=config.tail_frames))
        self._config = config
        # The release's cache has room for the current block too.
        rest = config.sink_frames + config.tail_frames + spec.frames_per_block
        self._middle = config.reservoir_frames - rest
        # The newer half of the middle, the tail that will join it, and the block that is read again after a clear.
        self._ring_frames = -(-self._middle // 2) + config.tail_frames + spec.frames_per_block
        ring_tokens = self._ring_frames * spec.frame_tokens
        self._ring = Store(spec.layers, ring_tokens, on_host=config.reservoir_on_host)
        # Frames of the video so far.
        self._num_seen = 0
        # Mean keys of the first layer: B ring D frame by frame, and B D summed over the sink.
        self._means: Tensor | None = None
        self._sink_sum: Tensor | None = None

    def begin(self, block: Block) -> Tensor:
        window, spec = self.window, self.window.spec
        start, full = window.start(block), spec.window_frames - spec.frames_per_block
        phases = window.begin(block, sink_phase=max(0, start - full))
        end = block.first_frame - window.num_prior
        first = max(window.sink_frames, end - self._middle)
        # A block that is read again may lie further back than the ring, which has moved on since.
        if max(first, self._num_seen - self._ring_frames) < end:
            device, time = window.sink.keys.device, start - window.prior_frames - 1
            # With the reservoir on the host its index must be copied too: the one wait for the device, per block.
            slots = self.heads.agree(self._choose(first, end, block)).to(self._ring.keys.device)
            rows = torch.arange(len(slots), device=slots.device)
            keys, values = (
                ring.unflatten(2, (self._ring_frames, -1))[:, rows, slots].to(device)
                for ring in (self._ring.keys, self._ring.values)
            )
            positions = frame_positions(torch.arange(time, time + 1, device=device), spec.grid)
            window.add(Role.BANK, keys, values, positions, in_front=True)
        return phases

    def state(self) -> State:
        means = copies({"ring.means": self._means, "ring.sink": self._sink_sum})
        seen = {"ring.frames": torch.tensor(self._num_seen)}
        return {**super().state(), **self._ring.state("ring"), **means, **seen}

    def expected(self, state: State) -> dict[str, Entry]:
        window = super().expected(state)
        ring: dict[str, Entry] = {}
        if len(window) > 1:
            means = {
                "ring.means": Entry(("B", self._ring_frames, "D"), "means"),
                "ring.sink": Entry(("B", "D"), "means"),
            }
            ring = {**self._ring.expected("ring"), **means}
        return {**window, **ring, "ring.frames": Entry((), torch.int64, 0, LAST_FRAME if ring else 0)}

    def load_state(self, state: State) -> None:
        super().load_state(state)
        self._ring.load_state("ring", state)
        self._means, self._sink_sum = (copy_of(state.get(f"ring.{name}")) for name in ("means", "sink"))
        self._num_seen = int(state["ring.frames"])

    def _choose(self, first: int, end: int, block: Block) -> Tensor:
        """Choose the slot of the ring that each row reads, B: one of the frames first..end-1."""
        assert self._means is not None and self._sink_sum is not None
        device = self._means.device
        frames = candidate_frames(first, end, self._config.num_candidates, device)
        slots = frames.clamp(min=self._num_seen - self._ring_frames) % self._ring_frames
        tail = None
        if self.window.num_prior:
            last = torch.arange(block.first_frame - self.window.num_prior, block.first_frame, device=device)
            tail = self._means[:, last % self._ring_frames].mean(dim=1)
        score = affinity(self._means[:, slots], self._sink_sum, tail, self._config.tail_weight)
        return slots[score.argmax(dim=1)]

    def keep(self, block: Block, pixels: Tensor, trace: MemoryTrace) -> MemoryTrace:
        """Put the finished block into the ring, frame by frame."""
        current, size = self.window.current, self.window.spec.frame_tokens
        exact = torch.promote_types(current.keys.dtype, torch.float32)
        keys = self.heads.join(current.keys[0][:, : block.num_frames * size], 2)
        tokens = keys.unflatten(1, (block.num_frames, size))
        means = tokens.mean(dim=(2, 3), dtype=exact)
        if self._means is None or self._sink_sum is None:
            self._means = means.new_zeros((means.shape[0], self._ring_frames, means.shape[2]))
            self._sink_sum = torch.zeros_like(means[:, 0])
        owned = self.window.owned(block)
        if owned:
            self._sink_sum += means[:, :owned].sum(dim=1)
        for frame in range(block.num_frames):
            slot = (block.first_frame + frame) % self._ring_frames
            to, since = slice(slot * size, (slot + 1) * size), slice(frame * size, (frame + 1) * size)
            self._ring.put(to, current.keys[:, :, since], current.values[:, :, since])
            self._means[:, slot] = means[:, frame]
        self._num_seen = block.end_frame
        return trace


@dataclass(frozen=True, slots=True)
class RelaxForcingConfig(MemoryConfig):
    """Keeps the sink, one past frame like the sink and unlike the last one, the last frame (Relax Forcing)."""

    sink_frames: int = 2
    tail_frames: int = 1
    num_candidates: int = 4
    tail_weight: float = 2.0
    # How far back a frame can be chosen, sink, tail and current included.
    reservoir_frames: int = 120
    # What is not in view is stored in the CPU's memory.
    reservoir_on_host: bool = False

    card: ClassVar[Card] = Card(
        keeps="first 2 frames; 1 of 4 earlier frames, like the opening and unlike the last; the last frame",
        extra_memory="a reservoir of the newer 61 frames: 17.5 GB at 1.3B, on the host with reservoir_on_host",
        paper="Relax Forcing, arXiv 2603.21366",
        licence="Apache-2.0",
    )

    def build(self, spec: BackboneSpec, admission: Callable[[], Admission]) -> RelaxForcing:
        block = spec.frames_per_block
        counts = ("sink_frames", "tail_frames", "num_candidates")
        remedy = "the release has sink 2, tail 1, candidates 4"
        check_settings(self, counts, 1, math.inf, "must be 1 or more", remedy)
        if self.tail_frames > block:
            limit = f"at most a block of {block} frames"
            raise refuse("tail_frames", self.tail_frames, limit, "the release has 1")
        if not math.isfinite(self.tail_weight):
            raise refuse("tail_weight", self.tail_weight, "must be finite", "the release has 2.0")
        least = self.sink_frames + 1 + self.tail_frames + block
        reason = "sink, a frame between, tail and current"
        check_frames("reservoir_frames", self.reservoir_frames, least, 10_000, reason)
        return RelaxForcing(own_window(spec, self.attended_frames(spec)[0]), self)

    def attended_frames(self, spec: BackboneSpec) -> tuple[int, ...]:
        return (self.sink_frames + 1 + self.tail_frames + spec.frames_per_block,)
