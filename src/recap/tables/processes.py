"""Executor: processes of this machine, each replaced when it dies."""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

import torch

from recap.errors import refuse
from recap.tables.jobs import Job, find_work
from recap.tables.runner import Done


class _Worker(NamedTuple):
    process: BaseProcess
    pipe: Connection


class Processes:
    """So many processes do one job each; more jobs than that wait here.

    Every process has one thread, so that results do not depend on the number of processes.
    """

    def __init__(self, work: str, folder: Path, workers: int, *, background: bool = False):
        find_work(work)
        self._work, self._folder, self._size, self._background = work, folder, workers, background
        # Children of a server process that has imported everything but used nothing: they start at once, and no
        # thread or GPU of ours is copied into them as a plain fork would.
        self._context: Any = multiprocessing.get_context("forkserver" if sys.platform != "win32" else "spawn")
        if sys.platform != "win32":
            self._context.set_forkserver_preload(["recap.tables.processes", work.partition(":")[0]])
        self._idle: list[_Worker] = []
        self._busy: list[tuple[_Worker, Job]] = []
        self._waiting: list[Job] = []

    def close(self) -> None:
        workers = [*self._idle, *(worker for worker, _ in self._busy)]
        for worker in workers:
            worker.process.terminate()
        for worker in workers:
            worker.process.join()
            worker.pipe.close()
        self._idle, self._busy, self._waiting = [], [], []

    def batches(self, jobs: Sequence[Job]) -> list[list[Job]]:
        return [[job] for job in jobs]

    @property
    def num_open(self) -> int:
        """Jobs that were submitted and have not ended."""
        return len(self._busy) + len(self._waiting)

    def has_room(self) -> bool:
        return self.num_open < self._size

    def submit(self, batch: Sequence[Job]) -> None:
        self._waiting += batch
        self._hand_out()

    def wait(self, seconds: float) -> list[Done]:
        self._hand_out()
        if not self._busy:
            time.sleep(seconds)
            return []
        pipes = [worker.pipe for worker, _ in self._busy]
        wait([*pipes, *(worker.process.sentinel for worker, _ in self._busy)], seconds)
        ended = []
        for worker, job in list(self._busy):
            if worker.pipe.poll():
                ended.append(self._read(worker, job))
            elif not worker.process.is_alive():
                ended.append(self._bury(worker, job))
        self._hand_out()
        return ended

    def _hand_out(self) -> None:
        while self._waiting and len(self._busy) < self._size:
            worker = self._idle.pop() if self._idle else self._start()
            job = self._waiting.pop(0)
            try:
                worker.pipe.send((job.payload, str(self._folder / job.key)))
            except OSError:
                # It died while it was idle: the next one takes the job.
                self._waiting.insert(0, job)
                worker.process.join()
                continue
            self._busy.append((worker, job))

    def _start(self) -> _Worker:
        ours, theirs = self._context.Pipe()
        arguments = (theirs, self._work, self._background)
        process = self._context.Process(target=_serve, args=arguments, daemon=True)
        try:
            process.start()
        except (EOFError, ConnectionError) as error:
            # The server process was killed as it answered; a new one is started with the next worker.
            limit = "the server process that starts workers was killed, perhaps for lack of memory"
            raise refuse(
                "worker", None, limit, "give the same command again: finished jobs are kept"
            ) from error
        theirs.close()
        return _Worker(process, ours)

    def _read(self, worker: _Worker, job: Job) -> Done:
        try:
            result, error = worker.pipe.recv()
        except (EOFError, OSError):
            return self._bury(worker, job)
        self._busy.remove((worker, job))
        self._idle.append(worker)
        return Done(job, result, error)

    def _bury(self, worker: _Worker, job: Job) -> Done:
        self._busy.remove((worker, job))
        worker.process.join()
        worker.pipe.close()
        return Done(job, None, f"its worker died (exit code {worker.process.exitcode})", crashed=True)


def _serve(pipe: Connection, work: str, background: bool) -> None:
    """The main function of a worker process."""
    _die_with_parent()
    torch.set_num_threads(1)
    if background and hasattr(os, "nice"):
        # What runs in the background must not keep a GPU waiting.
        os.nice(10)
    do = find_work(work)
    while True:
        try:
            payload, folder = pipe.recv()
        except EOFError:
            return
        try:
            answer = (do(payload, folder), "")
        except Exception as error:
            answer = (None, describe(error))  # type: ignore[assignment]
        pipe.send(answer)


def describe(error: BaseException) -> str:
    """The kind of an error, its text and where it was raised."""
    last = traceback.extract_tb(error.__traceback__)[-1:]
    place = f" ({Path(last[0].filename).name}:{last[0].lineno})" if last else ""
    return f"{type(error).__name__}: {error}{place}"


def _die_with_parent() -> None:
    """End this process when its parent is gone: nobody would read its result."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def watch() -> None:
        wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
