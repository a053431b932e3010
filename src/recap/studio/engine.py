"""The engine is the one thread on which the model works: for every session and video in turn, a block at a time.

A model takes one call at a time, and a thread of its own for every session would only wait for it, and keep its own
pool of the model's threads. Encoding and writing happen on a second thread, next to the model.

With a company of several rows, as many take a turn at once, those who have waited longest first. So nobody waits
longer than it takes to generate one block of everybody else, however many want one.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

from recap.errors import RecapError, refuse
from recap.session import Session
from recap.session.company import ALONE, Company, step_together
from recap.types import GeneratedBlock

Result = TypeVar("Result")

Asking = Generator[Session, GeneratedBlock, None]
"""Asks for the next block of one session after another; each is sent back when it is there."""

log = logging.getLogger("recap.studio")


class Performer(Protocol):
    """Takes turns on the model."""

    def wants_block(self) -> bool:
        """Tell whether there is a block to generate now."""

    def make_block(self) -> Asking:
        """Ask for what one block needs, and do all else that belongs to it."""

    def fail(self, error: RecapError) -> None:
        """Say in words that `make_block` failed; everything else continues."""


class Engine:
    """Owns the model's thread and the encoder's."""

    def __init__(self, company: Company = ALONE) -> None:
        self._company = company
        self.encoder = ThreadPoolExecutor(1, thread_name_prefix="studio-encoder")
        self._performers: deque[Performer] = deque()
        self._calls: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._news = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="studio-model", daemon=True)
        self._thread.start()

    def call(self, work: Callable[[], Result]) -> Future[Result]:
        """Run something on the model's thread, between two blocks."""
        future: Future[Result] = Future()
        with self._news:
            if self._closed:
                raise refuse("studio", "closed", "it is shutting down", "start it again")
            self._calls.append((work, future))
            self._news.notify()
        return future

    def add(self, performer: Performer) -> None:
        """Let a session or a video take turns; called on the model's thread."""
        self._performers.append(performer)

    def remove(self, performer: Performer) -> None:
        if performer in self._performers:
            self._performers.remove(performer)

    def close(self) -> None:
        """End both threads after what they do at present."""
        with self._news:
            self._closed = True
            self._news.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()
        self.encoder.shutdown(wait=True, cancel_futures=True)

    def _work(self) -> None:
        while True:
            with self._news:
                while not self._closed and not self._calls and not self._someone_waits():
                    self._news.wait()
                calls = list(self._calls)
                self._calls.clear()
                if self._closed:
                    for _, future in calls:
                        future.cancel()
                    return
            while calls:
                # Nothing of a call is held while the thread waits for the next one.
                _run(*calls.pop(0))
            self._take_turn()

    def _someone_waits(self) -> bool:
        return any(performer.wants_block() for performer in self._performers)

    def _take_turn(self) -> None:
        """Let the next ones who want to generate a block each; the first of them has waited longest."""
        turns: list[tuple[Performer, Asking]] = []
        for _ in range(len(self._performers)):
            performer = self._performers[0]
            self._performers.rotate(-1)
            if performer.wants_block():
                turns.append((performer, performer.make_block()))
            if len(turns) == self._company.width:
                break
        asked = [(*turn, session) for turn in turns if (session := _go_on(*turn)) is not None]
        while asked:
            made = _generate([session for *_, session in asked])
            answered = zip(asked, made, strict=True)
            again = [(who, asking, _go_on(who, asking, block)) for (who, asking, _), block in answered]
            asked = [(who, asking, session) for who, asking, session in again if session is not None]


def _generate(sessions: Sequence[Session]) -> Sequence[GeneratedBlock | Exception]:
    """Generate a block of each session; what fails in a joint forward fails for all of them."""
    try:
        return step_together(sessions)
    except Exception as error:
        return [error] * len(sessions)


def _go_on(
    performer: Performer, asking: Asking, answer: GeneratedBlock | Exception | None = None
) -> Session | None:
    """Give a performer what it asked for; returns the session that it asks for next, None at the end."""
    try:
        if answer is None:
            return next(asking)
        return asking.throw(answer) if isinstance(answer, Exception) else asking.send(answer)
    except StopIteration:
        return None
    except Exception as error:
        performer.fail(in_words(error))
        return None


def _run(work: Callable[[], Any], future: Future[Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(work())
    except Exception as error:
        future.set_exception(error)


def in_words(error: BaseException) -> RecapError:
    """Return what can be shown of a failure: one sentence, without a path and without a traceback."""
    if isinstance(error, RecapError):
        return error
    if isinstance(error, OSError):
        return refuse(
            "disk", error.strerror or "error", "a file could not be read or written", "make room, then play"
        )
    if isinstance(error, MemoryError) or "allocate memory" in str(error) or "out of memory" in str(error):
        return refuse("memory", "full", "the model did not fit", "close other sessions, then play")
    log.error("unexpected failure", exc_info=error)
    limit = "this should not happen; the server's log says where"
    return refuse("studio", type(error).__name__, limit, "press play to continue from the last block")
