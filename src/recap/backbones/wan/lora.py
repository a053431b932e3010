"""This module merges low-rank changes into the weights of a Wan transformer: W' = W + (alpha / rank) B A, in fp32.

Alpha does not follow from the rank, and a guess would silently apply half or twice the change, so it is read from
wherever the trainer wrote it: the caller, `.alpha` tensors, the metadata of a safetensors file, peft's
`adapter_config.json` in the same folder, and for a published file its hash. All that are there must agree.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from recap.backbones.wan.names import clean
from recap.backbones.wan.published import published_lora_alpha
from recap.errors import refuse
from recap.io.weights import Stored, files_of, listing, open_tensors, read_json_object, read_metadata

FIELD = "lora"
TARGETS = tuple(
    f".{module}.weight"
    for module in (
        *(f"{kind}_attn.{name}" for kind in ("self", "cross") for name in "qkvo"),
        "ffn.0",
        "ffn.2",
    )
)
"""Every linear layer of a block must be changed; a file that changes fewer is another kind of LoRA."""
DOWN, UP, ALPHA = "lora_A.weight", "lora_B.weight", "alpha"

CALLER = "lora_alpha"
CONFIG = "adapter_config.json"
# Alphas saved in bfloat16 are this far off.
ROUNDING = 2.0**-8

_NUMBERS = ("lora_alpha", "ss_network_alpha")
"""The values of these keys of metadata are alpha itself; kohya's tools write the second."""
# diffusers puts peft's config there, as JSON.
_PEFT = "lora_adapter_metadata"
_OTHERWISE = ("use_rslora", "use_dora", "alpha_pattern")
"""Under these settings of peft alpha / rank is not the scale of every layer."""

Alphas = Mapping[str, float]
"""Maps each weight to the alpha of its change."""


@dataclass(frozen=True, slots=True)
class Lora:
    """Holds the two factors of each changed weight, not read yet."""

    files: tuple[Path, ...]
    # Weight -> A (rank x in), B (out x rank).
    factors: Mapping[str, tuple[Stored, Stored]]
    alphas: Alphas

    def describe(self) -> dict[str, Any]:
        """Return ranks and alpha for a manifest; alpha is a list where layers differ."""
        alphas = sorted(set(self.alphas.values()))
        ranks = sorted({down.shape[0] for down, _ in self.factors.values()})
        return {"ranks": ranks, "alpha": alphas[0] if len(alphas) == 1 else alphas}

    def merge(self, name: str, weight: Tensor) -> Tensor:
        """Return the weight of that name with its change, in fp32; other tensors are returned as they are."""
        if name not in self.factors:
            return weight
        down, up = (factor.read().to(torch.float32) for factor in self.factors[name])
        return torch.addmm(weight.to(torch.float32), up, down, alpha=self.alphas[name] / down.shape[0])


def open_lora(path: Path, wanted: Mapping[str, torch.Size], alpha: float | None) -> Lora:
    """Open a LoRA that changes every linear layer of the blocks of a model with these tensors.

    `alpha` is for files that do not contain their own; one that contradicts the file is refused.
    """
    files = files_of(path, FIELD)
    parts = open_tensors(path, FIELD, choose=_generator, clean=_part)
    weights = [name for name in wanted if name.endswith(TARGETS)]
    # Alphas for every layer or for none: what a single one means for the other layers is not known.
    kinds = (DOWN, UP, ALPHA) if any(name.endswith(f".{ALPHA}") for name in parts) else (DOWN, UP)
    expected = {_of(weight, kind) for weight in weights for kind in kinds}
    unknown = [part.name for name, part in parts.items() if name not in expected]
    missing = sorted(expected - parts.keys())
    misfits = [fault for weight in weights for fault in _misfits(wanted[weight], weight, parts)]
    faults = {"missing": missing, "unknown": unknown, "misshapen or not floats": misfits}
    if any(faults.values()):
        described = "; ".join(listing(kind, names) for kind, names in faults.items() if names)
        limit = f"does not change the {len(weights)} linear layers of this model: {described}"
        raise refuse(FIELD, str(path), limit, "name the LoRA that belongs to this checkpoint")
    factors = {weight: (parts[_of(weight, DOWN)], parts[_of(weight, UP)]) for weight in weights}
    stored_alphas = {
        weight: float(parts[_of(weight, ALPHA)].read().item()) for weight in weights if ALPHA in kinds
    }
    return Lora(tuple(files), factors, _find_alphas(path, files, factors, stored_alphas, alpha))


