"""Where a memory meets Helios: a processor on every `blocks.*.attn1` of diffusers' untouched transformer.

One `Reading` is shared by all layers and says what the forward in progress is:
    nothing     the stock processor runs, as if we were not here
    denoising   the chunk's queries see the sequence's own keys, the sink with its bias, and the bank, whose keys are
                rotated to (0, h, w) on the full grid at every stage; merged by log-sum-exp. Queries of history see
                what they always do. A memory that changes nothing is the stock call, bit for bit
    settling    the stock attention; keys (behind their norm, not rotated) and values of the finished frames go to
                the memory
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from recap.attention.attend import Readable, attend
from recap.attention.context import BlockContext
from recap.backbones.helios.history import Slices
from recap.errors import refuse
from recap.types import Segment, Tokens, frame_positions


class Reading:
    """What the layers of one transformer are doing at the moment."""

    def __init__(self, rope: Any) -> None:
        self._rope = rope
        self.context: BlockContext | None = None
        self.places: Slices | None = None
        self.settling = False
        self.stage = 0
        self.stage_bias: float | None = None  # replaces the memory's where it has one
        self.grid = (0, 0)
        # What the memory adds to each layer in this block, by layer and its place among those added.
        self._turned: dict[tuple[int, int], Readable] = {}
        self._positions: dict[tuple[Any, ...], Tensor] = {}

    @contextmanager
    def denoising(
        self,
        context: BlockContext,
        places: Slices,
        grid: tuple[int, int],
        *,
        stage: int,
        reinforcement: float | None,
    ) -> Iterator[None]:
        """Forwards in here are denoising steps; the grid is that of full resolution."""
        self._enter(context, places, grid)
        self.stage = stage
        self.stage_bias = None if reinforcement is None else math.log(reinforcement)
        try:
            yield
        finally:
            self.context = self.places = None

    @contextmanager
    def settled(self, context: BlockContext, places: Slices, grid: tuple[int, int]) -> Iterator[None]:
        """The forward in here is the clean pass of a finished chunk."""
        self._enter(context, places, grid)
        self.settling = True
        try:
            yield
        finally:
            self.context = self.places = None
            self.settling = False
            self.forget()

    def forget(self) -> None:
        """A block is over: what was rotated for it can go."""
        self._turned = {}

    def _enter(self, context: BlockContext, places: Slices, grid: tuple[int, int]) -> None:
        assert self.context is None, "one forward at a time: rollouts may take turns, but not overlap"
        self.context, self.places, self.grid = context, places, grid

    def turned(self, layer: int, index: int, segment: Segment, like: Tensor) -> Readable:
        """A segment that the memory added, rotated: once per block where it is stored on the device."""
        if (known := self._turned.get((layer, index))) is not None:
            return known
        keys, values = (part.to(like.device, like.dtype) for part in (segment.keys, segment.values))
        table = rotary_table(self._rope, segment.positions.to(like.device))
        made = Readable(segment.role, _rotate(keys, table), values, segment.log_bias, segment.token_bias)
        if segment.keys.device == like.device:
            self._turned[layer, index] = made
        return made

    def positions(self, first: int, frames: int, device: torch.device) -> Tensor:
        """Positions 1 N 3 of whole frames, the same tensor for all layers."""
        asked = (first, frames, self.grid, device)
        if asked not in self._positions:
            times = torch.arange(first, first + frames, device=device)
            self._positions[asked] = frame_positions(times, self.grid)
        return self._positions[asked]


class MemoryProcessor:
    """Stands in for the processor of one layer's self-attention."""

    def __init__(self, stock: Any, layer: int, reading: Reading) -> None:
        self._stock = stock
        self._layer = layer
        self._reading = reading

    @property
    def _attention_backend(self) -> Any:
        return self._stock._attention_backend

    @_attention_backend.setter
    def _attention_backend(self, backend: Any) -> None:  # by which `set_attention_backend` reaches it
        self._stock._attention_backend = backend

    @property
    def _parallel_config(self) -> Any:
        return self._stock._parallel_config

    @_parallel_config.setter
    def _parallel_config(self, config: Any) -> None:
        self._stock._parallel_config = config

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        rotary_emb: Tensor | None = None,
        original_context_length: int | None = None,
    ) -> Tensor:
        reading = self._reading
        if reading.context is None:
            result: Tensor = self._stock(
                attn,
                hidden_states,
                encoder_hidden_states,
                attention_mask,
                rotary_emb,
                original_context_length,
            )
            return result
        assert rotary_emb is not None and reading.places is not None
        query, key, value = _project(attn, hidden_states)
        if reading.settling:
            self._hand_over(query, key, value)
        turned = _rotate(query, rotary_emb), _rotate(key, rotary_emb), value
        arranged = [] if reading.settling else self._arranged(key, value)
        output = self._read(*turned, arranged) if arranged else self._plain(*turned)
        output = output.flatten(2, 3).type_as(query)
        return attn.to_out[1](attn.to_out[0](output))  # type: ignore[no-any-return]

    def _hand_over(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        reading = self._reading
        assert reading.context is not None and reading.places is not None
        whole = reading.places.whole
        frames = (whole.stop - whole.start) // (reading.grid[0] * reading.grid[1])
        first = int(reading.context.phases[0])
        positions = reading.positions(first, frames, key.device)
        reading.context.hand_over(
            self._layer, Tokens(query[:, whole], key[:, whole], value[:, whole], positions)
        )

    def _arranged(self, key: Tensor, value: Tensor) -> list[Segment]:
        """All segments as the memory wants them read; an empty list where it changes nothing."""
        reading = self._reading
        assert reading.context is not None and reading.places is not None
        # Own keys are rotated by the model's own table, so they need no positions.
        nowhere = reading.positions(0, 0, key.device)
        own = [
            Segment(role, key[:, place], value[:, place], nowhere, part=part)
            for part, (role, place) in enumerate(reading.places.parts)
        ]
        arranged = reading.context.arranged(self._layer, own)
        parts = [segment.part for segment in arranged if segment.part is not None]
        if parts != list(range(len(own))):
            limit = f"must keep the {len(own)} parts of Helios' sequence in order; it returned {parts}"
            remedy = "return every segment it was passed, biased by dataclasses.replace if at all"
            raise refuse("memory's arrange", f"layer {self._layer}", limit, remedy)
        same = len(arranged) == len(own) and not any(segment.log_bias for segment in arranged)
        return [] if same else arranged

    def _read(self, query: Tensor, key: Tensor, value: Tensor, arranged: Sequence[Segment]) -> Tensor:
        """Queries of history see what they always do, those of the chunk also bias and bank."""
        reading = self._reading
        assert reading.context is not None and reading.places is not None
        current, parts = reading.places.current, reading.places.parts
        readable: list[Readable] = []
        for index, segment in enumerate(arranged):
            if segment.part is None:
                readable.append(reading.turned(self._layer, index, segment, key))
            else:
                place, bias = parts[segment.part][1], self._bias(segment.log_bias)
                readable.append(Readable(segment.role, key[:, place], value[:, place], bias))
        history = self._plain(query[:, : current.start], key, value)
        # On a GPU only the sink's share is measured: a kernel per role is too slow.
        chunk, shares = attend(query[:, current], readable, by_role=not query.is_cuda)
        reading.context.measured(shares, reading.stage)
        return torch.cat([history, chunk], dim=1)

    def _bias(self, log_bias: float) -> float:
        return self._reading.stage_bias if log_bias and self._reading.stage_bias is not None else log_bias

    def _plain(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """diffusers' own attention by the backend the user chose."""
        from diffusers.models.attention_dispatch import dispatch_attention_fn

        result: Tensor = dispatch_attention_fn(
            query, key, value, dropout_p=0.0, is_causal=False, backend=self._stock._attention_backend
        )
        return result


def check_transformer(transformer: Any) -> None:
    """Refuse what the processors cannot follow."""
    kind = type(transformer).__qualname__
    if getattr(transformer.config, "is_amplify_history", False):
        limit = "it scales all history keys (is_amplify_history), which no released weights do"
        raise refuse("transformer", kind, limit, "load it with is_amplify_history=False")
    if getattr(transformer, "_parallel_config", None) is not None:
        limit = "context parallelism splits the sequence, and the memory needs it whole"
        raise refuse("transformer", kind, limit, "run it on one device")
    if getattr(transformer, "is_cache_enabled", False):
        limit = "a cache of diffusers is enabled on it, which would take the clean pass for a step"
        raise refuse("transformer", kind, limit, "call transformer.disable_cache() first")


def rotary_table(rope: Any, positions: Tensor) -> Tensor:
    """The model's own rotary table, B N 2D, at positions B N 3 of any phase; fp32 as the model computes it."""
    phases = positions.to(torch.float32)
    bases = (rope.freqs_base_t, rope.freqs_base_y, rope.freqs_base_x)
    angles = torch.cat(
        [phases[..., axis, None] * base.to(phases.device) for axis, base in enumerate(bases)], dim=-1
    ).repeat_interleave(2, dim=-1)
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


def _rotate(x: Tensor, table: Tensor) -> Tensor:
    from diffusers.models.transformers.transformer_helios import apply_rotary_emb_transposed

    turned: Tensor = apply_rotary_emb_transposed(x, table)
    return turned


def _project(attn: Any, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values B N H D; fused projections and LoRA layers count."""
    if getattr(attn, "fused_projections", False):
        query, key, value = attn.to_qkv(hidden).chunk(3, dim=-1)
    else:
        query, key, value = attn.to_q(hidden), attn.to_k(hidden), attn.to_v(hidden)
    query, key, value = (
        part.unflatten(2, (attn.heads, -1)) for part in (attn.norm_q(query), attn.norm_k(key), value)
    )
    return query, key, value
