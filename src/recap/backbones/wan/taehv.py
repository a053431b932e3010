"""TAEHV, the small public video autoencoder (madebyollin/taehv, MIT), for Wan 2.1's latents: `taew2_1`.

Plain 2D layers on pictures that travel as rows of the batch. A memory block also reads its own input of one
step earlier, which is all that a stream must keep; convolutions 1x1 split one step into two, or join two.
Latents are the normalised ones of the diffusion model, pixels 0..1. A latent frame is four pictures; the
first three of a video are dropped, as the first frame of Wan stands for one picture.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from recap.contracts import Decoder, State
from recap.errors import refuse
from recap.io.weights import Stored, fill, open_tensors

FIELD = "tiny decoder"
CHANNELS = 16  # of a latent
DECODER_WIDTHS = (256, 128, 64, 64)  # from latents up to pictures
ENCODER_WIDTH = 64
GROWTH = (1, 2, 2)  # pictures out of one, by stage of the decoder; the encoder joins as many, in reverse
STEP = 4  # pictures of a latent frame
CELL = 8  # pixels along the side of one latent
SOFT_LIMIT = 3.0  # latents are squeezed into -3..3


def conv(channels: int, out: int, stride: int = 1, *, bias: bool = True) -> nn.Conv2d:
    return nn.Conv2d(channels, out, 3, stride, padding=1, bias=bias)


class SoftClamp(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x / SOFT_LIMIT) * SOFT_LIMIT


class MemoryBlock(nn.Module):
    """A residual block that also reads its own input of one step earlier."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Sequential(
            conv(2 * width, width), nn.ReLU(), conv(width, width), nn.ReLU(), conv(width, width)
        )

    def forward(self, x: Tensor, before: Tensor) -> Tensor:
        return functional.relu(self.conv(torch.cat([x, before], dim=1)) + x)


