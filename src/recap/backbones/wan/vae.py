"""This module runs Wan 2.1's own video autoencoder, diffusers' `AutoencoderKLWan`, unchanged, as a stream.

The network reads one latent frame (or one step of four pictures) at a time and stores what its causal
convolutions must remember in a list that the caller owns. Every stream here owns one, so any number of
videos can use one model. An entry of that list is a tensor of past features, or None before the first frame, or,
in the two layers that double time, a mark that the first frame has passed, which they do not double.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from recap.backbones.wan.decoder import check_clip, check_latents, check_stream, size_of
from recap.contracts import Decoder, Entry, State
from recap.errors import refuse
from recap.io.extras import import_extra
from recap.io.files import from_home
from recap.io.weights import Stored, fill, open_tensors, rename, without_storage
from recap.types import state_copy

FIELD = "Wan VAE"
# Pixels along the side of one latent.
CELL = 8
# Pictures of every latent frame except the first, which is one picture.
STEP = 4

PASSED = "Rep"
"""diffusers writes this mark, instead of features, for a time-doubling layer that has seen the first frame."""

KINDS = "kinds"
NOTHING, MARK, FEATURES = range(3)

Feature = Tensor | str | None

TO_PUBLISHED = (
    (r"^quant_conv\.", "conv1."),
    (r"^post_quant_conv\.", "conv2."),
    (r"\.norm1\.", ".residual.0."),
    (r"\.conv1\.", ".residual.2."),
    (r"\.norm2\.", ".residual.3."),
    (r"\.conv2\.", ".residual.6."),
    (r"\.conv_shortcut\.", ".shortcut."),
    (r"\.conv_in\.", ".conv1."),
    (r"\.norm_out\.", ".head.0."),
    (r"\.conv_out\.", ".head.2."),
    (r"\.mid_block\.resnets\.0\.", ".middle.0."),
    (r"\.mid_block\.attentions\.0\.", ".middle.1."),
    (r"\.mid_block\.resnets\.1\.", ".middle.2."),
    (r"\.down_blocks\.", ".downsamples."),
)
"""Maps diffusers' names to those of `Wan2.1_VAE.pth`, in this order; up blocks also need arithmetic."""

UP_BLOCK = re.compile(r"\.up_blocks\.(\d+)\.(resnets|upsamplers)\.(\d+)\.")


def published_name(name: str) -> str:
    """Return the name in `Wan2.1_VAE.pth` of a tensor of diffusers' model."""

    def flat(found: re.Match[str]) -> str:
        block, kind, index = int(found[1]), found[2], int(found[3])
        # The published file numbers all layers in one list: three residual layers and an upsampler per block.
        return f".upsamples.{4 * block + (3 if kind == 'upsamplers' else index)}."

    return rename(UP_BLOCK.sub(flat, name), TO_PUBLISHED)


