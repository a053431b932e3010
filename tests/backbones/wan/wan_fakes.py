"""Stand-ins for what the rollout passes to a backbone."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from recap.backbones.wan.model import CausalWan
from recap.backbones.wan.spec import UNTRAINED, WanSpec
from recap.types import Segment, frame_positions

Keys = tuple[Tensor, Tensor, Tensor]  # keys, values, positions

ONE_LAYER = replace(UNTRAINED, name="one-layer", layers=1)


def turn(x: Tensor, positions: Tensor) -> Tensor:
    """RoPE of B N H D at 1 N 3, pair by pair, in complex fp64."""
    pairs = x.shape[-1] // 2
    side = pairs // 3
    angles = []
    for axis, width in enumerate((pairs - 2 * side, side, side)):
        frequency = 10000.0 ** (-2 * torch.arange(width, dtype=torch.float64) / (2 * width))
        angles.append(positions[..., axis, None].double() * frequency)
    phase = torch.polar(torch.tensor(1.0, dtype=torch.float64), torch.cat(angles, -1)).unsqueeze(2)
    spun = torch.view_as_complex(x.double().reshape(*x.shape[:-1], pairs, 2)) * phase
    return torch.view_as_real(spun).flatten(-2).to(x.dtype)


class FakeContext:
    """Plain attention over the block's own tokens and, where given, one remembered run of keys per layer."""

    def __init__(self, phases: Tensor, kept: dict[int, Keys] | None = None) -> None:
        self.phases = phases
        self.place: Tensor | None = None
        self.kept = kept or {}
        self.seen: list[tuple[int, Tensor, Segment]] = []

    def positions(self, grid: tuple[int, int], device: torch.device) -> Tensor:
        if self.place is None:
            self.place = frame_positions(self.phases, grid)
        return self.place

    def attend(self, layer: int, query: Tensor, own: list[Segment]) -> Tensor:
        (current,) = own
        self.seen.append((layer, query, current))
        keys, values = turn(current.keys, current.positions), current.values
        if layer in self.kept:
            old_keys, old_values, old_positions = self.kept[layer]
            keys = torch.cat((turn(old_keys, old_positions), keys), 1)
            values = torch.cat((old_values, values), 1)
        logits = torch.einsum("bnhd,bmhd->bhnm", turn(query, current.positions), keys)
        weights = (logits / math.sqrt(query.shape[-1])).softmax(-1)
        return torch.einsum("bhnm,bmhd->bnhd", weights, values)

    def last_pass(self, layers: int) -> dict[int, Keys]:
        """What each layer made in the latest forward."""
        return {layer: (own.keys, own.values, own.positions) for layer, _, own in self.seen[-layers:]}


def fresh(spec: WanSpec = UNTRAINED, first: int = 0) -> FakeContext:
    return FakeContext(torch.arange(first, first + spec.frames_per_block, dtype=torch.float32))


def noise_of(
    seed: int, rows: int = 1, dtype: torch.dtype = torch.float32, frames: int = UNTRAINED.frames_per_block
) -> Callable[[], Tensor]:
    """A stream of unit Gaussian blocks of the untrained row."""
    generator = torch.Generator().manual_seed(seed)
    shape = (rows, frames, UNTRAINED.in_channels, *UNTRAINED.latent_size)
    return lambda: torch.randn(shape, generator=generator, dtype=dtype)


def random_model(spec: WanSpec, seed: int = 0) -> CausalWan:
    """fp64, every parameter random, biases and norms too, so that no mistake hides behind a zero or a one."""
    generator = torch.Generator().manual_seed(seed)
    with torch.device("meta"):
        model = CausalWan(spec)
    model = model.to_empty(device="cpu").double().requires_grad_(False)
    for name, parameter in model.named_parameters():
        centre = 1.0 if "norm" in name and name.endswith("weight") else 0.0
        width = 0.3 if parameter.dim() == 1 else parameter[0].numel() ** -0.5
        parameter.copy_(
            centre + width * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        )
    return model
