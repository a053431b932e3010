"""`deep-forcing` keeps a deep sink and compresses the rest by participation (Deep Forcing, arXiv 2512.05081).

The first S frames stay for good. Behind them the past is appended until the window is full; then a compression
keeps of everything between the sink and the last R frames (the current block among them) only the tokens that
recent queries ask for most, C = N - S - R frames' worth:

    phi_j = < sum_r q_r , k_j > / (H sqrt(D))     q_r: the last R frames' queries, rotated; k_j rotated

one number per token, shared by the heads of a layer; each layer chooses for itself. The queries are those of the
first pass of the current block (still noise) and of the last R - F frames before it (clean). So a block compresses
in two steps: `begin` decides that it is due and lays out the room, `observe` chooses in each layer as its first
queries arrive. The choice is the same for the whole block.

Only sums of queries are needed, so only one per frame is kept. Keys are kept unrotated, so nothing is rotated twice.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from recap.attention.heads import ALL_HEADS, Heads
from recap.attention.rope import Rotation, rotate, rotation
from recap.contracts import LAST_FRAME, Admission, Entry, MemoryConfig, State, copies, copy_of, together
from recap.errors import refuse, unknown_name
from recap.memory.base import WindowMemory
from recap.memory.store import Store
from recap.memory.window import Window, check_frames, own_window
from recap.types import BackboneSpec, Block, Card, MemoryTrace, Role, Segment, Tokens, frame_positions, widest

VARIANTS = ("release", "paper", "sink-only")
# The names, in a state, of what is known about chosen tokens.
CHOSEN = ("chosen.place", "chosen.spot", "chosen.count")


def participation(asked: Tensor, keys: Tensor, positions: Tensor, heads: Heads = ALL_HEADS) -> Tensor:
    """Return phi, B M: how much the summed queries B H D, rotated, ask for the keys B M H D at positions B M 3.

    H are those heads that are here; all of them count.
    """
    channels = asked.shape[-1]
    turned = rotate(keys.to(asked.dtype), rotation(positions, channels, asked.dtype))
    by_head = heads.join(torch.einsum("bhd,bmhd->bhm", asked * channels**-0.5, turned), 1)
    return by_head.mean(dim=1)


def choose(score: Tensor, count: Tensor, capacity: int, reuse_cap: int) -> Tensor:
    """Return the indices B capacity, in the cache's order, of the highest scores B M; ties: older first.

    A token that was chosen `reuse_cap` times already (0: no cap) is taken only if nothing else is left, so that
    every row and layer keeps equally many tokens.
    """
    if reuse_cap:
        score = score.masked_fill(count >= reuse_cap, -torch.inf)
    best = score.argsort(dim=1, descending=True, stable=True)[:, :capacity]
    return best.sort(dim=1).values


class Extent(NamedTuple):
    """Counts the frames' worth of tokens behind the sink, in the body's order: [ chosen | recent, oldest first ]."""

    chosen: int
    recent: int

    @property
    def total(self) -> int:
        return self.chosen + self.recent


class DeepForcing(WindowMemory):
    """Keeps a deep sink and, behind it, the body: tokens chosen by recent queries, then recent frames."""

    needs_queries = True

    def __init__(self, spec: BackboneSpec, config: DeepForcingConfig):
        super().__init__(Window(spec, sink_frames=config.sink_frames, prior_frames=0))
        self._config = config
        # C, in frames.
        self._capacity = config.budget_frames - config.sink_frames - config.recent_frames
        self._body = Store(spec.layers, (spec.window_frames - config.sink_frames) * spec.frame_tokens)
        self._extent = Extent(0, 0)
        # The frame at whose time the sink's first frame is read.
        self._sink_frame = 0
        # The prior was cleared, and no block has begun since.
        self._refilling = False
        # L B C 3: of every chosen token the frame at whose time it is read, its index in that frame, times chosen.
        self._about: Tensor | None = None
        # How many frames before the block are asked for their clean queries, at least one: of sums of nothing.
        self._asking = max(1, config.recent_frames - spec.frames_per_block)
        # L B frames H D: the sum of each of these frames' clean queries, rotated, oldest first.
        self._asked: Tensor | None = None
        # The rest is about the current block: its first frame, what to add to a frame to get its phase, whether it
        # compresses, the extent before that, the layers that still have to choose, the rotation of its own tokens
        # and the positions of the recent frames.
        self._first, self._shift = 0, 0
        self._compresses, self._before = False, self._extent
        self._undecided: set[int] = set()
        self._own_rotation: Rotation | None = None
        self._recent_positions: Tensor | None = None

    def begin(self, block: Block) -> Tensor:
        window, config, first = self.window, self._config, block.first_frame
        if self._refilling:
            # As when the window first filled: the sink, and the new shot right behind it.
            self._sink_frame, self._refilling = max(0, first - window.sink_frames), False
        num_seen = window.num_sink + self._extent.total + block.num_frames
        self._compresses, self._before = num_seen > window.spec.window_frames, self._extent
        if self._compresses:
            end = block.end_frame if config.variant == "paper" else first
            self._sink_frame = max(self._sink_frame, end - config.budget_frames)
            self._extent = Extent(self._capacity, config.recent_frames - block.num_frames)
        start, layers = window.start(block), range(window.spec.layers)
        self._first, self._shift = first, start - first
        self._own_rotation = self._recent_positions = None
        if self._extent.recent:
            times = torch.arange(start - self._extent.recent, start, device=self._body.keys.device)
            self._recent_positions = frame_positions(times, window.spec.grid)
        phases = window.begin(block, sink_phase=self._sink_frame + self._shift)
        self._undecided = set(layers) if self._compresses and self._capacity else set()
        if not self._undecided:
            for layer in layers:
                if self._compresses:
                    self._compress(layer, None)
                self._show(layer)
        return phases

    def observe(self, layer: int, query: Tensor) -> None:
        """Compress this layer now, if a compression is due."""
        if layer not in self._undecided:
            return
        assert self._asked is not None and self._about is not None
        rotated = rotate(query.to(self._asked.dtype), self._rotation(query))
        asked = rotated.sum(dim=1) + self._asked[layer].sum(dim=1)
        keys, about = self._candidates(layer, self._about[layer])
        score = participation(asked, keys, self._positions(about[..., 0], about[..., 1]), self.heads)
        cap = self._config.reuse_cap if self._config.variant == "release" else 0
        index = self.heads.agree(choose(score, about[..., 2], self._about.shape[2], cap))
        self._compress(layer, index)
        about = about.gather(1, index[..., None].expand(-1, -1, 3))
        about[..., 2] += 1
        if self._config.variant == "paper":
            # Each token moves from its own frame to its slot, right behind the sink.
            slots = torch.arange(index.shape[1], device=index.device) // self.window.spec.frame_tokens
            about[..., 0] = slots + self._sink_frame + self.window.sink_frames
        self._about[layer] = about
        self._show(layer)
        self._undecided.remove(layer)

    def arrange(self, layer: int, own: list[Segment]) -> list[Segment]:
        assert layer not in self._undecided, (
            "a compression is due: call `observe` with the first queries first"
        )
        return super().arrange(layer, own)

    def write(self, layer: int, tokens: Tokens) -> None:
        super().write(layer, tokens)
        if not self._capacity:
            return
        spec, (batch, _, heads, channels) = self.window.spec, tokens.queries.shape
        exact = torch.promote_types(tokens.queries.dtype, torch.float32)
        if self._asked is None:
            shape = (spec.layers, batch, self._asking, heads, channels)
            self._asked = torch.zeros(shape, dtype=exact, device=tokens.queries.device)
        if self._config.recent_frames == spec.frames_per_block:
            return
        frames = min(self._asking, tokens.queries.shape[1] // spec.frame_tokens)
        last = frames * spec.frame_tokens
        newest = Rotation(*(part[:, -last:] for part in self._rotation(tokens.queries)))
        turned = rotate(tokens.queries[:, -last:].to(exact), newest).unflatten(1, (frames, -1))
        self._asked[layer] = torch.cat([self._asked[layer][:, frames:], turned.sum(dim=2)], dim=1)

    def keep(self, block: Block, pixels: Tensor, trace: MemoryTrace) -> MemoryTrace:
        return replace(trace, notes={"compressed": self._compresses})

    def slide(self, block: Block) -> None:
        """Append the block to the body, less what belongs to the sink."""
        size, current = self.window.spec.frame_tokens, self.window.current
        if self._capacity and self._about is None:
            shape = (*current.keys.shape[:2], self._capacity * size, 3)
            self._about = torch.zeros(shape, dtype=torch.int64, device=current.keys.device)
        owned = self.window.owned(block)
        end = self._extent.total + block.num_frames - owned
        since, to = slice(owned * size, block.num_frames * size), slice(self._extent.total * size, end * size)
        self._body.put(to, current.keys[:, :, since], current.values[:, :, since])
        self._extent = Extent(self._extent.chosen, end - self._extent.chosen)
        super().slide(block)

    def clear_prior(self) -> None:
        """Forget recent frames and chosen tokens: the choice was made for the shot that ends."""
        self._extent, self._refilling = Extent(0, 0), True

    def refresh(self, first_frame: int, keys: Tensor, values: Tensor) -> None:
        super().refresh(first_frame, keys, values)
        size = self.window.spec.frame_tokens
        end, fresh = self._extent.total * size, min(self._extent.recent * size, keys.shape[2])
        if fresh:
            self._body.put(slice(end - fresh, end), keys[:, :, -fresh:], values[:, :, -fresh:])

    def state(self) -> State:
        chosen: dict[str, Tensor | None] = {
            "chosen.asked": None if self._asked is None else self.heads.join(self._asked, 3).flatten(2, 3)
        }
        if self._about is not None:
            chosen |= zip(CHOSEN, self._about.unbind(-1), strict=True)
        numbers = [self._extent.chosen, self._extent.total, self._sink_frame, int(self._refilling)]
        body = {**self._body.state("body"), "body.frames": torch.tensor(numbers)}
        return {**super().state(), **body, **copies(chosen)}

    def expected(self, state: State) -> dict[str, Entry]:
        window, spec = super().expected(state), self.window.spec
        body = self._body.expected("body")
        # A sink, where there is one, is made in the same block.
        body = body if len(window) > 1 else together(state, body)
        if body and self._capacity:
            shape = (spec.layers, "B", self._capacity * spec.frame_tokens)
            most = (LAST_FRAME, spec.frame_tokens - 1, LAST_FRAME)
            for name, high in zip(CHOSEN, most, strict=True):
                body[name] = Entry(shape, torch.int64, 0, high)
            body["chosen.asked"] = Entry((spec.layers, "B", self._asking * spec.heads, "D"), "queries")
        extent = (self._capacity, spec.window_frames - self.window.sink_frames) if body else (0, 0)
        return {**window, **body, "body.frames": Entry((4,), torch.int64, 0, (*extent, LAST_FRAME, 1))}

    def load_state(self, state: State) -> None:
        super().load_state(state)
        self._body.load_state("body", state)
        asked = copy_of(state.get("chosen.asked"))
        if asked is not None:
            asked = self.heads.own(asked.unflatten(2, (self._asking, -1)), 3).contiguous()
        self._asked = asked
        self._about = None
        if CHOSEN[0] in state:
            self._about = torch.stack([state[name] for name in CHOSEN], dim=-1)
        chosen, total, self._sink_frame, refilling = state["body.frames"].tolist()
        if chosen > total:
            limit = f"of {total} frames no more than all are chosen"
            raise refuse("state body.frames", chosen, limit, "load what `state` returned")
        if total and self.window.num_sink < self.window.sink_frames:
            limit = f"a sink of {self.window.sink_frames} frames is full before anything is kept behind it"
            raise refuse("state window.frames", self.window.num_sink, limit, "load what `state` returned")
        self._extent, self._refilling = Extent(chosen, total - chosen), bool(refilling)

    def _rotation(self, like: Tensor) -> Rotation:
        """Return the rotation of the block's tokens to absolute time, where queries of two blocks can be summed."""
        if self._own_rotation is None:
            spec = self.window.spec
            frames = like.shape[1] // spec.frame_tokens
            times = torch.arange(self._first, self._first + frames, device=like.device)
            exact = torch.promote_types(like.dtype, torch.float32)
            self._own_rotation = rotation(frame_positions(times, spec.grid), spec.head_dim, exact)
        return self._own_rotation

    def _candidates(self, layer: int, about: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys B M H D, and frame, index and count B M 3, of all tokens between the sink and the last frames.

        `about` is what is known of the layer's chosen tokens, which come first.
        """
        size, before = self.window.spec.frame_tokens, self._before
        frames = before.total - self._extent.recent
        keys = self._body.keys[layer][:, : frames * size]
        oldest, arrived = self._first - before.recent, frames - before.chosen
        times = torch.arange(oldest, oldest + arrived, device=keys.device).repeat_interleave(size)
        spots = torch.arange(size, device=keys.device).repeat(arrived)
        fresh = torch.stack([times, spots, torch.zeros_like(times)], dim=-1).expand(keys.shape[0], -1, -1)
        return keys, torch.cat([about[:, : before.chosen * size], fresh], dim=1)

    def _compress(self, layer: int, index: Tensor | None) -> None:
        """Keep the chosen candidates, B C, if any are wanted, and the last frames behind them."""
        size, end = self.window.spec.frame_tokens, self._before.total * self.window.spec.frame_tokens
        for store in (self._body.keys[layer], self._body.values[layer]):
            parts = [store[:, end - self._extent.recent * size : end]]
            if index is not None:
                parts.insert(0, store.gather(1, index[..., None, None].expand(-1, -1, *store.shape[2:])))
            # A copy first, since source and target overlap.
            store[:, : self._extent.total * size] = torch.cat(parts, dim=1)

    def _show(self, layer: int) -> None:
        """Let this layer see the body: chosen tokens, then recent frames."""
        size, parts = self.window.spec.frame_tokens, []
        split, end = self._extent.chosen * size, self._extent.total * size
        if split:
            assert self._about is not None
            frame, spot, _ = self._about[layer].unbind(-1)
            parts.append((Role.BANK, slice(0, split), self._positions(frame + self._shift, spot)))
        if self._recent_positions is not None:
            parts.append((Role.PRIOR, slice(split, end), self._recent_positions))
        for role, tokens, positions in parts:
            keys, values = self._body.keys[layer][:, tokens], self._body.values[layer][:, tokens]
            self.window.segments[layer].append(Segment(role, keys, values, positions))

    def _positions(self, frame: Tensor, spot: Tensor) -> Tensor:
        """Return positions B M 3 of tokens B M by frame and index in the frame."""
        columns = self.window.spec.grid[1]
        return torch.stack([frame, spot // columns, spot % columns], dim=-1).to(widest(frame.device))


@dataclass(frozen=True, slots=True)
class DeepForcingConfig(MemoryConfig):
    """Keeps a deep sink of 10 frames, and the tokens that recent queries ask for most (Deep Forcing).

    `variant`: "release" follows the published code; "paper" has no cap on reuse and moves chosen tokens and sink to
    contiguous times; "sink-only" is the deep sink and a sliding window, nothing is chosen.
    """

    variant: str = "release"
    window_frames: int = 21
    sink_frames: int = 10
    # What a compression leaves: sink, chosen tokens, recent frames.
    budget_frames: int = 16
    # The current block is among them.
    recent_frames: int = 4
    # How often a token may be chosen, in "release".
    reuse_cap: int = 7

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
        room = f"what fits next to a block of {block} in a window of {self.window_frames}"
        check_frames("sink_frames", self.sink_frames, 0, self.window_frames - block, room)
        if self.variant == "sink-only":
            # The same machine: every block compresses to all that fits, and nothing is chosen.
            recent = self.window_frames - self.sink_frames
            return DeepForcing(spec, replace(self, budget_frames=self.window_frames, recent_frames=recent))
        room = "one block to what the window holds"
        check_frames("recent_frames", self.recent_frames, block, self.window_frames, room)
        least = self.sink_frames + self.recent_frames
        parts = f"sink {self.sink_frames} + recent {self.recent_frames} to the window"
        if least > self.window_frames:
            limit = f"with recent_frames {self.recent_frames} it exceeds the window of {self.window_frames}"
            remedy = f"use {self.window_frames - self.recent_frames} or less"
            raise refuse("sink_frames", self.sink_frames, limit, remedy)
        check_frames("budget_frames", self.budget_frames, least, self.window_frames, parts)
        if self.variant == "release" and self.reuse_cap < 1:
            limit = "a token must be allowed to be chosen at least once"
            raise refuse("reuse_cap", self.reuse_cap, limit, 'use 1 or more, or variant "paper" for no cap')
        return DeepForcing(spec, self)

    def attended_frames(self, spec: BackboneSpec) -> tuple[int, ...]:
        if self.variant == "sink-only":
            return (self.window_frames,)
        return tuple(range(self.budget_frames, self.window_frames + 1, spec.frames_per_block))
