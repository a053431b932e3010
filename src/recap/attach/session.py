"""Hooks a memory into pipelines of the Wan family, whose calls are recognised and passed on to it.

A call of the generator is one of
    a noisy step    of the block in progress, or of the next one: the block begins, the memory is frozen
    the clean pass  of that block: its keys and values are written, it is decoded, scored and committed
    a re-cache      of frames already finished, at the clean time: upstream recomputes its past for a new prompt.
                    It runs as upstream does it; the memory's prior takes the new keys, nothing is scored
The number of finished frames separates the last two even where their ranges are equal, after the first block.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import ExitStack
from enum import Enum
from functools import partial
from typing import Any

import torch
from torch import Tensor

from recap.attach.attached import Attached, BuildMemory, OneThread, patch
from recap.attach.cache import CacheWrite, LayerCache, plan_write, write_later, write_now
from recap.attach.checkout import Checkout, CheckoutKernels, check_forward
from recap.contracts import Decoder
from recap.errors import refuse
from recap.rollout import BlockRun, unseen_pixels
from recap.types import BackboneSpec, Block, Role, Segment, frame_positions

VAE_STRIDE = 8
"""Pixels along a side of one latent of Wan2.1's autoencoder."""
PICTURES_PER_FRAME = 4
PICTURES_PER_SECOND = 16


def _untraced(function: Callable[..., Any], recursive: bool = True) -> Callable[..., Any]:
    """Keep torch.compile out of a function, and with `recursive` also out of what it calls.

    A compiled pipeline would trace our Python too, guard on objects that are new in every block, and compile again
    and again. Called when something is attached and not on import: the compiler itself takes seconds to import.
    """
    untraced: Callable[..., Any] = torch.compiler.disable(function, recursive=recursive)
    return untraced


class Pass(Enum):
    """Names the kinds of calls of a generator."""

    NOISY = "noisy step"
    CLEAN = "clean pass"
    RECACHE = "re-cache"


