"""Decodes by Wan 2.1's video decoder on one GPU: the readable model's weights, whole blocks at a time.

It computes the same as `recap.backbones.wan.vae` in a different way. All frames of a block pass through a layer
together, because a causal convolution needs only their order and the two inputs before them. Features are stored
channels last, as tensor cores read them. What a stream remembers has fixed addresses, so the kernels of a block can
be recorded once and replayed. Pictures are enlarged without writing the repeated pixels. On a GPU with enough
shared memory, in half precision, Triton kernels replace cuDNN's convolutions and everything between two of them.

Features are B T Y X C. A convolution leaves its bias to the next layer, which adds it in a pass that it makes anyway.
What a convolution remembers is updated in place, at a fixed address. A layer with `fused` set computes the same with
`recap.fast.vae_kernels`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from importlib.util import find_spec
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

from recap.attention.attend import HALF
from recap.backbones.wan.vae import FEATURES, FIELD, KINDS, MARK, NOTHING, WanVae
from recap.contracts import Decoder, State
from recap.errors import refuse
from recap.fast.graphs import RecordingRoom
from recap.fast.stream import FastStream, Size, fuse, weave

# Earlier frames that a convolution over three frames also reads.
PAST = 2
# Pixels of zeros around the frames that a convolution over 3 x 3 pixels reads.
MARGIN = 1
# Frames that plain torch works on at a time, because it needs several times their memory.
SLICE = 3
# Residual blocks in a stage.
LAYERS = 3
# The smallest norm that features are divided by.
TINY = 1e-12
# Compute capabilities with enough shared memory for the kernels' tiles: Hopper and Blackwell.
ROOMY: tuple[int, ...] = (9, 10)
# Channels of the public decoder's last stage.
PUBLIC_WIDTH = 96
# Widths of the middle and of the stages up to the pictures, in multiples of the last.
WIDTHS = (4, 4, 4, 2, 1)
# Whether time is doubled after a stage; space always is.
DOUBLED = (True, True, False)
COLOURS = 3
# Channels of the last convolution, because tensor cores write no fewer.
LEAST_CHANNELS = 16
# Number of wrong tensors that a message names.
SHOWN = 4


def can_fuse(device: torch.device, dtype: torch.dtype) -> bool:
    """Tell whether `recap.fast.vae_kernels` supports this device and precision."""
    if device.type != "cuda" or dtype not in HALF or find_spec("triton") is None:
        return False
    return torch.cuda.get_device_capability(device)[0] in ROOMY


def unit(x: Tensor, gamma: Tensor) -> Tensor:
    """Normalise every pixel's features ... C to root mean square 1 and scale them by channel, in fp32."""
    exact = x.to(torch.float32)
    norm: Tensor = torch.linalg.vector_norm(exact, dim=-1, keepdim=True)
    scaled: Tensor = exact / norm.clamp_min(TINY) * (gamma * gamma.shape[0] ** 0.5)
    return scaled


def append_to_past(
    past: Tensor, x: Tensor, margin: int, change: Callable[[Tensor], Tensor] = lambda part: part
) -> Tensor:
    """Append frames B T Y X C, changed, to the past, with a margin: B 2+T Y+2m X+2m C; updates the past in place."""
    batch, frames, height, width, channels = x.shape
    grid = x.new_zeros(batch, PAST + frames, height + 2 * margin, width + 2 * margin, channels)
    inner = grid[:, :, margin : margin + height, margin : margin + width]
    inner[:, :PAST] = past
    for start in range(0, frames, SLICE):
        inner[:, PAST + start : PAST + start + SLICE] = change(x[:, start : start + SLICE])
    past.copy_(inner[:, -PAST:])
    return grid


class Arranged(nn.Module):
    """Is the base of layers that are prepared once their weights are final, for torch or for Triton's kernels."""

    fused = False

    def arrange(self, fused: bool) -> None:
        """Choose the kernels of `forward`, and change the weights to the layout that they read."""
        self.fused = fused


