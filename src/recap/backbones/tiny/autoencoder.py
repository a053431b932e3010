"""This module is the autoencoder of the embedded backbone, in Wan's geometry: a latent is 4 pictures of 8 x 8 pixels.

All layers are 2D. A latent frame stands for one *step* of four pictures, which are channels (or, at half
resolution, rows of the batch); a residual block may also read part of its own input of one step earlier. So the
network is causal with a finite memory, a stream keeps one tensor per such block, and every step costs the same. The
first picture of a clip is a step of four equal pictures, of which the decoder returns the last; before the first
step the memory contains the first step itself, as if the picture had always been there. Norms are over channels
only, so results do not depend on how a stream is cut.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from recap.backbones.wan.decoder import check_clip, check_latents, check_stream, size_of
from recap.contracts import Entry, State

CELL = 8
"""Side of the square of pixels that one latent covers: three halvings."""


@dataclass(frozen=True, slots=True)
class AutoencoderSpec:
    """Lists every size of the autoencoder; widths and depths from half resolution down to an eighth."""

    latent_channels: int
    pictures_per_frame: int
    # Channels of one picture at 1/2, of a step at 1/4 and 1/8.
    widths: tuple[int, int, int]
    # Residual blocks at 1/2, 1/4 and 1/8.
    depths: tuple[int, int, int]
    # Channels of the previous step that a block reads, at 1/4 and 1/8.
    remembered: tuple[int, int]


EMBEDDED_AUTOENCODER = AutoencoderSpec(
    latent_channels=16, pictures_per_frame=4, widths=(32, 112, 160), depths=(2, 3, 2), remembered=(48, 80)
)


class WholeClip:
    """Finds a block's input of one step earlier in the batch, where all steps of a clip are neighbours."""

    def __init__(self, num_steps: int) -> None:
        self._num_steps = num_steps

    def previous(self, name: str, x: Tensor) -> Tensor:
        """Return what the block of that name passed one step before x, in the shape of x."""
        steps = x.unflatten(0, (-1, self._num_steps))
        return torch.cat([steps[:, :1], steps[:, :-1]], dim=1).flatten(0, 1)


class Stream:
    """Keeps every block's input of one step earlier: one step at a time, without end."""

    def __init__(self) -> None:
        self.kept: State = {}

    def previous(self, name: str, x: Tensor) -> Tensor:
        before = self.kept.get(name, x)
        self.kept[name] = x
        return before


Memory = WholeClip | Stream


