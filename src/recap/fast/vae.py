"""Wan 2.1's video decoder for one GPU: the weights of the readable model, whole blocks at a time.

It computes the same as `recap.backbones.wan.vae` in a different way. All frames of a block pass through a layer
together, because a causal convolution needs only their order and the two inputs before them. Features are stored
channels last, as tensor cores read them. What a stream remembers has fixed addresses, so the kernels of a block can
be recorded once and replayed. Pictures are enlarged without writing the repeated pixels. On a GPU with enough
shared memory, in half precision, Triton kernels replace cuDNN's convolutions and everything between two of them.
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
    Arranged,
    CausalConv,
    DecoderStage,
    Middle,
    append_to_past,
    can_fuse,
)

# Widths of the middle and of the stages up to the pictures, in multiples of the last.
WIDTHS = (4, 4, 4, 2, 1)
# Whether time is doubled after a stage; space always is.
DOUBLED = (True, True, False)
COLOURS = 3
# Channels of the last convolution, because tensor cores write no fewer.
LEAST_CHANNELS = 16
# Number of wrong tensors that a message names.
SHOWN = 4


class FastVae(nn.Module):
    """The decoder, with diffusers' names for its tensors: `fill` sets its weights, then `arrange` prepares it."""

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
    def of(cls, readable: WanVae, *, fused: bool | None = None) -> FastVae:
        """Copy the decoder of a readable autoencoder, on its device and in its precision."""
        found = readable.model.state_dict()
        vae = cls(found["decoder.conv_out.weight"].shape[1], readable.channels)
        vae.requires_grad_(False).to(readable.device).fill(found)
        first, config = vae.post_quant_conv, readable.model.config
        # Scaling latents by their statistics is linear, so it can be merged into the first linear layer.
        first.bias.add_(first.weight @ first.bias.new_tensor(config.latents_mean))
        first.weight.mul_(first.weight.new_tensor(config.latents_std))
        return vae.arrange(readable.dtype, fused)

    def open_decoder(self) -> Decoder:
        """Open a new decoding stream; any number may be open, but at full size each takes gigabytes."""
        return FastVaeStream(self)


class FastVaeStream(FastStream):
    """A decoding stream whose states are those of `VaeStream`."""

    def __init__(self, vae: FastVae) -> None:
        keeps = f"{len(vae.convs) + 1} {KINDS} and a tensor of features for each"
        super().__init__(vae.post_quant_conv.in_features, vae.conv_in.bias, keeps)
        self._vae = vae

    def _shapes(self, size: Size) -> list[tuple[int, ...]]:
        return self._vae.pasts(size)

    def _begin(self, latents: Tensor) -> Tensor:
        pixels: Tensor = self._vae(latents, self._kept, first=True)
        if latents.is_cuda:
            # The first block is shorter than the others, so they cannot reuse what it leaves in the allocator's
            # cache, which is gigabytes at full size.
            torch.cuda.empty_cache()
        return pixels

    def _later(self, kept: list[Tensor]) -> Callable[[Tensor], Tensor]:
        return partial(self._vae, pasts=kept, first=False)

    def _names(self, frames: int) -> dict[str, int]:
        kinds = self._vae.kinds(frames)
        return {str(index): index for index, kind in enumerate(kinds) if kind == FEATURES}

    def _marks(self, frames: int) -> State:
        return {KINDS: torch.tensor(self._vae.kinds(frames), dtype=torch.uint8)}
