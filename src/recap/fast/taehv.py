"""Decodes by the tiny decoder on one GPU: the readable model's weights, whole blocks at a time, channels last.

Enlarging, making several pictures from one, and the convolution after both are one convolution here. The second has
no bias and reads one pixel, so it can move before the first, and its weights can be merged into the third's.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from recap.backbones.wan.taehv import CHANNELS, STEP, MemoryBlock, SoftClamp, Taehv, TimeGrow
from recap.contracts import Decoder
from recap.fast.stream import FastStream, Size, fuse, weave

COLOURS = 3
# Channels of the last convolution, because tensor cores write no fewer.
LEAST_CHANNELS = 8


class Convolution(NamedTuple):
    """Convolves with weights that are stored channels last."""

    weight: Tensor
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        """Convolve N Y X C to N Y' X' O."""
        return functional.conv2d(x.permute(0, 3, 1, 2), *self, padding=1).permute(0, 2, 3, 1)


class TaehvStage(NamedTuple):
    """Describes memory blocks, then a convolution that makes `pictures` pictures of twice the size from each."""

    blocks: list[tuple[Convolution, Convolution, Convolution]]
    growth: Convolution
    pictures: int


class FastTaehv:
    """Decodes as a readable model does, on its device, possibly in lower precision."""

    def __init__(self, model: Taehv, dtype: torch.dtype | None = None) -> None:
        like = model.like()
        self.clamp = SoftClamp()
        self.like = like.new_empty(0, dtype=dtype or like.dtype)
        self.names = model.decoder.remembering()
        first, *middle, last = [
            layer for layer in model.decoder if not isinstance(layer, (nn.ReLU, SoftClamp))
        ]
        self.first = self._layer(cast(nn.Conv2d, first))
        self.stages: list[TaehvStage] = []
        blocks: list[tuple[Convolution, Convolution, Convolution]] = []
        grow: TimeGrow | None = None
        for layer in middle:
            if isinstance(layer, MemoryBlock):
                one, two, three = (self._layer(part) for part in layer.conv if isinstance(part, nn.Conv2d))
                blocks.append((one, two, three))
            elif isinstance(layer, TimeGrow):
                grow = layer
            elif isinstance(layer, nn.Conv2d):
                assert grow is not None and layer.bias is None
                self.stages.append(TaehvStage(blocks, self._growth(grow, layer), grow.times))
                blocks = []
        self.last = self._layer(cast(nn.Conv2d, last), least=LEAST_CHANNELS)

    def _layer(self, conv: nn.Conv2d, least: int = 0) -> Convolution:
        """Copy a convolution, with zero channels added until it has `least` outputs."""
        weight, bias = conv.weight.detach(), conv.bias
        assert bias is not None
        missing = max(0, least - len(weight))
        weight = functional.pad(weight, (0, 0, 0, 0, 0, 0, 0, missing))
        return Convolution(self._arranged(weight), functional.pad(bias.detach(), (0, missing)).to(self.like))

    def _growth(self, grow: TimeGrow, conv: nn.Conv2d) -> Convolution:
        """Merge weights P·M C 1 1, for P pictures from one, with O M 3 3 over repeated pixels: P·4·O C 2 2."""
        exact = grow.conv.weight.detach().to(torch.float64).flatten(1).unflatten(0, (grow.times, -1))
        merged = torch.einsum("pmc,omyx->pocyx", exact, conv.weight.detach().to(torch.float64))
        weight = torch.cat([fuse(picture) for picture in merged])
        return Convolution(self._arranged(weight), None)

    def _arranged(self, weight: Tensor) -> Tensor:
        return weight.to(self.like.dtype).contiguous(memory_format=torch.channels_last)

    def forward(self, latents: Tensor, kept: list[Tensor]) -> Tensor:
        """Decode B F C rows columns, fp32, to B 4F 3 Y X, fp32 in 0..1; `kept` is updated in place."""
        rows, memories = latents.shape[0], iter(kept)
        x = self.clamp(latents).to(self.like.dtype).permute(0, 1, 3, 4, 2).flatten(0, 1)
        x = self.first(x).relu_()
        for stage in self.stages:
            for block in stage.blocks:
                x = _remember(block, x, next(memories), rows)
            x = weave(stage.growth(x), pictures=stage.pictures)
        pictures = self.last(x.relu_())[..., :COLOURS].unflatten(0, (rows, -1))
        pixels: Tensor = pictures.permute(0, 1, 4, 2, 3).to(torch.float32).clamp(0, 1).contiguous()
        return pixels

    def memories(self, size: Size) -> list[tuple[int, ...]]:
        """Return the shapes of what memory blocks keep for latents of this size: B Y X C."""
        batch, rows, columns = size
        return [
            (batch, rows * 2**depth, columns * 2**depth, block[0].weight.shape[1] // 2)
            for depth, stage in enumerate(self.stages)
            for block in stage.blocks
        ]

    def open_decoder(self) -> Decoder:
        """Open a new decoding stream; any number of them may be open."""
        return FastTaehvStream(self)


def _remember(
    block: tuple[Convolution, Convolution, Convolution], x: Tensor, memory: Tensor, rows: int
) -> Tensor:
    """Compute `MemoryBlock` on N Y X C, and update its memory B Y X C in place."""
    timed = x.unflatten(0, (rows, -1))
    channels = x.shape[-1]
    both = x.new_empty(*timed.shape[:-1], 2 * channels)
    both[..., :channels] = timed
    both[:, 0, ..., channels:] = memory
    both[:, 1:, ..., channels:] = timed[:, :-1]
    memory.copy_(timed[:, -1])
    one, two, three = block
    y = two(one(both.flatten(0, 1)).relu_()).relu_()
    return three(y).add_(x).relu_()


class FastTaehvStream(FastStream):
    """Decodes a stream whose states are those of `TaehvStream`."""

    def __init__(self, decoder: FastTaehv) -> None:
        super().__init__(CHANNELS, decoder.like)
        self._decoder = decoder

    def _shapes(self, size: Size) -> list[tuple[int, ...]]:
        return self._decoder.memories(size)

    def _begin(self, latents: Tensor) -> Tensor:
        return self._steady(latents)[:, STEP - 1 :].clone()

    def _later(self, kept: list[Tensor]) -> Callable[[Tensor], Tensor]:
        return partial(self._decoder.forward, kept=kept)

    def _names(self, frames: int) -> dict[str, int]:
        return {name: index for index, name in enumerate(self._decoder.names)}
