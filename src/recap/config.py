"""RunConfig: everything that decides a run's result, from a file, a dict or flags; strict about names and types."""

from __future__ import annotations

import dataclasses
import json
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from recap.admission.flow import FlowNoveltyConfig
from recap.backbones.tiny.backbone import EmbeddedConfig
from recap.errors import refuse, unknown_name
from recap.memory.recap import RecapConfig
from recap.plan import Shot
from recap.registry import ADMISSIONS, BACKBONES, MEMORIES, look_up

PARTS: dict[str, Mapping[str, Any]] = {"backbone": BACKBONES, "memory": MEMORIES, "admission": ADMISSIONS}
"""What is chosen by name and has settings of its own."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def check_place(device: str, dtype: str) -> None:
    """Refuse where nothing can be computed, or not in this precision."""
    if dtype not in DTYPES:
        raise unknown_name("dtype", dtype, DTYPES)
    if device.partition(":")[0] not in ("cpu", "cuda"):
        raise refuse("device", device, "must be cpu or cuda", "cuda:1 names the second GPU")
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise refuse("device", device, "torch cannot use it here", "choose cpu") from error


@dataclass(frozen=True, slots=True)
class Choice:
    """Something chosen by name, with its settings: a config dataclass of that name's kind."""

    name: str
    settings: Any


@dataclass(frozen=True, slots=True)
class RunConfig:
    shots: tuple[Shot, ...]
    backbone: Choice = field(default_factory=lambda: Choice("embedded", EmbeddedConfig()))
    memory: Choice = field(default_factory=lambda: Choice("recap", RecapConfig()))
    admission: Choice = field(default_factory=lambda: Choice("flow", FlowNoveltyConfig()))
    flow: str = "auto"
    opening: str = ""  # a clip or a picture that the video goes on from
    seeds: tuple[int, ...] = (0,)  # one row of the batch each
    device: str = "cpu"
    dtype: str = "float32"
    eager: bool = False  # the readable path; else the fast one where there is one, equal but for rounding
    checkpoint_every: int = 1  # blocks between two states on disk
    trace_offered: bool = False  # the trace also tells what the bank did not take: some 2 KB a block

    def __post_init__(self) -> None:
        if not self.shots:
            raise refuse("shots", [], "at least 1 is needed", "give a prompt")
        if not self.seeds:
            raise refuse("seeds", [], "at least 1 is needed", "0 is as good as any")
        if self.checkpoint_every < 1:
            raise refuse(
                "checkpoint_every", self.checkpoint_every, "must be 1 or more", "1 saves after every block"
            )
        check_place(self.device, self.dtype)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> RunConfig:
        if not isinstance(values, Mapping):
            raise refuse("config", values, "must be a table of settings", "see the run.json of any run")
        known = {f.name for f in dataclasses.fields(cls)}
        for name in values:
            if name not in known:
                raise unknown_name("setting", name, known)
        ready = dict(values)
        for part, table in PARTS.items():
            if part in ready:
                ready[part] = _choice(part, ready[part], table)
        if "shots" in ready:
            ready["shots"] = tuple(from_settings(Shot, s, "shots") for s in _listed("shots", ready["shots"]))
        if "seeds" in ready:
            ready["seeds"] = tuple(_typed(int, s, "seeds") for s in _listed("seeds", ready["seeds"]))
        for name, kind in (
            ("flow", str),
            ("opening", str),
            ("device", str),
            ("dtype", str),
            ("eager", bool),
            ("checkpoint_every", int),
            ("trace_offered", bool),
        ):
            if name in ready:
                ready[name] = _typed(kind, ready[name], name)
        if "shots" not in ready:
            raise refuse("shots", None, "at least 1 is needed", "give a prompt or a script")
        return cls(**ready)

    def to_dict(self) -> dict[str, Any]:
        """Plain data that `from_dict` reads back to an equal config."""
        plain = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        for part in PARTS:
            choice: Choice = plain[part]
            plain[part] = {"name": choice.name, **dataclasses.asdict(choice.settings)}
        plain["shots"] = [dataclasses.asdict(shot) for shot in self.shots]
        plain["seeds"] = list(self.seeds)
        return plain


