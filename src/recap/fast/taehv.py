"""The tiny decoder for one GPU: the weights of the readable model, whole blocks at a time, channels last.

Enlarging, making pictures out of one and the convolution behind both are one convolution here: the second has no
bias and looks at one pixel, so it can go before the first, and its weights into the third's.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from recap.backbones.wan.taehv import CHANNELS, STEP, MemoryBlock, SoftClamp, Taehv, TimeGrow
from recap.contracts import Decoder, State
from recap.errors import refuse
from recap.fast.stream import FastStream, Size
from recap.fast.subpixel import fuse, weave

COLOURS = 3
ROOM = 8  # channels of the last convolution: tensor cores write no fewer


class Layer(NamedTuple):
    """Weights of a convolution, channels last."""

    weight: Tensor
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        """N Y X C -> N Y' X' O."""
        return functional.conv2d(x.permute(0, 3, 1, 2), *self, padding=1).permute(0, 2, 3, 1)


class Growth(NamedTuple):
    """Between two stages: pictures of twice the sides, and so many out of one."""

    layer: Layer
    pictures: int


class Stage(NamedTuple):
    blocks: list[tuple[Layer, Layer, Layer]]
    growth: Growth


class FastTaehv:
    """The decoding half of a finished model, on its device; precision may be lowered."""

    def __init__(self, model: Taehv, dtype: torch.dtype | None = None) -> None:
        like = model.like()
        self.clamp = SoftClamp()
        self.like = like.new_empty(0, dtype=dtype or like.dtype)
        self.names = model.decoder.remembering()
        first, *middle, last = [
            layer for layer in model.decoder if not isinstance(layer, (nn.ReLU, SoftClamp))
        ]
        self.first = self._layer(cast(nn.Conv2d, first))
        self.stages: list[Stage] = []
        blocks: list[tuple[Layer, Layer, Layer]] = []
        grow: TimeGrow | None = None
        for layer in middle:
            if isinstance(layer, MemoryBlock):
                one, two, three = (self._layer(part) for part in layer.conv if isinstance(part, nn.Conv2d))
                blocks.append((one, two, three))
            elif isinstance(layer, TimeGrow):
                grow = layer
            elif isinstance(layer, nn.Conv2d):
                assert grow is not None and layer.bias is None
                self.stages.append(Stage(blocks, self._growth(grow, layer)))
                blocks = []
        self.last = self._layer(cast(nn.Conv2d, last), room=ROOM)

    def _layer(self, conv: nn.Conv2d, room: int = 0) -> Layer:
        weight, bias = conv.weight.detach(), conv.bias
        assert bias is not None
        missing = max(0, room - len(weight))
        weight = functional.pad(weight, (0, 0, 0, 0, 0, 0, 0, missing))
        return Layer(self._arranged(weight), functional.pad(bias.detach(), (0, missing)).to(self.like))

    def _growth(self, grow: TimeGrow, conv: nn.Conv2d) -> Growth:
        """Pictures P out of one by weights P·M C 1 1, then O M 3 3 over repeated pixels -> P·4·O C 2 2."""
        exact = grow.conv.weight.detach().to(torch.float64).flatten(1).unflatten(0, (grow.times, -1))
        merged = torch.einsum("pmc,omyx->pocyx", exact, conv.weight.detach().to(torch.float64))
        weight = torch.cat([fuse(picture) for picture in merged])
        return Growth(Layer(self._arranged(weight), None), grow.times)

    def _arranged(self, weight: Tensor) -> Tensor:
        return weight.to(self.like.dtype).contiguous(memory_format=torch.channels_last)

    def forward(self, latents: Tensor, kept: list[Tensor]) -> Tensor:
        """Latents B F C rows columns, fp32 -> B 4F 3 Y X, fp32 in 0..1; what is kept moves on, in its place."""
        rows, memories = latents.shape[0], iter(kept)
        x = self.clamp(latents).to(self.like.dtype).permute(0, 1, 3, 4, 2).flatten(0, 1)
        x = self.first(x).relu_()
        for stage in self.stages:
            for block in stage.blocks:
                x = _remember(block, x, next(memories), rows)
            x = weave(stage.growth.layer(x), pictures=stage.growth.pictures)
        pictures = self.last(x.relu_())[..., :COLOURS].unflatten(0, (rows, -1))
        pixels: Tensor = pictures.permute(0, 1, 4, 2, 3).to(torch.float32).clamp(0, 1).contiguous()
        return pixels

    def memories(self, size: Size) -> list[tuple[int, ...]]:
        """Shapes of what blocks keep of a video of such latents: B Y X C."""
        batch, rows, columns = size
        return [
            (batch, rows * 2**depth, columns * 2**depth, block[0].weight.shape[1] // 2)
            for depth, stage in enumerate(self.stages)
            for block in stage.blocks
        ]

    def open_decoder(self) -> Decoder:
        """A fresh decoding stream; any number of them may be open."""
        return FastTaehvStream(self)


def _remember(block: tuple[Layer, Layer, Layer], x: Tensor, memory: Tensor, rows: int) -> Tensor:
    """What `MemoryBlock` computes, of N Y X C, with its memory B Y X C moving on."""
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
    """With the states of `TaehvStream`."""

    def __init__(self, decoder: FastTaehv) -> None:
        super().__init__(CHANNELS, decoder.like)
        self._decoder = decoder

    def _shapes(self, size: Size) -> list[tuple[int, ...]]:
        return self._decoder.memories(size)

    def _begin(self, latents: Tensor) -> Tensor:
        return self._steady(latents)[:, STEP - 1 :].clone()

    def _later(self, kept: list[Tensor]) -> Callable[[Tensor], Tensor]:
        return partial(self._decoder.forward, kept=kept)

    def state(self) -> State:
        self._refuse_torn()
        if self._frames == 0:
            return {}
        named = zip(self._decoder.names, self._kept, strict=True)
        return {
            name: kept.permute(0, 3, 1, 2).clone(memory_format=torch.contiguous_format)
            for name, kept in named
        }

    def load_state(self, state: State) -> None:
        if not state:
            return self._restore(None, 0, {})
        names = self._decoder.names
        if set(state) != set(names) or any(kept.dim() != 4 for kept in state.values()):
            raise self._foreign(state)
        kept = [state[name].permute(0, 2, 3, 1) for name in names]
        size = kept[0].shape[0], kept[0].shape[1], kept[0].shape[2]
        if [tuple(tensor.shape) for tensor in kept] != self._decoder.memories(size):
            raise self._foreign(state)
        self._restore(size, 2, dict(enumerate(kept)))

    def _foreign(self, state: State) -> ValueError:
        limit = f"an open stream of this decoder keeps {', '.join(self._decoder.names)}"
        return refuse("decoder state", sorted(state), limit, "load the state of the same decoder")
