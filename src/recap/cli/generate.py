"""`recap generate` generates a video with any memory, or resumes a stopped run."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from recap.backbones.wan.family import released_memory
from recap.cli.console import progress_bar, show_notice
from recap.cli.options import Memory, Setting
from recap.cli.settings import Generation, full_config, refuse_with, takes_generation
from recap.cli.stopping import stoppable
from recap.errors import refuse
from recap.fast.ranks.following import follow
from recap.fast.ranks.group import join_ranks
from recap.io.files import read_json
from recap.io.run_folder import new_folder
from recap.show.result import Run, generate_run, resume


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
    from_block: Annotated[
        int | None,
        typer.Option(help="With --resume: keep the blocks before this one and generate the rest again."),
    ] = None,
) -> None:
    """Generate a video with a memory.

    The video, its page, its trace and its state are written to a folder, block by block. Processes that
    `torchrun` starts generate one video together.
    """
    with join_ranks() as ranks:
        if not ranks.leads:
            follow(ranks)
            return
        ranks.done()
        work, folder = _chosen(options, memory, settings, out, resume_folder, from_block)
        how = partial(_how_to_resume, folder)
        with progress_bar("generating", "blocks", "loading the model") as reporter, stoppable(how):
            run = work(reporter=reporter, ranks=ranks)
    show_notice(f"page: {run.show(browser=False)}")
    for video in run.videos:
        typer.echo(video)


def _chosen(
    options: Generation,
    memory: str | None,
    settings: list[str] | None,
    out: Path | None,
    resume_folder: Path | None,
    from_block: int | None,
) -> tuple[Callable[..., Run], Path]:
    """Return what the options ask for, a new run or the rest of one, and its folder."""
    if resume_folder is not None:
        others = {"--memory": memory, "--set": settings, "--out": out}
        refuse_with("--resume", {**options.used(), **{n: v for n, v in others.items() if v}})
        return partial(
            resume, resume_folder, from_block=from_block, trust_code=options.trust_code
        ), resume_folder
    if from_block is not None:
        raise refuse("--from-block", from_block, "it belongs to --resume", "name the run's folder")
    values = options.values(own_memory=memory is not None or options.as_released)
    if memory is not None:
        values["memory"] = memory
    elif options.as_released:
        values["memory"] = released_memory(str(options.backbone))
    config = full_config(values, settings or [])
    folder = new_folder(config.shots[0].prompt, config.memory.name) if out is None else out
    return partial(generate_run, config, folder), folder


def _how_to_resume(folder: Path) -> str:
    """Return the command that continues a run, "" where it has not begun."""
    if not (folder / "run.json").is_file():
        return ""
    # A run with code of a user is not continued without it.
    trust = " --trust-code" if read_json(folder / "run.json").get("code") else ""
    return f"continue with: recap generate --resume {shlex.quote(str(folder))}{trust}"
