"""What happens while attached: calls of the upstream code, recognised and passed on to a memory.

A call of the generator is one of
    a noisy step    of the block in progress, or of the next one: the block begins, the memory is frozen
    the clean pass  of that block: its keys and values are written, it is decoded, scored and committed
    a re-cache      of frames already finished, at the clean time: upstream recomputes its past for a new prompt.
                    It runs as upstream has it; the memory's prior takes the new keys, nothing is scored
The number of finished frames separates the last two even where their ranges are equal, after the first block.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal

import torch
from torch import Tensor

from recap.attach.cache import CacheWrite, LayerCache, plan_write, write_later, write_now
from recap.attach.checkout import Checkout
from recap.attach.kernels import CheckoutKernels
from recap.attach.pictures import Pictures
from recap.contracts import MemoryPolicy
from recap.errors import refuse
from recap.rollout import BlockRun
from recap.trace import BlockTrace
from recap.types import BackboneSpec, Block, GeneratedBlock, Role, Segment, frame_positions

VAE_STRIDE = 8
"""Pixels along a side of one latent of Wan2.1's autoencoder."""
PICTURES_PER_FRAME = 4
PICTURES_PER_SECOND = 16


BuildMemory = Callable[[BackboneSpec, str], MemoryPolicy]
"""Builds a fresh memory for a model of that spec on that device."""


class Pass(Enum):
    NOISY = "noisy step"
    CLEAN = "clean pass"
    RECACHE = "re-cache"


@dataclass(slots=True)
class Attached:
    """What a `with attach(...)` hands out."""

    checkout: str  # which code base was recognised
    trace: list[BlockTrace] = field(default_factory=list)
    spec: BackboneSpec | None = None  # the sizes found, window and phases among them
    memory: MemoryPolicy | None = None  # of the video in progress or last generated
    videos: int = 0  # begun so far

    def remember(self, spec: BackboneSpec, memory: MemoryPolicy) -> None:
        """Take a fresh memory for the video in progress."""
        second = Block(1, spec.frames_per_block, spec.frames_per_block, ("",))
        if memory.noise_block(second) != second.index:
            limit = "it wants every block to start from the same noise, which the pipeline makes by itself"
            raise refuse("memory", type(memory).__name__, limit, "switch that setting off")
        self.spec, self.memory = spec, memory

    def record(self, made: GeneratedBlock) -> None:
        """Add a finished block to the trace."""
        self.trace.append(BlockTrace.of(made, video=self.videos - 1))