def load_wan_vae(
    path: Path, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> WanVae:
    """Load the autoencoder from `Wan2.1_VAE.pth` (or the same names in safetensors), or from a diffusers folder.

    The folder is either `vae/` itself or the model folder that contains it.
    """
    path = from_home(path)
    if path.is_dir():
        path = path / "vae" if (path / "vae").is_dir() else path
    found = open_tensors(path, FIELD)
    network = import_extra("diffusers").AutoencoderKLWan
    with without_storage():
        if path.is_dir():
            model = network.from_config(_checked_config(network, path))
        else:
            model = network(base_dim=_width(found))
    names = {name: name if path.is_dir() else published_name(name) for name in model.state_dict()}
    fill(model, found, path=path, field=FIELD, dtype=dtype, names=names)
    return WanVae(model.to(device))


def load_config(network: Any, folder: Path, field: str) -> dict[str, Any]:
    """Return the config of a model in diffusers' layout."""
    try:
        config: dict[str, Any] = network.load_config(folder)
    except (OSError, ValueError) as problem:
        limit = f"config.json cannot be read ({str(problem).partition(chr(10))[0]})"
        raise refuse(field, str(folder), limit, "pass a complete diffusers folder") from problem
    return config


def _checked_config(network: Any, folder: Path) -> dict[str, Any]:
    config = load_config(network, folder, FIELD)
    # Wan 2.2's files have the same class and another geometry.
    if config.get("is_residual") or config.get("patch_size") or config.get("z_dim", 16) != 16:
        limit = "this is not the autoencoder of Wan 2.1, whose latents have 16 channels"
        raise refuse(FIELD, str(folder), limit, "pass the vae of a Wan 2.1 model")
    return config


def _width(found: dict[str, Stored]) -> int:
    """Return the channels of the first layer, on which all others depend; the published file has 96."""
    first = found.get("encoder.conv1.weight")
    return 96 if first is None else first.shape[0]


class WanVae:
    """Holds the model, and the statistics that make its latents zero-mean and unit-variance."""

    def __init__(self, model: Any) -> None:
        self.model = model.eval().requires_grad_(False)
        self.channels = int(model.config.z_dim)
        weight = next(model.parameters())
        self.device, self.dtype = weight.device, weight.dtype
        # In fp32 whatever the model runs in, so that latents are not rounded twice.
        self._mean = torch.tensor(model.config.latents_mean, device=self.device).view(-1, 1, 1, 1)
        self._std = torch.tensor(model.config.latents_std, device=self.device).view(-1, 1, 1, 1)

    def to(self, device: torch.device | str) -> None:
        """Move the model to another device, before any stream is open."""
        self.model.to(device)
        self.device = torch.device(device)
        self._mean, self._std = self._mean.to(device), self._std.to(device)

    def open_decoder(self) -> Decoder:
        """Open a new decoding stream; any number of them may be open."""
        return VaeStream(self)

    @torch.no_grad()
    def encode(self, pixels: Tensor) -> Tensor:
        """Encode B T 3 Y X in 0..1, T = 1 + 4 n, to normalised latents B 1+n C Y/8 X/8, fp32: the mean, no sample."""
        check_clip(pixels, CELL, STEP)
        cache = empty_cache(self.model.encoder)
        latents = []
        for step in pixels.split([1, *[STEP] * (pixels.shape[1] // STEP)], dim=1):
            scaled = step.to(self.device, self.dtype).transpose(1, 2) * 2 - 1
            moments = self.model.quant_conv(self.model.encoder(scaled, feat_cache=cache, feat_idx=[0]))
            latents.append(moments[:, : self.channels].to(torch.float32))
        return ((torch.cat(latents, dim=2) - self._mean) / self._std).transpose(1, 2)

    def decode_frame(self, frame: Tensor, cache: list[Feature]) -> Tensor:
        """Decode normalised latents B C rows columns to B 3 P Y X in -1..1, and update the cache."""
        raw = frame.to(self.device, torch.float32).unsqueeze(2) * self._std + self._mean
        features = self.model.post_quant_conv(raw.to(self.dtype))
        pictures: Tensor = self.model.decoder(
            features, feat_cache=cache, feat_idx=[0], first_chunk=cache[0] is None
        )
        return pictures


class VaeStream:
    """Decodes latents frame by frame, so every kernel sees the same shapes however the stream is cut."""

    def __init__(self, vae: WanVae) -> None:
        self._vae = vae
        self._cache = empty_cache(vae.model.decoder)

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """Decode B F C rows columns, normalised, to B T 3 Y X, fp32 in 0..1; the first frame is one picture."""
        # The first convolution keeps frames in their own shape.
        known = self._cache[0]
        begun = (known.shape[0], known.shape[3], known.shape[4]) if isinstance(known, Tensor) else None
        check_latents(latents, self._vae.channels, begun)
        # The network replaces entries and changes none in place, so an error leaves the stream as it was.
        cache = list(self._cache)
        pictures = [self._vae.decode_frame(frame, cache) for frame in latents.unbind(1)]
        self._cache = cache
        return torch.cat(pictures, dim=2).transpose(1, 2).to(torch.float32).clamp(-1, 1) * 0.5 + 0.5

    def state(self) -> State:
        if self._cache[0] is None:
            return {}
        state = {KINDS: torch.tensor([_kind(entry) for entry in self._cache], dtype=torch.uint8)}
        for index, entry in enumerate(self._cache):
            if isinstance(entry, Tensor):
                state[str(index)] = state_copy(entry)
        return state

    def _expected(self, state: State) -> dict[str, Entry]:
        """Return what the state of an open stream must consist of; shortcuts keep nothing."""
        named = [
            (name, module)
            for name, module in self._vae.model.decoder.named_modules()
            if isinstance(module, nn.Conv3d) and "shortcut" not in name
        ]
        # Those that double time keep only a mark of the first frame.
        doubling = [str(index) for index, (name, _) in enumerate(named) if "time_conv" in name]
        marked = set() if state.keys() & set(doubling) else set(doubling)
        kinds = [MARK if str(index) in marked else FEATURES for index in range(len(named))]
        kinds += [NOTHING] * (len(self._cache) - len(named))
        expected = {KINDS: Entry((len(kinds),), torch.uint8, kinds, kinds)}
        (rows, columns), scale = size_of(state, "0"), 1
        for index, (name, module) in enumerate(named):
            if found := re.search(r"up_blocks\.(\d+)\.", name):
                scale = 2 ** int(found[1])
            if str(index) not in marked:
                shape = ("B", module.in_channels, range(1, 3), scale * rows, scale * columns)
                expected[str(index)] = Entry(shape, "floats")
        return expected

    def load_state(self, state: State) -> None:
        fresh = empty_cache(self._vae.model.decoder)
        if state:
            check_stream(state, self._expected(state))
            for index, kind in enumerate(state[KINDS].tolist()):
                if kind == FEATURES:
                    fresh[index] = state[str(index)].to(self._vae.device, self._vae.dtype, copy=True)
                elif kind == MARK:
                    fresh[index] = PASSED
        self._cache = fresh


def empty_cache(half: nn.Module) -> list[Feature]:
    """Return an empty entry for each causal convolution of an encoder or decoder; some stay empty."""
    return [None] * sum(isinstance(module, nn.Conv3d) for module in half.modules())


def _kind(entry: Feature) -> int:
    if isinstance(entry, Tensor):
        return FEATURES
    return NOTHING if entry is None else MARK
