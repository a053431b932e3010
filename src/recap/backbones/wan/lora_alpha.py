"""This module finds the alpha of a LoRA, whose changes are scaled by alpha / rank.

Alpha does not follow from the rank, and a guess would silently apply half or twice the change, so it is read from
wherever the trainer wrote it: the caller, `.alpha` tensors, the metadata of a safetensors file, peft's
`adapter_config.json` in the same folder, and for a published file its hash. All that are there must agree.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from recap.backbones.wan.published import published_lora_alpha
from recap.errors import refuse
from recap.io.weights import read_json_object, read_metadata

FIELD, REMEDY = "lora", "check the path, or fetch the file again"
CALLER = "lora_alpha"
CONFIG, CONFIG_OF = "adapter_config.json", "adapter_model"
"""peft writes the first next to a file of the second name."""
MOST_ALPHA = 1e6
"""Far above any that was published; beyond it, weights in fp32 could overflow."""
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


def find_alphas(
    path: Path, files: Sequence[Path], ranks: Mapping[str, int], tensors: Alphas, asked: float | None
) -> Alphas:
    """Return the alpha of every weight in `ranks`; refuses if no source has it, or if two sources differ.

    `tensors` are the alphas in the file itself, `asked` is the caller's.
    """
    sources: list[tuple[str, Alphas]] = []
    if asked is not None:
        sources.append((CALLER, dict.fromkeys(ranks, _checked(asked, CALLER))))
    if tensors:
        sources.append(
            ("its .alpha tensors", {name: _checked(value, name) for name, value in tensors.items()})
        )
    sources += [
        (source, dict.fromkeys(ranks, alpha)) for source, alpha in _written(files, set(ranks.values()))
    ]
    if not sources:
        published = [alpha for file in files if (alpha := published_lora_alpha(file)) is not None]
        sources = [("its publisher", dict.fromkeys(ranks, alpha)) for alpha in published]
    if not sources:
        limit = f"its alpha is not known: neither the file nor an {CONFIG} next to it contains it"
        remedy = (
            f"write {path.name}:alpha=NUMBER (or set backbone.lora_alpha for the LoRA that the model needs); "
            f"it is often the rank, which is {', '.join(map(str, sorted(set(ranks.values()))))} here"
        )
        raise refuse(FIELD, str(path), limit, remedy)
    source, alphas = sources[0]
    for other, others in sources[1:]:
        for name in ranks:
            if not math.isclose(alphas[name], others[name], rel_tol=ROUNDING):
                limit = f"{source} says {alphas[name]:g}, {other} says {others[name]:g} (for {name})"
                remedy = f"leave {CALLER} out" if source == CALLER else "correct one of them"
                raise refuse(FIELD, str(path), limit, remedy)
    return alphas


def _written(files: Sequence[Path], ranks: Collection[int]) -> Iterator[tuple[str, float]]:
    """Yield what the files' metadata and the files next to them contain: (where, alpha)."""
    for file in files:
        metadata = read_metadata(file, FIELD) if file.suffix == ".safetensors" else {}
        for key in _NUMBERS:
            number = number_in(metadata.get(key, ""))
            if number is not None:
                yield f"{key} of {file.name}", _checked(number, key)
        if _PEFT in metadata:
            yield from _of_peft(_parsed(metadata[_PEFT], file), f"{_PEFT} of {file.name}", ranks)
    for folder in dict.fromkeys(file.parent for file in files):
        if (folder / CONFIG).is_file() and _is_about(folder, files):
            yield from _of_peft(read_json_object(folder / CONFIG, FIELD, REMEDY), CONFIG, ranks)


def _is_about(folder: Path, files: Sequence[Path]) -> bool:
    """Return whether the folder's config is about these files: next to others it is about the one peft wrote."""
    there = [path for path in folder.iterdir() if path.suffix in (".safetensors", ".pt", ".pth", ".bin")]
    return len(there) == len(files) or any(file.stem == CONFIG_OF for file in files)


def _of_peft(config: Mapping[str, Any], source: str, ranks: Collection[int]) -> Iterator[tuple[str, float]]:
    """Yield the alpha of a config of peft; refuses settings under which it is not the scale of every layer."""
    # diffusers puts the name of the part before each setting.
    settings = {name.removeprefix("transformer."): value for name, value in config.items()}
    otherwise = [name for name in _OTHERWISE if settings.get(name)]
    if otherwise:
        limit = f"{source} sets it, so that its layers are not all scaled by alpha / rank"
        raise refuse(otherwise[0], settings[otherwise[0]], limit, "merge this LoRA with peft itself")
    rank = settings.get("r")
    if rank is not None and not settings.get("rank_pattern") and any(rank != own for own in ranks):
        limit = f"{source} is about a LoRA of another rank than {', '.join(map(str, sorted(ranks)))}"
        raise refuse("r", rank, limit, "put the config there that belongs to the file")
    alpha = settings.get("lora_alpha")
    if alpha is not None:
        yield source, _checked(alpha, source)


def _checked(alpha: object, source: str) -> float:
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not 0 < alpha <= MOST_ALPHA:
        limit = f"{source} must be a number above 0 and at most {MOST_ALPHA:,.0f}"
        raise refuse("lora alpha", alpha, limit, "correct it")
    return float(alpha)


def number_in(text: str) -> float | None:
    """Return the number that a text is, None if it is none."""
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
