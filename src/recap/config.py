"""`RunConfig` is everything that decides a run's result, read strictly from a file, a dict or flags."""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch

from recap.admission.flow import FlowNoveltyConfig
from recap.backbones.helios.family import HeliosConfig
from recap.backbones.noise import Sampling
from recap.backbones.tiny.backbone import EmbeddedConfig
from recap.backbones.wan.family import WanConfig
from recap.backbones.wan.quantised import check_precision, refuse_family
from recap.contracts import AdmissionConfig, BackboneConfig, MemoryConfig
from recap.errors import refuse, unknown_name
from recap.io.files import check_plain, read_json
from recap.io.lookup import look_up
from recap.io.report import Notice
from recap.memory.recap import RecapConfig
from recap.plan import Shot, check_amount, check_shots
from recap.registry import ADMISSIONS, BACKBONES, MEMORIES

PARTS: dict[str, Mapping[str, Any]] = {"backbone": BACKBONES, "memory": MEMORIES, "admission": ADMISSIONS}
"""What is chosen by name and has settings of its own."""

BASES: dict[str, type] = {"memory": MemoryConfig, "admission": AdmissionConfig}

DEFAULT_MEMORY = "recap"

MOST_ROWS = 256

LOW_MEMORY = ("auto", "on", "off")

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def resolve_device(device: str) -> str:
    """Name the device that `auto` means here: a GPU where CUDA can use one, else the CPU; mps must be named."""
    if device != "auto":
        return device
    return "cuda" if torch.cuda.is_available() else "cpu"


def resolve_dtype(dtype: str, device: str, backbone: type[Any]) -> str:
    """Name the precision that `auto` means: bfloat16 for a public model on a GPU, else float32."""
    if dtype != "auto":
        return dtype
    public = issubclass(backbone, WanConfig | HeliosConfig)
    return "bfloat16" if public and device.startswith("cuda") else "float32"


def check_device(device: str, dtype: str, field: str = "device") -> None:
    """Refuse a device that torch cannot use here, and an unknown precision."""
    if dtype not in DTYPES:
        raise unknown_name("dtype", dtype, (*DTYPES, "auto"))
    kind = device.partition(":")[0]
    if kind not in ("cpu", "cuda", "mps"):
        raise refuse(field, device, "must be cpu, cuda, mps or auto", "cuda:1 names the second GPU")
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise refuse(field, device, _why_no_gpu(kind), "choose cpu or auto") from error


MPS_NOTICE = (
    "device mps: positions and sums are computed in fp32, where other devices use fp64, so results differ in the "
    "last digits; what this GPU cannot compute runs on the CPU; no release was tested on such a machine"
)


def notice_device(device: str, notice: Notice) -> None:
    """Notify the user of what differs on a device."""
    if device.startswith("mps"):
        notice(MPS_NOTICE)


def _why_no_gpu(kind: str) -> str:
    if kind == "mps":
        built = torch.backends.mps.is_built()
        return f"torch {torch.__version__} " + (
            "finds no Apple GPU, or a macOS older than 14" if built else "is built without Apple's MPS"
        )
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built for the CPU only"
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} finds no usable NVIDIA GPU or driver"
    return f"torch finds {torch.cuda.device_count()} GPU(s), counted from cuda:0"


Settings = TypeVar("Settings", covariant=True)


@dataclass(frozen=True, slots=True)
class Choice(Generic[Settings]):
    """Names what was chosen, with its settings: a config dataclass of that name's kind."""

    name: str
    settings: Settings
    # It was not chosen: it belongs to the memory, and changes with it.
    usual: bool = field(default=False, compare=False)


AUTO = Choice("auto", FlowNoveltyConfig(), usual=True)
"""Stands for the usual admission of whichever memory a config has."""


