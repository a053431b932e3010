"""`recap generate`: draw a video with any memory, or continue a stopped run."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import typer

from recap.cli.console import progress_bar, show_notice
from recap.cli.options import (
    AsReleased,
    Backbone,
    DecoderName,
    Device,
    Dtype,
    Eager,
    Flow,
    GoOn,
    Image,
    Prompt,
    PromptEmbeds,
    Script,
    Seconds,
)
from recap.cli.settings import backbone_choice, full_config, opening_of, script_shots
from recap.config import RunConfig, read_json
from recap.errors import refuse
from recap.run import generate, resume

MOST_ROWS = 256


def generate_command(
    prompt: Prompt = None,
    seconds: Seconds = None,
    script: Script = None,
    backbone: Backbone = None,
    memory: Annotated[
        str | None, typer.Option(help="Which memory it has; see `recap list` [default: recap].")
    ] = None,
    flow: Flow = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the first row [default: 0].")] = None,
    rows: Annotated[
        int | None,
        typer.Option(help="Videos drawn as one batch, seeds counting up from --seed [default: 1]."),
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="A setting, e.g. memory.reinforcement=5; repeatable.")
    ] = None,
    as_released: AsReleased = False,
    decoder: DecoderName = None,
    prompt_embeds: PromptEmbeds = None,
    go_on: GoOn = None,
    image: Image = None,
    device: Device = None,
    dtype: Dtype = None,
    eager: Eager = False,
    out: Annotated[Path | None, typer.Option(help="Folder of the run; default runs/<time>-<memory>.")] = None,
    repeat: Annotated[Path | None, typer.Option("--from", help="Repeat the run of this run.json.")] = None,
    resume_folder: Annotated[
        Path | None, typer.Option("--resume", help="Continue the run in this folder, with its own settings.")
    ] = None,
) -> None:
    """Draw a video block by block and write it, its trace and its state to a folder."""
    drawn = {"prompt": prompt, "--seconds": seconds, "--script": script, "--seed": seed, "--rows": rows}
    opening = opening_of(go_on, image)
    chosen: dict[str, Any] = {
        "memory": memory,
        "flow": flow,
        "device": device,
        "dtype": dtype,
        "opening": opening,
    }
    chosen |= {"eager": eager or None}
    chosen |= backbone_choice(backbone, memory, decoder, prompt_embeds, as_released=as_released)
    given = {name: value for name, value in chosen.items() if value is not None}
    with progress_bar("drawing", "blocks") as report:
        if resume_folder is not None:
            more = {"--out": out, "--from": repeat, "--set": settings}
            _refuse_beside("--resume", {**drawn, **{f"--{n}": v for n, v in chosen.items()}, **more})
            record = resume(resume_folder, progress=report, notice=show_notice)
        else:
            if repeat is not None:
                _refuse_beside("--from", drawn)
                values = _repeated(repeat)
            else:
                values = {"shots": script_shots(prompt, seconds, script), "seeds": _seeds(seed, rows)}
            config = full_config({**values, **given}, settings or [])
            record = generate(config, out or _default_folder(config), progress=report, notice=show_notice)
    for video in record.videos:
        typer.echo(video)


def _refuse_beside(option: str, others: dict[str, Any]) -> None:
    for name, value in others.items():
        if value is not None and value != []:
            limit = f"{option} takes the settings of an earlier run"
            raise refuse(name, value, limit, f"leave out {name} or {option}")


def _seeds(seed: int | None, rows: int | None) -> list[int]:
    first, count = seed or 0, 1 if rows is None else rows
    if not 1 <= count <= MOST_ROWS:
        raise refuse("rows", count, f"must be 1 to {MOST_ROWS}", "1 draws one video")
    return list(range(first, first + count))


def _repeated(path: Path) -> Any:
    about = read_json(path)
    if not isinstance(about, dict) or not isinstance(about.get("config"), dict):
        raise refuse("--from", str(path), "holds no config", "name the run.json of an earlier run")
    return about["config"]


def _default_folder(config: RunConfig) -> Path:
    name = config.memory.name.rpartition(":")[2]
    return Path("runs") / f"{time.strftime('%Y%m%d-%H%M%S')}-{name}-{config.seeds[0]}"
