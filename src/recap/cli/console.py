"""What the commands print: notices, errors and a progress bar, all on standard error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.text import Text

_console = Console(stderr=True, soft_wrap=True, highlight=False)


def show_notice(text: str) -> None:
    _console.print(Text(text, style="dim"))


def show_error(text: str) -> None:
    _console.print(Text("error: ", style="bold red") + Text(" ".join(text.split()), style=""))


Report = Callable[[int, int | None, float], None]
"""Called with (done, total, pictures per second)."""


@contextmanager
def progress_bar(what: str, unit: str) -> Iterator[Report]:
    """A bar with counts, pictures per second and the time left; plain lines stay readable in a log."""
    columns = (
        TextColumn(what),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn(unit),
        TextColumn("{task.fields[rate]:.1f} pictures/s"),
        TimeRemainingColumn(),
    )
    bar = Progress(*columns, console=_console)
    task = bar.add_task(what, total=None, rate=0.0)

    def report(done: int, total: int | None, rate: float) -> None:
        bar.start()  # not before there is something to report: a refusal then stands alone
        bar.update(task, completed=done, total=total, rate=rate)
        if done == total:
            bar.stop()  # one bar is live at a time: what follows may have its own

    try:
        yield report
    finally:
        if bar.live.is_started:
            bar.stop()


@contextmanager
def byte_bar(what: str) -> Iterator[Report]:
    """A bar of bytes with their rate and the time left."""
    columns = (TextColumn(what), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    bar = Progress(*columns, console=_console)
    task = bar.add_task(what, total=None)

    def report(done: int, total: int | None, rate: float) -> None:
        bar.start()  # not before there is something to report: a refusal then stands alone
        bar.update(task, completed=done, total=total)

    try:
        yield report
    finally:
        if bar.live.is_started:
            bar.stop()