@dataclass(frozen=True, slots=True)
class RunConfig:
    """Holds everything that decides what a run generates.

    Where `device` or `dtype` is "auto", a config has what that means on this machine. Where `admission` is "auto", it
    has the usual one of the memory.
    """

    shots: tuple[Shot, ...]
    backbone: Choice[BackboneConfig] = field(default_factory=lambda: Choice("embedded", EmbeddedConfig()))
    memory: Choice[MemoryConfig] = field(default_factory=lambda: Choice(DEFAULT_MEMORY, RecapConfig()))
    admission: Choice[AdmissionConfig] = AUTO
    flow: str = "auto"
    # A clip or a picture that the video continues.
    opening: str = ""
    # Files of subjects that the video shows: casts, or pictures as NAME=PICTURE.
    cast: tuple[str, ...] = ()
    # Options of the sampler, see recap.backbones.noise: how much the noise of a frame opposes the one before it, and
    # the share of noise in the sink's frames when their keys are made.
    antiphase: float = 0.0
    sink_noise: float = 0.0
    # One row of the batch each.
    seeds: tuple[int, ...] = (0,)
    device: str = "auto"
    # Where the decoder and the flow run; "" stands for `device`.
    decoder_device: str = ""
    dtype: str = "auto"
    # How the transformer's weights are stored: "full" is as `dtype` says, "int8" and "fp8" take half of the memory.
    precision: str = "full"
    # The readable path instead of the fast one; they are equal but for rounding.
    eager: bool = False
    # "auto" takes the readable path where the fast one does not fit the card, "on" whatever needs the least memory.
    low_memory: str = "auto"
    # Blocks between two states on disk.
    checkpoint_every: int = 1
    # The trace also lists what the bank did not take: some 2 KB a block.
    trace_offered: bool = False

    def __post_init__(self) -> None:
        if not self.shots:
            raise refuse("shots", [], "at least 1 is needed", "give a prompt")
        if not self.seeds:
            raise refuse("seeds", [], "at least 1 is needed", "0 is as good as any")
        if self.admission.usual:
            object.__setattr__(self, "admission", usual_admission(self.memory))
        check_shots(self.shots)
        check_amount("number of seeds", len(self.seeds), MOST_ROWS, "rows of a batch", "run them one by one")
        if self.low_memory not in LOW_MEMORY:
            raise unknown_name("low_memory", self.low_memory, LOW_MEMORY)
        if self.checkpoint_every < 1:
            raise refuse(
                "checkpoint_every", self.checkpoint_every, "must be 1 or more", "1 saves after every block"
            )
        # Asked for here too, as it refuses what is out of range.
        _ = self.sampling
        device = resolve_device(self.device)
        dtype = resolve_dtype(self.dtype, device, type(self.backbone.settings))
        check_device(device, dtype)
        check_precision(self.precision, device, dtype)
        if self.precision != "full" and isinstance(self.backbone.settings, HeliosConfig):
            # Before its 14B weights are loaded.
            raise refuse_family(self.precision, self.backbone.name)
        if self.decoder_device:
            check_device(self.decoder_device, dtype, "decoder_device")
        object.__setattr__(self, "device", device)
        object.__setattr__(self, "dtype", dtype)

    @property
    def sampling(self) -> Sampling:
        """Return the options of the sampler."""
        return Sampling(self.antiphase, self.sink_noise)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> RunConfig:
        """Read a config from plain data, such as the `config` of a run.json; missing settings are defaults."""
        if not isinstance(values, Mapping):
            raise refuse("config", values, "must be a table of settings", "see the run.json of any run")
        known = _hints(cls)
        for name in values:
            if name not in known:
                raise unknown_name("setting", name, known)
        if "shots" not in values:
            raise refuse("shots", None, "at least 1 is needed", "give a prompt or a script")

        def ready(name: str, value: Any) -> Any:
            if name == "admission":
                return _choose_admission(value, values.get("memory", DEFAULT_MEMORY))
            if name in PARTS:
                return choose(name, value)
            if name == "shots":
                return tuple(from_settings(Shot, shot, name) for shot in _listed(name, value))
            if name == "seeds":
                return tuple(_typed(int, seed, name) for seed in _listed(name, value))
            if name == "cast":
                return tuple(_typed(str, member, name) for member in _listed(name, value))
            return _typed(known[name], value, name)

        return cls(**{name: ready(name, value) for name, value in values.items()})

    def to_dict(self) -> dict[str, Any]:
        """Write plain data that `from_dict` reads back to an equal config."""
        plain = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        for part in PARTS:
            choice: Choice[Any] = plain[part]
            plain[part] = {"name": choice.name, **dataclasses.asdict(choice.settings)}
        plain["shots"] = [dataclasses.asdict(shot) for shot in self.shots]
        plain["seeds"], plain["cast"] = list(self.seeds), list(self.cast)
        # Left out as in older versions, so that their runs can be resumed.
        if not self.decoder_device:
            del plain["decoder_device"]
        if self.low_memory == "auto":
            del plain["low_memory"]
        if self.precision == "full":
            del plain["precision"]
        return plain


