"""`recap generate`: draw a video with any memory, or continue a stopped run."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import typer

from recap.cli.console import progress_bar, show_notice
from recap.config import RunConfig, override, read_json
from recap.errors import refuse
from recap.run import generate, resume


def generate_command(
    prompt: Annotated[str | None, typer.Argument(help="What the video shows; or use --script.")] = None,
    seconds: Annotated[float, typer.Option(help="Length of the video.")] = 10.0,
    script: Annotated[
        Path | None,
        typer.Option(help='JSON list of shots: [{"prompt": ..., "seconds": ..., "cut": true}, ...].'),
    ] = None,
    backbone: Annotated[str, typer.Option(help="Which model draws; see `recap list`.")] = "untrained",
    memory: Annotated[str, typer.Option(help="Which memory it has; see `recap list`.")] = "recap",
    flow: Annotated[str, typer.Option(help="Optical flow for the novelty bank; see `recap list`.")] = "auto",
    seed: Annotated[int, typer.Option(help="Seed of the first row.")] = 0,
    rows: Annotated[int, typer.Option(help="Videos drawn as one batch, with seeds seed, seed + 1, ...")] = 1,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="A setting, e.g. memory.reinforcement=5; repeatable.")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    out: Annotated[Path | None, typer.Option(help="Folder of the run; default runs/<time>-<memory>.")] = None,
    repeat: Annotated[Path | None, typer.Option("--from", help="Repeat the run of this run.json.")] = None,
    resume_folder: Annotated[
        Path | None, typer.Option("--resume", help="Continue the run in this folder, with its own settings.")
    ] = None,
) -> None:
    """Draw a video block by block and write it, its trace and its state to a folder."""
    with progress_bar("drawing", "blocks") as report:
        if resume_folder is not None:
            record = resume(resume_folder, progress=report, notice=show_notice)
        else:
            if repeat is not None:
                values = _repeated(repeat)
            else:
                chosen = {"backbone": backbone, "memory": memory, "flow": flow, "device": device}
                values = {**chosen, "shots": _shots(prompt, seconds, script), "seeds": _seeds(seed, rows)}
            complete = RunConfig.from_dict(values).to_dict()
            config = RunConfig.from_dict(override(complete, settings or []))
            record = generate(config, out or _default_folder(config), progress=report, notice=show_notice)
    for video in record.videos:
        typer.echo(video)


def _shots(prompt: str | None, seconds: float, script: Path | None) -> Any:
    if (prompt is None) == (script is None):
        raise refuse(
            "prompt", prompt, "give a prompt or a --script, one of the two", "see recap generate --help"
        )
    return [{"prompt": prompt, "seconds": seconds}] if script is None else read_json(script)


def _seeds(seed: int, rows: int) -> list[int]:
    if rows < 1:
        raise refuse("rows", rows, "must be 1 or more", "1 draws one video")
    return list(range(seed, seed + rows))


def _repeated(path: Path) -> Any:
    about = read_json(path)
    if not isinstance(about, dict) or not isinstance(about.get("config"), dict):
        raise refuse("--from", str(path), "holds no config", "name the run.json of an earlier run")
    return about["config"]


def _default_folder(config: RunConfig) -> Path:
    name = config.memory.name.rpartition(":")[2]
    return Path("runs") / f"{time.strftime('%Y%m%d-%H%M%S')}-{name}-{config.seeds[0]}"
