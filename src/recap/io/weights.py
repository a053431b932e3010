"""This module opens files of named tensors without reading them, checks them strictly, and fills models from them.

A path means a torch pickle, a safetensors file, an index of shards or a folder with safetensors. Nothing in a file is
ever executed, and tensors stay mapped to their file until something needs them. Every fault is a ValueError that
names the file.
"""

from __future__ import annotations

import json
import pickle
import re
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from recap.errors import refuse

REMEDY = "check the path, or fetch the weights of this model again"
FLOATS = frozenset({"float16", "bfloat16", "float32", "float64"})
# A foreign file has hundreds of wrong names, and the first few show which file it is.
SHOWN = 8
SINGLE_FILES = ("model.safetensors", "diffusion_pytorch_model.safetensors")
"""transformers and diffusers give these names to weights that fit in one file."""

# Bytes of data.pkl, which names the tensors and does not contain them; that of the largest Wan is below 1 MB.
LARGEST_PICKLE = 1 << 25
_PICKLES = (".pt", ".pth", ".bin")
_INDEX = ".safetensors.index.json"
_DTYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2",
}  # fmt: skip

Shape = tuple[int, ...]
Choose = Callable[[Mapping[str, Any], Path], Mapping[str, Any]]
"""Picks the state dict out of what a pickle has."""


@dataclass(frozen=True, slots=True)
class Stored:
    """Describes one tensor of a file, not read yet; `name` is its name there."""

    name: str
    file: Path
    shape: Shape
    dtype: str
    read: Callable[[], Tensor]

    @property
    def is_float(self) -> bool:
        return self.dtype in FLOATS


def open_tensors(
    path: Path,
    field: str,
    remedy: str = REMEDY,
    *,
    choose: Choose = lambda found, file: found,
    clean: Callable[[str], str] = str,
) -> dict[str, Stored]:
    """Return the tensors of all files of a path, by their cleaned names; refuses two of one name."""
    tensors: dict[str, Stored] = {}
    for file in files_of(path, field, remedy):
        for name, stored in open_file(file, field, remedy, choose).items():
            other = tensors.setdefault(clean(name), stored)
            if other is not stored:
                limit = f"{name} is there twice, also as {other.name} in {other.file.name}"
                raise refuse(field, str(file), limit, "name one file of one model")
    return tensors


def files_of(path: Path, field: str, remedy: str = REMEDY) -> list[Path]:
    """Return the files that have the tensors of a path: a file, the shards of an index, or a folder with either."""
    if path.is_dir():
        return _files_in(path, field, remedy)
    if not path.is_file():
        raise refuse(field, str(path), "there is no such file", remedy)
    if path.name.endswith(_INDEX):
        return _files_in_index(path, field, remedy)
    if path.suffix not in (*_PICKLES, ".safetensors"):
        limit = f"its name ends in none of {', '.join(_PICKLES)}, .safetensors and {_INDEX}"
        raise refuse(field, str(path), limit, "name a file of weights")
    return [path]


def open_file(
    file: Path, field: str, remedy: str = REMEDY, choose: Choose = lambda found, file: found
) -> dict[str, Stored]:
    """Return the tensors of one file."""
    if file.suffix == ".safetensors":
        return _open_safetensors(file, field, remedy)
    found = load_pickle(file, field, remedy)
    if not isinstance(found, Mapping):
        raise refuse(field, str(file), f"it holds a {type(found).__name__}, not named tensors", remedy)
    if not found or not all(isinstance(name, str) for name in found):
        raise refuse(field, str(file), "it holds nothing that has names", remedy)
    return as_stored(choose(found, file), file, field)


def load_pickle(file: Path, field: str, remedy: str = REMEDY) -> Any:
    """Return what a torch file contains: tensors and plain containers; anything else is refused."""
    try:
        _check_pickle_size(file)
        # Mapped, so that a tensor takes memory only while it is read. Files older than torch 1.6 cannot be.
        return torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
    # A damaged pickle leads torch to errors of any kind.
    except Exception as problem:
        raise _unreadable(file, field, remedy, problem) from problem