class Pictures:
    """Decodes an upstream video block by block for the memory, and keeps the pictures for the pipeline's last step.

    The pipeline's own autoencoder keeps the state of its one stream in itself, so while attached nobody else may
    stream through it; whole videos may be decoded by it between videos.
    """

    def __init__(self, vae: Any, open_decoder: Callable[[], Decoder] | None, keep: bool) -> None:
        self._vae = vae
        # Ours may take its place later.
        self._decode: Callable[..., Tensor] = vae.decode_to_pixel
        self._open_decoder = open_decoder
        self._stream: Decoder | None = None
        self.keep = keep and open_decoder is None
        self._latents: list[Tensor] = []
        # In -1..1, as the autoencoder returns them.
        self._pictures: list[Tensor] = []

    def restart(self) -> None:
        """Begin a new video."""
        self._latents, self._pictures = [], []
        if self._open_decoder is not None:
            self._stream = self._open_decoder()
        else:
            self._vae.model.clear_cache()

    def decode(self, latents: Tensor) -> Tensor:
        """Decode the next block, B F C rows columns, to B T 3 Y X in 0..1."""
        if self._stream is not None:
            return self._stream.decode(latents)
        if latents.shape[0] != 1:
            limit = "the pipeline's autoencoder streams one row at a time"
            raise refuse("batch", latents.shape[0], limit, "generate rows one by one, or pass decoder=")
        pictures = self._decode(latents, use_cache=True)
        if self.keep:
            self._latents.append(latents.clone())
            self._pictures.append(pictures)
        return (pictures.float() * 0.5 + 0.5).clamp(0, 1)

    def decode_to_pixel(self, latents: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Replace the autoencoder's method: a whole video that was decoded on the way is not decoded again."""
        known = torch.cat(self._latents, dim=1) if self._latents else None
        if known is None or known.shape != latents.shape or not torch.equal(known.to(latents), latents):
            return self._decode(latents, *args, **kwargs)
        video = torch.cat(self._pictures, dim=1)
        # A long video is gigabytes.
        self._latents, self._pictures = [], []
        return video


class AttachedSession:
    """Follows the calls of one attached pipeline, video after video."""

    def __init__(
        self,
        checkout: Checkout,
        build: BuildMemory,
        pictures: Pictures,
        absolute: bool,
        window_frames: int | None,
    ) -> None:
        """Follow a checkout; `absolute` keeps its own phases, and None its own window."""
        if window_frames is not None and window_frames < checkout.frames_per_block:
            limit = f"a block of {checkout.frames_per_block} frames must fit into it"
            raise refuse("window_frames", window_frames, limit, "the paper's window is 6 frames")
        self.attached = Attached(checkout.name)
        self._checkout = checkout
        self._build = build
        self._pictures = pictures
        self._absolute = absolute and checkout.bakes_phases
        self._window_frames = window_frames
        self._kernels = CheckoutKernels(checkout)
        self._thread = OneThread()
        # Frames of this video that are committed.
        self._finished = 0
        # The call in progress: its kind, its first frame and its caches.
        self._pass: Pass | None = None
        self._first = 0
        self._caches: list[LayerCache] = []
        self._run: BlockRun | None = None
        self._write: CacheWrite | None = None
        # Rotates keys to absolute time for a cache that stores them so.
        self._table: Tensor | None = None
        self._recomputed: list[tuple[Tensor, Tensor]] = []

    def hook(self, undo: ExitStack) -> None:
        """Put all hooks on; `undo` takes them off again."""
        patch(undo, self._checkout.generator, "forward", self._hook_generator)
        for layer, attention in enumerate(self._checkout.attentions):
            patch(undo, attention, "forward", partial(self._hook_attention, layer))
        if self._pictures.keep:
            patch(undo, self._checkout.vae, "decode_to_pixel", lambda _: self._pictures.decode_to_pixel)

    def _hook_generator(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return a `forward` of the generator that announces every call with a cache to the session."""
        # A wrapper that hides the arguments is refused: its calls would look like calls without a cache.
        names, kind = ("noisy_image_or_video", "timestep", "kv_cache"), type(self._checkout.generator)
        remedy = "attach to the generator itself, without a wrapper around it"
        signature = check_forward(original, names, "pipeline.generator", kind.__qualname__, remedy)
        bind, begin = _untraced(signature.bind), _untraced(self._begin)
        end, leave = _untraced(self._end), _untraced(self._leave)

        def forward(*args: Any, **kwargs: Any) -> Any:
            call = bind(*args, **kwargs).arguments
            if call.get("kv_cache") is None:
                return original(*args, **kwargs)
            latents, start = call["noisy_image_or_video"], call.get("current_start") or 0
            with torch.no_grad():
                try:
                    begin(latents, call["timestep"], call["kv_cache"], start)
                    result = original(*args, **kwargs)
                    end(latents)
                finally:
                    leave()
            return result

        return _untraced(forward, recursive=False)

    def _hook_attention(self, layer: int, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return a `forward` of a layer's self-attention that reads what the memory arranges."""

        def forward(x: Any, *args: Any, **kwargs: Any) -> Any:
            return self._attend(layer, lambda: original(x, *args, **kwargs), x)

        return _untraced(forward)

    def _begin(self, latents: Tensor, timestep: Tensor, caches: list[LayerCache], start: int) -> None:
        """Begin a call of the generator with a cache, at token `start` of the video."""
        # All code bases empty the cache, or at least reset its indices, before a video and at no other time.
        starts = start < self._checkout.frame_tokens and int(caches[0]["global_end_index"].item()) == 0
        if starts:
            self._thread.begin()
        self._thread.enter()
        self._caches, self._first = caches, start // self._checkout.frame_tokens
        if starts:
            self._start_video(latents)
        clean = bool((timestep == self._checkout.context_noise).all())
        self._pass = self._enter(latents, self._first, clean)

    def _end(self, latents: Tensor) -> None:
        """End a call that went well."""
        if self._pass is Pass.CLEAN:
            assert self._run is not None
            self.attached.record(self._run.commit(latents, self._pixels_of(latents, self._run.block)))
            self._finished += self._run.block.num_frames
            self._run = None
        elif self._pass is Pass.RECACHE:
            assert self.attached.memory is not None
            keys, values = (torch.stack(parts) for parts in zip(*self._recomputed, strict=True))
            self.attached.memory.refresh(self._first, keys, values)

    def _pixels_of(self, latents: Tensor, block: Block) -> Tensor:
        """Decode a finished block if the memory looks at pictures."""
        memory, spec = self.attached.memory, self.attached.spec
        assert memory is not None and spec is not None
        if memory.needs_pixels:
            return self._pictures.decode(latents)
        return unseen_pixels(spec, block, latents)

    def _leave(self) -> None:
        """Leave any call, also a failed one."""
        if self._thread.leave():
            self._pass = None
            self._recomputed = []

    def _attend(self, layer: int, original: Callable[[], Any], x: Tensor) -> Any:
        """Compute one layer's self-attention on x B N M; returns what upstream returns."""
        if self._pass is None:
            # A call without a cache, as in training.
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
        if self._checkout.bakes_phases:
            keys = self._kernels.turn(keys, self._absolute_table(keys))
        if self._checkout.defers_writes:
            return output, write_later(self._write, keys, values)
        write_now(self._caches[layer], self._write, keys, values)
        return output

    def _start_video(self, latents: Tensor) -> None:
        """Begin a video with a fresh memory."""
        spec = self._measure(latents)
        memory = self._build(spec, str(latents.device))
        self.attached.remember(spec, memory)
        self.attached.videos += 1
        if memory.needs_pixels:
            self._pictures.restart()
        self._finished, self._run = 0, None

    def _measure(self, latents: Tensor) -> BackboneSpec:
        """Return the sizes of the model that generates these latents, B F C rows columns."""
        checkout, (channels, rows, columns) = self._checkout, latents.shape[2:]
        patch = math.isqrt(max(rows * columns // checkout.frame_tokens, 1))
        grid = (rows // patch, columns // patch)
        if grid[0] * grid[1] != checkout.frame_tokens:
            limit = f"the pipeline counts {checkout.frame_tokens} tokens a frame (frame_seq_length)"
            remedy = "generate at the size the checkout is made for"
            raise refuse("latents.shape", tuple(latents.shape), limit, remedy)
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
        """Recognise the kind of a call, and begin its block where it is the first of it."""
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
        """Return the table that rotates the block's keys to absolute time."""
        if self._table is None:
            assert self._run is not None and self.attached.spec is not None
            block = self._run.block
            frames = torch.arange(block.num_frames, device=keys.device) + block.first_frame
            self._table = self._kernels.table(frame_positions(frames, self.attached.spec.grid), keys)
        return self._table
