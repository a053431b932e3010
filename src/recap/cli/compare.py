"""`recap compare` generates the same script with several memories, next to each other on one page."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from recap.cli.console import progress_bar
from recap.cli.settings import Generation, full_config, takes_generation
from recap.cli.stopping import stoppable
from recap.config import RunConfig, override
from recap.errors import refuse, unknown_name
from recap.io.run_folder import new_folder
from recap.show.comparison import compare


@takes_generation
def compare_command(
    options: Generation,
    memories: Annotated[
        str, typer.Option(help="Which memories, separated by commas; see `recap list memories`.")
    ] = "none,sink,recap",
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set", help="A setting; memory.x=... is set in every memory that has an x. Repeatable."
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder of the result, new or of this comparison [default: runs/<time>-<prompt>-compare]."
        ),
    ] = None,
) -> None:
    """Generate one script with several memories.

    One page compares them. The same command with the folder of a stopped comparison resumes it.
    """
    names = [name.strip() for name in memories.split(",")]
    if not all(names):
        raise refuse("--memories", memories, "a name is missing", "for example none,sink,recap")
    own = [text for text in settings or [] if text.partition("=")[0].partition(".")[0] == "memory"]
    config = full_config(
        options.values(own_memory=True), [text for text in settings or [] if text not in own]
    )
    tables = _memory_tables(config, names, own)
    with (
        progress_bar("generating", "blocks", "loading the model") as generating,
        progress_bar("showing", "pictures") as showing,
    ):
        folder = out or new_folder(config.shots[0].prompt, "compare")
        again = f"the same command with --out {shlex.quote(str(folder))} continues it"
        with stoppable(lambda: again if folder.is_dir() else ""):
            summary = compare(config, tables, folder, reporter=generating, showing=showing.progress)
    typer.echo(summary.page)


def _memory_tables(config: RunConfig, names: Sequence[str], settings: Sequence[str]) -> list[dict[str, Any]]:
    """Make a table of settings per memory; each assignment is applied to all memories that have the setting."""
    plain = config.to_dict()
    kinds = [RunConfig.from_dict({**plain, "memory": name}).memory.settings for name in names]
    known = [{field.name for field in dataclasses.fields(kind)} for kind in kinds]
    wanted = {text: text.partition("=")[0].partition(".")[2] for text in settings}
    for text, setting in wanted.items():
        if not setting:
            limit = "the memories of a comparison are those of --memories"
            raise refuse("--set", text, limit, "for example --set memory.reinforcement=3")
        if not any(setting in fields for fields in known):
            raise unknown_name("memory setting", setting, set().union(*known))
    return [
        override({"memory": {"name": name}}, [text for text in settings if wanted[text] in fields])["memory"]
        for name, fields in zip(names, known, strict=True)
    ]