def _check_pickle_size(file: Path) -> None:
    """Refuse a list of tensors that would unpack to more than any model's: torch would unpack it whole."""
    if not zipfile.is_zipfile(file):
        return
    with zipfile.ZipFile(file) as archive:
        size = sum(entry.file_size for entry in archive.infolist() if entry.filename.endswith(".pkl"))
    if size > LARGEST_PICKLE:
        limit = f"at most {LARGEST_PICKLE:,} are read"
        raise ValueError(f"its list of tensors unpacks to {size:,} bytes; {limit}")


def as_stored(values: Mapping[str, Any], file: Path, field: str) -> dict[str, Stored]:
    """Return tensors that are in memory, or mapped by torch, as tensors of a file."""
    foreign = [str(name) for name, value in values.items() if not _is_plain(name, value)]
    if foreign:
        limit = f"it holds {listing('entries that are no plain tensors', foreign)}"
        raise refuse(field, str(file), limit, "name a file with nothing but the weights")
    return {
        name: Stored(name, file, tuple(value.shape), str(value.dtype).removeprefix("torch."), value.detach)
        for name, value in values.items()
    }


def read_metadata(file: Path, field: str) -> dict[str, str]:
    """Return the free texts of a safetensors file."""
    return _open_handle(file, field, REMEDY).metadata() or {}


def read_json_object(file: Path, field: str, remedy: str = REMEDY) -> dict[str, Any]:
    """Return the object in a JSON file; refuses any other content."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as problem:
        raise refuse(field, str(file), f"not JSON ({problem})", remedy) from problem
    if not isinstance(found, dict):
        raise refuse(field, str(file), f"it holds a {type(found).__name__}, not an object", remedy)
    return found


def rename(name: str, table: Sequence[tuple[str, str]]) -> str:
    """Return a tensor's name in another layout: each (pattern, replacement) of the table is applied in turn."""
    for pattern, replacement in table:
        name = re.sub(pattern, replacement, name)
    return name


def listing(kind: str, names: Sequence[str]) -> str:
    """Return '2 missing (a, b)', or the first eight of many."""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return f"{len(names)} {kind} ({', '.join(names[:SHOWN])}{more})"


def list_faults(found: Mapping[str, Stored], wanted: Mapping[str, Tensor]) -> list[str]:
    """Return what keeps tensors from filling a model that has those of `wanted`, an entry for each kind of fault."""
    both = [(found[name], tensor) for name, tensor in wanted.items() if name in found]
    kinds = {
        "missing": [name for name in wanted if name not in found],
        "unknown": [stored.name for name, stored in found.items() if name not in wanted],
        "misshapen": [
            f"{stored.name} {list(stored.shape)} for {list(tensor.shape)}"
            for stored, tensor in both
            if stored.shape != tensor.shape
        ],
        "not floats": [
            f"{stored.name} {stored.dtype}"
            for stored, tensor in both
            if tensor.is_floating_point() and not stored.is_float
        ],
    }
    return [listing(kind, names) for kind, names in kinds.items() if names]


class _NothingDrawn(TorchFunctionMode):
    """Leaves tensors as they are where a module would draw their first values.

    Without storage there is nothing to draw into, and torch imports its compiler for it, which takes a second.
    """

    DRAWING = frozenset(
        {Tensor.normal_, Tensor.uniform_, nn.init.normal_, nn.init.uniform_, nn.init.kaiming_uniform_}
    )

    def __torch_function__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if function in self.DRAWING:
            return args[0] if args else kwargs["tensor"]
        return function(*args, **kwargs)


@contextmanager
def without_storage() -> Iterator[None]:
    """Make modules without storage, to be filled; the global random generator does not advance."""
    with torch.device("meta"), _NothingDrawn():
        yield