def _generator(found: Mapping[str, Any], file: Path) -> Mapping[str, Any]:
    """Return the generator's LoRA of a trainer's file, which has the critic's next to it."""
    chosen = found.get("generator_lora", found)
    if not isinstance(chosen, Mapping):
        raise refuse(FIELD, str(file), "its generator_lora is no state dict", "name a file of LoRA weights")
    return chosen


def _part(name: str) -> str:
    """Return our name of a tensor: for the halves of a change it leaves out which adapter they belong to."""
    bare = clean(clean(name).removeprefix("base_model.model."))
    # peft writes `lora_A.weight` to files and `lora_A.<adapter>.weight` in a state dict of the live model.
    return re.sub(r"\.(lora_[AB])\.[^.]+\.weight$", r".\1.weight", bare)


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
    yield from (f"{part.name} {part.dtype}" for part in (down, up) if not part.is_float)
    rank = down.shape[0] if down.shape else 0
    if not (rank > 0 and down.shape[1:] == weight[1:] and up.shape == (weight[0], rank)):
        yield f"{down.name} and {up.name} {list(down.shape)} and {list(up.shape)} for {list(weight)}"


def _find_alphas(
    path: Path,
    files: Sequence[Path],
    factors: Mapping[str, tuple[Stored, Stored]],
    tensors: Alphas,
    asked: float | None,
) -> Alphas:
    """Return the alpha of every weight; refuses if no source has it, or if two sources differ."""
    sources: list[tuple[str, Alphas]] = []
    if asked is not None:
        sources.append((CALLER, dict.fromkeys(factors, _checked(asked, CALLER))))
    if tensors:
        sources.append(
            ("its .alpha tensors", {name: _checked(value, name) for name, value in tensors.items()})
        )
    sources += [(source, dict.fromkeys(factors, alpha)) for source, alpha in _written(files)]
    if not sources:
        published = [alpha for file in files if (alpha := published_lora_alpha(file)) is not None]
        sources = [("its publisher", dict.fromkeys(factors, alpha)) for alpha in published]
    if not sources:
        ranks = sorted({down.shape[0] for down, _ in factors.values()})
        limit = f"its alpha is not known: neither the file nor an {CONFIG} next to it contains it"
        remedy = (
            "name it by --lora-alpha (recap convert), backbone.lora_alpha (a run) or lora_alpha= (Python); "
            f"it is often the rank, which is {', '.join(map(str, ranks))} here"
        )
        raise refuse(FIELD, str(path), limit, remedy)
    source, alphas = sources[0]
    for other, others in sources[1:]:
        for name in factors:
            if not math.isclose(alphas[name], others[name], rel_tol=ROUNDING):
                limit = f"{source} says {alphas[name]:g}, {other} says {others[name]:g} (for {name})"
                remedy = f"leave {CALLER} out" if source == CALLER else "correct one of them"
                raise refuse(FIELD, str(path), limit, remedy)
    return alphas


def _written(files: Sequence[Path]) -> Iterator[tuple[str, float]]:
    """Yield what the files' metadata and the files next to them contain: (where, alpha)."""
    for file in files:
        metadata = read_metadata(file, FIELD) if file.suffix == ".safetensors" else {}
        for key in _NUMBERS:
            number = _number(metadata.get(key, ""))
            if number is not None:
                yield f"{key} of {file.name}", _checked(number, key)
        if _PEFT in metadata:
            yield from _of_peft(_parsed(metadata[_PEFT], file), f"{_PEFT} of {file.name}")
    for folder in dict.fromkeys(file.parent for file in files):
        if (folder / CONFIG).is_file():
            yield from _of_peft(read_json_object(folder / CONFIG, FIELD), CONFIG)


def _of_peft(config: Mapping[str, Any], source: str) -> Iterator[tuple[str, float]]:
    """Yield the alpha of a config of peft; refuses settings under which it is not the scale of every layer."""
    # diffusers puts the name of the part before each setting.
    settings = {name.removeprefix("transformer."): value for name, value in config.items()}
    otherwise = [name for name in _OTHERWISE if settings.get(name)]
    if otherwise:
        limit = f"{source} sets it, so that its layers are not all scaled by alpha / rank"
        raise refuse(otherwise[0], settings[otherwise[0]], limit, "merge this LoRA with peft itself")
    alpha = settings.get("lora_alpha")
    if alpha is not None:
        yield source, _checked(alpha, source)


def _checked(alpha: object, source: str) -> float:
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not 0 < alpha < math.inf:
        raise refuse("lora alpha", alpha, f"{source} must be a number above 0", "correct it")
    return float(alpha)


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        # Trainers write None where nobody set it.
        return None


def _parsed(text: str, file: Path) -> Mapping[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise refuse(FIELD, str(file), f"its {_PEFT} is no JSON object", "fetch the file again")
    return found
