"""`deep-forcing`: a deep sink and participative compression (Deep Forcing, arXiv 2512.05081).

The first S frames stay for good. Behind them the past is appended until the window is full; then a compression
keeps of everything between the sink and the last R frames (the block at hand among them) only the tokens that
recent queries ask for most, C = N - S - R frames' worth:

    phi_j = < sum_r q_r , k_j > / (H sqrt(D))     q_r: the last R frames' queries, rotated; k_j rotated

one number per token, shared by the heads of a layer, chosen anew by each layer. The queries are those of the
first pass of the block at hand (noise, still) and of the last R - F frames before it (clean). A compression
happens in that first pass and stands for the whole block.

Only sums of queries are needed, so only a sum is kept. Keys are kept unrotated, so nothing is rotated twice.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from recap.attention.rope import Rotation, rotate, rotation
from recap.contracts import Admission, State
from recap.errors import refuse, unknown_name
from recap.memory.checks import check_frames, own_window
from recap.memory.store import Store
from recap.memory.window import Window
from recap.types import BackboneSpec, Block, Card, MemoryTrace, Role, Segment, Tokens, frame_positions

VARIANTS = ("release", "paper", "sink-only")


def participation(asked: Tensor, keys: Tensor, positions: Tensor) -> Tensor:
    """phi, B M: how much the summed queries B H D, rotated, ask for the keys B M H D at positions B M 3."""
    heads, channels = asked.shape[-2:]
    turned = rotate(keys.to(asked.dtype), rotation(positions, channels, asked.dtype))
    asked = asked * (heads**-1 * channels**-0.5)
    return torch.einsum("bhd,bmhd->bm", asked, turned)


def choose(score: Tensor, count: Tensor, capacity: int, reuse_cap: int) -> Tensor:
    """Indices B capacity, in the cache's order, of the highest scores B M; ties: older first.

    What was chosen `reuse_cap` times already (0: no cap) comes in only where nothing else is left, so that
    every row and layer keeps equally many tokens.
    """
    if reuse_cap:
        score = score.masked_fill(count >= reuse_cap, -torch.inf)
    best = score.argsort(dim=1, descending=True, stable=True)[:, :capacity]
    return best.sort(dim=1).values


class DeepForcing:
    """The body of the cache, behind the sink, is [ chosen tokens | recent frames, oldest first ]."""

    def __init__(
        self,
        spec: BackboneSpec,
        *,
        sink_frames: int,
        budget_frames: int,
        recent_frames: int,
        reuse_cap: int = 0,
        unify_phases: bool = False,
    ):
        self._spec = spec
        self._budget = budget_frames
        self._recent = recent_frames
        self._capacity = budget_frames - sink_frames - recent_frames  # C, in frames
        self._reuse_cap = reuse_cap
        self._unify = unify_phases
        self._window = Window(spec, sink_frames=sink_frames, prior_frames=0)
        self._body = Store(spec.layers, (spec.window_frames - sink_frames) * spec.frame_tokens)
        self._num_chosen = 0  # frames' worth
        self._num_body = 0  # frames, the chosen among them
        self._sink_frame = 0  # the frame whose place in time the sink's first frame takes
        self._refilling = False  # the prior was cleared, and no block has begun since
        # Of every chosen token: the frame whose place in time it has, its place in the picture, times chosen.
        self._place: Tensor | None = None  # L B C, likewise the others
        self._spot: Tensor | None = None
        self._count: Tensor | None = None
        self._asked: Tensor | None = None  # L B H D: sum of the last clean queries, rotated
        # While a block is under way:
        self._first = 0  # frame of the block, and the phase it is read at
        self._start = 0
        self._compressing = False
        self._before = (0, 0)  # chosen and body frames before this block's compression
        self._turn: Rotation | None = None  # of the block's own tokens, in absolute time
        self._recent_positions: Tensor | None = None
        self._kept: dict[int, list[Segment]] = {}

    def begin(self, block: Block) -> Tensor:
        first, window = block.first_frame, self._window
        if self._refilling:
            # As when the window first filled: the sink, and the new shot right behind it.
            self._sink_frame = max(0, first - window.sink_frames)
            self._refilling = False
        self._first, self._turn, self._kept = first, None, {}
        held = window.num_sink + self._num_body
        self._compressing = held + block.num_frames > self._spec.window_frames
        if self._compressing:
            end = block.end_frame if self._unify else first
            self._sink_frame = max(self._sink_frame, end - self._budget)
            self._before = (self._num_chosen, self._num_body)
            self._num_chosen = self._capacity
            self._num_body = self._capacity + self._recent - block.num_frames
        start = self._start = window.start(block)
        phases = window.begin(block, sink_phase=self._sink_frame + start - first)
        recent = self._num_body - self._num_chosen
        self._recent_positions = None
        if recent:
            times = torch.arange(start - recent, start, device=self._body.keys.device)
            self._recent_positions = frame_positions(times, self._spec.grid)
        if not (self._compressing and self._capacity):
            for layer in range(self._spec.layers):
                if self._compressing:
                    self._compact(layer, None)
                self._kept[layer] = self._segments(layer)
        return phases

    def observe(self, layer: int, query: Tensor) -> None:
        """The first pass of a block: if a compression is due, this layer's happens now."""
        if layer in self._kept:
            return
        assert self._asked is not None and self._count is not None
        turned = rotate(query.to(self._asked.dtype), self._own_turn(query))
        asked = turned.sum(dim=1) + self._asked[layer]
        keys, place, spot, count = self._candidates(layer)
        score = participation(asked, keys, self._positions(place, spot))
        self._compact(layer, choose(score, count, self._count.shape[2], self._reuse_cap), place, spot, count)
        self._kept[layer] = self._segments(layer)

    def arrange(self, layer: int, own: list[Segment]) -> list[Segment]:
        assert layer in self._kept, "a compression is due: hand the first pass's queries to `observe` first"
        return [*self._window.segments(layer), *self._kept[layer], *own]

    def write(self, layer: int, tokens: Tokens) -> None:
        self._window.write(layer, tokens)
        if not self._capacity:
            return
        batch, _, heads, channels = tokens.queries.shape
        exact = torch.promote_types(tokens.queries.dtype, torch.float32)
        if self._asked is None:
            shape = (self._spec.layers, batch, heads, channels)
            self._asked = torch.zeros(shape, dtype=exact, device=tokens.queries.device)
        last = (self._recent - self._spec.frames_per_block) * self._spec.frame_tokens
        if last:
            turn = self._own_turn(tokens.queries)
            turn = Rotation(turn.cos[:, -last:], turn.sin[:, -last:])
            self._asked[layer] = rotate(tokens.queries[:, -last:].to(exact), turn).sum(dim=1)

    def commit(self, block: Block, pixels: Tensor) -> MemoryTrace:
        counts: dict[Role, int] = {}
        for segment in (*self._window.segments(0), *self._kept[0]):
            counts[segment.role] = counts.get(segment.role, 0) + segment.keys.shape[1]
        counts[Role.CURRENT] = block.num_frames * self._spec.frame_tokens
        self._append(block)
        return MemoryTrace(counts, notes={"compressed": self._compressing})

    def reread(self, block: Block) -> None:
        self._append(block)

    def clear_prior(self) -> None:
        """Recent frames and chosen tokens go: the choice was made for the shot that ends."""
        self._num_chosen = self._num_body = 0
        self._refilling = True

    def refresh(self, first_frame: int, keys: Tensor, values: Tensor) -> None:
        self._window.refresh(first_frame, keys, values)
        size = self._spec.frame_tokens
        end = self._num_body * size
        fresh = min((self._num_body - self._num_chosen) * size, keys.shape[2])
        if fresh:
            self._body.keys[:, :, end - fresh : end].copy_(keys[:, :, -fresh:])
            self._body.values[:, :, end - fresh : end].copy_(values[:, :, -fresh:])

    def state(self) -> State:
        numbers = [self._num_chosen, self._num_body, self._sink_frame, int(self._refilling)]
        kept = {"place": self._place, "spot": self._spot, "count": self._count, "asked": self._asked}
        return {
            **self._window.state(),
            **self._body.state("body"),
            **{f"chosen.{name}": value.clone() for name, value in kept.items() if value is not None},
            "body.frames": torch.tensor(numbers),
        }

    def load_state(self, state: State) -> None:
        self._window.load_state(state)
        self._body.load_state("body", state)
        self._place, self._spot, self._count, self._asked = (
            state[f"chosen.{name}"].clone() if f"chosen.{name}" in state else None
            for name in ("place", "spot", "count", "asked")
        )
        self._num_chosen, self._num_body, self._sink_frame, refilling = state["body.frames"].tolist()
        self._refilling = bool(refilling)

    def _append(self, block: Block) -> None:
        size, current = self._spec.frame_tokens, self._window.current
        self._body.allocate(current.keys)
        if self._capacity and self._place is None:
            shape = (self._spec.layers, current.keys.shape[1], self._capacity * size)
            self._place, self._spot, self._count = (
                torch.zeros(shape, dtype=torch.int64, device=current.keys.device) for _ in range(3)
            )
        owned = self._window.owned(block)
        since = slice(owned * size, block.num_frames * size)
        to = slice(self._num_body * size, (self._num_body + block.num_frames - owned) * size)
        self._body.keys[:, :, to].copy_(current.keys[:, :, since])
        self._body.values[:, :, to].copy_(current.values[:, :, since])
        self._num_body += block.num_frames - owned
        self._window.slide(block)

    def _own_turn(self, like: Tensor) -> Rotation:
        """Absolute time, so that sums of queries of two blocks go together whatever the row's phases are."""
        if self._turn is None:
            frames = like.shape[1] // self._spec.frame_tokens
            times = torch.arange(self._first, self._first + frames, device=like.device)
            exact = torch.promote_types(like.dtype, torch.float32)
            self._turn = rotation(frame_positions(times, self._spec.grid), self._spec.head_dim, exact)
        return self._turn

    def _candidates(self, layer: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Keys B M H D, places, spots and counts B M of all between the sink and the last frames."""
        assert self._place is not None and self._spot is not None and self._count is not None
        size, (chosen, body) = self._spec.frame_tokens, self._before
        frames = body - (self._num_body - self._num_chosen)
        keys = self._body.keys[layer][:, : frames * size]
        batch, device, old = keys.shape[0], keys.device, chosen * size
        since = self._first - (body - chosen)  # the oldest recent frame
        times = torch.arange(since, since + frames - chosen, device=device).repeat_interleave(size)
        spots = torch.arange(size, device=device).repeat(frames - chosen)
        fresh = (times, spots, torch.zeros_like(times))
        known = (self._place[layer], self._spot[layer], self._count[layer])
        place, spot, count = (
            torch.cat([kept[:, :old], more.expand(batch, -1)], dim=1)
            for kept, more in zip(known, fresh, strict=True)
        )
        return keys, place, spot, count

    def _compact(self, layer: int, index: Tensor | None, *about: Tensor) -> None:
        """Keep the chosen candidates, if any are wanted, and the last frames behind them."""
        size, (_, body) = self._spec.frame_tokens, self._before
        recent = (self._num_body - self._num_chosen) * size
        for store in (self._body.keys[layer], self._body.values[layer]):
            parts = [store[:, body * size - recent : body * size]]
            if index is not None:
                parts.insert(0, store.gather(1, index[..., None, None].expand(-1, -1, *store.shape[2:])))
            store[:, : self._num_body * size] = torch.cat(parts, dim=1)  # a copy: source and target overlap
        if index is None:
            return
        assert self._place is not None and self._spot is not None and self._count is not None
        place, spot, count = about
        self._place[layer] = place.gather(1, index)
        self._spot[layer] = spot.gather(1, index)
        self._count[layer] = count.gather(1, index) + 1
        if self._unify:  # each token moves from its own frame to its slot, right behind the sink
            slots = torch.arange(index.shape[1], device=index.device) // size
            self._place[layer] = slots + self._sink_frame + self._window.sink_frames

    def _segments(self, layer: int) -> list[Segment]:
        size, segments = self._spec.frame_tokens, []
        chosen, end = self._num_chosen * size, self._num_body * size
        if chosen:
            assert self._place is not None and self._spot is not None
            positions = self._positions(self._place[layer] + (self._start - self._first), self._spot[layer])
            segments.append(self._segment(Role.BANK, layer, slice(0, chosen), positions))
        if self._recent_positions is not None:
            segments.append(self._segment(Role.PRIOR, layer, slice(chosen, end), self._recent_positions))
        return segments

    def _segment(self, role: Role, layer: int, tokens: slice, positions: Tensor) -> Segment:
        keys, values = self._body.keys[layer], self._body.values[layer]
        return Segment(role, keys[:, tokens], values[:, tokens], positions)

    def _positions(self, place: Tensor, spot: Tensor) -> Tensor:
        columns = self._spec.grid[1]
        return torch.stack([place, spot // columns, spot % columns], dim=-1).to(torch.float64)


@dataclass(frozen=True, slots=True)
class DeepForcingConfig:
    """A deep sink of 10 frames, and the tokens that recent queries ask for most (Deep Forcing).

    `variant`: "release" as published code does; "paper": no cap on reuse, chosen tokens and sink moved to
    contiguous places in time; "sink-only": the deep sink and a sliding window, nothing is chosen.
    """

    variant: str = "release"
    window_frames: int = 21
    sink_frames: int = 10
    budget_frames: int = 16  # what a compression leaves: sink, chosen tokens, recent frames
    recent_frames: int = 4  # the current block among them
    reuse_cap: int = 7  # times a token may be chosen, in "release"

    card: ClassVar[Card] = Card(
        keeps="first 10 frames; 2 frames' worth of tokens chosen by recent queries, per layer; recent frames",
        extra_memory="one summed query per layer, counters: below 1 %",
        paper="Deep Forcing, arXiv 2512.05081",
        licence="Apache-2.0",
    )

    def build(self, spec: BackboneSpec, admission: Callable[[], Admission]) -> DeepForcing:
        block = spec.frames_per_block
        if self.variant not in VARIANTS:
            raise unknown_name("variant", self.variant, VARIANTS)
        spec = own_window(spec, self.window_frames)
        beside = f"what fits beside a block of {block} in a window of {self.window_frames}"
        check_frames("sink_frames", self.sink_frames, 0, self.window_frames - block, beside)
        if self.variant == "sink-only":
            # The same machine: every block compresses to all that fits, and nothing is chosen.
            recent = self.window_frames - self.sink_frames
            return DeepForcing(
                spec,
                sink_frames=self.sink_frames,
                budget_frames=self.window_frames,
                recent_frames=recent,
            )
        check_frames("recent_frames", self.recent_frames, block, 2 * block, "one block to two")
        least = self.sink_frames + self.recent_frames
        parts = f"sink {self.sink_frames} + recent {self.recent_frames} to the window"
        if least > self.window_frames:
            limit = f"with recent_frames {self.recent_frames} it exceeds the window of {self.window_frames}"
            remedy = f"use {self.window_frames - self.recent_frames} or less"
            raise refuse("sink_frames", self.sink_frames, limit, remedy)
        check_frames("budget_frames", self.budget_frames, least, self.window_frames, parts)
        release = self.variant == "release"
        if release and self.reuse_cap < 1:
            limit = "a token must be allowed to be chosen at least once"
            raise refuse("reuse_cap", self.reuse_cap, limit, 'use 1 or more, or variant "paper" for no cap')
        return DeepForcing(
            spec,
            sink_frames=self.sink_frames,
            budget_frames=self.budget_frames,
            recent_frames=self.recent_frames,
            reuse_cap=self.reuse_cap if release else 0,
            unify_phases=not release,
        )

    def attended_frames(self, spec: BackboneSpec) -> tuple[int, ...]:
        """Frames' worth of tokens that a block sees once the window has been full, in turn."""
        if self.variant == "sink-only":
            return (self.window_frames,)
        return tuple(range(self.budget_frames, self.window_frames + 1, spec.frames_per_block))
