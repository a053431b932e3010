"""A causal Wan backbone on the fast path: the same promises, prompts and noise, other code under them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeGuard

import torch
from torch import Tensor

from recap.backbones.wan.backbone import CLEAN_TIME, WanBackbone
from recap.backbones.wan.model import Conditioning
from recap.backbones.wan.schedule import clean_estimate, model_time, renoise, warp
from recap.contracts import Context, Decoder, Noise, OpenContext
from recap.fast.dit import FastWan, Made, Window
from recap.fast.graphs import Graphed
from recap.types import BackboneSpec, Role, Segment, Tokens

Layout = tuple[tuple[Role, int, float, bool], ...]


def _layout(kept: list[Segment]) -> Layout:
    return tuple(
        (segment.role, segment.keys.shape[1], segment.log_bias, segment.token_bias is not None)
        for segment in kept
    )


class Drawer:
    """The steps of a block over one layout of the window, recorded where there is a GPU to record on."""

    def __init__(self, fast: FastWan, sigmas: tuple[float, ...], text: Conditioning, window: Window) -> None:
        self.window = window
        # Functions of what they need, not methods: a drawer that is let go frees its gigabytes at once.
        self.draw = Graphed(partial(_draw, fast, sigmas, text, window))
        self.settle = Graphed(partial(_settle, fast, len(sigmas), text, window))


def _draw(
    fast: FastWan, sigmas: tuple[float, ...], text: Conditioning, window: Window, noises: Tensor
) -> tuple[Tensor, Tensor]:
    """Noise steps B F C rows columns -> latents, and the share of the mass of each group, groups B."""
    noisy, shares = noises[0], []
    for step, sigma in enumerate(sigmas):
        flow, mass = fast.forward(noisy, step, text, window)
        shares.append(mass)
        clean = clean_estimate(noisy, flow, sigma)
        if step + 1 < len(sigmas):
            noisy = renoise(clean, noises[step + 1], sigmas[step + 1])
    return clean, torch.stack(shares).mean(dim=0)


def _settle(fast: FastWan, step: int, text: Conditioning, window: Window, latents: Tensor) -> list[Made]:
    made: list[Made] = []
    fast.forward(latents, step, text, window, made)
    return made


class FastWanBackbone:
    """Takes a finished backbone and generates with its weights.

    Rollouts may take turns: windows are shared storage, filled again where another block was there in between.
    """

    def __init__(self, plain: WanBackbone, open_decoder: Callable[[], Decoder] | None = None) -> None:
        """Streams are opened by the plain one, if no faster way is given."""
        model = plain.model
        self.plain = plain
        self._open_decoder = open_decoder or plain.open_decoder
        self.spec: BackboneSpec = plain.spec
        self._sigmas = warp(model.spec.steps, model.spec.shift)
        times = [*map(model_time, self._sigmas), CLEAN_TIME]
        with torch.no_grad():
            self._fast = FastWan(model, times)
        self._drawers: dict[tuple[Layout, tuple[int, ...]], Drawer] = {}
        self._text: Conditioning | None = None
        self._given: Conditioning | None = None
        self._filled: tuple[Drawer, object] | None = None

    def condition(self, prompts: tuple[str, ...]) -> Conditioning:
        """One prompt per row."""
        return self.plain.condition(prompts)

    @torch.no_grad()
    def denoise(self, noise: Noise, given: Conditioning, context: Context) -> Tensor:
        """Draw one block, B F C rows columns."""
        if not self._serves(context):
            return self.plain.denoise(noise, given, context)
        model = self.plain.model
        noises = torch.stack([noise() for _ in self._sigmas])
        if model.device.type == "cuda":
            noises = noises.pin_memory()  # else the host would wait here for the block before
        noises = noises.to(model.device, non_blocking=True).to(model.dtype)
        drawer = self._open(noises.shape[1:], given, context)
        latents, masses = drawer.draw(noises)
        context.measured(
            {
                group.role: mass.clone()
                for group, mass in zip(drawer.window.groups, masses, strict=True)
                if group.role is not None
            }
        )
        return latents.clone()  # the next block's steps end where these did

    @torch.no_grad()
    def settle(self, latents: Tensor, given: Conditioning, context: Context) -> None:
        """One forward at the clean time; every layer's tokens go to the memory."""
        if not self._serves(context):
            return self.plain.settle(latents, given, context)
        model = self.plain.model
        latents = latents.to(model.device, model.dtype)
        drawer = self._open(latents.shape, given, context)
        positions = context.positions(model.spec.grid, model.device)
        for layer, made in enumerate(drawer.settle(latents)):
            # Copies: a memory may keep what it is given, and the next block writes where these lie.
            own = (made.queries.clone(), made.keys.clone(), made.values.clone())
            context.hand_over(layer, Tokens(*own, positions))

    def decoder(self) -> Decoder:
        """A fresh decoding stream."""
        return self._open_decoder()

    def encode(self, pixels: Tensor) -> Tensor:
        """Latents of given pictures."""
        return self.plain.encode(pixels)

    def _serves(self, context: Context) -> TypeGuard[OpenContext]:
        """Whether the window is known before the first step, and laid out alike in all layers."""
        if not isinstance(context, OpenContext) or not context.foreseeable:
            return False
        return len({_layout(context.kept(layer)) for layer in range(self.spec.layers)}) == 1

    def _open(self, shape: tuple[int, ...], given: Conditioning, context: OpenContext) -> Drawer:
        """The drawer for such a window, filled."""
        model = self.plain.model
        rows, frames = shape[:2]
        kept = context.kept(0)
        layout = _layout(kept)
        self._take_text(given)
        assert self._text is not None
        key = (layout, tuple(shape))
        if key not in self._drawers:
            window = Window(model, kept, rows, frames)
            self._drawers[key] = Drawer(self._fast, self._sigmas, self._text, window)
        drawer = self._drawers[key]
        # The memory is frozen all block long, so the clean pass finds the window as the steps left it.
        if self._filled != (drawer, context.block_key):
            positions = context.positions(model.spec.grid, model.device)
            drawer.window.fill(context, positions, self._fast.kernels)
            self._filled = (drawer, context.block_key)
        return drawer

    def _take_text(self, given: Conditioning) -> None:
        """Copy a new prompt's keys and values to where recordings read them."""
        if given is self._given:
            return
        if self._text is None or self._text.keys[0].shape != given.keys[0].shape:
            self._drawers.clear()  # they read the old place
            self._text = Conditioning(
                tuple(k.clone() for k in given.keys), tuple(v.clone() for v in given.values)
            )
        else:
            for mine, theirs in zip(
                (*self._text.keys, *self._text.values), (*given.keys, *given.values), strict=True
            ):
                mine.copy_(theirs)
        self._given = given
