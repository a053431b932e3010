"""`recap weights`: fetch public weights that the package does not carry."""

from __future__ import annotations

from typing import Annotated

import typer

from recap.cli.console import show_notice
from recap.errors import unknown_name
from recap.flow.weights import fetch_raft_small

FETCHERS = {"raft-small": fetch_raft_small}


def weights_command(name: Annotated[str, typer.Argument(help=f"One of: {', '.join(FETCHERS)}.")]) -> None:
    """Fetch public weights, check them and put them where they are found."""
    if name not in FETCHERS:
        raise unknown_name("weights", name, FETCHERS)
    typer.echo(FETCHERS[name](show_notice))
