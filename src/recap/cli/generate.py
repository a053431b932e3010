"""`recap generate`: generate a video with any memory, or resume a stopped run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from recap.cli.console import progress_bar, show_notice
from recap.cli.options import (
    AsReleased,
    Backbone,
    Continued,
    DecoderName,
    Device,
    Dtype,
    Eager,
    Flow,
    Image,
    Memory,
    Prompt,
    PromptEmbeds,
    Script,
    Seconds,
    Setting,
)
from recap.cli.settings import backbone_choice, full_config, memory_choice, opening_path, script_shots
from recap.config import read_json
from recap.errors import refuse
from recap.show.result import generate_run, resume

MOST_ROWS = 256
Rows = Annotated[
    int | None,
    typer.Option(help="Videos generated as one batch, seeds counting up from --seed [default: 1]."),
]
Out = Annotated[Path | None, typer.Option(help="Folder of the run [default: runs/<time>-<prompt>-<memory>].")]
ResumeFolder = Annotated[
    Path | None, typer.Option("--resume", help="Resume the run in this folder, with its own settings.")
]


def generate_command(
    prompt: Prompt = None,
    seconds: Seconds = None,
    script: Script = None,
    backbone: Backbone = None,
    memory: Memory = None,
    flow: Flow = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the first row [default: 0].")] = None,
    rows: Rows = None,
    settings: Setting = None,
    as_released: AsReleased = False,
    decoder: DecoderName = None,
    prompt_embeds: PromptEmbeds = None,
    continued: Continued = None,
    image: Image = None,
    device: Device = None,
    dtype: Dtype = None,
    eager: Eager = False,
    out: Out = None,
    repeat: Annotated[Path | None, typer.Option("--from", help="Repeat the run of this run.json.")] = None,
    resume_folder: ResumeFolder = None,
) -> None:
    """Generate a video with a memory.

    The video, its page, its trace and its state are written to a folder, block by block.
    """
    script_options = {
        "prompt": prompt,
        "--seconds": seconds,
        "--script": script,
        "--seed": seed,
        "--rows": rows,
    }
    chosen: dict[str, Any] = {
        "memory": memory_choice(memory, backbone, as_released=as_released),
        "flow": flow,
        "device": device,
        "dtype": dtype,
        "opening": opening_path(continued, image),
        "eager": eager or None,
        "backbone": backbone_choice(backbone, decoder, prompt_embeds, as_released=as_released),
    }
    with progress_bar("generating", "blocks", "loading the model") as report:
        if resume_folder is not None:
            others = {**{f"--{name}": value for name, value in chosen.items()}, "--set": settings}
            _refuse_with("--resume", {**script_options, **others, "--out": out, "--from": repeat})
            run = resume(resume_folder, progress=report, notice=show_notice)
        else:
            if repeat is not None:
                _refuse_with("--from", script_options)
                values = _recorded(repeat)
            else:
                values = {"shots": script_shots(prompt, seconds, script), "seeds": _seeds(seed, rows)}
            given = {name: value for name, value in chosen.items() if value is not None}
            run = generate_run(full_config({**values, **given}, settings or []), out, report, show_notice)
    show_notice(f"page: {run.show(browser=False)}")
    for video in run.videos:
        typer.echo(video)


def _refuse_with(option: str, others: dict[str, Any]) -> None:
    for name, value in others.items():
        if value is not None and value != []:
            limit = f"{option} takes the settings of an earlier run"
            raise refuse(name, value, limit, f"leave out {name} or {option}")


def _seeds(seed: int | None, rows: int | None) -> list[int]:
    first, count = seed or 0, 1 if rows is None else rows
    if not 1 <= count <= MOST_ROWS:
        raise refuse("rows", count, f"must be 1 to {MOST_ROWS}", "1 generates one video")
    return list(range(first, first + count))


def _recorded(path: Path) -> Any:
    about = read_json(path)
    if not isinstance(about, dict) or not isinstance(about.get("config"), dict):
        raise refuse("--from", str(path), "holds no config", "name the run.json of an earlier run")
    return about["config"]
