"""Files of named tensors: torch pickles, safetensors, and folders of them, opened without reading the tensors.

Nothing in a file is run: pickles are opened with `weights_only=True`. Every fault is a ValueError that names
the file.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from recap.errors import refuse

FIELD = "checkpoint"
AGAIN = "fetch the file again"
FLOATS = frozenset({"float16", "bfloat16", "float32", "float64"})
SHOWN = 8  # names of tensors in an error, of each kind

_PICKLES = (".pt", ".pth")
_INDEX = ".safetensors.index.json"
_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


@dataclass(frozen=True, slots=True)
class Stored:
    """One tensor of a file, not read yet."""

    name: str  # in the file
    file: Path
    shape: tuple[int, ...]
    dtype: str
    read: Callable[[], Tensor]


def listing(kind: str, names: Sequence[str]) -> str:
    """'2 missing (a, b)', or the first eight of many."""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return f"{len(names)} {kind} ({', '.join(names[:SHOWN])}{more})"


def files_of(path: Path) -> list[Path]:
    """The files that hold the tensors of a path: a file, an index of shards, or a folder with either."""
    if path.is_dir():
        return _files_in(path / "transformer" if (path / "transformer").is_dir() else path)
    if not path.is_file():
        raise refuse(FIELD, str(path), "there is no such file", "check the path")
    if path.name.endswith(_INDEX):
        return _files_in_index(path)
    if path.suffix not in (*_PICKLES, ".safetensors"):
        limit = "its name ends in none of .pt, .pth, .safetensors and .safetensors.index.json"
        raise refuse(FIELD, str(path), limit, "name a file of weights")
    return [path]


def open_file(
    file: Path, choose: Callable[[Mapping[str, Any], Path], Mapping[str, Any]]
) -> dict[str, Stored]:
    """The tensors of one file; `choose` picks the state dict out of what a pickle holds."""
    if file.suffix == ".safetensors":
        return _open_safetensors(file)
    return _stored(choose(_open_pickle(file), file), file)


def read_json_object(file: Path) -> dict[str, Any]:
    """A JSON file that must hold an object."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise refuse(FIELD, str(file), f"not JSON ({error})", AGAIN) from error
    if not isinstance(found, dict):
        raise refuse(FIELD, str(file), f"holds a {type(found).__name__}, not an object", AGAIN)
    return found


def read_metadata(file: Path) -> dict[str, str]:
    """The free texts of a safetensors file."""
    return _opened(file).metadata() or {}


def _files_in(folder: Path) -> list[Path]:
    indices = sorted(folder.glob(f"*{_INDEX}"))
    if len(indices) > 1:
        names = ", ".join(index.name for index in indices)
        raise refuse(FIELD, str(folder), f"it holds several models ({names})", "name one of these files")
    if indices:
        return _files_in_index(indices[0])
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        limit = "the folder holds no .safetensors"
        raise refuse(FIELD, str(folder), limit, "name a file of weights, or a folder with .safetensors")
    return files


def _files_in_index(index: Path) -> list[Path]:
    shards = read_json_object(index).get("weight_map")
    if not isinstance(shards, dict) or not shards or not all(isinstance(s, str) for s in shards.values()):
        raise refuse(FIELD, str(index), "it has no weight_map from tensors to files", AGAIN)
    files = []
    for name in sorted(set(shards.values())):
        # A shard lies beside its index; a path out of there would read what nobody named.
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise refuse(FIELD, str(index), f"it points at {name!r}", "shards are .safetensors beside it")
        if not (index.parent / name).is_file():
            raise refuse(FIELD, str(index), f"the shard {name} is not there", "fetch all the shards")
        files.append(index.parent / name)
    return files


def _open_safetensors(file: Path) -> dict[str, Stored]:
    opened = _opened(file)
    slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118 (no mapping)

    def reader(name: str) -> Callable[[], Tensor]:
        return lambda: cast(Tensor, opened.get_tensor(name))

    stored = {}
    for name, part in slices.items():
        dtype = part.get_dtype()
        stored[name] = Stored(name, file, tuple(part.get_shape()), _DTYPES.get(dtype, dtype), reader(name))
    return stored


def _opened(file: Path) -> Any:  # its hints are incomplete
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise refuse(FIELD, str(file), f"not a whole safetensors file ({error})", AGAIN) from error


def _open_pickle(file: Path) -> Mapping[str, Any]:
    try:
        # Mapped, so that a tensor takes memory only while it is read. Files older than torch 1.6 cannot be.
        found = torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
    except Exception as error:  # a damaged pickle leads torch to errors of any kind
        said = str(error).strip().splitlines() or [type(error).__name__]
        limit = f"not a whole torch file of nothing but tensors ({said[0]})"
        raise refuse(FIELD, str(file), limit, AGAIN) from error
    if not isinstance(found, Mapping):
        raise refuse(FIELD, str(file), f"holds a {type(found).__name__}", "name a file with a state dict")
    if not found or not all(isinstance(name, str) for name in found):
        raise refuse(FIELD, str(file), "holds nothing that has names", "name a file with a state dict")
    return found


def _stored(values: Mapping[str, Any], file: Path) -> dict[str, Stored]:
    foreign = [str(name) for name, value in values.items() if not _is_plain(name, value)]
    if foreign:
        limit = f"holds {listing('entries that are no plain tensors', foreign)}"
        raise refuse(FIELD, str(file), limit, "name a file with a state dict")

    def reader(tensor: Tensor) -> Callable[[], Tensor]:
        return lambda: tensor.detach()

    return {
        name: Stored(name, file, tuple(value.shape), str(value.dtype).removeprefix("torch."), reader(value))
        for name, value in values.items()
    }


def _is_plain(name: object, value: object) -> bool:
    """Whether it can be read like any array: neither sparse, nor without storage, nor on a device."""
    if not isinstance(name, str) or not isinstance(value, Tensor):
        return False
    return value.layout == torch.strided and value.device.type == "cpu" and not value.is_nested
