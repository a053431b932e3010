"""Low-rank changes to a Wan transformer, merged into its weights: W' = W + (alpha / rank) B A, in fp32."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from recap.backbones.wan.lora_alpha import Alphas, find_alphas
from recap.backbones.wan.names import clean
from recap.errors import refuse
from recap.io.weights import FLOATS, Shape, Stored, files_of, listing, open_file

FIELD = "lora"

TARGETS = (
    *(f"{kind}_attn.{name}" for kind in ("self", "cross") for name in "qkvo"),
    "ffn.0",
    "ffn.2",
)
"""Every linear layer of a block; a file that changes fewer is another kind of LoRA."""

# peft writes `lora_A.weight` to files and `lora_A.<adapter>.weight` in a state dict of the live model.
_HALF = re.compile(r"(?P<module>.+)\.lora_(?P<half>[AB])(?:\.(?P<adapter>[^.]+))?\.weight")

_ALPHA = ".alpha"


@dataclass(frozen=True, slots=True)
class Lora:
    """The two factors of each changed weight, not read yet."""

    files: tuple[Path, ...]
    factors: Mapping[str, tuple[Stored, Stored]]  # weight -> A (rank x in), B (out x rank)
    alphas: Alphas

    @property
    def ranks(self) -> list[int]:
        return sorted({down.shape[0] for down, _ in self.factors.values()})

    @property
    def alpha(self) -> float | list[float]:
        """The one of all layers, or all there are."""
        different = sorted(set(self.alphas.values()))
        return different[0] if len(different) == 1 else different

    def merge(self, name: str, weight: Tensor) -> Tensor:
        """The weight of that name with its change, in fp32; other tensors as they are."""
        if name not in self.factors:
            return weight
        down, up = (factor.read().to(torch.float32) for factor in self.factors[name])
        return torch.addmm(weight.to(torch.float32), up, down, alpha=self.alphas[name] / down.shape[0])


def open_lora(path: Path, wanted: Mapping[str, Shape], alpha: float | None) -> Lora:
    """Open a LoRA that changes every linear layer of the blocks of a model with these tensors.

    `alpha` is for files that do not contain their own; one that contradicts the file is refused.
    """
    files = files_of(path, FIELD)
    parts: dict[str, Stored] = {}
    unknown = []
    for file in files:
        for name, stored in open_file(file, FIELD, choose=_generator).items():
            part = _part(name)
            if part is None or part in parts:
                unknown.append(name)
            else:
                parts[part] = stored
    scales = {name: parts.pop(name) for name in list(parts) if name.endswith(_ALPHA)}
    targets = [name for name in wanted if name.endswith(tuple(f".{t}.weight" for t in TARGETS))]
    expected = {_of(target, half) for target in targets for half in "AB"}
    unknown += [parts[half].name for half in parts if half not in expected]
    scaled = {f"{target.removesuffix('.weight')}{_ALPHA}": target for target in targets}
    unknown += [scales[name].name for name in scales if name not in scaled]
    missing = sorted(expected - parts.keys())
    # One for every layer or none: what a single one means for the other layers is not known.
    missing += sorted(scaled.keys() - scales.keys()) if scales else []
    faults = [listing(kind, names) for kind, names in (("missing", missing), ("unknown", unknown)) if names]
    factors = {
        target: (parts[_of(target, "A")], parts[_of(target, "B")])
        for target in targets
        if not {_of(target, "A"), _of(target, "B")} & set(missing)
    }
    misfits = [fault for target, pair in factors.items() for fault in _misfits(wanted[target], *pair)]
    misfits += [f"{part.name} {list(part.shape)}" for part in scales.values() if math.prod(part.shape) != 1]
    if misfits:
        faults.append(listing("misshapen or not floats", misfits))
    if faults:
        limit = f"does not change the {len(targets)} linear layers of this model: {'; '.join(faults)}"
        raise refuse(FIELD, str(path), limit, "name the LoRA that belongs to this checkpoint")
    written = {scaled[name]: float(stored.read().item()) for name, stored in scales.items()}
    ranks = {target: down.shape[0] for target, (down, _) in factors.items()}
    return Lora(tuple(files), factors, find_alphas(path, files, ranks, written, alpha))


def _generator(found: Mapping[str, Any], file: Path) -> Mapping[str, Any]:
    """A trainer's file has the critic's LoRA next to that of the generator."""
    if "generator_lora" not in found:
        return found
    chosen = found["generator_lora"]
    if not isinstance(chosen, Mapping):
        raise refuse(FIELD, str(file), "its generator_lora is no state dict", "name a file of LoRA weights")
    return chosen


def _part(name: str) -> str | None:
    """The name of the half or alpha that a tensor is, under our names; None for any other tensor."""
    bare = clean(clean(name).removeprefix("base_model.model."))
    if bare.endswith(_ALPHA):
        return bare
    found = _HALF.fullmatch(bare)
    return _of(f"{found['module']}.weight", found["half"]) if found else None


def _of(weight: str, half: str) -> str:
    return f"{weight.removesuffix('weight')}lora_{half}.weight"


def _misfits(weight: Shape, down: Stored, up: Stored) -> list[str]:
    faults = [f"{part.name} {part.dtype}" for part in (down, up) if part.dtype not in FLOATS]
    rank = down.shape[0] if down.shape else 0
    fits = rank > 0 and down.shape[1:] == weight[1:] and up.shape == (weight[0], rank)
    if not fits:
        shapes = f"{list(down.shape)} and {list(up.shape)} for {list(weight)}"
        faults.append(f"{down.name} and {up.name} {shapes}")
    return faults