def from_settings(kind: type[Any], values: Any, path: str) -> Any:
    """Build a config dataclass from a mapping, naming whatever does not fit."""
    if not isinstance(values, Mapping):
        raise refuse(path, values, "must be a table of settings", f"known: {', '.join(_hints(kind))}")
    hints = _hints(kind)
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


def override(values: Mapping[str, Any], assignments: Sequence[str]) -> dict[str, Any]:
    """Apply `part.name=value` assignments, values written as JSON or plain text, to a config's dict."""
    result = json.loads(json.dumps(values))
    for assignment in assignments:
        path, equals, text = assignment.partition("=")
        part, dot, name = path.partition(".")
        if not equals or not part:
            raise refuse("--set", assignment, "must read name=value", "for example memory.reinforcement=5")
        try:
            value = json.loads(text)
        except (json.JSONDecodeError, RecursionError, ValueError):
            value = text
        if dot and part in PARTS and isinstance(result.get(part), str):
            result[part] = {"name": result[part]}  # chosen by an assignment before this one
        if dot and not isinstance(result.get(part), dict):
            tables = [k for k, v in result.items() if isinstance(v, dict)]
            if not tables:
                raise refuse(
                    "--set", assignment, "has no parts to set here", "write name=value without a dot"
                )
            raise unknown_name("--set", part, tables)
        (result[part] if dot else result)[name if dot else part] = value
    return typing.cast(dict[str, Any], result)


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise refuse("file", str(path), f"cannot be read ({error.strerror})", "check the path") from error
    except UnicodeDecodeError as error:
        raise refuse("file", str(path), "is not text", "give a JSON file") from error
    except (json.JSONDecodeError, RecursionError) as error:
        raise refuse("file", str(path), f"is not JSON ({error})", "mend it or write it anew") from error


def _choice(part: str, values: Any, table: Mapping[str, Any]) -> Choice:
    if isinstance(values, Choice):
        return values
    if isinstance(values, str):
        values = {"name": values}
    if not isinstance(values, Mapping) or not isinstance(values.get("name"), str):
        raise refuse(part, values, "must be a name or a table with one", f"known: {', '.join(table)}")
    kind = look_up(part, values["name"], table)
    if not (isinstance(kind, type) and dataclasses.is_dataclass(kind)) or not callable(
        getattr(kind, "build", None)
    ):
        limit = "it is no dataclass with a method build"
        raise refuse(part, values["name"], limit, "see 'Add your own memory' in the README")
    settings = {name: value for name, value in values.items() if name != "name"}
    return Choice(values["name"], from_settings(kind, settings, part))


def _hints(kind: type[Any]) -> dict[str, Any]:
    hints = typing.get_type_hints(kind)
    return {f.name: hints[f.name] for f in dataclasses.fields(kind)}


def _listed(name: str, values: Any) -> Sequence[Any]:
    if not isinstance(values, (list, tuple)):
        raise refuse(name, values, "must be a list", "put it in square brackets")
    return values


def _typed(kind: Any, value: Any, path: str) -> Any:
    """The value as its field's type; whole numbers serve as floats, nothing else is converted."""
    kind = typing.get_origin(kind) or kind
    if kind is tuple and isinstance(value, list):  # as JSON writes it
        return tuple(value)
    if not isinstance(kind, type):  # a union or the like, of a config that is not ours
        return value
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        if abs(value) > 10**18:
            raise refuse(path, f"{str(value)[:12]}...", "is too large", "check its digits")
        return float(value)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise refuse(path, value, f"must be of type {kind.__name__}", "check its spelling")
    return value
