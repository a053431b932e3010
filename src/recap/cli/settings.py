"""This module turns the options of the commands that generate into a config."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import wraps
from inspect import Parameter
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from recap.backbones.wan.lora import read_choice, spell_choice
from recap.cli import options
from recap.config import MOST_ROWS, RunConfig, choose, override, refuse_code, usual_admission
from recap.contracts import BackboneConfig
from recap.errors import refuse
from recap.io.files import read_json
from recap.registry import BACKBONES, MEMORIES
from recap.tables.schedules import parse_schedules

DEFAULT_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Generation:
    """Holds the options that say what is generated and how, with any memory; `takes_generation` adds them."""

    prompt: Annotated[
        str | None,
        typer.Argument(
            help="What the video shows (`recap list` has the words of `embedded`); or use --script."
        ),
    ] = None
    seconds: Annotated[
        float | None, typer.Option(help="Length of the video, rounded to whole blocks [default: 10].")
    ] = None
    script: Annotated[
        Path | None,
        typer.Option(
            help='JSON list of shots: [{"prompt": ..., "seconds": ..., "cut": true}, ...]; or a schedule.'
        ),
    ] = None
    backbone: options.Backbone = None
    flow: options.Flow = None
    seed: Annotated[int | None, typer.Option(help="Seed of the first row [default: 0].")] = None
    rows: Annotated[
        int | None,
        typer.Option(help="Videos generated as one batch, seeds counting up from --seed [default: 1]."),
    ] = None
    as_released: Annotated[
        bool,
        typer.Option(
            "--as-released",
            help="Take the window, the phases and, if none is named, the memory of the model's own code.",
        ),
    ] = False
    decoder: options.DecoderName = None
    lora: options.Loras = None
    prompt_embeds: Annotated[
        Path | None, typer.Option(help="File of text embeddings, instead of the public text encoder.")
    ] = None
    clip: Annotated[Path | None, typer.Option("--continue", help="A clip that the video continues.")] = None
    image: Annotated[Path | None, typer.Option(help="A picture that the video starts from.")] = None
    cast: Annotated[
        list[str] | None,
        typer.Option(help="A cast file, or NAME=PICTURE, whose subjects the video shows; may be repeated."),
    ] = None
    device: options.Device = None
    devices: options.Devices = None
    dtype: options.Dtype = None
    precision: options.Precision = None
    eager: options.Eager = False
    low_memory: options.LowMemory = None
    record: Annotated[
        Path | None, typer.Option("--from", help="Repeat the script and settings of this run.json.")
    ] = None

    trust_code: options.TrustCode = False

    def used(self) -> dict[str, Any]:
        """Return the values of the options that were used, by their names."""
        spelled = {"prompt": "prompt", "clip": "--continue", "record": "--from"}
        used = {
            name: value
            for name, value in asdict(self).items()
            if value is not None and value is not False and value != [] and name != "trust_code"
        }
        return {spelled.get(name, f"--{name.replace('_', '-')}"): value for name, value in used.items()}

    def values(self, *, own_memory: bool = False) -> dict[str, Any]:
        """Return what the options say, without those that were not used, as `RunConfig.from_dict` takes it.

        With `own_memory` the caller chooses the memory, and that of a run.json is left out; so is its admission,
        where that is the usual one of the memory.
        """
        if self.record is None:
            start = {"shots": self._shots(), "seeds": self._seeds()}
        else:
            own = {"prompt", "--seconds", "--script", "--seed", "--rows"}
            refuse_with("--from", {name: value for name, value in self.used().items() if name in own})
            start = _recorded(self.record)
        if self.clip is not None and self.image is not None:
            raise refuse("--image", str(self.image), "--continue names pictures too", "use one of the two")
        opening = self.clip or self.image
        chosen = {
            "backbone": self._backbone(),
            "flow": self.flow,
            **self._devices(),
            "dtype": self.dtype,
            "precision": self.precision,
            "opening": None if opening is None else str(opening),
            "cast": self.cast or None,
            "eager": self.eager or None,
            "low_memory": self.low_memory,
        }
        used = {name: value for name, value in chosen.items() if value is not None}
        kept = {name: value for name, value in start.items() if name not in used}
        left_out = kept.pop("memory", None) if own_memory else None
        if self.record is not None and not self.trust_code:
            refuse_code(kept, self.record)
        if _goes_with(left_out, kept.get("admission")):
            del kept["admission"]
        return {**kept, **used}

    def _devices(self) -> dict[str, str | None]:
        """Return the devices of the run."""
        if self.devices is None:
            return {"device": self.device}
        if self.device is not None:
            raise refuse("--device", self.device, "--devices names two", "use one of the two options")
        names = [name.strip() for name in self.devices.split(",")]
        if len(names) != 2 or not all(names):
            raise refuse("--devices", self.devices, "must name two devices", "for example cuda:0,cuda:1")
        return {"device": names[0], "decoder_device": names[1]}

    def _shots(self) -> Any:
        if self.prompt is None and self.script is None:
            remedy = 'for example "a fox on a beach by day", or use --script'
            raise refuse("prompt", None, "it says what to generate", remedy)
        if self.script is None:
            seconds = DEFAULT_SECONDS if self.seconds is None else self.seconds
            return [{"prompt": self.prompt, "seconds": seconds}]
        if self.prompt is not None:
            raise refuse("prompt", self.prompt, "--script has prompts of its own", "use one of the two")
        if self.seconds is not None:
            raise refuse("--seconds", self.seconds, "a script has its own", "leave it out")
        values = read_json(self.script)
        return _scheduled(values, self.script) if isinstance(values, Mapping) else values

    def _seeds(self) -> list[int]:
        first, count = self.seed or 0, 1 if self.rows is None else self.rows
        if not 1 <= count <= MOST_ROWS:
            raise refuse("rows", count, f"must be 1 to {MOST_ROWS}", "1 generates one video")
        return list(range(first, first + count))

    def _backbone(self) -> Any:
        """Name the backbone with the settings that have options of their own; None where no option was used."""
        settings: dict[str, Any] = {
            "decoder": self.decoder,
            "prompt_embeds": None if self.prompt_embeds is None else str(self.prompt_embeds),
            "as_released": self.as_released or None,
            "loras": spell_loras(self.lora) or None,
        }
        used = {name: value for name, value in settings.items() if value is not None}
        check_options(self.backbone, used)
        return {"name": self.backbone, **used} if used else self.backbone


def spell_loras(texts: Sequence[str] | None) -> list[str]:
    """Return the LoRAs of --lora with whole paths: a run may be resumed from another folder."""
    return [spell_choice(read_choice(text)) for text in texts or ()]


def read_loras(backbone: str, texts: Sequence[str] | None) -> tuple[str, ...]:
    """Return the LoRAs of --lora, with whole paths; refuses them where the backbone takes none."""
    loras = spell_loras(texts)
    check_options(backbone, {"loras": loras} if loras else {})
    return tuple(loras)


def check_options(backbone: str | None, used: Mapping[str, Any]) -> None:
    """Refuse an option whose setting the backbone does not have; with None, none was named."""
    for setting, value in used.items():
        option = {"loras": "--lora"}.get(setting, f"--{setting.replace('_', '-')}")
        if backbone is None:
            limit = "it is a setting of the public models"
            raise refuse(option, value, limit, "name one with --backbone")
        # Code of the user's own has its settings checked when they are read.
        kind = BACKBONES.get(backbone)
        if kind is not None and setting not in _settings_of(kind):
            have = ", ".join(name for name, other in BACKBONES.items() if setting in _settings_of(other))
            raise refuse(option, value, f"{backbone} has no such setting", f"leave it out, or choose {have}")


def _settings_of(kind: type[BackboneConfig]) -> set[str]:
    return {each.name for each in fields(kind)}  # type: ignore[arg-type]


def takes_generation(command: Callable[..., None]) -> Callable[..., None]:
    """Spread the options of `Generation` over a command, which is called with one object in their place."""
    hints = get_type_hints(Generation, include_extras=True) | get_type_hints(command, include_extras=True)
    _, *own = inspect.signature(command).parameters.values()
    shared = [
        Parameter(each.name, Parameter.KEYWORD_ONLY, default=each.default) for each in fields(Generation)
    ]
    parameters = [p.replace(kind=Parameter.KEYWORD_ONLY, annotation=hints[p.name]) for p in (*shared, *own)]

    @wraps(command)
    def spread(**values: Any) -> None:
        command(Generation(**{each.name: values.pop(each.name) for each in shared}), **values)

    # Typer reads both.
    spread.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    spread.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return spread


def full_config(values: Mapping[str, Any], settings: Sequence[str]) -> RunConfig:
    """Make the config of these values, None where an option was not used, and of the assignments of --set."""
    chosen = {name: value for name, value in values.items() if value is not None}
    return RunConfig.from_dict(override(chosen, settings))


def refuse_with(option: str, others: Mapping[str, Any]) -> None:
    """Refuse options next to one that takes the settings of an earlier run."""
    for name, value in others.items():
        limit = f"{option} takes the settings of an earlier run"
        raise refuse(name, value, limit, f"leave out {name} or {option}")


def _goes_with(memory: Any, admission: Any) -> bool:
    """Tell whether a recorded admission is the usual one of the recorded memory, so that it may be a default."""
    name = memory.get("name") if isinstance(memory, Mapping) else memory
    # Code that the record names as its memory is not imported to find out.
    if admission is None or not isinstance(name, str) or name not in MEMORIES:
        return False
    return bool(choose("admission", admission) == usual_admission(choose("memory", name)))


def _recorded(path: Path) -> Any:
    about = read_json(path)
    if not isinstance(about, dict) or not isinstance(about.get("config"), dict):
        raise refuse("--from", str(path), "holds no config", "name the run.json of an earlier run")
    return about["config"]


def _scheduled(values: Mapping[str, Any], source: Path) -> list[dict[str, Any]]:
    """Return the shots of a file that holds a schedule."""
    found = parse_schedules(values)
    if len(found) > 1:
        limit = f"it holds {len(found)} schedules"
        remedy = "keep one, or use recap reproduce recurrence --schedules"
        raise refuse("--script", str(source), limit, remedy)
    return [asdict(shot) for shot in found[0].shots]
