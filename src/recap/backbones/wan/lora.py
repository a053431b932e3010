"""This module merges low-rank changes into a Wan transformer: W' = W + strength (alpha / rank) B A, in fp32.

A file may have the names of the original model, of diffusers, of ComfyUI or of kohya's and musubi's tools.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from recap.backbones.wan.lora_alpha import FIELD, MOST_ALPHA, REMEDY, Alphas, find_alphas, number_in
from recap.backbones.wan.names import ALPHA, DOWN, UP, is_unread_change, lora_layers, split_lora
from recap.errors import refuse
from recap.io.files import from_home
from recap.io.weights import REMEDY as MODEL_REMEDY
from recap.io.weights import Stored, files_of, listing, open_tensors

TARGETS = tuple(
    f".{module}.weight"
    for module in (
        *(f"{kind}_attn.{name}" for kind in ("self", "cross") for name in "qkvo"),
        "ffn.0",
        "ffn.2",
    )
)
"""Every linear layer of a block; the LoRA that belongs to a model changes them all."""


FLOAT8 = ("float8_e4m3fn", "float8_e5m2")
"""Some tools store factors so, to save space; they are changes as they are, without scales."""
MOST_STRENGTH = 1e6
"""Far above any use, of either sign; beyond it, weights in fp32 could overflow."""


@dataclass(frozen=True, slots=True)
class LoraChoice:
    """Names a LoRA and says how strongly it is applied; `alpha` is for files that do not contain their own."""

    path: Path
    strength: float = 1.0
    alpha: float | None = None
    # Whether it must change every linear layer of the blocks, as the one that belongs to a model does.
    whole: bool = False


@dataclass(frozen=True, slots=True)
class Lora:
    """Holds the two factors of each changed weight, not read yet."""

    choice: LoraChoice
    files: tuple[Path, ...]
    # How its tensors are named.
    layout: str
    # Weight -> A (rank x in), B (out x rank).
    factors: Mapping[str, tuple[Stored, Stored]]
    alphas: Alphas

    def describe(self) -> dict[str, Any]:
        """Return what was found for a manifest; alpha is a list where layers differ."""
        alphas = sorted(set(self.alphas.values()))
        return {
            "names": self.layout,
            "layers": len(self.factors),
            "ranks": sorted({down.shape[0] for down, _ in self.factors.values()}),
            "alpha": alphas[0] if len(alphas) == 1 else alphas,
            "strength": self.choice.strength,
        }

    def __str__(self) -> str:
        about = self.describe()
        ranks = ", ".join(map(str, about["ranks"]))
        return (
            f"lora: {self.choice.path.name} ({self.layout} names) changes {about['layers']} layers, "
            f"rank {ranks}, alpha {about['alpha']}, strength {self.choice.strength:g}"
        )

    def merge(self, name: str, weight: Tensor) -> Tensor:
        """Return the weight of that name with its change, in fp32; other tensors are returned as they are."""
        if name not in self.factors:
            return weight
        down, up = (_read_finite(factor) for factor in self.factors[name])
        scale = self.choice.strength * self.alphas[name] / down.shape[0]
        return torch.addmm(weight.to(torch.float32), up, down, alpha=scale)


def _read_finite(factor: Stored) -> Tensor:
    """Return a factor in fp32; refuses one that would spoil the whole model in silence."""
    found = factor.read().to(torch.float32)
    if not found.isfinite().all():
        limit = f"its {factor.name} has values that are NaN or infinite"
        raise refuse(FIELD, str(factor.file), limit, "fetch the file again, or leave it out")
    return found


def read_choice(text: str, field: str = "--lora") -> LoraChoice:
    """Read FILE, FILE:strength, FILE:alpha=NUMBER or FILE:strength:alpha=NUMBER."""
    path, strength, alpha = text, 1.0, None
    head, colon, tail = path.rpartition(":")
    if colon and tail.startswith("alpha="):
        path, alpha = head, number_in(tail.removeprefix("alpha="))
        if alpha is None or not 0 < alpha <= MOST_ALPHA:
            limit = f"alpha must be a number above 0 and at most {MOST_ALPHA:,.0f}"
            raise refuse(field, text, limit, "write FILE:alpha=16")
    head, colon, tail = path.rpartition(":")
    number = number_in(tail)
    if colon and number is not None:
        path, strength = head, number
    if any(character < " " for character in path):
        # What JSON makes of C:\new.safetensors.
        limit = "a backslash in it was read as part of another character"
        raise refuse(field, text, limit, "write the path with / instead")
    if not path or not 0 < abs(strength) <= MOST_STRENGTH:
        limit = f"must be FILE or FILE:strength, the strength not 0 and at most {MOST_STRENGTH:,.0f}"
        raise refuse(field, text, limit, "for example style.safetensors:0.8")
    return LoraChoice(from_home(path), strength, alpha)


def spell_choice(choice: LoraChoice) -> str:
    """Return the text that `read_choice` reads, with the whole path, which means the same in any folder."""
    alpha = "" if choice.alpha is None else f":alpha={choice.alpha}"
    return f"{choice.path.absolute()}:{choice.strength}{alpha}"


def open_lora(choice: LoraChoice, wanted: Mapping[str, torch.Size]) -> Lora:
    """Open a LoRA for a model with these tensors; refuses one that does not fit, layer by layer.

    An alpha of the choice that contradicts the file is refused too.
    """
    path, remedy = choice.path, MODEL_REMEDY if choice.whole else REMEDY
    files = files_of(path, FIELD, remedy)
    weights = [name for name in wanted if name.endswith(TARGETS if choice.whole else ".weight")]
    weights = [name for name in weights if len(wanted[name]) == 2]
    layers = lora_layers(weights)

    def ours(name: str) -> str:
        layer, kind = split_lora(name)
        return _of(layers[layer][0], kind) if kind and layer in layers else name

    parts = open_tensors(path, FIELD, remedy, choose=_generator, clean=ours)
    layouts = {layers[layer][1] for p in parts.values() if (layer := split_lora(p.name)[0]) in layers}
    if not layouts:
        example = next(name for name in weights if name.endswith(TARGETS))
        raise _foreign(path, parts, lora_layers([example]))
    changed = weights
    if not choice.whole:
        changed = [name for name in weights if any(_of(name, kind) in parts for kind in (DOWN, UP, ALPHA))]
    # Alphas for every layer or for none: what a single one means for the other layers is not known.
    kinds = (DOWN, UP, ALPHA) if any(name.endswith(f".{ALPHA}") for name in parts) else (DOWN, UP)
    expected = {_of(weight, kind) for weight in changed for kind in kinds}
    unknown = [part.name for name, part in parts.items() if name not in expected]
    unread = [name for name in unknown if is_unread_change(name)]
    faults = {
        "missing": sorted(expected - parts.keys()),
        "unknown": [name for name in unknown if name not in unread],
        "misshapen or not floats": [f for weight in changed for f in _misfits(wanted[weight], weight, parts)],
    }
    if unread and not any(faults.values()):
        limit = f"changes of biases, norms and DoRA are not read, and it has {listing('of them', unread)}"
        raise refuse(FIELD, str(path), limit, "name a LoRA without them")
    if any(faults.values()):
        faults["not read, as changes of biases, norms and DoRA are not"] = unread
        described = "; ".join(listing(kind, names) for kind, names in faults.items() if names)
        what = f"change the {len(weights)}" if choice.whole else f"fit the {len(weights)}"
        names = ", ".join(sorted(layouts))
        limit = f"does not {what} linear layers of this model ({names} names): {described}"
        raise refuse(FIELD, str(path), limit, "name a LoRA that was made for this model")
    factors = {weight: (parts[_of(weight, DOWN)], parts[_of(weight, UP)]) for weight in changed}
    stored_alphas = {
        weight: float(parts[_of(weight, ALPHA)].read().item()) for weight in changed if ALPHA in kinds
    }
    ranks = {weight: down.shape[0] for weight, (down, _) in factors.items()}
    alphas = find_alphas(path, files, ranks, stored_alphas, choice.alpha)
    return Lora(choice, tuple(files), " and ".join(sorted(layouts)), factors, alphas)


def _foreign(path: Path, parts: Mapping[str, Stored], example: Mapping[str, tuple[str, str]]) -> ValueError:
    """Make the error of a file that has no tensor of a name we know: it names what was expected."""
    found = listing("tensors", [part.name for part in parts.values()])
    known = ", ".join(f"{layer}.{DOWN} ({layout})" for layer, (_, layout) in example.items())
    limit = f"it has no change to a linear layer of this model, but {found}"
    return refuse(FIELD, str(path), limit, f"names are expected such as {known}")


def _generator(found: Mapping[str, Any], file: Path) -> Mapping[str, Any]:
    """Return the generator's LoRA of a trainer's file, which has the critic's next to it."""
    chosen = found.get("generator_lora", found)
    if not isinstance(chosen, Mapping):
        raise refuse(FIELD, str(file), "its generator_lora is no state dict", "name a file of LoRA weights")
    return chosen


def _of(weight: str, kind: str) -> str:
    return f"{weight.removesuffix('weight')}{kind}"


def _misfits(weight: torch.Size, name: str, parts: Mapping[str, Stored]) -> Iterator[str]:
    """Yield what is wrong with the parts of one weight, as far as they are there."""
    alpha = parts.get(_of(name, ALPHA))
    if alpha is not None and math.prod(alpha.shape) != 1:
        yield f"{alpha.name} {list(alpha.shape)}"
    down, up = parts.get(_of(name, DOWN)), parts.get(_of(name, UP))
    if down is None or up is None:
        return
    yield from (
        f"{part.name} {part.dtype}" for part in (down, up) if not part.is_float and part.dtype not in FLOAT8
    )
    rank = down.shape[0] if down.shape else 0
    if not (rank > 0 and down.shape[1:] == weight[1:] and up.shape == (weight[0], rank)):
        yield f"{down.name} and {up.name} {list(down.shape)} and {list(up.shape)} for {list(weight)}"
