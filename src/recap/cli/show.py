"""`recap show` writes the page of one run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from recap.cli.options import TrustCode
from recap.show.result import Run
from recap.show.run_page import write_run_page


def show_command(
    run: Annotated[Path, typer.Argument(help="Folder of a finished run.")],
    trust_code: TrustCode = False,
    browser: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
) -> None:
    """Write the page of one run.

    It shows the video, what the bank kept and when, the shares of attention and the settings.
    """
    write_run_page(run, trust_code=trust_code)
    typer.echo(Run(run, trust_code=trust_code).show(browser=browser))
