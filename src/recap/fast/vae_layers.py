"""The layers of Wan 2.1's video decoder, channels last, several frames at a time.

Features are B T Y X C. A convolution leaves its bias to the next layer, which adds it in a pass that it makes anyway.
What a convolution remembers is updated in place, at a fixed address. A layer with `fused` set computes the same with
`recap.fast.vae_kernels`.
"""

from __future__ import annotations

from importlib.util import find_spec
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

from recap.fast.subpixel import fuse, weave

# Earlier frames that a convolution over three frames also reads.
PAST = 2
# Pixels of zeros around the frames that a convolution over 3 x 3 pixels reads.
MARGIN = 1
# Residual blocks in a stage.
LAYERS = 3
# The smallest norm that features are divided by.
TINY = 1e-12
HALVES = (torch.bfloat16, torch.float16)
# Compute capabilities with enough shared memory for the kernels' tiles: Hopper and Blackwell.
ROOMY = (9, 10)


def can_fuse(device: torch.device, dtype: torch.dtype) -> bool:
    """Tell whether `recap.fast.vae_kernels` supports this device and precision."""
    if device.type != "cuda" or dtype not in HALVES or find_spec("triton") is None:
        return False
    return torch.cuda.get_device_capability(device)[0] in ROOMY


def unit(x: Tensor, gamma: Tensor) -> Tensor:
    """Normalise every pixel's features ... C to root mean square 1 and scale them by channel, in fp32."""
    exact = x.to(torch.float32)
    norm: Tensor = torch.linalg.vector_norm(exact, dim=-1, keepdim=True)
    scaled: Tensor = exact / norm.clamp_min(TINY) * (gamma * gamma.shape[0] ** 0.5)
    return scaled


def append_to_past(past: Tensor, x: Tensor, margin: int) -> Tensor:
    """Append frames B T Y X C to the past, with a margin: B 2+T Y+2m X+2m C. The past is updated in place."""
    batch, frames, height, width, channels = x.shape
    grid = x.new_zeros(batch, PAST + frames, height + 2 * margin, width + 2 * margin, channels)
    inner = grid[:, :, margin : margin + height, margin : margin + width]
    inner[:, :PAST] = past
    inner[:, PAST:] = x
    past.copy_(inner[:, -PAST:])
    return grid


class Arranged(nn.Module):
    """A layer that is prepared once its weights are final, for plain torch or for Triton's kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.fused = False

    def arrange(self, fused: bool) -> None:
        """Choose the kernels of `forward`, and change the weights to the layout that they read."""
        self.fused = fused


class CausalConv(Arranged):
    """A convolution over three frames and `side` x `side` pixels; its input begins with the two past frames."""

    def __init__(self, channels: int, out: int, side: int = 3) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out, channels, PAST + 1, side, side))
        self.bias = nn.Parameter(torch.empty(out))
        self.channels, self.side = channels, side
        # Index of its past among all pasts.
        self.index = 0
        # Size of its input relative to the latents.
        self.scale = 1

    def arrange(self, fused: bool) -> None:
        if fused and self.side == 3:
            from recap.fast.vae_kernels import tile_for

            self.fused = tile_for(self.channels, len(self.weight)) is not None
        if self.fused:
            self.weight.data = self.weight.data.permute(0, 2, 3, 4, 1).flatten(1).contiguous()
        else:
            folded = self.weight.data.transpose(1, 2).flatten(1, 2)
            self.weight.data = folded.contiguous(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        """Convolve B 2+T Y+2 X+2 C (without the margin if `side` is 1) to B T Y X O, without the bias."""
        if self.fused:
            from recap.fast.vae_kernels import shifted

            return shifted(x, self.weight)
        frames = x.shape[1] - PAST
        # Three frames become channels of one picture, so that a 2D convolution can be used.
        folded = torch.cat([x[:, t : t + frames] for t in range(PAST + 1)], dim=-1)
        made = functional.conv2d(folded.flatten(0, 1).permute(0, 3, 1, 2), self.weight)
        unfolded: Tensor = made.permute(0, 2, 3, 1).unflatten(0, (-1, frames))
        return unfolded


class Activation(Arranged):
    """Norm and SiLU, in one pass with everything else between two convolutions."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.empty(channels))

    def forward(self, x: Tensor, bias: Tensor | None, past: Tensor) -> Tensor:
        """Activate B T Y X C and append it to the past, with a margin: B 2+T Y+2 X+2 C."""
        if self.fused:
            from recap.fast.vae_kernels import activated

            return activated(x, bias, self.gamma, past)
        whole = x if bias is None else x.to(torch.float32) + bias
        return append_to_past(past, functional.silu(unit(whole, self.gamma)).to(x.dtype), MARGIN)


