"""`recap compare`: the same script with several memories, side by side on one page."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from recap.cli.console import progress_bar, show_notice
from recap.cli.options import Backbone, Device, Flow, Prompt, Script, Seconds
from recap.cli.settings import full_config, script_shots
from recap.config import RunConfig, override
from recap.errors import refuse, unknown_name
from recap.show.comparison import compare


def compare_command(
    prompt: Prompt = None,
    memories: Annotated[
        str, typer.Option(help="Which memories, separated by commas; see `recap list`.")
    ] = "none,sink,recap",
    seconds: Seconds = None,
    script: Script = None,
    backbone: Backbone = None,
    flow: Flow = None,
    seed: Annotated[int, typer.Option(help="The seed of every run.")] = 0,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="A setting; memory.x=... goes to every memory that has an x. Repeatable."),
    ] = None,
    device: Device = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder of the result, new or of this comparison; default runs/<time>-compare."),
    ] = None,
) -> None:
    """Draw the same script with several memories and write one page that compares them.

    The same command with the folder of a stopped comparison goes on with it.
    """
    chosen = {"backbone": backbone, "flow": flow, "device": device}
    values = {"shots": script_shots(prompt, seconds, script), "seeds": [seed]}
    values |= {name: value for name, value in chosen.items() if value is not None}
    names = [name.strip() for name in memories.split(",")]
    if not all(names):
        raise refuse("--memories", memories, "a name is missing", "for example none,sink,recap")
    shared = [text for text in settings or [] if text.partition("=")[0].partition(".")[0] != "memory"]
    own = [text for text in settings or [] if text not in shared]
    config = full_config(values, shared)
    folder = out or Path("runs") / f"{time.strftime('%Y%m%d-%H%M%S')}-compare"
    tables = _tables(config, names, own)
    with progress_bar("drawing", "blocks") as drawing, progress_bar("showing", "pictures") as showing:
        summary = compare(config, tables, folder, drawing, show_notice, showing=showing)
    typer.echo(summary.page)


def _tables(config: RunConfig, names: Sequence[str], settings: Sequence[str]) -> list[dict[str, Any]]:
    """Every memory with its settings; each assignment goes to all memories that know it."""
    plain = config.to_dict()
    kinds = [RunConfig.from_dict({**plain, "memory": name}).memory.settings for name in names]
    known = [{field.name for field in dataclasses.fields(kind)} for kind in kinds]
    tables: list[dict[str, Any]] = [{"memory": {"name": name}} for name in names]
    for text in settings:
        setting = text.partition("=")[0].partition(".")[2]
        if not setting:
            limit = "the memories of a comparison are those of --memories"
            raise refuse("--set", text, limit, "for example --set memory.reinforcement=3")
        if not any(setting in fields for fields in known):
            raise unknown_name("memory setting", setting, set().union(*known))
        tables = [
            override(table, [text]) if setting in fields else table
            for table, fields in zip(tables, known, strict=True)
        ]
    return [table["memory"] for table in tables]
