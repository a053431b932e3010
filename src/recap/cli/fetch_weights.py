"""`recap weights` fetches public weights that the package does not carry."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from recap.backbones.helios.checkpoint import fetch_helios_weights
from recap.backbones.helios.spec import ROWS
from recap.backbones.wan.published import SETS, fetch_weights
from recap.cli.console import byte_bar
from recap.errors import refuse, unknown_name
from recap.flow import RAFT_SMALL
from recap.io.report import Reporter

NAMES = (RAFT_SMALL.name, *SETS, *ROWS)


def weights_command(
    name: Annotated[str | None, typer.Argument(help=f"One of: {', '.join(NAMES)}.")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print licences, files and sizes, and fetch nothing.")
    ] = False,
) -> None:
    """Fetch public weights, check them and put them where recap looks for them."""
    if name is None:
        raise refuse("NAME", None, "it says what to fetch", f"one of: {', '.join(NAMES)}")
    if name not in NAMES:
        raise unknown_name("weights", name, NAMES)
    with byte_bar("checking") as reporter:
        found = _fetch(name, dry_run, reporter)
    if found is not None:
        typer.echo(found)


def _fetch(name: str, dry_run: bool, reporter: Reporter) -> Path | None:
    """Fetch what one name stands for; returns its main file or folder, and None after a dry run."""
    if name in ROWS:
        return fetch_helios_weights(name, dry_run=dry_run, reporter=reporter)
    if name in SETS:
        return fetch_weights(name, dry_run=dry_run, reporter=reporter)
    if not dry_run:
        return RAFT_SMALL.fetch(reporter)
    reporter.notice(f"licence: {RAFT_SMALL.licence}")
    reporter.notice(f"raft-small: 4.0 MB to fetch, to {RAFT_SMALL.path}")
    return None
