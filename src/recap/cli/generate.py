"""`recap generate` generates a video with any memory, or resumes a stopped run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from recap.backbones.wan.family import released_memory
from recap.cli.console import progress_bar, show_notice
from recap.cli.options import Memory, Setting
from recap.cli.settings import Generation, full_config, refuse_with, takes_generation
from recap.show.result import generate_run, resume


@takes_generation
def generate_command(
    options: Generation,
    memory: Memory = None,
    settings: Setting = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the run [default: runs/<time>-<prompt>-<memory>].")
    ] = None,
    resume_folder: Annotated[
        Path | None, typer.Option("--resume", help="Resume the run in this folder, with its own settings.")
    ] = None,
) -> None:
    """Generate a video with a memory.

    The video, its page, its trace and its state are written to a folder, block by block.
    """
    with progress_bar("generating", "blocks", "loading the model") as reporter:
        if resume_folder is not None:
            others = {"--memory": memory, "--set": settings, "--out": out}
            refuse_with("--resume", {**options.used(), **{n: v for n, v in others.items() if v}})
            run = resume(resume_folder, reporter=reporter)
        else:
            values = options.values()
            if memory is not None:
                values["memory"] = memory
            elif options.as_released:
                values["memory"] = released_memory(str(options.backbone))
            run = generate_run(full_config(values, settings or []), out, reporter)
    show_notice(f"page: {run.show(browser=False)}")
    for video in run.videos:
        typer.echo(video)