class Session:
    def __init__(
        self,
        checkout: Checkout,
        build: BuildMemory,
        pictures: Pictures,
        *,
        phases: Literal["window", "released"],
        window_frames: int | None,
    ):
        self.attached = Attached(checkout.name)
        self._checkout = checkout
        self._build = build
        self._pictures = pictures
        self._absolute = phases == "released" and checkout.bakes_phases
        self._window_frames = window_frames
        self._kernels = CheckoutKernels(checkout)
        self._finished = 0  # frames of this video that are committed
        self._pass: Pass | None = None  # of the call in progress
        self._first = 0  # its first frame
        self._caches: list[LayerCache] = []
        self._run: BlockRun | None = None
        self._write: CacheWrite | None = None
        self._table: Tensor | None = None  # rotates keys to absolute time for a cache that stores them so
        self._recomputed: list[tuple[Tensor, Tensor]] = []

    def begin(self, latents: Tensor, timestep: Tensor, caches: list[LayerCache], start: int) -> None:
        """Before a call of the generator with a cache, which begins at token `start` of the video."""
        self._caches = caches
        self._first = start // self._checkout.frame_tokens
        # All code bases empty the cache, or at least reset its indices, before a video and at no other time.
        if self._first == 0 and int(caches[0]["global_end_index"].item()) == 0:
            self._start_video(latents)
        clean = bool((timestep == self._checkout.context_noise).all())
        self._pass = self._enter(latents, self._first, clean)

    def end(self, latents: Tensor) -> None:
        """After a call that went well."""
        if self._pass is Pass.CLEAN:
            self._finish(latents)
        elif self._pass is Pass.RECACHE:
            self._refresh(self._first)

    def leave(self) -> None:
        """After any call, also a failed one."""
        self._pass = None
        self._recomputed = []

    def attend(self, layer: int, original: Callable[[], Any], x: Tensor) -> Any:
        """One layer's self-attention on x B N M; what upstream returns."""
        if self._pass is None:  # a call without a cache, as in training
            return original()
        attention = self._checkout.attentions[layer]
        shape = (*x.shape[:2], attention.num_heads, attention.head_dim)
        keys, values = attention.norm_k(attention.k(x)).view(shape), attention.v(x).view(shape)
        if self._pass is Pass.RECACHE:
            self._recomputed.append((keys, values))
            return original()
        assert self._run is not None and self.attached.spec is not None and self._write is not None
        context = self._run.clean if self._pass is Pass.CLEAN else self._run.context
        query = attention.norm_q(attention.q(x)).view(shape)
        own = [Segment(Role.CURRENT, keys, values, context.positions(self.attached.spec.grid, x.device))]
        output = attention.o(context.attend(layer, query, own).flatten(2))
        cached = (
            keys if not self._checkout.bakes_phases else self._kernels.turn(keys, self._absolute_table(keys))
        )
        if self._checkout.defers_writes:
            return output, write_later(self._write, cached, values)
        write_now(self._caches[layer], self._write, cached, values)
        return output

    def _start_video(self, latents: Tensor) -> None:
        spec = self._measure(latents)
        self.attached.remember(spec, self._build(spec, str(latents.device)))
        self.attached.videos += 1
        self._pictures.restart()
        self._finished, self._run = 0, None

    def _measure(self, latents: Tensor) -> BackboneSpec:
        """The sizes of the model that generates these latents, B F C rows columns."""
        checkout, (channels, rows, columns) = self._checkout, latents.shape[2:]
        patch = math.isqrt(max(rows * columns // checkout.frame_tokens, 1))
        grid = (rows // patch, columns // patch)
        if grid[0] * grid[1] != checkout.frame_tokens:
            limit = f"the pipeline counts {checkout.frame_tokens} tokens a frame (frame_seq_length)"
            raise refuse(
                "latents.shape", tuple(latents.shape), limit, "generate at the size the checkout is made for"
            )
        first, window_frames = checkout.attentions[0], self._window_frames
        if window_frames is None:
            window_frames = self._caches[0]["k"].shape[1] // checkout.frame_tokens
        return BackboneSpec(
            name=checkout.name,
            layers=len(checkout.attentions),
            heads=first.num_heads,
            head_dim=first.head_dim,
            grid=grid,
            token_pixels=patch * VAE_STRIDE,
            latent_channels=channels,
            latent_size=(rows, columns),
            frames_per_block=checkout.frames_per_block,
            window_frames=window_frames,
            pictures_per_frame=PICTURES_PER_FRAME,
            pictures_per_second=PICTURES_PER_SECOND,
            phases="absolute" if self._absolute else "window",
        )

    def _enter(self, latents: Tensor, first: int, clean: bool) -> Pass:
        frames = latents.shape[1]
        if clean and first < self._finished:
            return Pass.RECACHE
        if first != self._finished or self.attached.memory is None or self.attached.spec is None:
            limit = f"frames up to {self._finished} were seen since the video began"
            raise refuse("current_start frame", first, limit, "attach before the pipeline begins a video")
        if frames != self.attached.spec.frames_per_block:
            limit = f"a memory takes blocks of {self.attached.spec.frames_per_block} frames"
            raise refuse("frames", frames, limit, "switch independent_first_frame off")
        if self._run is None:
            index = first // self.attached.spec.frames_per_block
            block = Block(index, first, frames, ("",) * latents.shape[0])
            self._run = BlockRun(self.attached.memory, self.attached.spec, block, self._kernels)
            self._table = None
        checkout = self._checkout
        self._write = plan_write(
            self._caches[0],
            first * checkout.frame_tokens,
            frames * checkout.frame_tokens,
            sink_tokens=checkout.sink_frames * checkout.frame_tokens,
            rolls=checkout.rolls,
            protects_sink=checkout.defers_writes,
        )
        return Pass.CLEAN if clean else Pass.NOISY

    def _absolute_table(self, keys: Tensor) -> Tensor:
        if self._table is None:
            assert self._run is not None and self.attached.spec is not None
            block = self._run.block
            frames = torch.arange(block.num_frames, device=keys.device) + block.first_frame
            self._table = self._kernels.table(frame_positions(frames, self.attached.spec.grid), keys)
        return self._table

    def _finish(self, latents: Tensor) -> None:
        assert self._run is not None
        self.attached.record(self._run.commit(latents, self._pictures.decode(latents)))
        self._finished += self._run.block.num_frames
        self._run = None

    def _refresh(self, first: int) -> None:
        assert self.attached.memory is not None
        keys, values = (torch.stack(parts) for parts in zip(*self._recomputed, strict=True))
        self.attached.memory.refresh(first, keys, values)
