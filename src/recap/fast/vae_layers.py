"""The layers of Wan 2.1's video decoder, channels last, several frames at a time.

Features are B T Y X C. A convolution leaves its bias to the layer behind, which adds it in a pass it makes
anyway. What a convolution remembers has a fixed place in memory and is changed there. A layer that is `fused`
computes by `recap.fast.vae_kernels` what is stated here.
"""

from __future__ import annotations

from importlib.util import find_spec
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

from recap.fast.subpixel import fuse, weave

PAST = 2  # frames before its first that a convolution over three reads
MARGIN = 1  # pixel of zeros around the frames that a convolution over 3 x 3 reads
LAYERS = 3  # residual blocks in a stage
TINY = 1e-12  # the least norm that features are divided by
HALVES = (torch.bfloat16, torch.float16)
ROOMY = (9, 10)  # generations of chips whose multiprocessors hold the kernels' tiles: Hopper, Blackwell


def can_fuse(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether `recap.fast.vae_kernels` serves there."""
    if device.type != "cuda" or dtype not in HALVES or find_spec("triton") is None:
        return False
    return torch.cuda.get_device_capability(device)[0] in ROOMY


def unit(x: Tensor, gamma: Tensor) -> Tensor:
    """... C -> the same, fp32: every pixel's features at root mean square 1, scaled by channel."""
    exact = x.to(torch.float32)
    norm: Tensor = torch.linalg.vector_norm(exact, dim=-1, keepdim=True)
    scaled: Tensor = exact / norm.clamp_min(TINY) * (gamma * gamma.shape[0] ** 0.5)
    return scaled


def behind(past: Tensor, x: Tensor, margin: int) -> Tensor:
    """B T Y X C -> B 2+T Y+2m X+2m C: frames behind the ones before them; the past moves on, in its place."""
    batch, frames, height, width, channels = x.shape
    grid = x.new_zeros(batch, PAST + frames, height + 2 * margin, width + 2 * margin, channels)
    inner = grid[:, :, margin : margin + height, margin : margin + width]
    inner[:, :PAST] = past
    inner[:, PAST:] = x
    past.copy_(inner[:, -PAST:])
    return grid


class CausalConv(nn.Module):
    """Three frames and `side` x `side` pixels; the input begins with the two frames of the past."""

    def __init__(self, channels: int, out: int, side: int = 3) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out, channels, PAST + 1, side, side))
        self.bias = nn.Parameter(torch.empty(out))
        self.channels, self.side = channels, side
        self.place = 0  # of its past among all pasts
        self.scale = 1  # sides of its input, in sides of the latents
        self.fused = False

    def arrange(self, fused: bool) -> None:
        """Once the weights are final: lay them out as `forward` reads them."""
        if fused and self.side == 3:
            from recap.fast.vae_kernels import tile_for

            self.fused = tile_for(self.channels, len(self.weight)) is not None
        if self.fused:
            self.weight.data = self.weight.data.permute(0, 2, 3, 4, 1).flatten(1).contiguous()
        else:
            folded = self.weight.data.transpose(1, 2).flatten(1, 2)
            self.weight.data = folded.contiguous(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        """B 2+T Y+2 X+2 C, with a margin unless for one pixel -> B T Y X O, without the bias."""
        if self.fused:
            from recap.fast.vae_kernels import shifted

            return shifted(x, self.weight)
        frames = x.shape[1] - PAST
        # Time among the channels: pictures with three frames' channels, and kernels of two dimensions.
        folded = torch.cat([x[:, t : t + frames] for t in range(PAST + 1)], dim=-1)
        made = functional.conv2d(folded.flatten(0, 1).permute(0, 3, 1, 2), self.weight)
        unfolded: Tensor = made.permute(0, 2, 3, 1).unflatten(0, (-1, frames))
        return unfolded


class Activation(nn.Module):
    """Norm and SiLU, in one pass with all else that stands between two convolutions."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.empty(channels))
        self.fused = False

    def arrange(self, fused: bool) -> None:
        self.fused = fused

    def forward(self, x: Tensor, bias: Tensor | None, past: Tensor) -> Tensor:
        """B T Y X C -> B 2+T Y+2 X+2 C: activated, behind the past, with a margin."""
        if self.fused:
            from recap.fast.vae_kernels import activated

            return activated(x, bias, self.gamma, past)
        whole = x if bias is None else x.to(torch.float32) + bias
        return behind(past, functional.silu(unit(whole, self.gamma)).to(x.dtype), MARGIN)


class Enlarge(nn.Module):
    """Twice the rows and columns, each pixel repeated, then 3 x 3 pixels."""

    def __init__(self, channels: int, out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out, channels, 3, 3))
        self.bias = nn.Parameter(torch.empty(out))

    def arrange(self, fused: bool) -> None:
        self.weight.data = fuse(self.weight.data).contiguous(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        """B T Y X C -> B T 2Y 2X O."""
        made = functional.conv2d(x.flatten(0, 1).permute(0, 3, 1, 2), self.weight, padding=MARGIN)
        larger: Tensor = weave(made.permute(0, 2, 3, 1), self.bias).unflatten(0, x.shape[:2])
        return larger


class Residual(nn.Module):
    def __init__(self, channels: int, out: int) -> None:
        super().__init__()
        self.norm1 = Activation(channels)
        self.conv1 = CausalConv(channels, out)
        self.norm2 = Activation(out)
        self.conv2 = CausalConv(out, out)
        self.conv_shortcut = nn.Linear(channels, out) if channels != out else nn.Identity()
        self.fused = False

    def arrange(self, fused: bool) -> None:
        self.fused = fused

    def forward(self, x: Tensor, pasts: list[Tensor]) -> Tensor:
        """May change what it is given."""
        first, second = pasts[self.conv1.place], pasts[self.conv2.place]
        # One expression, since a name would hold the features of the first half through the second.
        y = self.conv2(self.norm2(self.conv1(self.norm1(x, None, first)), self.conv1.bias, second))
        return self._join(self.conv_shortcut(x), y)

    def _join(self, kept: Tensor, y: Tensor) -> Tensor:
        """What went around the block, in its place, and what went through."""
        if self.fused:
            from recap.fast.vae_kernels import joined

            return joined(kept, y, self.conv2.bias)
        return kept.add_(y + self.conv2.bias)


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
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.resnets = nn.ModuleList([Residual(channels, channels) for _ in range(2)])
        self.attentions = nn.ModuleList([FrameAttention(channels)])

    def forward(self, x: Tensor, pasts: list[Tensor]) -> Tensor:
        x = self.attentions[0](self.resnets[0](x, pasts))
        made: Tensor = self.resnets[1](x, pasts)
        return made


class Upsampler(nn.Module):
    """Twice the size, and twice the frames where time is doubled; the first frame of a video is not."""

    def __init__(self, channels: int, doubled: bool) -> None:
        super().__init__()
        self.time_conv = CausalConv(channels, 2 * channels, side=1) if doubled else None
        # The published name counts the repetition of pixels, which has no weights, as a layer of its own.
        self.resample = nn.Sequential(nn.Identity(), Enlarge(channels, channels // 2))

    def forward(self, x: Tensor, pasts: list[Tensor], first: bool) -> Tensor:
        if self.time_conv is not None:
            head, rest = x[:, : int(first)], x[:, int(first) :]
            if rest.shape[1]:
                past = pasts[self.time_conv.place]
                made = self.time_conv(behind(past, rest, margin=0)) + self.time_conv.bias
                rest = made.unflatten(-1, (2, -1)).permute(0, 1, 4, 2, 3, 5).flatten(1, 2)
            x = torch.cat([head, rest], dim=1) if first else rest
        larger: Tensor = self.resample(x)
        return larger


class Stage(nn.Module):
    def __init__(self, channels: int, out: int, doubled: bool | None) -> None:
        super().__init__()
        sizes = [channels, *[out] * LAYERS]
        self.resnets = nn.ModuleList([Residual(before, after) for before, after in pairwise(sizes)])
        self.upsamplers = nn.ModuleList([] if doubled is None else [Upsampler(out, doubled)])

    def forward(self, x: Tensor, pasts: list[Tensor], first: bool) -> Tensor:
        for block in self.resnets:
            x = block(x, pasts)
        for upsampler in self.upsamplers:
            x = upsampler(x, pasts, first)
        return x