class CausalConv(Arranged):
    """Convolves over three frames and `side` x `side` pixels; its input begins with the two past frames."""

    def __init__(self, channels: int, out: int, side: int = 3) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out, channels, PAST + 1, side, side))
        self.bias = nn.Parameter(torch.empty(out))
        self.channels, self.side = channels, side
        self.sliced = False
        # Index of its past among all pasts.
        self.index = 0
        # Size of its input relative to the latents.
        self.scale = 1

    def arrange(self, fused: bool) -> None:
        # Next to the kernels what is left to torch is small.
        self.sliced = not fused
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
        if not self.sliced:
            return self._fold(x)
        slices = [self._fold(x[:, t : t + SLICE + PAST]) for t in range(0, x.shape[1] - PAST, SLICE)]
        return torch.cat(slices, dim=1) if len(slices) > 1 else slices[0]

    def _fold(self, x: Tensor) -> Tensor:
        """Convolve frames as channels of one picture, so that a 2D convolution can be used."""
        frames = x.shape[1] - PAST
        folded = torch.cat([x[:, t : t + frames] for t in range(PAST + 1)], dim=-1)
        made = functional.conv2d(folded.flatten(0, 1).permute(0, 3, 1, 2), self.weight)
        unfolded: Tensor = made.permute(0, 2, 3, 1).unflatten(0, (-1, frames))
        return unfolded


