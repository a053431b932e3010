"""Wan 2.1's video decoder for one GPU: the weights of the readable model, whole blocks at a time.

Three things differ from `recap.backbones.wan.vae`, none of them in what is computed. All frames of a block pass
a layer together, since a causal convolution needs nothing of them but their order and the two inputs before
them. Features lie channels last, as tensor cores read them. And what a stream remembers has a fixed place in
memory, so that the kernels of a block can be recorded once and replayed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from recap.backbones.wan.vae import FEATURES, FIELD, KINDS, MARK, NOTHING, WanVae
from recap.contracts import Decoder, State
from recap.errors import refuse
from recap.fast.graphs import Graphed
from recap.fast.vae_layers import PAST, CausalConv, Enlarge, Middle, Parts, Stage, behind

WIDTHS = (4, 4, 4, 2, 1)  # of the middle and of the stages up to the pictures, in multiples of the last
DOUBLED = (True, True, False)  # whether time is doubled behind a stage, as space always is
COLOURS = 3
ROOM = 8  # channels of the last convolution: tensor cores write no fewer
SHOWN = 4  # of the wrong tensors


class FastDecoder(nn.Module):
    """The network, under diffusers' names for its tensors; weights are to be given."""

    def __init__(self, width: int, channels: int, parts: Parts | None = None) -> None:
        super().__init__()
        parts = parts or Parts()
        wide = [width * multiple for multiple in WIDTHS]
        # What enlarges a stage's pictures also halves their channels.
        entering = [wide[0], *(before // 2 for before in wide[1:-1])]
        self.post_quant_conv = nn.Linear(channels, channels)
        self.conv_in = parts.conv(channels, wide[0])
        self.mid_block = Middle(wide[0], parts)
        self.up_blocks = nn.ModuleList(
            Stage(*sizes, parts) for sizes in zip(entering, wide[1:], (*DOUBLED, None), strict=True)
        )
        self.norm_out = parts.activation(width)
        self.conv_out = parts.conv(width, ROOM)
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
        x = self.conv_in(behind(pasts[0], x)) + self.conv_in.bias
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

    def arrange(self, dtype: torch.dtype) -> None:
        """Once the weights are final: the precision and the layouts that `forward` works in."""
        self.requires_grad_(False)
        for name, child in self.named_children():
            # The first is next to nothing, and latents need not be rounded before it.
            child.to(torch.float32 if name == "post_quant_conv" else dtype)
        for module in self.modules():
            if isinstance(module, CausalConv | Enlarge):
                module.arrange()

    def pasts(self, batch: int, rows: int, columns: int) -> list[Tensor]:
        """Room for what the convolutions keep of a video of such latents; zeros are its beginning."""
        like = self.conv_in.bias
        return [
            like.new_zeros(batch, PAST, rows * conv.scale, columns * conv.scale, conv.channels)
            for conv in self.convs
        ]

    def kinds(self, frames: int) -> list[int]:
        """Of what each convolution keeps, as `VaeStream` tells them apart, after one frame or more.

        Those that double time have nothing to keep of the first frame. And diffusers counts one more, which
        keeps nothing at all.
        """
        kept = [MARK if frames == 1 and conv.side == 1 else FEATURES for conv in self.convs]
        return [*kept, NOTHING]


class FastVae:
    """The network, and the step that all blocks of a video but the first go through."""

    def __init__(self, network: FastDecoder, dtype: torch.dtype) -> None:
        network.arrange(dtype)
        self.network = network
        self.step: Callable[[Tensor, list[Tensor], bool], Tensor] = network
        self.channels = network.post_quant_conv.in_features
        self.device = network.conv_in.bias.device

    @classmethod
    def of(cls, vae: WanVae, parts: Parts | None = None) -> FastVae:
        """The decoder of a finished autoencoder, on its device and in its precision."""
        found = vae.model.state_dict()
        network = FastDecoder(found["decoder.conv_out.weight"].shape[1], vae.channels, parts)
        network.requires_grad_(False).to(vae.device).fill(found)
        first, config = network.post_quant_conv, vae.model.config
        # The statistics of the latents are a linear layer before a linear layer.
        first.bias.add_(first.weight @ first.bias.new_tensor(config.latents_mean))
        first.weight.mul_(first.weight.new_tensor(config.latents_std))
        return cls(network, vae.dtype)

    def open_decoder(self) -> Decoder:
        """A fresh decoding stream; any number may be open, though at full size each holds gigabytes."""
        return FastVaeStream(self)


class FastVaeStream:
    """Latents to pixels, block by block, with the states of `VaeStream`.

    The pasts move on while a block is decoded, so after an error within it a state must be loaded.
    """

    def __init__(self, vae: FastVae) -> None:
        self._vae = vae
        self._pasts: list[Tensor] = []
        self._frames = 0  # so far, counted to 2: the first is not like the others, and the second is
        self._steady = Graphed(self._continue)

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """B F C rows columns, normalised -> B T 3 Y X, fp32 in 0..1; the first frame is one picture."""
        self._check(latents)
        latents = latents.to(self._vae.device, torch.float32)
        if not self._pasts:
            self._pasts = self._vae.network.pasts(latents.shape[0], *latents.shape[-2:])
        if self._frames == 0:
            pixels: Tensor = self._vae.network(latents, self._pasts, first=True)
        else:
            pixels = self._steady(latents).clone()  # what is handed out must outlive the next block
        self._frames = min(2, self._frames + latents.shape[1])
        return pixels

    def _continue(self, latents: Tensor) -> Tensor:
        return self._vae.step(latents, self._pasts, False)

    def state(self) -> State:
        if self._frames == 0:
            return {}
        kinds = self._vae.network.kinds(self._frames)
        state = {KINDS: torch.tensor(kinds, dtype=torch.uint8)}
        for place, past in enumerate(self._pasts):
            if kinds[place] == FEATURES:
                state[str(place)] = past.permute(0, 4, 1, 2, 3).clone(memory_format=torch.contiguous_format)
        return state

    def load_state(self, state: State) -> None:
        if not state:
            self._pasts, self._frames, self._steady = [], 0, Graphed(self._continue)
            return
        kinds = state[KINDS].tolist() if KINDS in state else []
        frames = 1 if MARK in kinds else 2
        named = {str(place) for place, kind in enumerate(kinds) if kind == FEATURES}
        if kinds != self._vae.network.kinds(frames) or {KINDS, *named} != set(state):
            raise self._foreign(state)
        batch, _, _, rows, columns = state["0"].shape
        pasts = self._vae.network.pasts(batch, rows, columns)
        for place in sorted(named):
            kept = state[place].permute(0, 2, 3, 4, 1)
            # `VaeStream` keeps no more than there was: one frame, after the first.
            past = pasts[int(place)][:, -kept.shape[1] :]
            if kept.shape != past.shape:
                raise self._foreign(state)
            past.copy_(kept)
        self._pasts, self._frames, self._steady = pasts, frames, Graphed(self._continue)

    def _foreign(self, state: State) -> ValueError:
        kept = len(self._vae.network.convs) + 1
        limit = f"an open stream of this decoder keeps {kept} {KINDS} and a tensor of features for each"
        return refuse("decoder state", sorted(state), limit, "load the state of the same decoder")

    def _check(self, latents: Tensor) -> None:
        if latents.dim() != 5 or latents.shape[2] != self._vae.channels or latents.shape[1] == 0:
            limit = f"this decoder reads frames of {self._vae.channels} channels"
            raise refuse("latents.shape", tuple(latents.shape), limit, "pass B F C rows columns, F > 0")
        if self._pasts:
            batch, _, *sides = self._pasts[0].shape[:4]
            if (latents.shape[0], *latents.shape[-2:]) != (batch, *sides):
                limit = f"this stream began with {batch} rows of frames of {sides[0]} x {sides[1]}"
                raise refuse(
                    "latents.shape", tuple(latents.shape), limit, "open a decoder per batch and size"
                )