def from_settings(kind: type[Any], values: Any, path: str) -> Any:
    """Build a config dataclass from a mapping, naming whatever does not fit."""
    if not isinstance(values, Mapping):
        raise refuse(path, values, "must be a table of settings", f"known: {', '.join(_hints(kind))}")
    hints = _hints(kind)
    values = _without_retired(getattr(kind, "retired", {}), values, path)
    for name in values:
        if name not in hints:
            raise unknown_name(f"{path} setting", name, hints)
    missing = [
        f.name
        for f in dataclasses.fields(kind)
        if f.name not in values
        and f.default is dataclasses.MISSING
        and f.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise refuse(f"{path}.{missing[0]}", None, "has no default", "give it a value")
    return kind(**{name: _typed(hints[name], value, f"{path}.{name}") for name, value in values.items()})


def _without_retired(retired: Mapping[str, Any], values: Mapping[str, Any], path: str) -> Mapping[str, Any]:
    """Leave out settings that an older version had, where its run left them as usual."""
    for name, usual in retired.items():
        if name in values and values[name] != usual:
            raise refuse(f"{path}.{name}", values[name], "there is no such setting any more", "leave it out")
    return {name: value for name, value in values.items() if name not in retired}


def override(
    values: Mapping[str, Any], assignments: Sequence[str], parts: Collection[str] = tuple(PARTS)
) -> dict[str, Any]:
    """Apply `name=value`, then `part.name=value` assignments to the plain data of a config.

    Values are JSON or plain text. A part that the data does not name is set up from its default.
    """
    result = dict(values)
    for assignment in sorted(assignments, key=lambda text: "." in text.partition("=")[0]):
        path, equals, text = assignment.partition("=")
        part, dot, name = path.partition(".")
        if not equals or not part:
            raise refuse("--set", assignment, "must read name=value", "for example memory.reinforcement=5")
        value = _read_value(text)
        if not dot:
            result[part] = value
            continue
        if part not in parts:
            remedy = f"known: {', '.join(parts)}" if parts else "write name=value without a dot"
            raise refuse("--set", assignment, f"there is no part {part!r}", remedy)
        usual = getattr(RunConfig(shots=(Shot("", 1.0),)), part)
        chosen = result.get(part) or (AUTO.name if usual.usual else usual.name)
        table = chosen if isinstance(chosen, Mapping) else {"name": chosen}
        kind = PARTS[part].get(str(table.get("name")))
        if isinstance(value, str) and kind is not None and _hints(kind).get(name) == tuple[str, ...]:
            if value.startswith("["):
                raise refuse(path, value, "it is no list of texts in quotes", 'write it as ["one", "two"]')
            # A list of one need not be written as one.
            value = [value]
        result[part] = {**table, name: value}
    return result


def _read_value(text: str) -> Any:
    """Return the JSON value that a text is, or the text; in a list, backslashes of paths need not be doubled."""
    for spelled in (text, text.replace("\\", "\\\\")):
        with suppress(RecursionError, ValueError):
            return json.loads(spelled)
    return text


def refuse_code(config: Any, source: Path | str) -> None:
    """Refuse the config of a file that names code to import: files are data, only flags and Python name code."""
    for part, table in PARTS.items():
        chosen = config.get(part) if isinstance(config, Mapping) else None
        name = chosen.get("name") if isinstance(chosen, Mapping) else chosen
        if isinstance(name, str) and name not in table and ":" in name:
            limit = f"{source} names code that would be imported and run"
            remedy = "add --trust-code (in Python trust_code=True) if you trust whoever wrote it"
            raise refuse(part, name, limit, remedy)


def read_record(folder: Path, field: str = "run", *, trust_code: bool = False) -> dict[str, Any]:
    """Read the run.json of a run: its `config`, `versions` and the `spec` of its backbone.

    Refuses links in the folder and, without `trust_code`, a config that names code to import.
    """
    if not (folder / "run.json").is_file():
        raise refuse(field, str(folder), "holds no run.json", "name the folder of an earlier run")
    check_plain(folder, field)
    about = read_json(folder / "run.json")
    if not isinstance(about, dict) or "config" not in about:
        raise refuse(field, str(folder), "its run.json holds no config", "start the run again")
    if not trust_code:
        refuse_code(about["config"], folder / "run.json")
    return about


def choose(part: str, values: Any) -> Choice[Any]:
    """Make the choice of a part from its name, or from a table of its name and settings."""
    table = PARTS[part]
    if isinstance(values, Choice):
        return values
    if isinstance(values, str):
        values = {"name": values}
    if not isinstance(values, Mapping) or not isinstance(values.get("name"), str):
        raise refuse(part, values, "must be a name or a table with one", f"known: {', '.join(table)}")
    kind = look_up(part, values["name"], table)
    base = BASES.get(part, object)
    right = isinstance(kind, type) and issubclass(kind, base) and dataclasses.is_dataclass(kind)
    if not right or not callable(getattr(kind, "build", None)):
        of = f" of type {base.__name__}" if part in BASES else ""
        limit = f"it is not a dataclass{of} with a method build"
        raise refuse(part, values["name"], limit, "see docs/extending.md")
    settings = {name: value for name, value in values.items() if name != "name"}
    return Choice(values["name"], from_settings(kind, settings, part))


def usual_admission(memory: Choice[MemoryConfig]) -> Choice[AdmissionConfig]:
    """Return the admission that a memory has unless one is chosen."""
    return dataclasses.replace(choose("admission", memory.settings.usual_admission), usual=True)


def _choose_admission(values: Any, memory: Any) -> Choice[AdmissionConfig]:
    """Make the choice of an admission, where "auto" names the usual one of the memory."""
    if values == AUTO.name:
        return AUTO
    if isinstance(values, Mapping) and values.get("name") == AUTO.name:
        values = {**values, "name": usual_admission(choose("memory", memory)).name}
        return dataclasses.replace(choose("admission", values), usual=len(values) == 1)
    return choose("admission", values)


# Types of the fields by class: a table has thousands of configs, and Python parses annotations every time.
_TYPES: dict[type[Any], Mapping[str, Any]] = {}


def _hints(kind: type[Any]) -> Mapping[str, Any]:
    if kind not in _TYPES:
        hints = typing.get_type_hints(kind)
        _TYPES[kind] = {f.name: hints[f.name] for f in dataclasses.fields(kind)}
    return _TYPES[kind]


def _listed(name: str, values: Any) -> Sequence[Any]:
    if not isinstance(values, (list, tuple)):
        raise refuse(name, values, "must be a list", "put it in square brackets")
    return values


def _typed(kind: Any, value: Any, path: str) -> Any:
    """Return the value as its field's type; whole numbers are accepted as floats, nothing else is converted."""
    kind = typing.get_origin(kind) or kind
    if kind is tuple and isinstance(value, list):
        # JSON writes a tuple so.
        return tuple(value)
    if not isinstance(kind, type) or kind is types.UnionType:
        # It is a union or the like, which is left to the config's own checks.
        return value
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        if abs(value) > 10**18:
            raise refuse(path, f"{str(value)[:12]}...", "is too large", "check its digits")
        return float(value)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise refuse(path, value, f"must be of type {kind.__name__}", "check its spelling")
    return value
