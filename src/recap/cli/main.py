"""`recap`: the commands, and the one place where an error becomes a line and an exit code."""

from __future__ import annotations

import errno
import sys
from collections.abc import Callable
from typing import Annotated

import torch
import typer

from recap import __version__
from recap.cli import (
    bench,
    compare,
    convert,
    generate,
    inspect,
    list_names,
    reproduce,
    vbench,
    weights,
)
from recap.cli.console import show_error
from recap.fast.threads import use_fair_threads

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Appearance memory for long video generation.",
)
app.command("generate")(generate.generate_command)
app.command("compare")(compare.compare_command)
app.command("inspect")(inspect.inspect_command)
app.command("list")(list_names.list_command)
app.command("weights")(weights.weights_command)
app.command("convert")(convert.convert_command)
app.command("bench")(bench.bench_command)
app.command("reproduce")(reproduce.reproduce_command)
app.command("report")(reproduce.report_command)
app.add_typer(vbench.app, name="vbench")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Options of `recap` itself."""


def run_safely(command: Callable[[], object]) -> None:
    """Run; what a user can mend becomes one line that says how, and exit code 2."""
    use_fair_threads()
    try:
        command()
    except ValueError as error:
        show_error(str(error))
        sys.exit(2)
    except OSError as error:
        show_error(_explained(error))
        sys.exit(2)
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError | torch.OutOfMemoryError) and "allocate memory" not in str(
            error
        ):
            raise
        show_error("out of memory; take fewer rows, a smaller capacity or smaller pictures")
        sys.exit(2)


def _explained(error: OSError) -> str:
    where = f" ({error.filename})" if error.filename else ""
    full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    remedy = "make room there or choose another --out" if full else "check the path or choose another --out"
    return f"{error.strerror or error}{where}; {remedy}"


def main() -> None:
    """The console script."""
    run_safely(app)
