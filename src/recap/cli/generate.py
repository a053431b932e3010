"""`recap generate`: generate a video with any memory, or resume a stopped run."""

from __future__ import annotations

import shlex
import signal
from collections.abc import Iterator
from contextlib import contextmanager
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
    TrustCode,
)
from recap.cli.settings import backbone_choice, full_config, memory_choice, opening_path, script_shots
from recap.config import MOST_ROWS, read_json, refuse_code
from recap.errors import refuse
from recap.run import new_folder
from recap.show.result import generate_run, resume

Rows = Annotated[
    int | None,
    typer.Option(help="Videos generated as one batch, seeds counting up from --seed [default: 1]."),
]
Out = Annotated[Path | None, typer.Option(help="Folder of the run [default: runs/<time>-<prompt>-<memory>].")]
ResumeFolder = Annotated[
    Path | None, typer.Option("--resume", help="Resume the run in this folder, with its own settings.")
]
FromBlock = Annotated[
    int | None,
    typer.Option(help="With --resume: keep the blocks before this one and generate the rest again."),
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
    from_block: FromBlock = None,
    trust_code: TrustCode = False,
) -> None:
    """Generate a video with a memory.

    The video, its page, its trace and its state are written to a folder, block by block.
    """
    words = {"prompt": prompt, "--seconds": seconds, "--script": script, "--seed": seed, "--rows": rows}
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
            _refuse_with("--resume", {**words, **others, "--out": out, "--from": repeat})
            how: dict[str, Any] = {"from_block": from_block, "trust_code": trust_code}
            with _stoppable(resume_folder):
                run = resume(resume_folder, progress=report, notice=show_notice, **how)
        else:
            if from_block is not None:
                raise refuse("--from-block", from_block, "it belongs to --resume", "name the run's folder")
            if repeat is not None:
                values = _recorded(repeat, words, chosen, trust_code)
            else:
                values = {"shots": script_shots(prompt, seconds, script), "seeds": _seeds(seed, rows)}
            given = {name: value for name, value in chosen.items() if value is not None}
            config = full_config({**values, **given}, settings or [])
            folder = new_folder(config) if out is None else out
            with _stoppable(folder):
                run = generate_run(config, folder, report, show_notice)
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


@contextmanager
def _stoppable(folder: Path) -> Iterator[None]:
    """Say how to continue a run that is stopped by Ctrl-C or SIGTERM."""

    def stop(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        if (folder / "run.json").is_file():
            show_notice(f"stopped; continue with: recap generate --resume {shlex.quote(str(folder))}")
        raise
    finally:
        signal.signal(signal.SIGTERM, before)


def _recorded(path: Path, words: dict[str, Any], chosen: dict[str, Any], trust_code: bool) -> Any:
    """Read the config of a run.json, which has shots and seeds of its own; what was chosen replaces its settings."""
    _refuse_with("--from", words)
    about = read_json(path)
    if not isinstance(about, dict) or not isinstance(about.get("config"), dict):
        raise refuse("--from", str(path), "holds no config", "name the run.json of an earlier run")
    if not trust_code:
        used = {name: value for name, value in about["config"].items() if chosen.get(name) is None}
        refuse_code(used, path)
    return about["config"]
