"""Runs a causal Wan backbone on the fast path: the same promises, prompts and noise."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple, TypeGuard

import torch
from torch import Tensor

from recap.attention.context import BlockContext
from recap.backbones.wan.backbone import CLEAN_TIME, WanBackbone
from recap.backbones.wan.model import TextConditioning
from recap.backbones.wan.schedule import clean_estimate, model_time, renoise
from recap.contracts import Context, Decoder, Noise
from recap.fast.biases import Layout, find_layout
from recap.fast.dit import FastWan, LayerTokens
from recap.fast.graphs import Graphed
from recap.fast.windows import Pair, WindowStorage
from recap.types import Tokens


class BlockRunner(NamedTuple):
    """Runs the steps of a block over one layout of the window, recorded as CUDA graphs where there is a GPU."""

    window: WindowStorage
    denoise: Graphed[Pair]
    settle: Graphed[list[LayerTokens]]


def _denoise(
    fast: FastWan, sigmas: tuple[float, ...], text: TextConditioning, window: WindowStorage, noises: Tensor
) -> Pair:
    """Turn noise, steps B F C rows columns, into latents; also return each group's share of attention, groups B."""
    noisy, shares = noises[0], []
    for step, sigma in enumerate(sigmas):
        flow, mass = fast.forward(noisy, step, text, window)
        shares.append(mass)
        clean = clean_estimate(noisy, flow, sigma)
        if step + 1 < len(sigmas):
            noisy = renoise(clean, noises[step + 1], sigmas[step + 1])
    return clean, torch.stack(shares).mean(dim=0)


class FastWanBackbone(WanBackbone):
    """Generates with the weights of a readable backbone, and as that one does where a window cannot be foreseen.

    Rollouts may take turns: windows are shared storage, filled again where another block was there in between.
    """

    def __init__(self, plain: WanBackbone, open_decoder: Callable[[], Decoder] | None = None) -> None:
        """Take over a readable backbone, and its decoder unless `open_decoder` opens a faster one."""
        vars(self).update(vars(plain))
        self.open_decoder = open_decoder or plain.open_decoder
        times = [*map(model_time, self._sigmas), CLEAN_TIME]
        with torch.no_grad():
            self._fast = FastWan(self.model, times)
        self._runners: dict[tuple[Layout, tuple[int, ...]], BlockRunner] = {}
        # Keys and values of the window that is filled; all windows begin here.
        self._room = torch.empty(0, dtype=self.model.dtype, device=self.model.device)
        self._text: TextConditioning | None = None
        self._copied_text: TextConditioning | None = None
        self._filled: tuple[BlockRunner, object] | None = None

    @torch.no_grad()
    def denoise(self, noise: Noise, conditioning: TextConditioning, context: Context) -> Tensor:
        """Generate the latents of one block, B F C rows columns."""
        if not self._supports(context):
            return super().denoise(noise, conditioning, context)
        noises = torch.stack([noise() for _ in self._sigmas])
        if self.model.device.type == "cuda":
            # From pageable memory the copy would make the host wait for the previous block.
            noises = noises.pin_memory()
        noises = noises.to(self.model.device, non_blocking=True).to(self.model.dtype)
        runner = self._prepare(noises.shape[1:], conditioning, context)
        latents, shares = runner.denoise(noises)
        measured = zip(runner.window.groups, shares, strict=True)
        context.measured({group.role: share.clone() for group, share in measured if group.role is not None})
        # A copy, because the next block overwrites the output of the recording.
        return latents.clone()

    @torch.no_grad()
    def settle(self, latents: Tensor, conditioning: TextConditioning, context: Context) -> None:
        """Run the layers at the clean time; every one's tokens go to the memory."""
        if not self._supports(context):
            return super().settle(latents, conditioning, context)
        latents = self._take(latents)
        runner = self._prepare(latents.shape, conditioning, context)
        positions = context.positions(self.model.spec.grid, self.model.device)
        # The clean pass leaves the block's tokens in the window.
        self._filled = None
        for layer, own in enumerate(runner.settle(latents)):
            # Copies, because a memory may keep the tokens and the next block overwrites these.
            queries, keys, values = (part.clone() for part in (own.queries, own.keys, own.values))
            tokens = Tokens(queries, keys, values, positions)
            context.hand_over(layer, tokens)
            if own.plain is not None:
                context.hand_share(layer, own.plain.clone())
            context.show_read(layer, tokens)

    def _supports(self, context: Context) -> TypeGuard[BlockContext]:
        """Tell whether the window is known before the first step and has the same layout in all layers."""
        if not isinstance(context, BlockContext) or not context.foreseeable:
            return False
        return self._layout(context) is not None

    def _layout(self, context: BlockContext) -> Layout | None:
        return find_layout([context.kept(layer) for layer in range(self.spec.layers)])

    def _prepare(self, shape: tuple[int, ...], text: TextConditioning, context: BlockContext) -> BlockRunner:
        """Return the runner for the context's window, with the window and the text filled in."""
        rows, frames = shape[:2]
        layout = self._layout(context)
        assert layout is not None, "`_supports` was not asked"
        own_text = self._copy_text(text)
        key = (layout, tuple(shape))
        if key not in self._runners:
            self._widen(WindowStorage.elements(self.model, layout, rows, frames))
            window = WindowStorage(self.model, layout, rows, frames, len(self._sigmas) + 1, self._room)
            # None refers to this object: without a reference cycle a dropped runner frees its gigabytes at once.
            denoise = partial(_denoise, self._fast, self._sigmas, own_text, window)
            settle = partial(self._fast.settle, step=len(self._sigmas), text=own_text, window=window)
            self._runners[key] = BlockRunner(window, Graphed(denoise), Graphed(settle))
        runner = self._runners[key]
        # The memory does not change within a block, so the clean pass finds the window as the steps left it.
        if self._filled != (runner, context.block_key):
            positions = context.positions(self.model.spec.grid, self.model.device)
            runner.window.fill(context, positions, self._fast.kernels)
            self._filled = (runner, context.block_key)
        return runner

    def _widen(self, elements: int) -> None:
        """Make room for a larger window; recordings read the old room, so they go, and both before the new one."""
        if elements > len(self._room):
            self._runners.clear()
            self._filled = None
            self._room = self._room.new_empty(0)
            if self._room.is_cuda:
                # Else what was reserved for the old one stays next to the new one.
                torch.cuda.empty_cache()
            self._room = self._room.new_empty(elements)

    def _copy_text(self, text: TextConditioning) -> TextConditioning:
        """Copy a new prompt's keys and values to the storage that recordings read, and return that storage."""
        own = self._text
        if own is None or own.keys[0].shape != text.keys[0].shape:
            # The recordings read the old storage.
            self._runners.clear()
            own = TextConditioning(tuple(k.clone() for k in text.keys), tuple(v.clone() for v in text.values))
            self._text = own
        elif text is not self._copied_text:
            for target, source in zip((*own.keys, *own.values), (*text.keys, *text.values), strict=True):
                target.copy_(source)
        self._copied_text = text
        return own