class Activation(Arranged):
    """Applies norm and SiLU, in one pass with everything else between two convolutions."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.empty(channels))

    def forward(self, x: Tensor, bias: Tensor | None, past: Tensor) -> Tensor:
        """Activate B T Y X C and append it to the past, with a margin: B 2+T Y+2 X+2 C."""
        if self.fused:
            from recap.fast.vae_kernels import activated

            return activated(x, bias, self.gamma, past)

        def activate(part: Tensor) -> Tensor:
            whole = part if bias is None else part.to(torch.float32) + bias
            return functional.silu(unit(whole, self.gamma)).to(x.dtype)

        return append_to_past(past, x, MARGIN, activate)


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
    """Adds two causal convolutions, each after its activation, to a shortcut around them."""

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
    """Attends with one head between all pixels of a frame."""

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


class FastVae(nn.Module):
    """Decodes, with diffusers' names for its tensors: `fill` sets its weights, then `arrange` prepares it."""

    def __init__(self, width: int, channels: int) -> None:
        super().__init__()
        wide = [width * multiple for multiple in WIDTHS]
        # The upsampler of a stage also halves the channels.
        entering = [wide[0], *(before // 2 for before in wide[1:-1])]
        self.post_quant_conv = nn.Linear(channels, channels)
        self.conv_in = CausalConv(channels, wide[0])
        self.mid_block = Middle(wide[0])
        self.up_blocks = nn.ModuleList(
            DecoderStage(*sizes) for sizes in zip(entering, wide[1:], (*DOUBLED, None), strict=True)
        )
        self.norm_out = Activation(width)
        self.conv_out = CausalConv(width, LEAST_CHANNELS)
        self.convs = [module for module in self.modules() if isinstance(module, CausalConv)]
        for index, conv in enumerate(self.convs):
            conv.index = index
        for depth, stage in enumerate(self.up_blocks):
            for conv in [module for module in stage.modules() if isinstance(module, CausalConv)]:
                conv.scale = 2**depth
        self.conv_out.scale = 2 ** len(DOUBLED)

    def forward(self, latents: Tensor, pasts: list[Tensor], first: bool) -> Tensor:
        """Decode B F C rows columns, fp32, to B T 3 Y X, fp32 in 0..1; `pasts` is updated in place."""
        x = self.post_quant_conv(latents.permute(0, 1, 3, 4, 2)).to(self.conv_in.bias.dtype)
        x = self.conv_in(append_to_past(pasts[0], x, MARGIN)) + self.conv_in.bias
        x = self.mid_block(x, pasts)
        for stage in self.up_blocks:
            x = stage(x, pasts, first)
        x = self.conv_out(self.norm_out(x, None, pasts[-1]))
        colours: Tensor = (x + self.conv_out.bias)[..., :COLOURS].to(torch.float32)
        return (colours.clamp(-1, 1) * 0.5 + 0.5).permute(0, 1, 4, 2, 3).contiguous()

    def fill(self, found: Mapping[str, Tensor]) -> None:
        """Take the decoder's tensors from those of diffusers' whole model."""
        theirs = {
            name.removeprefix("decoder."): tensor
            for name, tensor in found.items()
            if name.startswith(("decoder.", "post_quant_conv."))
        }
        own = self.state_dict()
        wrong = sorted(own.keys() ^ theirs.keys())
        for name in own.keys() & theirs.keys():
            outputs = COLOURS if name.startswith("conv_out.") else len(own[name])
            if len(theirs[name]) != outputs or theirs[name][0].numel() != own[name][0].numel():
                wrong.append(f"{name} {tuple(theirs[name].shape)}")
        if wrong:
            limit = "this is not the decoder of Wan 2.1"
            raise refuse(FIELD, wrong[:SHOWN], limit, "pass the vae of a Wan 2.1 model")
        for name, tensor in own.items():
            # Kernels of one pixel lose their sides, and the last convolution gets outputs that nobody reads.
            tensor.zero_()[: len(theirs[name])] = theirs[name].reshape(-1, *tensor.shape[1:])

    def arrange(self, dtype: torch.dtype, fused: bool | None = None) -> FastVae:
        """Choose the precision, layouts and kernels of `forward`, once the weights are final.

        With or without Triton's kernels; None uses them where they are supported.
        """
        fused = can_fuse(self.conv_in.bias.device, dtype) if fused is None else fused
        self.requires_grad_(False)
        for name, child in self.named_children():
            # The first layer costs almost nothing, so latents need not be rounded before it.
            child.to(torch.float32 if name == "post_quant_conv" else dtype)
        for module in self.modules():
            if isinstance(module, Arranged):
                module.arrange(fused)
        return self

    def pasts(self, size: Size) -> list[tuple[int, ...]]:
        """Return the shapes of what the convolutions keep for latents of this size; zeros begin a video."""
        batch, rows, columns = size
        return [(batch, PAST, rows * conv.scale, columns * conv.scale, conv.channels) for conv in self.convs]

    def kinds(self, frames: int) -> list[int]:
        """Return what each convolution keeps after one frame or more, in the terms of `VaeStream`.

        Those that double time keep nothing of the first frame. diffusers counts one more convolution, which keeps
        nothing at all.
        """
        kept = [MARK if frames == 1 and conv.side == 1 else FEATURES for conv in self.convs]
        return [*kept, NOTHING]

    @classmethod
    def of(cls, readable: WanVae) -> FastVae:
        """Copy the decoder of a readable autoencoder, on its device and in its precision."""
        found = readable.model.state_dict()
        vae = cls(found["decoder.conv_out.weight"].shape[1], readable.channels)
        vae.requires_grad_(False).to(readable.device).fill(found)
        first, config = vae.post_quant_conv, readable.model.config
        # Scaling latents by their statistics is linear, so it can be merged into the first linear layer.
        first.bias.add_(first.weight @ first.bias.new_tensor(config.latents_mean))
        first.weight.mul_(first.weight.new_tensor(config.latents_std))
        return vae.arrange(readable.dtype)

    def open_decoder(self) -> Decoder:
        """Open a new decoding stream; any number may be open, but at full size each takes gigabytes."""
        return FastVaeStream(self)


class FastVaeStream(FastStream):
    """Decodes a stream whose states are those of `VaeStream`."""

    def __init__(self, vae: FastVae) -> None:
        super().__init__(vae.post_quant_conv.in_features, vae.conv_in.bias)
        self._vae = vae

    def _shapes(self, size: Size) -> list[tuple[int, ...]]:
        return self._vae.pasts(size)

    def _begin(self, latents: Tensor) -> Tensor:
        decode: Callable[[], Tensor] = partial(self._vae, latents, self._kept, first=True)
        if not latents.is_cuda:
            return decode()
        pixels: Tensor = RecordingRoom.current().run(decode).clone()
        # The first block is shorter than the others, so they cannot reuse what it leaves in the allocator's cache,
        # which is gigabytes at full size.
        torch.cuda.empty_cache()
        return pixels

    def _later(self, kept: list[Tensor]) -> Callable[[Tensor], Tensor]:
        return partial(self._vae, pasts=kept, first=False)

    def _names(self, frames: int) -> dict[str, int]:
        kinds = self._vae.kinds(frames)
        return {str(index): index for index, kind in enumerate(kinds) if kind == FEATURES}

    def _marks(self, frames: int) -> State:
        return {KINDS: torch.tensor(self._vae.kinds(frames), dtype=torch.uint8)}
