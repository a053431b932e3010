"""This module says how to continue a command that is stopped by Ctrl-C or SIGTERM."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from recap.cli.console import show_notice


@contextmanager
def stoppable(how: Callable[[], str]) -> Iterator[None]:
    """Show how to continue what is stopped in here; an empty text where there is nothing to continue yet."""

    def stop(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        if text := how():
            show_notice(f"stopped; {text}")
        raise
    finally:
        signal.signal(signal.SIGTERM, before)
