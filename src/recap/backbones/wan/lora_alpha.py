"""The alpha of a LoRA, read from wherever its trainer wrote it, and never assumed.

A change is scaled by alpha / rank, and alpha does not follow from the rank: a guess would silently apply half or
twice the change. Sources are the caller, `.alpha` tensors, the metadata of a safetensors file, peft's
`adapter_config.json` in the same folder, and for a published file its hash. All that are there must agree.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from recap.backbones.wan.published import published_lora_alpha
from recap.errors import refuse
from recap.io.weights import read_json_object, read_metadata

FIELD = "lora alpha"
CALLER = "lora_alpha"
CONFIG = "adapter_config.json"
ROUNDING = 2.0**-8  # alphas saved in bfloat16 are this far off

_NUMBERS = ("lora_alpha", "ss_network_alpha")
"""Keys of metadata whose value is alpha itself; kohya's tools write the second."""
_PEFT = "lora_adapter_metadata"  # diffusers puts peft's config there, as JSON
_OTHERWISE = ("use_rslora", "use_dora", "alpha_pattern")
"""Settings of peft under which alpha / rank is not the scale of every layer."""

Alphas = Mapping[str, float]
"""Weight -> alpha of its change."""


def find_alphas(
    path: Path, files: Sequence[Path], ranks: Mapping[str, int], tensors: Alphas, asked: float | None
) -> Alphas:
    """Alpha of every weight in `ranks`; refused if no source has it, or if two sources differ."""
    if asked is not None:
        _checked(asked, CALLER)
    sources: list[tuple[str, Alphas]] = [] if asked is None else [(CALLER, dict.fromkeys(ranks, asked))]
    if tensors:
        sources.append(("its .alpha tensors", {name: _checked(tensors[name], name) for name in ranks}))
    sources += [(source, dict.fromkeys(ranks, alpha)) for source, alpha in _written(files)]
    if not sources:
        published = [alpha for file in files if (alpha := published_lora_alpha(file)) is not None]
        sources = [("its publisher", dict.fromkeys(ranks, alpha)) for alpha in published]
    if not sources:
        limit = f"its alpha is not known: neither the file nor an {CONFIG} next to it contains it"
        remedy = (
            "name it by --lora-alpha (recap convert), backbone.lora_alpha (a run) or lora_alpha= (Python); "
            f"it is often the rank, which is {', '.join(map(str, sorted(set(ranks.values()))))} here"
        )
        raise refuse("lora", str(path), limit, remedy)
    source, alphas = sources[0]
    for other, others in sources[1:]:
        for name in ranks:
            if not math.isclose(alphas[name], others[name], rel_tol=ROUNDING):
                limit = f"{source} says {alphas[name]:g}, {other} says {others[name]:g} (for {name})"
                remedy = f"leave {CALLER} out" if source == CALLER else "correct one of them"
                raise refuse("lora", str(path), limit, remedy)
    return alphas


def _written(files: Sequence[Path]) -> Iterator[tuple[str, float]]:
    """What the files' metadata and the files next to them contain: (where, alpha)."""
    for file in files:
        metadata = read_metadata(file, "lora") if file.suffix == ".safetensors" else {}
        for key in _NUMBERS:
            number = _number(metadata.get(key, ""))
            if number is not None:
                yield f"{key} of {file.name}", _checked(number, key)
        if _PEFT in metadata:
            yield from _of_peft(_parsed(metadata[_PEFT], file), f"{_PEFT} of {file.name}")
    for folder in dict.fromkeys(file.parent for file in files):
        if (folder / CONFIG).is_file():
            yield from _of_peft(read_json_object(folder / CONFIG, "lora"), CONFIG)


def _of_peft(config: Mapping[str, Any], source: str) -> Iterator[tuple[str, float]]:
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
    number = isinstance(alpha, int | float) and not isinstance(alpha, bool)
    if not number or not 0 < float(alpha) < math.inf:  # type: ignore[arg-type]
        raise refuse(FIELD, alpha, f"{source} must be a number above 0", "correct it")
    return float(alpha)  # type: ignore[arg-type]


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:  # trainers write None where nobody set it
        return None


def _parsed(text: str, file: Path) -> Mapping[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise refuse("lora", str(file), f"its {_PEFT} is no JSON object", "fetch the file again")
    return found
