"""This module is the window that every memory shares: a permanent sink and a sliding prior, around the current block.

The layout is the paper's, eq. (layout_base): [ sink s | prior L-s-b | current b ]. Keys are stored unrotated and
get their phases at retrieval: sink 0..s-1, the current block right behind a full window, the prior just before it.
The layout fills up over the first blocks and then never changes.

A backbone that carries its history in its own sequence (Helios) gets a `CarriedWindow` instead.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from recap.contracts import Entry, State, together
from recap.errors import refuse
from recap.memory.sink_bias import LayerBias, SinkBias
from recap.memory.store import Store
from recap.types import BackboneSpec, Block, Role, Segment, Tokens, frame_positions, widest


def own_window(spec: BackboneSpec, window_frames: int) -> BackboneSpec:
    """Return the backbone's sizes with a window of the memory's own, whatever the backbone's is."""
    _check_window(spec)
    block = spec.frames_per_block
    if window_frames < block:
        limit = f"a block of {block} frames must fit into it"
        raise refuse("window_frames", window_frames, limit, f"use {block} or more")
    return replace(spec, window_frames=window_frames)


def check_frames(field: str, value: int, low: int, high: int, why: str) -> None:
    """Refuse a number of frames outside low..high."""
    if not low <= value <= high:
        raise refuse(field, value, f"must be {low} to {high}, {why}", f"use {min(max(value, low), high)}")


def timeless_positions(source: Tensor) -> Tensor:
    """Return positions B N 3 of tokens that are read at temporal phase 0, with their own row and column."""
    source = source.to(widest(source.device))
    return torch.cat([torch.zeros_like(source[..., :1]), source[..., 1:]], dim=-1)


def count_tokens(segments: Iterable[Segment]) -> dict[Role, int]:
    """Count keys by role."""
    counts: dict[Role, int] = {}
    for segment in segments:
        counts[segment.role] = counts.get(segment.role, 0) + segment.keys.shape[1]
    return counts


