"""This module prints notices, errors and progress, all on standard error."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    ProgressColumn,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.progress import Progress as RichProgress
from rich.text import Text

from recap.io.report import Progress, Reporter

_console = Console(stderr=True, soft_wrap=True, highlight=False)
# Seconds between two lines of progress where standard error is no terminal.
LINE_EVERY_S = 5.0


def show_notice(text: str) -> None:
    """Print a line for the user's information."""
    _console.print(Text(text, style="dim"))


def show_error(text: str) -> None:
    """Print the one line that a command fails with."""
    _console.print(Text("error: ", style="bold red") + Text(" ".join(text.split()), style=""))


@contextmanager
def progress_bar(what: str, unit: str, before: str = "") -> Iterator[Reporter]:
    """Show notices, and a bar with counts, pictures per second and the time left; in a log, a line every few seconds.

    `before` is shown until there is something to count.
    """
    if not _console.is_terminal:
        if before:
            show_notice(f"{what}: {before}")
        yield Reporter(show_notice, _lines(what, unit))
        return
    rate_column = TextColumn("{task.fields[rate]:.1f} pictures/s")
    columns = (MofNCompleteColumn(), TextColumn(unit), rate_column, TimeRemainingColumn())
    with (
        _console.status(before) if before else nullcontext() as status,
        _bar(what, *columns) as update,
    ):

        def report(done: int, total: int | None, rate: float) -> None:
            if status:
                status.stop()
            update(done, total, rate)

        yield Reporter(show_notice, report)


@contextmanager
def byte_bar(what: str) -> Iterator[Reporter]:
    """Show notices, and a bar of bytes with their rate and the time left."""
    with _bar(what, DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn()) as update:
        yield Reporter(show_notice, update)


@contextmanager
def _bar(what: str, *columns: ProgressColumn) -> Iterator[Progress]:
    bar = RichProgress(TextColumn(what), BarColumn(), *columns, console=_console)
    task = bar.add_task(what, total=None, rate=0.0)

    def update(done: int, total: int | None, rate: float) -> None:
        # The bar starts when there is something to report: a refusal then stands alone.
        bar.start()
        bar.update(task, completed=done, total=total, rate=rate)
        if done == total:
            # One bar is live at a time: what follows may have its own.
            bar.stop()

    try:
        yield update
    finally:
        if bar.live.is_started:
            bar.stop()


def _lines(what: str, unit: str) -> Progress:
    """Report by plain lines: the first, the last, and one every few seconds between them."""
    last, shown = -LINE_EVERY_S, -1

    def report(done: int, total: int | None, rate: float) -> None:
        nonlocal last, shown
        now = time.monotonic()
        if done == shown or (done != total and now - last < LINE_EVERY_S):
            return
        last, shown = now, done
        count = f"{done} of {total} {unit}" if total else f"{done} {unit}"
        show_notice(f"{what}: {count}" + (f", {rate:.1f} pictures/s" if rate else ""))

    return report
