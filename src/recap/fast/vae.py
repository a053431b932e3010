"""Wan 2.1's video decoder for one GPU: the weights of the readable model, whole blocks at a time.

Some things differ from `recap.backbones.wan.vae`, none of them in what is computed. All frames of a block pass
a layer together, since a causal convolution needs nothing of them but their order and the two inputs before
them. Features lie channels last, as tensor cores read them. What a stream remembers has a fixed place in memory,
so that the kernels of a block can be recorded once and replayed. Pictures are enlarged without writing the
repeated pixels. And on a GPU that has room for them, Triton kernels take the place of cuDNN's convolutions and of
all that stands between two of them, in half precision.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor, nn

from recap.backbones.wan.vae import FEATURES, FIELD, KINDS, MARK, NOTHING, WanVae
from recap.contracts import Decoder, State
from recap.errors import refuse
from recap.fast.stream import FastStream, Size
from recap.fast.vae_layers import (
    MARGIN,
    PAST,
    Activation,
    CausalConv,
    Enlarge,
    Middle,
    Residual,
    Stage,
    behind,
    can_fuse,
)

WIDTHS = (4, 4, 4, 2, 1)  # of the middle and of the stages up to the pictures, in multiples of the last
DOUBLED = (True, True, False)  # whether time is doubled behind a stage, as space always is
COLOURS = 3
ROOM = 16  # channels of the last convolution: tensor cores write no fewer
SHOWN = 4  # of the wrong tensors


class FastDecoder(nn.Module):
    """The network, under diffusers' names for its tensors; weights are to be given."""

    def __init__(self, width: int, channels: int) -> None:
        super().__init__()
        wide = [width * multiple for multiple in WIDTHS]
        # What enlarges a stage's pictures also halves their channels.
        entering = [wide[0], *(before // 2 for before in wide[1:-1])]
        self.post_quant_conv = nn.Linear(channels, channels)
        self.conv_in = CausalConv(channels, wide[0])
        self.mid_block = Middle(wide[0])
        self.up_blocks = nn.ModuleList(
            Stage(*sizes) for sizes in zip(entering, wide[1:], (*DOUBLED, None), strict=True)
        )
        self.norm_out = Activation(width)
        self.conv_out = CausalConv(width, ROOM)
        self.convs = [module for module in self.modules() if isinstance(module, CausalConv)]
        for place, conv in enumerate(self.convs):
            conv.place = place
        for depth, stage in enumerate(self.up_blocks):
            for conv in [module for module in stage.modules() if isinstance(module, CausalConv)]:
                conv.scale = 2**depth
        self.conv_out.scale = 2 ** len(DOUBLED)

    def forward(self, latents: Tensor, pasts: list[Tensor], first: bool) -> Tensor:
        """Latents B F C rows columns, fp32 -> B T 3 Y X, fp32 in 0..1; the pasts move on."""
        x = self.post_quant_conv(latents.permute(0, 1, 3, 4, 2)).to(self.conv_in.bias.dtype)
        x = self.conv_in(behind(pasts[0], x, MARGIN)) + self.conv_in.bias
        x = self.mid_block(x, pasts)
        for stage in self.up_blocks:
            x = stage(x, pasts, first)
        x = self.conv_out(self.norm_out(x, None, pasts[-1]))
        colours: Tensor = (x + self.conv_out.bias)[..., :COLOURS].to(torch.float32)
        return (colours.clamp(-1, 1) * 0.5 + 0.5).permute(0, 1, 4, 2, 3).contiguous()

    def fill(self, found: Mapping[str, Tensor]) -> None:
        """Take the tensors of diffusers' model, whatever else it has besides a decoder."""
        theirs = {
            name.removeprefix("decoder."): tensor
            for name, tensor in found.items()
            if name.startswith(("decoder.", "post_quant_conv."))
        }
        own = self.state_dict()
        wrong = sorted(own.keys() ^ theirs.keys())
        for name in own.keys() & theirs.keys():
            rows = COLOURS if name.startswith("conv_out.") else len(own[name])
            if len(theirs[name]) != rows or theirs[name][0].numel() != own[name][0].numel():
                wrong.append(f"{name} {tuple(theirs[name].shape)}")
        if wrong:
            limit = "this is not the decoder of Wan 2.1"
            raise refuse(FIELD, wrong[:SHOWN], limit, "pass the vae of a Wan 2.1 model")
        for name, tensor in own.items():
            # Kernels of one pixel lose their sides, and the last convolution gets rows that draw nothing.
            tensor.zero_()[: len(theirs[name])] = theirs[name].reshape(-1, *tensor.shape[1:])

    def arrange(self, dtype: torch.dtype, fused: bool) -> None:
        """Once the weights are final: the precision, the layouts and the kernels that `forward` works with."""
        self.requires_grad_(False)
        for name, child in self.named_children():
            # The first is next to nothing, and latents need not be rounded before it.
            child.to(torch.float32 if name == "post_quant_conv" else dtype)
        for module in self.modules():
            if isinstance(module, CausalConv | Activation | Enlarge | Residual):
                module.arrange(fused)

    def pasts(self, size: Size) -> list[tuple[int, ...]]:
        """Shapes of what the convolutions keep of a video of such latents; zeros are its beginning."""
        batch, rows, columns = size
        return [(batch, PAST, rows * conv.scale, columns * conv.scale, conv.channels) for conv in self.convs]

    def kinds(self, frames: int) -> list[int]:
        """Of what each convolution keeps, as `VaeStream` tells them apart, after one frame or more.

        Those that double time have nothing to keep of the first frame. And diffusers counts one more, which
        keeps nothing at all.
        """
        kept = [MARK if frames == 1 and conv.side == 1 else FEATURES for conv in self.convs]
        return [*kept, NOTHING]


class FastVae:
    """The network, on its device, in a precision of its own."""

    def __init__(self, network: FastDecoder, dtype: torch.dtype, *, fused: bool | None = None) -> None:
        """By Triton's kernels or without; where nothing is said, by them if they serve there."""
        device = network.conv_in.bias.device
        self.network = network
        self.fused = can_fuse(device, dtype) if fused is None else fused
        network.arrange(dtype, self.fused)

    @classmethod
    def of(cls, vae: WanVae, *, fused: bool | None = None) -> FastVae:
        """The decoder of a finished autoencoder, on its device and in its precision."""
        found = vae.model.state_dict()
        network = FastDecoder(found["decoder.conv_out.weight"].shape[1], vae.channels)
        network.requires_grad_(False).to(vae.device).fill(found)
        first, config = network.post_quant_conv, vae.model.config
        # The statistics of the latents are a linear layer before a linear layer.
        first.bias.add_(first.weight @ first.bias.new_tensor(config.latents_mean))
        first.weight.mul_(first.weight.new_tensor(config.latents_std))
        return cls(network, vae.dtype, fused=fused)

    def open_decoder(self) -> Decoder:
        """A fresh decoding stream; any number may be open, though at full size each holds gigabytes."""
        return FastVaeStream(self.network)


class FastVaeStream(FastStream):
    """With the states of `VaeStream`."""

    def __init__(self, network: FastDecoder) -> None:
        super().__init__(network.post_quant_conv.in_features, network.conv_in.bias)
        self._network = network

    def _shapes(self, size: Size) -> list[tuple[int, ...]]:
        return self._network.pasts(size)

    def _begin(self, latents: Tensor) -> Tensor:
        pixels: Tensor = self._network(latents, self._kept, first=True)
        if latents.is_cuda:
            # The first block is shorter than the others, which could use nothing of what it leaves in the cache:
            # at full size gigabytes.
            torch.cuda.empty_cache()
        return pixels

    def _later(self, kept: list[Tensor]) -> Callable[[Tensor], Tensor]:
        return partial(self._network, pasts=kept, first=False)

    def state(self) -> State:
        self._refuse_torn()
        if self._frames == 0:
            return {}
        kinds = self._network.kinds(self._frames)
        state = {KINDS: torch.tensor(kinds, dtype=torch.uint8)}
        for place, past in enumerate(self._kept):
            if kinds[place] == FEATURES:
                state[str(place)] = past.permute(0, 4, 1, 2, 3).clone(memory_format=torch.contiguous_format)
        return state

    def load_state(self, state: State) -> None:
        if not state:
            return self._restore(None, 0, {})
        kinds = state[KINDS].tolist() if KINDS in state else []
        frames = 1 if MARK in kinds else 2
        places = [place for place, kind in enumerate(kinds) if kind == FEATURES]
        named = {KINDS, *map(str, places)}
        if kinds != self._network.kinds(frames) or named != set(state):
            raise self._foreign(state)
        if any(state[str(place)].dim() != 5 for place in places):
            raise self._foreign(state)
        kept = {place: state[str(place)].movedim(1, -1) for place in places}
        size = kept[0].shape[0], kept[0].shape[2], kept[0].shape[3]
        shapes = self._network.pasts(size)
        for place, past in kept.items():
            batch, most, *others = shapes[place]
            # `VaeStream` keeps no more than there was: one frame, after the first.
            if not 1 <= past.shape[1] <= most or (past.shape[0], *past.shape[2:]) != (batch, *others):
                raise self._foreign(state)
        self._restore(size, frames, kept)

    def _foreign(self, state: State) -> ValueError:
        kept = len(self._network.convs) + 1
        limit = f"an open stream of this decoder keeps {kept} {KINDS} and a tensor of features for each"
        return refuse("decoder state", sorted(state), limit, "load the state of the same decoder")