class ChannelNorm(nn.Module):
    """Normalises by the root mean square over the channels of each pixel."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        # Autocast would compute `square` and `rsqrt` in fp32, and with them every later activation.
        power = (x * x).mean(dim=1, keepdim=True, dtype=torch.float32)
        scale = torch.rsqrt(power + 1e-6).to(x.dtype)
        normed: Tensor = x * scale * self.weight.to(x.dtype).view(-1, 1, 1)
        return normed


class ResidualBlock(nn.Module):
    """Has two convolutions and a shortcut; the second starts at zero, so a deep stack starts as the identity."""

    def __init__(self, name: str, width: int, remembered: int) -> None:
        super().__init__()
        self.name = name
        self.remembered = remembered
        self.norm1 = ChannelNorm(width)
        self.conv1 = nn.Conv2d(width + remembered, width, 3, padding=1)
        self.norm2 = ChannelNorm(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x: Tensor, memory: Memory) -> Tensor:
        hidden = functional.silu(self.norm1(x))
        if self.remembered:
            before = memory.previous(self.name, hidden[:, : self.remembered])
            hidden = torch.cat([hidden, before], dim=1)
        hidden = functional.silu(self.norm2(self.conv1(hidden)))
        changed: Tensor = x + self.conv2(hidden)
        return changed


class Stack(nn.ModuleList):
    """Runs the residual blocks of one resolution."""

    def __init__(self, name: str, width: int, depth: int, remembered: int) -> None:
        super().__init__(ResidualBlock(f"{name}.{index}", width, remembered) for index in range(depth))

    def forward(self, x: Tensor, memory: Memory) -> Tensor:
        for block in self:
            x = block(x, memory)
        return x


class StepEncoder(nn.Module):
    """Encodes steps of pictures in -1..1 as raw latents."""

    def __init__(self, spec: AutoencoderSpec) -> None:
        super().__init__()
        fine, middle, coarse = spec.widths
        self.count = spec.pictures_per_frame
        self.enter = nn.Conv2d(3 * 4, fine, 3, padding=1)
        self.fine = Stack("fine", fine, spec.depths[0], 0)
        self.join = nn.Conv2d(self.count * fine * 4, middle, 1)
        self.middle = Stack("middle", middle, spec.depths[1], spec.remembered[0])
        self.shrink = nn.Conv2d(middle * 4, coarse, 1)
        self.coarse = Stack("coarse", coarse, spec.depths[2], spec.remembered[1])
        self.norm = ChannelNorm(coarse)
        self.leave = nn.Conv2d(coarse, spec.latent_channels, 3, padding=1)

    def forward(self, steps: Tensor, memory: Memory) -> Tensor:
        """Encode N P 3 Y X as N C Y/8 X/8."""
        halves = functional.pixel_unshuffle(steps.flatten(0, 1), 2)
        halves = self.fine(self.enter(_nhwc(halves)), memory)
        quarters = functional.pixel_unshuffle(halves, 2).unflatten(0, (-1, self.count)).flatten(1, 2)
        x = self.middle(self.join(_nhwc(quarters)), memory)
        x = self.coarse(self.shrink(_nhwc(functional.pixel_unshuffle(x, 2))), memory)
        latents: Tensor = self.leave(functional.silu(self.norm(x)))
        return latents


class StepDecoder(nn.Module):
    """Decodes raw latents to steps of pictures in -1..1, not clamped."""

    def __init__(self, spec: AutoencoderSpec) -> None:
        super().__init__()
        fine, middle, coarse = spec.widths
        self.count = spec.pictures_per_frame
        self.enter = nn.Conv2d(2 * spec.latent_channels, coarse, 3, padding=1)
        self.coarse = Stack("coarse", coarse, spec.depths[2], spec.remembered[1])
        self.grow = nn.Conv2d(coarse, middle * 4, 1)
        self.middle = Stack("middle", middle, spec.depths[1], spec.remembered[0])
        self.split = nn.Conv2d(middle, self.count * fine * 4, 1)
        self.fine = Stack("fine", fine, spec.depths[0], 0)
        self.norm = ChannelNorm(fine)
        self.leave = nn.Conv2d(fine, 3 * 4, 3, padding=1)

    def forward(self, latents: Tensor, memory: Memory) -> Tensor:
        """Decode N C rows columns to N P 3 Y X."""
        before = memory.previous("latents", latents)
        x = self.coarse(self.enter(_nhwc(torch.cat([latents, before], dim=1))), memory)
        x = self.middle(_nhwc(functional.pixel_shuffle(self.grow(x), 2)), memory)
        pictures = self.split(x).unflatten(1, (self.count, -1)).flatten(0, 1)
        halves = self.fine(_nhwc(functional.pixel_shuffle(pictures, 2)), memory)
        full = functional.pixel_shuffle(self.leave(functional.silu(self.norm(halves))), 2)
        steps: Tensor = full.unflatten(0, (-1, self.count))
        return steps


class Autoencoder(nn.Module):
    """Has encoder, decoder, and the statistics that make latents zero-mean and unit-variance per channel."""

    latent_mean: Tensor
    latent_std: Tensor

    def __init__(self, spec: AutoencoderSpec = EMBEDDED_AUTOENCODER) -> None:
        super().__init__()
        self.spec = spec
        self.encoder = StepEncoder(spec)
        self.decoder = StepDecoder(spec)
        self.register_buffer("latent_mean", torch.zeros(spec.latent_channels))
        self.register_buffer("latent_std", torch.ones(spec.latent_channels))
        self.apply(_initialise)

    def encode(self, pixels: Tensor) -> Tensor:
        """Encode B T 3 Y X in 0..1, T = 1 + n P, as normalised latents B 1+n C Y/8 X/8."""
        return (self.encode_raw(pixels) - _per_channel(self.latent_mean)) / _per_channel(self.latent_std)

    def decode(self, latents: Tensor) -> Tensor:
        """Decode normalised latents B F C rows columns to B T 3 Y X in 0..1, all steps at once."""
        raw = latents * _per_channel(self.latent_std) + _per_channel(self.latent_mean)
        return self.decode_raw(raw).clamp(0, 1)

    def encode_raw(self, pixels: Tensor) -> Tensor:
        """Encode pictures as latents that are not normalised, for training."""
        count = self.spec.pictures_per_frame
        check_clip(pixels, CELL, count)
        repeated = pixels[:, :1].expand(-1, count - 1, -1, -1, -1)
        steps = torch.cat([repeated, pixels], dim=1).unflatten(1, (-1, count))
        latents = self.encoder(steps.flatten(0, 1) * 2 - 1, WholeClip(steps.shape[1]))
        framed: Tensor = latents.unflatten(0, steps.shape[:2])
        return framed

    def decode_raw(self, latents: Tensor) -> Tensor:
        """Decode raw latents without clamping, so that values out of range have a gradient."""
        steps = self.decoder(latents.flatten(0, 1), WholeClip(latents.shape[1]))
        pictures: Tensor = steps.unflatten(0, latents.shape[:2]).flatten(1, 2)
        return pictures[:, self.spec.pictures_per_frame - 1 :] * 0.5 + 0.5


class StreamingDecoder:
    """Decodes latents frame by frame, so every kernel sees the same shapes however the stream is cut."""

    def __init__(self, autoencoder: Autoencoder) -> None:
        self._model = autoencoder
        self._stream = Stream()

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """Decode B F C rows columns to B T 3 Y X, fp32 in 0..1; the first frame of the stream is one picture."""
        known = self._stream.kept.get("latents")
        begun = None if known is None else (known.shape[0], known.shape[2], known.shape[3])
        check_latents(latents, self._model.spec.latent_channels, begun)
        mean, std = self._model.latent_mean, self._model.latent_std
        raw = latents.to(mean.device, mean.dtype) * _per_channel(std) + _per_channel(mean)
        pictures = []
        for frame in raw.unbind(1):
            first = not self._stream.kept
            step = self._model.decoder(frame, self._stream)
            pictures.append(step[:, -1:] if first else step)
        return torch.cat(pictures, dim=1).to(torch.float32).mul_(0.5).add_(0.5).clamp_(0, 1)

    def state(self) -> State:
        # Contiguous copies: the kept tensors may be slices, and a state must not change later.
        kept = sorted(self._stream.kept.items())
        return {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in kept}

    def load_state(self, state: State) -> None:
        blocks = [m for m in self._model.decoder.modules() if isinstance(m, ResidualBlock) and m.remembered]
        rows, columns = size_of(state, "latents")
        expected = {"latents": Entry(("B", self._model.spec.latent_channels, "y", "x"), "floats")}
        for block in blocks:
            scale = 2 if block.name.startswith("middle") else 1
            expected[block.name] = Entry(("B", block.remembered, scale * rows, scale * columns), "floats")
        check_stream(state, expected)
        like = self._model.latent_mean
        # The memory layout decides which kernel runs, so restored tensors get the layout they had.
        self._stream.kept = {name: _nhwc(kept.to(like).clone()) for name, kept in state.items()}


def _initialise(module: nn.Module) -> None:
    """Set weights that preserve the variance of their input; torch's own would halve it at every layer."""
    if isinstance(module, nn.Conv2d):
        nn.init.normal_(module.weight, std=module.weight[0].numel() ** -0.5)
        assert module.bias is not None
        nn.init.zeros_(module.bias)
    if isinstance(module, ResidualBlock):
        nn.init.zeros_(module.conv2.weight)


def _per_channel(statistic: Tensor) -> Tensor:
    return statistic.view(-1, 1, 1)


def _nhwc(x: Tensor) -> Tensor:
    """Store channels innermost: convolutions run fastest with this layout, on CPU and GPU."""
    return x.contiguous(memory_format=torch.channels_last)
