"""Ways to compute the same decoder, for `recap.bench.vae` to choose from."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from recap.bench.vae_kernels import NARROW, WIDE, Tile, activated, joined, shifted
from recap.fast.vae_layers import PAST, Activation, CausalConv, Enlarge, Parts, join

SMALL = 64  # channels, under which a tile of matrix products would stay mostly empty


class PlanarConv(CausalConv):
    """Channels first, as PyTorch has them if nothing else is said; tensor cores need a copy before and after."""

    def arrange(self) -> None:
        pass

    def forward(self, x: Tensor) -> Tensor:
        margins = (0, self.side // 2, self.side // 2)
        made = functional.conv3d(x.permute(0, 4, 1, 2, 3).contiguous(), self.weight, padding=margins)
        return made.permute(0, 2, 3, 4, 1).contiguous()


class FoldedConv(CausalConv):
    """Time among the channels: pictures with three frames' channels, and kernels of two dimensions."""

    def arrange(self) -> None:
        folded = self.weight.data.transpose(1, 2).flatten(1, 2)
        self.weight.data = folded.contiguous(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        frames = x.shape[1] - PAST
        folded = torch.cat([x[:, t : t + frames] for t in range(PAST + 1)], dim=-1)
        made = functional.conv2d(
            folded.flatten(0, 1).permute(0, 3, 1, 2), self.weight, padding=self.side // 2
        )
        unfolded: Tensor = made.permute(0, 2, 3, 1).unflatten(0, (-1, frames))
        return unfolded


class SummedConv(CausalConv):
    """Three convolutions of two dimensions, one for each frame read, and their sum."""

    def arrange(self) -> None:
        parted = self.weight.data.movedim(2, 0)
        self.kernels = [kernel.contiguous(memory_format=torch.channels_last) for kernel in parted]

    def forward(self, x: Tensor) -> Tensor:
        frames = x.shape[1] - PAST
        parts = [
            functional.conv2d(
                x[:, t : t + frames].flatten(0, 1).permute(0, 3, 1, 2), kernel, padding=self.side // 2
            )
            for t, kernel in enumerate(self.kernels)
        ]
        total: Tensor = (parts[0] + parts[1] + parts[2]).permute(0, 2, 3, 1).unflatten(0, (-1, frames))
        return total


class SubpixelEnlarge(Enlarge):
    """Repeated pixels meet several weights of a kernel at once: four kernels of 2 x 2, one per place in the cell.

    16 products a pixel instead of 36, and the repeated picture is never written. One convolution with a margin
    of 1 makes all four, on a grid with one row and column more, out of which each takes its own part.
    """

    def arrange(self) -> None:
        weight = self.weight.data.to(torch.float32)
        # Of the cell's upper pixel the kernel's rows meet the source's rows y - 1, y, y; of the lower y, y, y + 1.
        meet = weight.new_tensor([[[1, 0, 0], [0, 1, 1]], [[1, 1, 0], [0, 0, 1]]])
        fused = torch.einsum("aiy,bjx,ocyx->abocij", meet, meet, weight).flatten(0, 2)
        self.weight.data = fused.to(self.weight.dtype).contiguous(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        height, width = x.shape[2:4]
        made = functional.conv2d(x.flatten(0, 1).permute(0, 3, 1, 2), self.weight, padding=1)
        cells = made.permute(0, 2, 3, 1).unflatten(-1, (2, 2, -1))
        rows = [
            torch.stack(
                [cells[:, down : down + height, right : right + width, down, right] for right in (0, 1)],
                dim=3,
            )
            for down in (0, 1)
        ]
        whole = torch.stack(rows, dim=2).flatten(3, 4).flatten(1, 2) + self.bias
        larger: Tensor = whole.unflatten(0, x.shape[:2])
        return larger


class KernelActivation(Activation):
    margin = 0

    def forward(self, x: Tensor, bias: Tensor | None, past: Tensor) -> Tensor:
        if x.is_cuda and x.shape[1] >= PAST:
            return activated(x, bias, self.gamma, past, self.margin)
        sides = [self.margin] * 4
        return functional.pad(super().forward(x, bias, past), [0, 0, *sides])


class MarginActivation(KernelActivation):
    """For `ShiftedConv`."""

    margin = 1


def kernel_join(kept: Tensor, y: Tensor, bias: Tensor) -> Tensor:
    return joined(kept, y, bias) if y.is_cuda else join(kept, y, bias)


class ShiftedConv(CausalConv):
    """The 3 x 3 x 3 convolutions as shifted matrix products, on frames that come with a margin of zeros."""

    tiles: ClassVar[dict[tuple[int, ...], Tile]] = {}  # the fastest found, by what there is to compute

    def arrange(self) -> None:
        super().arrange()
        self.flat = self.weight.data.permute(0, 2, 3, 4, 1).flatten(1).contiguous()

    def forward(self, x: Tensor) -> Tensor:
        if self.side == 1 or self.place == 0:
            return super().forward(x)  # does not come from an activation, so has no margin
        if min(self.channels, len(self.weight)) < SMALL or not x.is_cuda:
            return functional.conv3d(x.permute(0, 4, 1, 2, 3), self.weight).permute(0, 2, 3, 4, 1)
        shape = (*x.shape, len(self.weight))
        if shape not in self.tiles:
            self.tiles[shape] = min(tiles_for(x), key=lambda tile: fastest(shifted, x, self.flat, tile))
        return shifted(x, self.flat, self.tiles[shape])


def tiles_for(x: Tensor) -> tuple[Tile, ...]:
    return tuple(tile for tile in WIDE if x.shape[-1] % tile.depth == 0) or NARROW


def fastest(function: Callable[..., object], *given: object, times: int = 3) -> float:
    """Milliseconds at best of a few calls, after one that compiles and chooses."""
    function(*given)
    return min(milliseconds(function, *given) for _ in range(times))


def milliseconds(function: Callable[..., object], *given: object) -> float:
    """Of one call, on the device's own clock where there is a device."""
    if not torch.cuda.is_available():
        start = time.perf_counter()
        function(*given)
        return 1e3 * (time.perf_counter() - start)
    began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    began.record()
    function(*given)
    ended.record()
    ended.synchronize()
    return float(began.elapsed_time(ended))


CONVS: dict[str, type[CausalConv]] = {
    "planar": PlanarConv,
    "conv3d": CausalConv,
    "folded": FoldedConv,
    "summed": SummedConv,
    "shifted": ShiftedConv,
}
OPTIONS = ("subpixel", "kernels", "compiled", "tuned", "graph")


def parts_of(words: set[str]) -> Parts:
    """One of `CONVS`, and maybe `subpixel` and `kernels`; what is shifted needs kernels and has them."""
    (name,) = words & CONVS.keys()
    parts = Parts(conv=CONVS[name], enlarge=SubpixelEnlarge if "subpixel" in words else Enlarge)
    if name == "shifted":
        return parts._replace(activation=MarginActivation, join=kernel_join)
    return parts._replace(activation=KernelActivation, join=kernel_join) if "kernels" in words else parts
