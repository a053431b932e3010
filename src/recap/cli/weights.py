"""`recap weights`: fetch public weights that the package does not carry."""

from __future__ import annotations

from typing import Annotated

import typer

from recap.backbones.helios.spec import ROWS
from recap.backbones.helios.weights import fetch_helios_weights
from recap.backbones.wan.weights import SETS, fetch_weights
from recap.cli.console import byte_bar, show_notice
from recap.errors import unknown_name
from recap.flow.weights import FILE_NAME, LICENCE, fetch_raft_small
from recap.io.files import weights_folder

NAMES = ("raft-small", *SETS, *ROWS)


def weights_command(
    name: Annotated[str, typer.Argument(help=f"One of: {', '.join(NAMES)}.")],
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print licences, files and sizes, and fetch nothing.")
    ] = False,
) -> None:
    """Fetch public weights, check them and put them where they are found."""
    if name not in NAMES:
        raise unknown_name("weights", name, NAMES)
    if name == "raft-small":
        if dry_run:
            show_notice(f"licence: {LICENCE}")
            show_notice(f"raft-small: 4.0 MB to fetch, to {weights_folder() / FILE_NAME}")
        else:
            typer.echo(fetch_raft_small(show_notice))
        return
    if name in ROWS:
        folder = fetch_helios_weights(name, dry_run=dry_run, report=show_notice)
        if folder is not None:
            typer.echo(folder)
        return
    with byte_bar("checking") as progress:
        files = fetch_weights(name, dry_run=dry_run, report=show_notice, progress=progress)
    if files is not None:
        typer.echo(files.checkpoint)
