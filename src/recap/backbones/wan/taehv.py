"""This is the decoder of TAEHV, the small public video autoencoder (madebyollin/taehv, MIT), for Wan 2.1: `taew2_1`.

It has plain 2D layers, and pictures are rows of the batch. A memory block also reads its own input of one step
earlier, which is all that a stream must keep; 1x1 convolutions split one step into two. Latents are the normalised
ones of the diffusion model, pixels are in 0..1. A latent frame is four pictures; the first three of a video are
dropped, because Wan's first frame stands for one picture. The encoder in the public files is not read.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from recap.backbones.wan.decoder import check_latents, check_stream, size_of
from recap.contracts import Decoder, Entry, State
from recap.io.files import from_home
from recap.io.weights import Stored, fill, open_tensors, without_storage
from recap.types import state_copy

FIELD = "tiny decoder"
# Channels of a latent.
CHANNELS = 16
# From latents up to pictures.
DECODER_WIDTHS = (256, 128, 64, 64)
# Pictures made from one, by stage.
GROWTH = (1, 2, 2)
# Pictures of a latent frame.
STEP = 4
# Latents are limited softly to -3..3.
SOFT_LIMIT = 3.0


def conv(channels: int, out: int, *, bias: bool = True) -> nn.Conv2d:
    return nn.Conv2d(channels, out, 3, padding=1, bias=bias)


class SoftClamp(nn.Module):
    """Limits latents smoothly."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x / SOFT_LIMIT) * SOFT_LIMIT


class MemoryBlock(nn.Module):
    """Adds to its input what it makes of that and of the input of one step earlier."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Sequential(
            conv(2 * width, width), nn.ReLU(), conv(width, width), nn.ReLU(), conv(width, width)
        )

    def forward(self, x: Tensor, before: Tensor) -> Tensor:
        return functional.relu(self.conv(torch.cat([x, before], dim=1)) + x)


class TimeGrow(nn.Module):
    """Makes several pictures from one, earlier ones first: N C Y X -> N·times C Y X."""

    def __init__(self, width: int, times: int) -> None:
        super().__init__()
        self.times = times
        self.conv = nn.Conv2d(width, width * times, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        grown: Tensor = self.conv(x).unflatten(1, (self.times, -1)).flatten(0, 1)
        return grown


class TimeStack(nn.ModuleList):
    """Applies a sequence of layers to any number of steps of a video."""

    def forward(self, steps: Tensor, kept: State) -> tuple[Tensor, State]:
        """Take B T C Y X and the state of the previous call ({} at the start); return both for the next.

        Neither argument is changed, so the call can be compiled, and repeated after an error.
        """
        rows, later = steps.shape[0], {}
        x = steps.flatten(0, 1)
        for index, layer in enumerate(self):
            if isinstance(layer, MemoryBlock):
                timed = x.unflatten(0, (rows, -1))
                name = str(index)
                first = kept[name].unsqueeze(1) if kept else torch.zeros_like(timed[:, :1])
                before = torch.cat([first, timed[:, :-1]], dim=1).flatten(0, 1)
                # A copy, because a view would keep all steps alive.
                later[name] = timed[:, -1].clone()
                x = layer(x, before)
            else:
                x = layer(x)
        return x.unflatten(0, (rows, -1)), later

    def remembering(self) -> list[str]:
        """Return the names in the state."""
        return [str(index) for index, layer in enumerate(self) if isinstance(layer, MemoryBlock)]


class Taehv(nn.Module):
    """Has the decoder's layers under the names of the public files."""

    def __init__(self) -> None:
        super().__init__()
        first, *_, last = DECODER_WIDTHS
        layers: list[nn.Module] = [SoftClamp(), conv(CHANNELS, first), nn.ReLU()]
        for width, narrower, times in zip(DECODER_WIDTHS, DECODER_WIDTHS[1:], GROWTH, strict=False):
            layers += [MemoryBlock(width) for _ in range(3)]
            layers += [nn.Upsample(scale_factor=2), TimeGrow(width, times), conv(width, narrower, bias=False)]
        self.decoder = TimeStack([*layers, nn.ReLU(), conv(last, 3)])

    def open_decoder(self) -> Decoder:
        """Open a new decoding stream; any number of them may be open."""
        return TaehvStream(self)

    def like(self) -> Tensor:
        """Return a tensor on the device and in the precision of the model."""
        return cast(nn.Conv2d, self.decoder[-1]).weight


class TaehvStream:
    """Decodes latents frame by frame, so every kernel sees the same shapes however the stream is cut."""

    def __init__(self, model: Taehv) -> None:
        self._model = model
        self._kept: State = {}

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """Decode B F 16 rows columns, normalised, to B T 3 Y X, fp32 in 0..1; the first frame is one picture."""
        check_latents(latents, CHANNELS, self._begun())
        weight = self._model.like()
        pictures, kept = [], self._kept
        for frame in latents.to(weight).split(1, dim=1):
            first = not kept
            step, kept = self._model.decoder(frame, kept)
            pictures.append(step[:, STEP - 1 :] if first else step)
        self._kept = kept
        return torch.cat(pictures, dim=1).to(torch.float32).clamp_(0, 1)

    def state(self) -> State:
        return {name: state_copy(kept) for name, kept in self._kept.items()}

    def load_state(self, state: State) -> None:
        names = self._model.decoder.remembering()
        (rows, columns), scale, expected = size_of(state, names[0]), 1, {}
        for index, layer in enumerate(self._model.decoder):
            if isinstance(layer, nn.Upsample):
                scale *= 2
            if isinstance(layer, MemoryBlock):
                width = cast(nn.Conv2d, layer.conv[0]).out_channels
                expected[str(index)] = Entry(("B", width, scale * rows, scale * columns), "floats")
        check_stream(state, expected)
        weight = self._model.like()
        self._kept = {name: kept.to(weight.device, weight.dtype, copy=True) for name, kept in state.items()}

    def _begun(self) -> tuple[int, int, int] | None:
        """Return the batch, rows and columns of the latents decoded so far."""
        if not self._kept:
            return None
        # The first memory block sees frames in their own size.
        rows, _, height, width = self._kept[self._model.decoder.remembering()[0]].shape
        return rows, height, width


def load_taehv(path: Path, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> Taehv:
    """Load the decoder from a public `taew2_1` file, `.pth` or `.safetensors`."""
    path = from_home(path)
    stored = open_tensors(path, FIELD)
    found = {name: tensor for name, tensor in stored.items() if not name.startswith("encoder.")}
    with without_storage():
        model = Taehv()
    for index, layer in enumerate(model.decoder):
        name = f"decoder.{index}.conv.weight"
        if isinstance(layer, TimeGrow) and name in found:
            # A file may have been trained to make more pictures here than are wanted: the latest stay.
            found[name] = _last(found[name], layer.conv.out_channels)
    fill(model, found, path=path, field=FIELD, dtype=dtype)
    return model.eval().requires_grad_(False).to(device)


def _last(stored: Stored, count: int) -> Stored:
    """Return the last `count` entries along the first axis of a stored tensor, or all where there are fewer."""
    if not stored.shape:
        return stored
    shape = (min(count, stored.shape[0]), *stored.shape[1:])
    return replace(stored, shape=shape, read=lambda: stored.read()[-count:])