class Enlarge(Arranged):
    """Repeats each pixel to twice the rows and columns, then convolves over 3 x 3 pixels."""

    def __init__(self, channels: int, out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out, channels, 3, 3))
        self.bias = nn.Parameter(torch.empty(out))

    def arrange(self, fused: bool) -> None:
        self.weight.data = fuse(self.weight.data).contiguous(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        """Enlarge B T Y X C to B T 2Y 2X O."""
        made = functional.conv2d(x.flatten(0, 1).permute(0, 3, 1, 2), self.weight, padding=MARGIN)
        larger: Tensor = weave(made.permute(0, 2, 3, 1), self.bias).unflatten(0, x.shape[:2])
        return larger


class ResidualUnit(Arranged):
    """Two causal convolutions, each after its activation, and a shortcut around them."""

    def __init__(self, channels: int, out: int) -> None:
        super().__init__()
        self.norm1 = Activation(channels)
        self.conv1 = CausalConv(channels, out)
        self.norm2 = Activation(out)
        self.conv2 = CausalConv(out, out)
        self.conv_shortcut = nn.Linear(channels, out) if channels != out else nn.Identity()

    def forward(self, x: Tensor, pasts: list[Tensor]) -> Tensor:
        """Compute the block; this may overwrite x."""
        first, second = pasts[self.conv1.index], pasts[self.conv2.index]
        # One expression, because a name would keep the features of the first half alive through the second.
        y = self.conv2(self.norm2(self.conv1(self.norm1(x, None, first)), self.conv1.bias, second))
        shortcut = self.conv_shortcut(x)
        if self.fused:
            from recap.fast.vae_kernels import joined

            return joined(shortcut, y, self.conv2.bias)
        total: Tensor = shortcut.add_(y + self.conv2.bias)
        return total


class FrameAttention(nn.Module):
    """Attention with one head between all pixels of a frame."""

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
        self.resnets = nn.ModuleList([ResidualUnit(channels, channels) for _ in range(2)])
        self.attentions = nn.ModuleList([FrameAttention(channels)])

    def forward(self, x: Tensor, pasts: list[Tensor]) -> Tensor:
        x = self.attentions[0](self.resnets[0](x, pasts))
        made: Tensor = self.resnets[1](x, pasts)
        return made


class Upsampler(nn.Module):
    """Doubles the size, and with `doubled` also the frames, except the first frame of a video."""

    def __init__(self, channels: int, doubled: bool) -> None:
        super().__init__()
        self.time_conv = CausalConv(channels, 2 * channels, side=1) if doubled else None
        # In the published names the repetition of pixels, which has no weights, counts as a layer.
        self.resample = nn.Sequential(nn.Identity(), Enlarge(channels, channels // 2))

    def forward(self, x: Tensor, pasts: list[Tensor], first: bool) -> Tensor:
        if self.time_conv is not None:
            head, rest = x[:, : int(first)], x[:, int(first) :]
            if rest.shape[1]:
                past = pasts[self.time_conv.index]
                made = self.time_conv(append_to_past(past, rest, margin=0)) + self.time_conv.bias
                rest = made.unflatten(-1, (2, -1)).permute(0, 1, 4, 2, 3, 5).flatten(1, 2)
            x = torch.cat([head, rest], dim=1) if first else rest
        larger: Tensor = self.resample(x)
        return larger


class DecoderStage(nn.Module):
    def __init__(self, channels: int, out: int, doubled: bool | None) -> None:
        super().__init__()
        sizes = [channels, *[out] * LAYERS]
        self.resnets = nn.ModuleList([ResidualUnit(before, after) for before, after in pairwise(sizes)])
        self.upsamplers = nn.ModuleList([] if doubled is None else [Upsampler(out, doubled)])

    def forward(self, x: Tensor, pasts: list[Tensor], first: bool) -> Tensor:
        for block in self.resnets:
            x = block(x, pasts)
        for upsampler in self.upsamplers:
            x = upsampler(x, pasts, first)
        return x
