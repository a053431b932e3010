"""This module joins a memory to Helios, by a processor on every `blocks.*.attn1` of diffusers' untouched transformer.

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
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from recap.attention.attend import Readable, attend
from recap.attention.context import BlockContext
from recap.attention.heads import ALL_HEADS, Heads
from recap.backbones.helios.history import Slices
from recap.errors import refuse
from recap.types import Segment, Tokens, frame_positions


@dataclass(frozen=True, slots=True)
class Forward:
    """Describes a forward in progress; the grid is that of full resolution."""

    context: BlockContext
    places: Slices
    grid: tuple[int, int]
    # None in the clean pass of a finished chunk.
    stage: int | None = None
    # Replaces the memory's bias where it has one.
    stage_bias: float | None = None

    def read(self, segment: Segment, key: Tensor, value: Tensor) -> Readable:
        """Return a part of the sequence, its keys rotated, with the bias that it has at this stage."""
        log_bias, head_bias = segment.log_bias, segment.head_bias
        if segment.biased and self.stage_bias is not None:
            log_bias, head_bias = self.stage_bias, None
        return Readable(segment.role, key, value, log_bias, None, head_bias)


class Reading:
    """Knows what the layers of one transformer are doing at the moment."""

    def __init__(self, rope: Any) -> None:
        self._rope = rope
        self.forward: Forward | None = None
        # What the memory adds to each layer in this block, by layer and its index among the segments.
        self._turned: dict[tuple[int, int], Readable] = {}
        self._positions: dict[tuple[Any, ...], Tensor] = {}

    def denoising(
        self,
        context: BlockContext,
        places: Slices,
        grid: tuple[int, int],
        *,
        stage: int,
        reinforcement: float | None,
    ) -> AbstractContextManager[None]:
        """Return a context in which forwards are denoising steps; the grid is that of full resolution."""
        bias = None if reinforcement is None else math.log(reinforcement)
        return self._during(Forward(context, places, grid, stage, bias))

    @contextmanager
    def settled(self, context: BlockContext, places: Slices, grid: tuple[int, int]) -> Iterator[None]:
        """Return a context in which the forward is the clean pass of a finished chunk."""
        try:
            with self._during(Forward(context, places, grid)):
                yield
        finally:
            self.forget()

    @contextmanager
    def _during(self, forward: Forward) -> Iterator[None]:
        assert self.forward is None, "one forward at a time: rollouts may take turns, but not overlap"
        self.forward = forward
        try:
            yield
        finally:
            self.forward = None

    def forget(self) -> None:
        """Drop what was rotated for a block, which is over."""
        self._turned = {}

    def turned(self, layer: int, index: int, segment: Segment, like: Tensor) -> Readable:
        """Return a segment that the memory added, rotated: once per block where it is stored on the device."""
        if (known := self._turned.get((layer, index))) is not None:
            return known
        keys, values = (part.to(like.device, like.dtype) for part in (segment.keys, segment.values))
        table = rotary_table(self._rope, segment.positions.to(like.device))
        made = Readable(segment.role, _rotate(keys, table), values, segment.log_bias, segment.token_bias)
        if segment.keys.device == like.device:
            self._turned[layer, index] = made
        return made

    def positions(self, first: int, frames: int, grid: tuple[int, int], device: torch.device) -> Tensor:
        """Return the positions 1 N 3 of whole frames, the same tensor for all layers."""
        asked = (first, frames, grid, device)
        if asked not in self._positions:
            times = torch.arange(first, first + frames, device=device)
            self._positions[asked] = frame_positions(times, grid)
        return self._positions[asked]


def _of_stock(name: str) -> Any:
    """Return a property that is that of the stock processor; diffusers sets these on every processor."""
    return property(
        lambda self: getattr(self._stock, name), lambda self, value: setattr(self._stock, name, value)
    )


class MemoryProcessor:
    """Replaces the processor of one layer's self-attention."""

    heads: Heads = ALL_HEADS
    """Which heads it attends with."""

    _attention_backend = _of_stock("_attention_backend")
    _parallel_config = _of_stock("_parallel_config")

    def __init__(self, stock: Any, layer: int, reading: Reading) -> None:
        self._stock = stock
        self._layer = layer
        self._reading = reading

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        rotary_emb: Tensor | None = None,
        original_context_length: int | None = None,
    ) -> Tensor:
        now = self._reading.forward
        if now is None:
            stock = (encoder_hidden_states, attention_mask, rotary_emb, original_context_length)
            result: Tensor = self._stock(attn, hidden_states, *stock)
            return result
        assert rotary_emb is not None
        query, key, value = self._gather(*_project(attn, hidden_states))
        arranged: Sequence[Segment] = ()
        if now.stage is None:
            self._hand_over(now, query, key, value)
        else:
            arranged = self._arranged(now, key, value)
        turned = _rotate(query, rotary_emb), _rotate(key, rotary_emb), value
        output = self._read(now, *turned, arranged) if arranged else self._plain(*turned)
        output = self._give_back(output).flatten(2, 3).type_as(query)
        return attn.to_out[1](attn.to_out[0](output))  # type: ignore[no-any-return]

    def _gather(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return all tokens of the heads that are here, from what this process projected: all of them."""
        return query, key, value

    def _give_back(self, output: Tensor) -> Tensor:
        """Return all heads of the tokens that this process has in the linear parts: all of them."""
        return output

    def _hand_over(self, now: Forward, query: Tensor, key: Tensor, value: Tensor) -> None:
        whole = now.places.whole
        frames = (whole.stop - whole.start) // (now.grid[0] * now.grid[1])
        positions = self._reading.positions(int(now.context.phases[0]), frames, now.grid, key.device)
        now.context.hand_over(self._layer, Tokens(query[:, whole], key[:, whole], value[:, whole], positions))

    def _arranged(self, now: Forward, key: Tensor, value: Tensor) -> list[Segment]:
        """Return all segments as the memory wants them read; an empty list where it changes nothing."""
        # Own keys are rotated by the model's own table, so they need no positions.
        nowhere = self._reading.positions(0, 0, now.grid, key.device)
        own = [
            Segment(role, key[:, place], value[:, place], nowhere, part=part)
            for part, (role, place) in enumerate(now.places.parts)
        ]
        arranged = now.context.arranged(self._layer, own)
        parts = [segment.part for segment in arranged if segment.part is not None]
        if parts != list(range(len(own))):
            limit = f"must keep the {len(own)} parts of Helios' sequence in order; it returned {parts}"
            remedy = "return every segment it was passed, biased by dataclasses.replace if at all"
            raise refuse("memory's arrange", f"layer {self._layer}", limit, remedy)
        same = len(arranged) == len(own) and not any(segment.biased for segment in arranged)
        return [] if same else arranged

    def _read(
        self, now: Forward, query: Tensor, key: Tensor, value: Tensor, arranged: Sequence[Segment]
    ) -> Tensor:
        """Attend: queries of history see what they always do, those of the chunk also bias and bank."""
        readable: list[Readable] = []
        for index, segment in enumerate(arranged):
            if segment.part is None:
                readable.append(self._reading.turned(self._layer, index, segment, key))
            else:
                place = now.places.parts[segment.part][1]
                readable.append(now.read(segment, key[:, place], value[:, place]))
        current = now.places.current
        history = self._plain(query[:, : current.start], key, value)
        # On a GPU only the sink's share is measured: a kernel per role is too slow.
        chunk = attend(query[:, current], readable, by_role=not query.is_cuda, heads=self.heads)
        now.context.measured(chunk.shares, now.stage)
        return torch.cat([history, chunk.output], dim=1)

    def _plain(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attend by diffusers' own attention, with the backend that the user chose."""
        from diffusers.models.attention_dispatch import dispatch_attention_fn

        result: Tensor = dispatch_attention_fn(
            query, key, value, dropout_p=0.0, is_causal=False, backend=self._stock._attention_backend
        )
        return result


def check_transformer(transformer: Any) -> None:
    """Refuse a transformer with settings that the processors cannot follow."""
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
    """Return the model's own rotary table, B N 2D, at positions B N 3 of any phase; fp32 as the model computes it."""
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
    """Return queries, keys and values B N H D, also by fused projections and LoRA layers."""
    if getattr(attn, "fused_projections", False):
        query, key, value = attn.to_qkv(hidden).chunk(3, dim=-1)
    else:
        query, key, value = attn.to_q(hidden), attn.to_k(hidden), attn.to_v(hidden)
    query, key, value = (
        part.unflatten(2, (attn.heads, -1)) for part in (attn.norm_q(query), attn.norm_k(key), value)
    )
    return query, key, value
