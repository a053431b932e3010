"""Published weights: named tensors out of files, and models filled with exactly those.

Nothing in a file is ever executed. Tensors stay mapped to their file until something needs them, so a model
of many gigabytes is read once, on its way to the device.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from recap.errors import refuse

INSTALL = "pip install recap-forcing[wan]"
FETCH_AGAIN = "fetch the file again from its publisher"
SINGLE_FILES = ("model.safetensors", "diffusion_pytorch_model.safetensors")
"""What transformers and diffusers call weights that fit in one file."""

SHOWN = 4  # of the wrong tensors: a foreign file has hundreds, and the first few say which file it is

UNREADABLE = Exception  # a damaged pickle leads torch to errors of any kind


def extra(package: str) -> Any:
    """A package of the `wan` extra; most machines that import this module do without."""
    try:
        return import_module(package)
    except ImportError as missing:
        limit = f"the public Wan models need it, and it cannot be imported ({missing})"
        raise refuse("package", package, limit, INSTALL) from missing


def read_tensors(path: Path, field: str) -> dict[str, Tensor]:
    """The named tensors of a `.pth`, `.pt` or `.safetensors` file, or of a folder of safetensors."""
    if path.is_dir():
        return {name: tensor for file in shards(path, field) for name, tensor in _read(file, field).items()}
    return _read(path, field)


def shards(folder: Path, field: str) -> list[Path]:
    """The files a folder keeps its weights in: those its index names, or the one that has the usual name."""
    index = next(iter(sorted(folder.glob("*.safetensors.index.json"))), None)
    if index is not None:
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError, AttributeError, TypeError) as problem:
            limit = f"it does not say which file holds which tensor ({problem!r})"
            raise refuse(field, str(index), limit, FETCH_AGAIN) from problem
        # The last part alone: an index must not lead out of its folder.
        return [folder / Path(name).name for name in names]
    for name in SINGLE_FILES:
        if (folder / name).is_file():
            return [folder / name]
    limit = f"the folder holds neither an index of shards nor {' nor '.join(SINGLE_FILES)}"
    raise refuse(field, str(folder), limit, "pass the folder that has the weights, or the file itself")


def _read(path: Path, field: str) -> dict[str, Tensor]:
    if not path.is_file():
        raise refuse(field, str(path), "no such file", "check the path")
    try:
        if path.suffix == ".safetensors":
            return dict(load_file(path))
        # Files of the time before zip containers cannot be mapped.
        mapped = zipfile.is_zipfile(path)
        found = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except UNREADABLE as problem:
        reason = str(problem).partition("\n")[0] or type(problem).__name__
        raise refuse(field, str(path), f"cannot be read ({reason})", FETCH_AGAIN) from problem
    if not isinstance(found, Mapping) or not all(isinstance(value, Tensor) for value in found.values()):
        raise refuse(field, str(path), "not a table of named tensors", "pass the file of the weights alone")
    return {str(name): tensor for name, tensor in found.items()}


def fill(
    model: nn.Module,
    found: Mapping[str, Tensor],
    file_names: Mapping[str, str],
    *,
    field: str,
    path: Path,
    dtype: torch.dtype,
) -> None:
    """Give every tensor of a model (on the meta device) its content; `file_names` says ours -> the file's.

    Whatever is missing, left over, of another shape or not of floats is named as the file names it.
    """
    expected = model.state_dict()
    assert expected.keys() == file_names.keys()
    theirs = set(file_names.values())
    wrong = [f"{name} is missing" for name in sorted(theirs - found.keys())]
    wrong += [f"{name} is not part of the model" for name in sorted(found.keys() - theirs)]
    for ours, name in file_names.items():
        if name in found and found[name].shape != expected[ours].shape:
            wrong.append(f"{name} is {tuple(found[name].shape)}, not {tuple(expected[ours].shape)}")
        elif name in found and not found[name].is_floating_point():
            wrong.append(f"{name} is of {found[name].dtype}, not of floats")
    if wrong:
        more = f"; and {len(wrong) - SHOWN} more" if len(wrong) > SHOWN else ""
        limit = f"the tensors do not fit: {'; '.join(wrong[:SHOWN])}{more}"
        raise refuse(field, str(path), limit, "pass the weights of this very model")
    # One conversion per tensor of the file, so that what is shared there is shared here.
    cast = {name: found[name].to(dtype) for name in theirs}
    model.load_state_dict({ours: cast[name] for ours, name in file_names.items()}, assign=True)