class Window:
    """Keeps the sink and the prior, and lays them out for each block together with what a memory adds."""

    wants_tokens = True
    """Whether the clean pass is needed: sink and prior are made of what it writes."""

    def __init__(
        self,
        spec: BackboneSpec,
        *,
        sink_frames: int = 0,
        prior_frames: int | None = None,
        reinforcement: float | str = 1.0,
    ):
        """Size the window; the prior gets all that sink and block leave, unless a memory fills a part itself."""
        self._check(spec, sink_frames)
        rest = spec.window_frames - spec.frames_per_block - sink_frames
        self.spec = spec
        self.sink_frames = sink_frames
        self.prior_frames = rest if prior_frames is None else prior_frames
        self.bias = SinkBias(spec, sink_frames, reinforcement)
        self.current = Store(spec.layers, spec.block_tokens)
        self.sink = Store(spec.layers, sink_frames * spec.frame_tokens)
        self.prior = Store(spec.layers, self.prior_frames * spec.frame_tokens)
        # Frames stored; host integers, so no step ever waits for the device.
        self.num_sink = 0
        self.num_prior = 0
        # What the block sees of the past, by layer.
        self.segments: list[list[Segment]] = []

    def _check(self, spec: BackboneSpec, sink_frames: int) -> None:
        _check_window(spec)
        most = spec.window_frames - spec.frames_per_block
        if not 0 <= sink_frames <= most:
            limit = f"0 to {most} fit next to a block in {spec.name}'s window"
            raise refuse("sink_frames", sink_frames, limit, "choose a smaller sink")

    def start(self, block: Block) -> int:
        """Return the temporal phase of the block's first frame."""
        full = self.spec.window_frames - self.spec.frames_per_block
        return block.first_frame if self.spec.phases == "absolute" else min(block.first_frame, full)

    def begin(self, block: Block, *, sink_phase: int = 0) -> Tensor:
        """Lay the window out for a block; returns the block's own phases."""
        phases, start = self.begin_empty(block), self.start(block)
        # A block that is read again must not see itself as its own sink.
        num_sink = min(self.num_sink, block.first_frame)
        if num_sink:
            rows, device = self.sink.keys.shape[1], self.sink.keys.device
            biases = self.bias.layers(rows, device)
            self.show(Role.SINK, self.sink, 0, range(sink_phase, sink_phase + num_sink), biases)
        # The prior ends at its store's end, so that sliding is the same copy at every fill.
        first = self.prior_frames - self.num_prior
        self.show(Role.PRIOR, self.prior, first, range(start - self.num_prior, start))
        return phases

    def begin_empty(self, block: Block) -> Tensor:
        """Forget what the last block saw, and show nothing yet; returns the block's own phases, F."""
        self.segments = [[] for _ in range(self.spec.layers)]
        start = self.start(block)
        return torch.arange(start, start + block.num_frames, dtype=torch.float64)

    def show(
        self, role: Role, store: Store, first: int, times: range, biases: Sequence[LayerBias] = ()
    ) -> None:
        """Let the block see the frames of a store from `first` on, one for each of these temporal phases."""
        if times:
            tokens = slice(first * self.spec.frame_tokens, (first + len(times)) * self.spec.frame_tokens)
            phases = torch.arange(times.start, times.stop, times.step, device=store.keys.device)
            positions = frame_positions(phases, self.spec.grid)
            self.add(role, store.keys[:, :, tokens], store.values[:, :, tokens], positions, biases=biases)

    def add(
        self,
        role: Role,
        keys: Tensor,
        values: Tensor,
        positions: Tensor,
        *,
        log_bias: float = 0.0,
        biases: Sequence[LayerBias] = (),
        token_bias: Tensor | None = None,
        in_front: bool = False,
    ) -> None:
        """Let the block see keys and values L B N H D, behind or in front of what it sees already.

        `biases` has one entry per layer, or none where all layers have the same `log_bias`.
        """
        biases = biases or [LayerBias(log_bias)] * len(self.segments)
        for seen, own_keys, own_values, bias in zip(self.segments, keys, values, biases, strict=True):
            segment = Segment(role, own_keys, own_values, positions, token_bias=token_bias, **bias._asdict())
            seen.insert(0 if in_front else len(seen), segment)

    def arrange(self, layer: int, own: list[Segment]) -> list[Segment]:
        """Return what this layer sees, the same objects from `begin` to `slide`, and the backbone's own."""
        return [*self.segments[layer], *own]

    def own_tokens(self, block: Block) -> dict[Role, int]:
        """Count the keys by role that the backbone itself brings."""
        return {Role.CURRENT: block.num_frames * self.spec.frame_tokens}

    def write(self, layer: int, tokens: Tokens) -> None:
        """Take the clean keys and values of the current block."""
        self.current.allocate(tokens.keys)
        # A first block of given frames may be shorter than a block.
        count = tokens.keys.shape[1]
        self.current.keys[layer][:, :count].copy_(tokens.keys)
        self.current.values[layer][:, :count].copy_(tokens.values)

    def owned(self, block: Block) -> int:
        """Return how many leading frames of the block belong to the sink."""
        return min(max(self.sink_frames - block.first_frame, 0), block.num_frames)

    def leaving(self, block: Block) -> tuple[Tensor, Tensor, Tensor]:
        """Return source B N 3, keys and values L B N H D of what `slide` will drop, oldest first."""
        owned, size, room = self.owned(block), self.spec.frame_tokens, self.prior_frames
        taken = min(block.num_frames - owned, room)
        stay = min(self.num_prior, room - taken)
        parts = [(self.current, slice(owned * size, (block.num_frames - taken) * size))]
        if self.num_prior > stay:
            parts.insert(0, (self.prior, slice((room - self.num_prior) * size, (room - stay) * size)))
        frames = [
            *range(block.first_frame - self.num_prior, block.first_frame - stay),
            *range(block.first_frame + owned, block.end_frame - taken),
        ]
        keys = torch.cat([store.keys[:, :, part] for store, part in parts], dim=2)
        values = torch.cat([store.values[:, :, part] for store, part in parts], dim=2)
        source = frame_positions(torch.tensor(frames, device=keys.device), self.spec.grid).long()
        return source.expand(keys.shape[1], -1, -1), keys, values

    def slide(self, block: Block) -> None:
        """Move the finished block into sink and prior."""
        size, owned, first = self.spec.frame_tokens, self.owned(block), block.first_frame
        keys, values = (x[:, :, : block.num_frames * size] for x in (self.current.keys, self.current.values))
        if owned:
            to, since = slice(first * size, (first + owned) * size), slice(0, owned * size)
            self.sink.put(to, keys[:, :, since], values[:, :, since])
            self.num_sink = first + owned
        if self.prior_frames:
            self._slide_prior(keys[:, :, owned * size :], values[:, :, owned * size :])
        self.segments = []

    def _slide_prior(self, keys: Tensor, values: Tensor) -> None:
        """Append frames L B N H D to the prior, whose oldest make room for them."""
        size, room = self.spec.frame_tokens, self.prior_frames
        taken = min(keys.shape[2] // size, room)
        stay = min(self.num_prior, room - taken)
        self.prior.allocate(keys)
        for store, fresh in ((self.prior.keys, keys), (self.prior.values, values)):
            if stay:
                # A copy, since source and target overlap.
                moved = store[:, :, (room - stay) * size :].clone()
                store[:, :, (room - taken - stay) * size : (room - taken) * size].copy_(moved)
            store[:, :, (room - taken) * size :].copy_(fresh[:, :, fresh.shape[2] - taken * size :])
        self.num_prior = stay + taken

    def keep_prior(self, frames: int) -> None:
        """Forget all of the prior but its newest frames."""
        self.num_prior = min(self.num_prior, frames)

    def refresh(self, first_frame: int, keys: Tensor, values: Tensor) -> None:
        """Replace the newest frames of the prior, and the sink if the new frames begin with it.

        The sink is the opening scene, which only its own frames may replace.
        """
        size = self.spec.frame_tokens
        prior = min(self.num_prior * size, keys.shape[2])
        sink = min(self.num_sink * size, keys.shape[2]) if first_frame == 0 else 0
        if prior:
            self.prior.put(slice(-prior, None), keys[:, :, -prior:], values[:, :, -prior:])
        if sink:
            self.sink.put(slice(sink), keys[:, :, :sink], values[:, :, :sink])

    def state(self) -> State:
        frames = torch.tensor([self.num_sink, self.num_prior])
        stores = {**self.sink.state("sink"), **self.prior.state("prior")}
        return {**stores, "window.frames": frames, **self.bias.state()}

    def expected(self, state: State) -> dict[str, Entry]:
        """Return what such a state must consist of; both stores are made with the first block."""
        stores = together(state, {**self.sink.expected("sink"), **self.prior.expected("prior")})
        most = (self.sink_frames, self.prior_frames) if stores else (0, 0)
        frames = Entry((2,), torch.int64, 0, most)
        return {**stores, "window.frames": frames, **self.bias.expected(state)}

    def load_state(self, state: State) -> None:
        self.sink.load_state("sink", state)
        self.prior.load_state("prior", state)
        self.num_sink, self.num_prior = state["window.frames"].tolist()
        self.bias.load_state(state)


class CarriedWindow(Window):
    """Is the window of a backbone that reads its past again at every step, as segments of its own sequence.

    It has no sink or prior of its own, so nothing of it fills, slides or needs saving: it stores only the finished
    block, for a bank to choose from, and reinforces the sink inside the backbone's sequence.
    """

    wants_tokens = False

    def __init__(self, spec: BackboneSpec, *, sink_frames: int = 0, reinforcement: float | str = 1.0):
        super().__init__(spec, sink_frames=sink_frames, prior_frames=0, reinforcement=reinforcement)
        self._own_tokens: dict[Role, int] = {}
        self._biases: list[LayerBias] = []

    def _check(self, spec: BackboneSpec, sink_frames: int) -> None:
        if sink_frames not in (0, 1):
            limit = f"{spec.name} carries one frame of the opening in its sequence"
            raise refuse("sink_frames", sink_frames, limit, "1 reinforces it, 0 leaves it as it is")

    def start(self, block: Block) -> int:
        """Return the same for every block: the model places it behind a full window."""
        return self.spec.window_frames - self.spec.frames_per_block

    def begin(self, block: Block, *, sink_phase: int = 0) -> Tensor:
        self._own_tokens, self._biases = {}, []
        return self.begin_empty(block)

    def arrange(self, layer: int, own: list[Segment]) -> list[Segment]:
        if layer == 0 and own:
            self._own_tokens = count_tokens(own)
        if self.sink_frames and own:
            own = [self._reinforced(layer, s) if s.role is Role.SINK else s for s in own]
        return super().arrange(layer, own)

    def _reinforced(self, layer: int, sink: Segment) -> Segment:
        """Return the sink of a layer's own sequence with its bias; all layers' are made at the first read."""
        if not self._biases:
            self._biases = self.bias.layers(sink.keys.shape[0], sink.keys.device)
        bias = self._biases[layer]
        return replace(sink, log_bias=bias.log_bias, head_bias=bias.head_bias)

    def own_tokens(self, block: Block) -> dict[Role, int]:
        """Return the keys by role of the backbone's own sequence at the block's last step."""
        return self._own_tokens

    def slide(self, block: Block) -> None:
        """Do nothing: the rollout passes past latents to the backbone directly."""

    def state(self) -> State:
        return self.bias.state()

    def expected(self, state: State) -> dict[str, Entry]:
        return self.bias.expected(state)

    def load_state(self, state: State) -> None:
        self.bias.load_state(state)


def make_window(spec: BackboneSpec, *, sink_frames: int = 0, reinforcement: float | str = 1.0) -> Window:
    """Make the window of a memory that needs a sink and leaves all the rest to the prior."""
    kind = CarriedWindow if spec.carries_history else Window
    return kind(spec, sink_frames=sink_frames, reinforcement=reinforcement)


def _check_window(spec: BackboneSpec) -> None:
    """Refuse a backbone without a window of keys and values to choose from."""
    if spec.carries_history:
        limit = "it carries its history in its own sequence, and this memory keeps keys and values of it"
        raise refuse("backbone", spec.name, limit, "choose none, sink or recap")