def fill(
    model: nn.Module,
    found: Mapping[str, Stored],
    *,
    path: Path,
    field: str,
    dtype: torch.dtype | Callable[[str], torch.dtype],
    names: Mapping[str, str] | None = None,
    what: str | None = None,
    remedy: str = REMEDY,
    copy: bool = True,
) -> None:
    """Fill every tensor of a model, best made on the meta device, and leave no tensor of the file over.

    `names` maps the names of the model to those of the file, where they differ; `dtype` may depend on the latter.
    Without `copy`, tensors that need no conversion stay mapped to their file, for models that go to a device at once.
    A refused file leaves the model as it was.
    """
    expected = model.state_dict()
    names = {name: name for name in expected} if names is None else names
    assert expected.keys() == names.keys()
    wanted = {names[name]: tensor for name, tensor in expected.items()}
    if faults := list_faults(found, wanted):
        model_name = what or type(model).__name__
        limit = f"does not fit the {len(wanted)} tensors of {model_name}: {'; '.join(faults)}"
        raise refuse(field, str(path), limit, remedy)

    def read(name: str) -> Tensor:
        chosen = dtype(name) if callable(dtype) else dtype
        kept = chosen if wanted[name].is_floating_point() else wanted[name].dtype
        return found[name].read().to(kept, copy=copy)

    # One conversion for each tensor of the file, so that what is shared there is shared here.
    converted = {name: read(name) for name in wanted}
    model.load_state_dict({ours: converted[name] for ours, name in names.items()}, assign=True)


def _files_in(folder: Path, field: str, remedy: str) -> list[Path]:
    indices = sorted(folder.glob(f"*{_INDEX}"))
    if len(indices) > 1:
        names = ", ".join(index.name for index in indices)
        raise refuse(field, str(folder), f"it holds several models ({names})", "name one of these files")
    if indices:
        return _files_in_index(indices[0], field, remedy)
    single = [folder / name for name in SINGLE_FILES if (folder / name).is_file()]
    files = single[:1] or sorted(folder.glob("*.safetensors"))
    if not files:
        limit = "the folder holds no .safetensors"
        raise refuse(field, str(folder), limit, "name a file of weights, or a folder with .safetensors")
    return files


def _files_in_index(index: Path, field: str, remedy: str) -> list[Path]:
    shards = read_json_object(index, field, remedy).get("weight_map")
    if not isinstance(shards, dict) or not shards or not all(isinstance(s, str) for s in shards.values()):
        raise refuse(field, str(index), "it has no weight_map from tensors to files", remedy)
    files = []
    for name in sorted(set(shards.values())):
        # A shard lies next to its index; any other path would read a file that the user did not name.
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise refuse(field, str(index), f"it points at {name!r}", "shards are .safetensors next to it")
        if not (index.parent / name).is_file():
            raise refuse(field, str(index), f"there is no such file as its shard {name}", remedy)
        files.append(index.parent / name)
    return files


def _open_safetensors(file: Path, field: str, remedy: str) -> dict[str, Stored]:
    handle = _open_handle(file, field, remedy)
    stored = {}
    for name in handle.keys():  # noqa: SIM118 (no mapping)
        part = handle.get_slice(name)
        dtype = part.get_dtype()
        read = partial(handle.get_tensor, name)
        stored[name] = Stored(name, file, tuple(part.get_shape()), _DTYPES.get(dtype, dtype), read)
    return stored


def _open_handle(file: Path, field: str, remedy: str) -> Any:
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as problem:
        raise _unreadable(file, field, remedy, problem) from problem


def _unreadable(file: Path, field: str, remedy: str, problem: Exception) -> ValueError:
    reason = (str(problem).strip().splitlines() or [type(problem).__name__])[0]
    if isinstance(problem, pickle.UnpicklingError):
        # Its own text advises to run what is in the file.
        reason = "damaged, or more than tensors in it"
    return refuse(field, str(file), f"cannot be read as a whole file of tensors ({reason})", remedy)


def _is_plain(name: object, value: object) -> bool:
    """Return whether a value can be read like any array: neither sparse, nor without storage, nor on a device."""
    if not isinstance(name, str) or not isinstance(value, Tensor):
        return False
    return value.layout == torch.strided and value.device.type == "cpu" and not value.is_nested
