"""Low-rank changes to a Wan transformer, merged into its weights: W' = W + (alpha / rank) B A, in fp32."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from recap.backbones.wan.names import clean
from recap.backbones.wan.storage import FIELD, FLOATS, Stored, files_of, listing, open_file
from recap.errors import refuse

TARGETS = (
    *(f"{kind}_attn.{name}" for kind in ("self", "cross") for name in "qkvo"),
    "ffn.0",
    "ffn.2",
)
"""Every linear layer of a block; a file that changes fewer is another kind of LoRA."""

# peft writes `lora_A.weight` to files and `lora_A.<adapter>.weight` in a state dict of the live model.
_HALF = re.compile(r"(?P<module>.+)\.lora_(?P<half>[AB])(?:\.(?P<adapter>[^.]+))?\.weight")

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Lora:
    """The two factors of each changed weight, not read yet."""

    files: tuple[Path, ...]
    factors: Mapping[str, tuple[Stored, Stored]]  # weight -> A (rank x in), B (out x rank)
    alpha: float | None  # None: the rank, so that the scale is one

    @property
    def ranks(self) -> list[int]:
        return sorted({down.shape[0] for down, _ in self.factors.values()})

    def merge(self, name: str, weight: Tensor) -> Tensor:
        """The weight of that name with its change, in fp32; other tensors as they are."""
        if name not in self.factors:
            return weight
        down, up = (factor.read().to(torch.float32) for factor in self.factors[name])
        scale = 1.0 if self.alpha is None else self.alpha / down.shape[0]
        return torch.addmm(weight.to(torch.float32), up, down, alpha=scale)


def open_lora(path: Path, wanted: Mapping[str, Shape], alpha: float | None) -> Lora:
    """Open a LoRA that changes every linear layer of the blocks of a model with these tensors."""
    if alpha is not None and not 0 < alpha < float("inf"):
        raise refuse("lora alpha", alpha, "must be above 0", "leave it out where alpha is the rank")
    files = files_of(path)
    halves: dict[str, Stored] = {}
    unknown = []
    for file in files:
        for name, stored in open_file(file, _generator).items():
            half = _half(name)
            if half is None or half in halves:
                unknown.append(name)
            else:
                halves[half] = stored
    targets = [name for name in wanted if name.endswith(tuple(f".{t}.weight" for t in TARGETS))]
    expected = {_of(target, half) for target in targets for half in "AB"}
    unknown += [halves[half].name for half in halves if half not in expected]
    missing = sorted(expected - halves.keys())
    faults = [listing(kind, names) for kind, names in (("missing", missing), ("unknown", unknown)) if names]
    factors = {
        target: (halves[_of(target, "A")], halves[_of(target, "B")])
        for target in targets
        if not {_of(target, "A"), _of(target, "B")} & set(missing)
    }
    misfits = [fault for target, pair in factors.items() for fault in _misfits(wanted[target], *pair)]
    if misfits:
        faults.append(listing("misshapen or not floats", misfits))
    if faults:
        limit = f"does not change the {len(targets)} linear layers of this model: {'; '.join(faults)}"
        raise refuse("lora", str(path), limit, "name the LoRA that belongs to this checkpoint")
    return Lora(tuple(files), factors, alpha)


def _generator(found: Mapping[str, Any], file: Path) -> Mapping[str, Any]:
    """A trainer's file holds the critic's LoRA beside that of the generator."""
    if "generator_lora" not in found:
        return found
    chosen = found["generator_lora"]
    if not isinstance(chosen, Mapping):
        raise refuse(FIELD, str(file), "its generator_lora is no state dict", "name a file of LoRA weights")
    return chosen


def _half(name: str) -> str | None:
    """Whose half a tensor is, under our names, or nothing."""
    bare = clean(clean(name).removeprefix("base_model.model."))
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
