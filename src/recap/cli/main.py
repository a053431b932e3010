"""This module joins the commands of `recap`, and turns every error into a line and an exit code."""

from __future__ import annotations

import errno
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import entry_points
from typing import Annotated, Any

import torch
import typer
from typer.core import TyperGroup

from recap import __version__
from recap.cli import (
    bench,
    cast,
    compare,
    convert,
    fetch_weights,
    generate,
    inspect,
    list_names,
    probe,
    reproduce,
    serve,
    show,
    studio,
    study,
    verify,
)
from recap.cli.console import show_error
from recap.cli.examples import EXAMPLES
from recap.cli.plug_ins import PLUG_INS, find_plug_in
from recap.errors import RecapError, refuse, unknown_name
from recap.fast.threads import use_fair_threads


class _WithPlugIns(TyperGroup):
    """Adds the commands of plug-ins, which are imported only when they are used or listed."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [*super().list_commands(ctx), *sorted(entry_points(group=PLUG_INS).names)]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        # The help leaves out a plug-in that cannot be loaded; using it shows why, see `_run_app`.
        with suppress(RecapError):
            return super().get_command(ctx, cmd_name) or find_plug_in(cmd_name)


app = typer.Typer(
    cls=_WithPlugIns,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Appearance memory for long video generation.",
    epilog=EXAMPLES[""],
)
COMMANDS: dict[str, Callable[..., None]] = {
    "generate": generate.generate_command,
    "compare": compare.compare_command,
    "show": show.show_command,
    "studio": studio.studio_command,
    "serve": serve.serve_command,
    "inspect": inspect.inspect_command,
    "list": list_names.list_command,
    "weights": fetch_weights.weights_command,
    "convert": convert.convert_command,
    "bench": bench.bench_command,
    "probe": probe.probe_command,
    "verify": verify.verify_command,
    "reproduce": reproduce.reproduce_command,
    "report": reproduce.report_command,
}
DISK_FAULTS = {
    errno.ENOSPC: "make room there",
    errno.EDQUOT: "make room there, or ask for a larger quota",
    errno.EFBIG: "choose a file system, or a limit of the shell, that takes larger files",
    errno.EROFS: "choose a folder that can be written",
    errno.EIO: "check the disk, or choose another one",
}
# What the parser raises for a wrong option or argument; typer has no public name for it.
UsageError: Any = typer.BadParameter.__base__
for name, command in COMMANDS.items():
    # The first line of the docstring, whole: by itself the help would cut it to the width of a terminal.
    summary = (command.__doc__ or "").partition("\n")[0]
    app.command(name, short_help=summary, epilog=EXAMPLES.get(name))(command)

GROUPS = {
    "cast": (cast.app, "Keep subjects for other videos: save, show, merge."),
    "study": (study.app, "Ask people which video is better: make, serve, report."),
}
for name, (group, summary) in GROUPS.items():
    app.add_typer(group, name=name, short_help=summary)


def _print_version(wanted: bool) -> None:
    if wanted:
        device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
        typer.echo(f"recap {__version__}, torch {torch.__version__}, {device}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print versions and device."),
    ] = False,
) -> None:
    """Declare the options of `recap` itself."""


def run_safely(command: Callable[[], object]) -> None:
    """Run a command; what a user can correct becomes one line that says how, and exit code 2."""
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
        full = isinstance(error, MemoryError | torch.OutOfMemoryError) or "allocate memory" in str(error)
        if not full:
            raise
        remedy = "take fewer rows, a smaller capacity or smaller pictures; --decoder tiny, --precision int8"
        show_error(f"out of memory; {remedy}")
        sys.exit(2)


def _explained(error: OSError) -> str:
    """Return which file could not be read or written, why, and what to do; complete files stay as they are."""
    limit = error.strerror or str(error)
    if error.errno not in DISK_FAULTS:
        remedy = "check the path or choose another --out"
        return str(refuse("file", error.filename, limit, remedy)) if error.filename else f"{limit}; {remedy}"
    # A failed `write` does not know the name of its file.
    where = error.filename or "the file being written"
    again = "then give the command again (a stopped run: --resume), or choose another --out"
    remedy = f"{DISK_FAULTS[error.errno]}, {again}"
    return str(refuse("disk", where, limit, remedy))


def _run_app() -> None:
    """Run the command line; wrong options and commands are refused in the same form as wrong values."""
    try:
        sys.exit(app(standalone_mode=False))
    except typer.Abort as stop:
        # The parser takes the end of any pipe for the end of the terminal's input.
        if isinstance(stop.__cause__ or stop.__context__, EOFError):
            limit = "it ended without a message, perhaps killed or out of memory"
            raise refuse("helper process", None, limit, "give the same command again") from stop
        show_error("stopped")
        sys.exit(130)
    except UsageError as error:
        message = error.format_message()
        if message.startswith("Usage:"):
            # A command without arguments shows its help.
            typer.echo(message, err=True)
            sys.exit(2)
        words = sys.argv[1:2]
        if message.startswith("No such command") and error.ctx.parent is None:
            # This refuses a plug-in that is broken or not installed.
            find_plug_in(words[0])
            raise unknown_name(
                "command", words[0], [*COMMANDS, *GROUPS, *entry_points(group=PLUG_INS).names]
            ) from error
        # Some versions write their own guess on a second line.
        problem = message.partition("\n")[0].rstrip(".")
        # An option at the end without its value is refused before the parser knows the command.
        path = error.ctx.command_path if error.ctx else "recap"
        raise RecapError(f"{problem}; see `{path} --help`") from error


def main() -> None:
    """Run the console script."""
    if sys.argv[1:2] != ["list"] or not hasattr(signal, "SIGPIPE"):
        run_safely(_run_app)
        return
    # Like other tools that only print, it ends silently when `head` has read enough.
    before = signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        run_safely(_run_app)
    finally:
        signal.signal(signal.SIGPIPE, before)
