"""The engine is the one thread on which the model runs: for every session and video in turn, a block at a time.

A model takes one call at a time, and a thread of its own for every session would only wait for it, and keep its own
pool of the model's threads. Encoding and writing happen on a second thread, next to the model.

With a batcher of several rows, as many performers take a turn at once, those that have waited longest first. So none
waits longer than it takes to generate one block of every other one.
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
from recap.session.batcher import ALONE, Batcher, step_together
from recap.types import GeneratedBlock

Result = TypeVar("Result")

Requests = Generator[Session, GeneratedBlock, None]
"""Yields sessions whose next block is needed; each block is sent back when it is generated."""

log = logging.getLogger("recap.studio")


class Performer(Protocol):
    """Takes turns on the model."""

    def wants_block(self) -> bool:
        """Tell whether there is a block to generate now."""

    def make_block(self) -> Requests:
        """Request the blocks of all its sessions, and do all else that belongs to them."""

    def fail(self, error: RecapError) -> None:
        """Report that `make_block` failed; everything else continues."""


class Engine:
    """Owns the model's thread and the encoder's."""

    def __init__(self, batcher: Batcher = ALONE) -> None:
        self._batcher = batcher
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
        """Add a session or a video; called on the model's thread."""
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
                # Popped, so that no finished call stays referenced while the thread waits.
                _run(*calls.pop(0))
            self._take_turn()

    def _someone_waits(self) -> bool:
        return any(performer.wants_block() for performer in self._performers)

    def _take_turn(self) -> None:
        """Generate a block for each of the next performers that want one; the first has waited longest."""
        turns: list[tuple[Performer, Requests]] = []
        for _ in range(len(self._performers)):
            performer = self._performers[0]
            self._performers.rotate(-1)
            if performer.wants_block():
                turns.append((performer, performer.make_block()))
            if len(turns) == self._batcher.width:
                break
        wanted = [(*turn, session) for turn in turns if (session := _advance(*turn)) is not None]
        while wanted:
            made = _generate([session for *_, session in wanted])
            answered = zip(wanted, made, strict=True)
            later = [
                (each, requests, _advance(each, requests, block)) for (each, requests, _), block in answered
            ]
            wanted = [(each, requests, session) for each, requests, session in later if session is not None]


def _generate(sessions: Sequence[Session]) -> Sequence[GeneratedBlock | Exception]:
    """Generate a block of each session; what fails in a joint forward fails for all of them."""
    try:
        return step_together(sessions)
    except Exception as error:
        return [error] * len(sessions)


def _advance(
    performer: Performer, requests: Requests, answer: GeneratedBlock | Exception | None = None
) -> Session | None:
    """Send a performer the block that it requested; returns the session that it requests next, None at the end."""
    try:
        if answer is None:
            return next(requests)
        return requests.throw(answer) if isinstance(answer, Exception) else requests.send(answer)
    except StopIteration:
        return None
    except Exception as error:
        performer.fail(as_refusal(error))
        return None


def _run(work: Callable[[], Any], future: Future[Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(work())
    except Exception as error:
        future.set_exception(error)


def as_refusal(error: BaseException) -> RecapError:
    """Return a failure as clients may see it: one sentence, without a path and without a traceback."""
    if isinstance(error, RecapError):
        return error
    if isinstance(error, OSError):
        limit = "a file could not be read or written"
        return refuse("disk", error.strerror or "error", limit, "make room, then play")
    if isinstance(error, MemoryError) or "allocate memory" in str(error) or "out of memory" in str(error):
        return refuse("memory", "full", "the model did not fit", "close other sessions, then play")
    log.error("unexpected failure", exc_info=error)
    limit = "this should not happen; the server's log says where"
    return refuse("studio", type(error).__name__, limit, "press play to continue from the last block")
