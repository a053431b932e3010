"""This module defines how work is reported: by notices, and by progress."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

Notice = Callable[[str], None]
"""It is called with a line for the user."""

Progress = Callable[[int, int | None, float], None]
"""It is called with (done, total or None, units per second)."""


def no_progress(done: int, total: int | None, rate: float) -> None:
    """Show nothing."""


def each_once(notice: Notice) -> Notice:
    """Make a notice that shows every line once: parts that are built several times repeat themselves."""
    shown: set[str] = set()

    def show_once(line: str) -> None:
        if line not in shown:
            shown.add(line)
            notice(line)

    return show_once


@dataclass(frozen=True, slots=True)
class Reporter:
    """Prints notices and shows no progress, unless its caller passes something better."""

    notice: Notice = print
    progress: Progress = no_progress

    def counter(self, total: int) -> Callable[[int], None]:
        """Return a function that is called with the size of every finished piece and reports the sum of them."""
        done, start = 0, time.monotonic()

        def advance(size: int) -> None:
            nonlocal done
            done += size
            self.progress(done, total, done / max(time.monotonic() - start, 1e-9))

        return advance


SILENT = Reporter(notice=lambda line: None)
"""Reports nothing."""
