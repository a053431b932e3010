"""`recap sweep status`: how far the sweeps of a folder are."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from recap.tables.status import find_sweeps, sweep_status

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Sweeps: the runs behind the tables.",
)


@app.command("status")
def status_command(
    folder: Annotated[
        Path, typer.Argument(help="Folder of results, of one table (results/TABLE) or of its work.")
    ] = Path("results"),
) -> None:
    """How sweeps stand: done, under way, waiting, given up and why, and the time left."""
    for place in find_sweeps(folder):
        status = sweep_status(place)
        typer.echo(f"{_name(place, folder.resolve())}: {status.line()}")
        for key, error in status.errors.items():
            typer.echo(f"  {key}: {error}")


def _name(place: Path, asked: Path) -> str:
    """A table's sweep lies in its `work`; below the folder that was asked for, the way there tells two apart."""
    table = place.parent if place.name == "work" else place
    return table.relative_to(asked).as_posix() if asked in table.parents else table.name
