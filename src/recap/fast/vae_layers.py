"""The layers of Wan 2.1's video decoder, channels last, several frames at a time.

Features are B T Y X C. A convolution leaves its bias to the layer behind, which adds it in a pass it makes
anyway. What a convolution remembers has a fixed place in memory and is changed there.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

PAST = 2  # frames before its first that a convolution over three reads
LAYERS = 3  # residual blocks in a stage
TINY = 1e-12  # the least norm that features are divided by


def unit(x: Tensor, gamma: Tensor) -> Tensor:
    """... C -> the same, fp32: every pixel's features at root mean square 1, scaled by channel."""
    exact = x.to(torch.float32)
    norm: Tensor = torch.linalg.vector_norm(exact, dim=-1, keepdim=True)
    scaled: Tensor = exact / norm.clamp_min(TINY) * (gamma * gamma.shape[0] ** 0.5)
    return scaled


def behind(past: Tensor, x: Tensor) -> Tensor:
    """B T Y X C -> B 2+T Y X C: frames behind the ones before them; the past moves on, in its place."""
    both = torch.cat([past, x], dim=1)
    past.copy_(both[:, -PAST:])
    return both


class CausalConv(nn.Module):
    """Three frames and `side` x `side` pixels; the input begins with the two frames of the past."""

    def __init__(self, channels: int, out: int, side: int = 3) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out, channels, PAST + 1, side, side))
        self.bias = nn.Parameter(torch.empty(out))
        self.channels, self.side = channels, side
        self.place = 0  # of its past among all pasts
        self.scale = 1  # sides of its input, in sides of the latents

    def arrange(self) -> None:
        """Once the weights are final: lay them out as `forward` reads them."""
        self.weight.data = self.weight.data.contiguous(memory_format=torch.channels_last_3d)

    def forward(self, x: Tensor) -> Tensor:
        """B 2+T Y X C -> B T Y X O, without the bias."""
        margins = (0, self.side // 2, self.side // 2)
        made = functional.conv3d(x.permute(0, 4, 1, 2, 3), self.weight, padding=margins)
        return made.permute(0, 2, 3, 4, 1)


class Activation(nn.Module):
    """Norm and SiLU, in one pass with all else that stands between two convolutions."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.empty(channels))

    def forward(self, x: Tensor, bias: Tensor | None, past: Tensor) -> Tensor:
        """B T Y X C -> B 2+T Y X C: activated, behind the past."""
        whole = x if bias is None else x.to(torch.float32) + bias
        return behind(past, functional.silu(unit(whole, self.gamma)).to(x.dtype))


def join(kept: Tensor, y: Tensor, bias: Tensor) -> Tensor:
    """The end of a residual block: what went around it, and what went through."""
    return kept + (y + bias)


class Enlarge(nn.Module):
    """Twice the rows and columns, each pixel repeated, then 3 x 3 pixels."""

    def __init__(self, channels: int, out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out, channels, 3, 3))
        self.bias = nn.Parameter(torch.empty(out))

    def arrange(self) -> None:
        self.weight.data = self.weight.data.contiguous(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        """B T Y X C -> B T 2Y 2X O."""
        pictures = x.flatten(0, 1).permute(0, 3, 1, 2)
        repeated = functional.interpolate(pictures, scale_factor=2.0, mode="nearest-exact")
        made = functional.conv2d(repeated, self.weight, self.bias, padding=1)
        larger: Tensor = made.permute(0, 2, 3, 1).unflatten(0, x.shape[:2])
        return larger


class Parts(NamedTuple):
    """What a decoder is built of; the defaults say what every other choice must compute."""

    conv: type[CausalConv] = CausalConv
    activation: type[Activation] = Activation
    enlarge: type[Enlarge] = Enlarge
    join: Callable[[Tensor, Tensor, Tensor], Tensor] = join


class Residual(nn.Module):
    def __init__(self, channels: int, out: int, parts: Parts) -> None:
        super().__init__()
        self.norm1 = parts.activation(channels)
        self.conv1 = parts.conv(channels, out)
        self.norm2 = parts.activation(out)
        self.conv2 = parts.conv(out, out)
        self.conv_shortcut = nn.Linear(channels, out) if channels != out else nn.Identity()
        self.join = parts.join

    def forward(self, x: Tensor, pasts: list[Tensor]) -> Tensor:
        y = self.conv1(self.norm1(x, None, pasts[self.conv1.place]))
        y = self.conv2(self.norm2(y, self.conv1.bias, pasts[self.conv2.place]))
        return self.join(self.conv_shortcut(x), y, self.conv2.bias)


class FrameAttention(nn.Module):
    """Every pixel of a frame looks at every other, in one head."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.ParameterDict({"gamma": torch.empty(channels)})
        self.to_qkv = nn.Linear(channels, 3 * channels)
        self.proj = nn.Linear(channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        frames = unit(x, self.norm["gamma"]).to(x.dtype).flatten(0, 1).flatten(1, 2).unsqueeze(1)
        query, key, value = self.to_qkv(frames).chunk(3, dim=-1)
        seen = self.proj(functional.scaled_dot_product_attention(query, key, value))
        return torch.add(x, seen.view(x.shape))


class Middle(nn.Module):
    def __init__(self, channels: int, parts: Parts) -> None:
        super().__init__()
        self.resnets = nn.ModuleList([Residual(channels, channels, parts) for _ in range(2)])
        self.attentions = nn.ModuleList([FrameAttention(channels)])

    def forward(self, x: Tensor, pasts: list[Tensor]) -> Tensor:
        x = self.attentions[0](self.resnets[0](x, pasts))
        made: Tensor = self.resnets[1](x, pasts)
        return made


class Upsampler(nn.Module):
    """Twice the size, and twice the frames where time is doubled; the first frame of a video is not."""

    def __init__(self, channels: int, doubled: bool, parts: Parts) -> None:
        super().__init__()
        self.time_conv = parts.conv(channels, 2 * channels, side=1) if doubled else None
        # The published name counts the repetition of pixels, which has no weights, as a layer of its own.
        self.resample = nn.Sequential(nn.Identity(), parts.enlarge(channels, channels // 2))

    def forward(self, x: Tensor, pasts: list[Tensor], first: bool) -> Tensor:
        if self.time_conv is not None:
            head, rest = x[:, : int(first)], x[:, int(first) :]
            if rest.shape[1]:
                made = self.time_conv(behind(pasts[self.time_conv.place], rest)) + self.time_conv.bias
                rest = made.unflatten(-1, (2, -1)).permute(0, 1, 4, 2, 3, 5).flatten(1, 2)
            x = torch.cat([head, rest], dim=1) if first else rest
        larger: Tensor = self.resample(x)
        return larger


class Stage(nn.Module):
    def __init__(self, channels: int, out: int, doubled: bool | None, parts: Parts) -> None:
        super().__init__()
        sizes = [channels, *[out] * LAYERS]
        self.resnets = nn.ModuleList([Residual(before, after, parts) for before, after in pairwise(sizes)])
        self.upsamplers = nn.ModuleList([] if doubled is None else [Upsampler(out, doubled, parts)])

    def forward(self, x: Tensor, pasts: list[Tensor], first: bool) -> Tensor:
        for block in self.resnets:
            x = block(x, pasts)
        for upsampler in self.upsamplers:
            x = upsampler(x, pasts, first)
        return x
