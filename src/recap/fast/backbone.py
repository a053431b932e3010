"""A causal Wan backbone on the fast path: it keeps the same promises and takes the same prompts and noise."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeGuard

import torch
from torch import Tensor

from recap.attention.context import BlockContext
from recap.backbones.wan.backbone import CLEAN_TIME, WanBackbone
from recap.backbones.wan.model import TextConditioning
from recap.backbones.wan.schedule import clean_estimate, model_time, renoise, warp
from recap.contracts import Context, Decoder, Noise
from recap.fast.dit import FastWan, LayerTokens, WindowStorage
from recap.fast.graphs import Graphed
from recap.types import BackboneSpec, Role, Segment, Tokens

Layout = tuple[tuple[Role, int, float, bool], ...]


def _layout(kept: list[Segment]) -> Layout:
    return tuple(
        (segment.role, segment.keys.shape[1], segment.log_bias, segment.token_bias is not None)
        for segment in kept
    )


class BlockRunner:
    """The steps of a block over one layout of the window, recorded as CUDA graphs where there is a GPU."""

    def __init__(
        self, fast: FastWan, sigmas: tuple[float, ...], text: TextConditioning, window: WindowStorage
    ) -> None:
        self.window = window
        # Functions instead of methods: without a reference cycle a dropped runner frees its gigabytes at once.
        self.denoise = Graphed(partial(_denoise, fast, sigmas, text, window))
        self.settle = Graphed(partial(_settle, fast, len(sigmas), text, window))


def _denoise(
    fast: FastWan, sigmas: tuple[float, ...], text: TextConditioning, window: WindowStorage, noises: Tensor
) -> tuple[Tensor, Tensor]:
    """Turn noise, steps B F C rows columns, into latents; also return each group's share of attention, groups B."""
    noisy, shares = noises[0], []
    for step, sigma in enumerate(sigmas):
        flow, mass = fast.forward(noisy, step, text, window)
        shares.append(mass)
        clean = clean_estimate(noisy, flow, sigma)
        if step + 1 < len(sigmas):
            noisy = renoise(clean, noises[step + 1], sigmas[step + 1])
    return clean, torch.stack(shares).mean(dim=0)


def _settle(
    fast: FastWan, step: int, text: TextConditioning, window: WindowStorage, latents: Tensor
) -> list[LayerTokens]:
    tokens: list[LayerTokens] = []
    fast.forward(latents, step, text, window, tokens)
    return tokens


class FastWanBackbone:
    """Generates with the weights of a readable backbone.

    Rollouts may take turns: windows are shared storage, filled again where another block was there in between.
    """

    def __init__(self, plain: WanBackbone, open_decoder: Callable[[], Decoder] | None = None) -> None:
        """Take over a readable backbone, and its decoder unless `open_decoder` opens a faster one."""
        model = plain.model
        self.plain = plain
        self._open_decoder = open_decoder or plain.open_decoder
        self.spec: BackboneSpec = plain.spec
        self._sigmas = warp(model.spec.steps, model.spec.shift)
        times = [*map(model_time, self._sigmas), CLEAN_TIME]
        with torch.no_grad():
            self._fast = FastWan(model, times)
        self._runners: dict[tuple[Layout, tuple[int, ...]], BlockRunner] = {}
        self._text: TextConditioning | None = None
        self._copied_text: TextConditioning | None = None
        self._filled: tuple[BlockRunner, object] | None = None

    def condition(self, prompts: tuple[str, ...]) -> TextConditioning:
        """Encode one prompt per row."""
        return self.plain.condition(prompts)

    @torch.no_grad()
    def denoise(self, noise: Noise, given: TextConditioning, context: Context) -> Tensor:
        """Generate the latents of one block, B F C rows columns."""
        if not self._supports(context):
            return self.plain.denoise(noise, given, context)
        model = self.plain.model
        noises = torch.stack([noise() for _ in self._sigmas])
        if model.device.type == "cuda":
            # From pageable memory the copy would make the host wait for the previous block.
            noises = noises.pin_memory()
        noises = noises.to(model.device, non_blocking=True).to(model.dtype)
        runner = self._prepare(noises.shape[1:], given, context)
        latents, shares = runner.denoise(noises)
        context.measured(
            {
                group.role: share.clone()
                for group, share in zip(runner.window.groups, shares, strict=True)
                if group.role is not None
            }
        )
        # A copy, because the next block overwrites the output of the recording.
        return latents.clone()

    @torch.no_grad()
    def settle(self, latents: Tensor, given: TextConditioning, context: Context) -> None:
        """Run one forward at the clean time; every layer's tokens go to the memory."""
        if not self._supports(context):
            return self.plain.settle(latents, given, context)
        model = self.plain.model
        latents = latents.to(model.device, model.dtype)
        runner = self._prepare(latents.shape, given, context)
        positions = context.positions(model.spec.grid, model.device)
        for layer, own in enumerate(runner.settle(latents)):
            # Copies, because a memory may keep the tokens and the next block overwrites these.
            queries, keys, values = (part.clone() for part in own)
            context.hand_over(layer, Tokens(queries, keys, values, positions))

    def decoder(self) -> Decoder:
        """Open a new decoding stream."""
        return self._open_decoder()

    def encode(self, pixels: Tensor) -> Tensor:
        """Encode pictures as latents."""
        return self.plain.encode(pixels)

    def _supports(self, context: Context) -> TypeGuard[BlockContext]:
        """Tell whether the window is known before the first step and has the same layout in all layers."""
        if not isinstance(context, BlockContext) or not context.foreseeable:
            return False
        return len({_layout(context.kept(layer)) for layer in range(self.spec.layers)}) == 1

    def _prepare(self, shape: tuple[int, ...], text: TextConditioning, context: BlockContext) -> BlockRunner:
        """Return the runner for the context's window, with the window and the text filled in."""
        model = self.plain.model
        rows, frames = shape[:2]
        kept = context.kept(0)
        own_text = self._copy_text(text)
        key = (_layout(kept), tuple(shape))
        if key not in self._runners:
            window = WindowStorage(model, kept, rows, frames)
            self._runners[key] = BlockRunner(self._fast, self._sigmas, own_text, window)
        runner = self._runners[key]
        # The memory does not change within a block, so the clean pass finds the window as the steps left it.
        if self._filled != (runner, context.block_key):
            positions = context.positions(model.spec.grid, model.device)
            runner.window.fill(context, positions, self._fast.kernels)
            self._filled = (runner, context.block_key)
        return runner

    def _copy_text(self, text: TextConditioning) -> TextConditioning:
        """Copy a new prompt's keys and values to the storage that recordings read, and return that storage."""
        own = self._text
        if own is None or own.keys[0].shape != text.keys[0].shape:
            # The recordings read the old storage.
            self._runners.clear()
            own = TextConditioning(tuple(k.clone() for k in text.keys), tuple(v.clone() for v in text.values))
            self._text = own
        elif text is not self._copied_text:
            pairs = zip((*own.keys, *own.values), (*text.keys, *text.values), strict=True)
            for target, source in pairs:
                target.copy_(source)
        self._copied_text = text
        return own