class TimeGrow(nn.Module):
    """N C Y X -> N·times C Y X: pictures out of one, the earlier first."""

    def __init__(self, width: int, times: int) -> None:
        super().__init__()
        self.times = times
        self.conv = nn.Conv2d(width, width * times, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        grown: Tensor = self.conv(x).unflatten(1, (self.times, -1)).flatten(0, 1)
        return grown


class TimePool(nn.Module):
    """N C Y X -> N/times C Y X: neighbours side by side, the earlier first, and joined."""

    def __init__(self, width: int, times: int) -> None:
        super().__init__()
        self.times = times
        self.conv = nn.Conv2d(width * times, width, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        pooled: Tensor = self.conv(x.unflatten(0, (-1, self.times)).flatten(1, 2))
        return pooled


class TimeStack(nn.ModuleList):
    """Layers in a row over steps of a video, any number of them at once."""

    def forward(self, steps: Tensor, kept: State) -> tuple[Tensor, State]:
        """B T C Y X, and what the call before returned, or nothing at the start -> likewise.

        Neither argument is changed, so that the call can be compiled, and repeated after an error.
        """
        rows, later = steps.shape[0], {}
        x = steps.flatten(0, 1)
        for index, layer in enumerate(self):
            if isinstance(layer, MemoryBlock):
                timed = x.unflatten(0, (rows, -1))
                name = str(index)
                first = kept[name].unsqueeze(1) if kept else torch.zeros_like(timed[:, :1])
                before = torch.cat([first, timed[:, :-1]], dim=1).flatten(0, 1)
                later[name] = timed[:, -1].clone()  # a copy, or a view would hold all steps
                x = layer(x, before)
            else:
                x = layer(x)
        return x.unflatten(0, (rows, -1)), later

    def remembering(self) -> list[str]:
        """The names under which the call keeps things."""
        return [str(index) for index, layer in enumerate(self) if isinstance(layer, MemoryBlock)]


def _decoder() -> TimeStack:
    first, *_, last = DECODER_WIDTHS
    layers: list[nn.Module] = [SoftClamp(), conv(CHANNELS, first), nn.ReLU()]
    for width, narrower, times in zip(DECODER_WIDTHS, DECODER_WIDTHS[1:], GROWTH, strict=False):
        layers += [MemoryBlock(width) for _ in range(3)]
        layers += [nn.Upsample(scale_factor=2), TimeGrow(width, times), conv(width, narrower, bias=False)]
    return TimeStack([*layers, nn.ReLU(), conv(last, 3)])


def _encoder() -> TimeStack:
    width = ENCODER_WIDTH
    layers: list[nn.Module] = [conv(3, width), nn.ReLU()]
    for times in reversed(GROWTH):
        layers += [TimePool(width, times), conv(width, width, stride=2, bias=False)]
        layers += [MemoryBlock(width) for _ in range(3)]
    return TimeStack([*layers, conv(width, CHANNELS)])


class Taehv(nn.Module):
    """Both halves, under the names of the public files."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = _encoder()
        self.decoder = _decoder()

    def open_decoder(self) -> Decoder:
        """A fresh decoding stream; any number of them may be open."""
        return TaehvStream(self)

    @torch.no_grad()
    def encode(self, pixels: Tensor) -> Tensor:
        """B T 3 Y X in 0..1 -> normalised latents B T/4 16 Y/8 X/8, fp32; the last picture fills up the fours."""
        self._check(pixels)
        missing = -pixels.shape[1] % STEP
        held = torch.cat([pixels, pixels[:, -1:].expand(-1, missing, -1, -1, -1)], dim=1)
        weight = self.like()
        latents = []
        kept: State = {}
        # Four pictures at a time: a clip in full resolution and 64 channels would not fit.
        for step in held.split(STEP, dim=1):
            made, kept = self.encoder(step.to(weight), kept)
            latents.append(made)
        return torch.cat(latents, dim=1).to(torch.float32)

    def like(self) -> Tensor:
        """A tensor on the device and in the precision the model computes in."""
        return cast(nn.Conv2d, self.decoder[-1]).weight

    def _check(self, pixels: Tensor) -> None:
        if pixels.dim() != 5 or pixels.shape[2] != 3 or pixels.shape[3] % CELL or pixels.shape[4] % CELL:
            limit = f"pictures are RGB with sides that {CELL} divides"
            raise refuse("pixels.shape", tuple(pixels.shape), limit, "pass B T 3 Y X")
        if pixels.shape[1] == 0:
            raise refuse("pixels.shape", tuple(pixels.shape), "a clip has pictures", "pass B T 3 Y X, T > 0")


class TaehvStream:
    """Latents to pixels, frame by frame: every kernel sees the same shapes however the stream is cut."""

    def __init__(self, model: Taehv) -> None:
        self._model = model
        self._kept: State = {}

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """B F 16 rows columns, normalised -> B T 3 Y X, fp32 in 0..1; the first frame is one picture."""
        self._check(latents)
        weight = self._model.like()
        pictures, kept = [], self._kept
        for frame in latents.to(weight).split(1, dim=1):
            opening = not kept
            step, kept = self._model.decoder(frame, kept)
            pictures.append(step[:, STEP - 1 :] if opening else step)
        self._kept = kept
        return torch.cat(pictures, dim=1).to(torch.float32).clamp_(0, 1)

    def state(self) -> State:
        # Contiguous copies: what is handed out must not change later, and files take no strides.
        return {name: kept.clone(memory_format=torch.contiguous_format) for name, kept in self._kept.items()}

    def load_state(self, state: State) -> None:
        names = self._model.decoder.remembering()
        if state and set(state) != set(names):
            limit = f"an open stream of this decoder keeps {', '.join(names)}"
            raise refuse("decoder state", sorted(state), limit, "load the state of the same decoder")
        weight = self._model.like()
        self._kept = {name: kept.to(weight.device, weight.dtype, copy=True) for name, kept in state.items()}

    def _check(self, latents: Tensor) -> None:
        if latents.dim() != 5 or latents.shape[2] != CHANNELS or latents.shape[1] == 0:
            limit = f"this decoder reads frames of {CHANNELS} channels"
            raise refuse("latents.shape", tuple(latents.shape), limit, "pass B F C rows columns, F > 0")
        if not self._kept:
            return
        first = self._model.decoder.remembering()[0]  # which sees frames in their own size
        known = self._kept[first]
        begun, given = (known.shape[0], *known.shape[2:]), (latents.shape[0], *latents.shape[3:])
        if begun != given:
            limit = f"this stream began with {begun[0]} rows of frames of {begun[1]} x {begun[2]}"
            raise refuse("latents.shape", tuple(latents.shape), limit, "open a decoder per batch and size")


def load_taehv(path: Path, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> Taehv:
    """The autoencoder of a public `taew2_1` file, `.pth` or `.safetensors`."""
    path = Path(path).expanduser()
    found = open_tensors(path, FIELD)
    with torch.device("meta"):  # nothing is drawn that would be overwritten at once
        model = Taehv()
    for index, layer in enumerate(model.decoder):
        name = f"decoder.{index}.conv.weight"
        if isinstance(layer, TimeGrow) and name in found:
            # A file may have been trained to make more pictures here than are wanted: the latest stay.
            found[name] = _last(found[name], layer.conv.out_channels)
    fill(model, found, path=path, field=FIELD, dtype=dtype)
    return model.eval().requires_grad_(False).to(device)


def _last(stored: Stored, count: int) -> Stored:
    """The last `count` rows of a stored tensor, or all where there are fewer."""
    if not stored.shape:
        return stored
    shape = (min(count, stored.shape[0]), *stored.shape[1:])
    return replace(stored, shape=shape, read=lambda: stored.read()[-count:])
