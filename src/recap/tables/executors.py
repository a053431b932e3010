"""This module does jobs one by one, in processes of this machine or on a Ray cluster.

Every worker has one thread, so that results do not depend on the number of workers or on where they are. This is the
only file that imports ray. Its results come back to the process that holds the store; only files of jobs, where there
are any, need a folder that is reachable under the same path from every machine.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from recap.errors import refuse
from recap.tables.runner import Done, Executor, Job, Result

# How long the head of a Ray cluster may take to answer.
ANSWER_S = 5.0


Work = Callable[[Job, Path], Result]
"""A function of a module that does a job, with a folder for the job's files."""


def do_work(work: Work, job: Job, folder: Path) -> Result:
    """Do a job on one thread, with a folder of its own in `folder`."""
    torch.set_num_threads(1)
    return work(job, folder / job.key)


@dataclass(eq=False)
class _Worker:
    process: BaseProcess
    pipe: Connection
    job: Job | None = None


class Processes(Executor):
    """Does jobs in so many processes, each replaced when it dies; more jobs than that wait here."""

    def __init__(self, work: Work, folder: Path, workers: int, *, background: bool = False):
        self._work, self._folder, self._size, self._background = work, folder, workers, background
        # Children of a server process that has imported everything but used nothing: they start at once, and no
        # thread or GPU of ours is copied into them as a plain fork would.
        self._context: Any = multiprocessing.get_context("forkserver" if sys.platform != "win32" else "spawn")
        if sys.platform != "win32":
            self._context.set_forkserver_preload([__name__, work.__module__])
        self._workers: list[_Worker] = []
        self._waiting: list[Job] = []

    def close(self) -> None:
        for worker in self._workers:
            worker.process.terminate()
        for worker in list(self._workers):
            self._bury(worker)
        self._waiting = []

    @property
    def _busy(self) -> list[_Worker]:
        return [worker for worker in self._workers if worker.job]

    def has_room(self) -> bool:
        return len(self._busy) + len(self._waiting) < self._size

    def submit(self, batch: Sequence[Job]) -> None:
        self._waiting += batch
        self._hand_out()

    def wait(self, seconds: float) -> list[Done]:
        if not self._busy:
            time.sleep(seconds)
            return []
        wait([each for worker in self._busy for each in (worker.pipe, worker.process.sentinel)], seconds)
        ended = [self._end(w) for w in self._busy if w.pipe.poll() or not w.process.is_alive()]
        self._hand_out()
        return ended

    def _hand_out(self) -> None:
        while self._waiting and len(self._busy) < self._size:
            worker = next((each for each in self._workers if not each.job), None) or self._start()
            job = self._waiting[0]
            try:
                worker.pipe.send(job)
            except OSError:
                # It died while it was idle: the next one takes the job.
                self._bury(worker)
                continue
            worker.job = self._waiting.pop(0)

    def _start(self) -> _Worker:
        ours, theirs = self._context.Pipe()
        arguments = (theirs, self._work, self._folder, self._background)
        process = self._context.Process(target=_serve, args=arguments, daemon=True)
        try:
            process.start()
        except (EOFError, ConnectionError) as error:
            # The server process was killed as it answered; a new one is started with the next worker.
            limit = "the server process that starts workers was killed, perhaps for lack of memory"
            remedy = "give the same command again: finished jobs are kept"
            raise refuse("worker", None, limit, remedy) from error
        theirs.close()
        self._workers.append(_Worker(process, ours))
        return self._workers[-1]

    def _end(self, worker: _Worker) -> Done:
        """Return what became of the job of a worker that has answered or died."""
        job, worker.job = worker.job, None
        assert job is not None
        try:
            if worker.pipe.poll():
                return Done(job, *worker.pipe.recv())
        except (EOFError, OSError):
            pass
        self._bury(worker)
        return Done(job, None, f"its worker died (exit code {worker.process.exitcode})", crashed=True)

    def _bury(self, worker: _Worker) -> None:
        self._workers.remove(worker)
        worker.process.join()
        worker.pipe.close()


def _serve(pipe: Connection, work: Work, folder: Path, background: bool) -> None:
    """Do jobs until the pipe is closed: the main function of a worker process."""
    _die_with_parent()
    # Ctrl-C reaches all processes of a terminal; the one that asked ends this one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if background and hasattr(os, "nice"):
        # What runs in the background must not keep a GPU waiting.
        os.nice(10)
    while True:
        try:
            job = pipe.recv()
        except EOFError:
            return
        try:
            answer: tuple[Result | None, str] = (do_work(work, job, folder), "")
        except Exception as error:
            answer = (None, describe(error))
        pipe.send(answer)


def _die_with_parent() -> None:
    """End this process when its parent is gone: nobody would read its result."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def watch() -> None:
        wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def describe(error: BaseException) -> str:
    """Return the kind of an error, its text and where it was raised."""
    last = traceback.extract_tb(error.__traceback__)[-1:]
    place = f" ({Path(last[0].filename).name}:{last[0].lineno})" if last else ""
    return f"{type(error).__name__}: {error}{place}"


def _check_address(address: str) -> None:
    """Refuse HOST:PORT where nobody answers: Ray itself would try for minutes."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not colon:
        return
    try:
        with socket.create_connection((host, int(port)), ANSWER_S):
            return
    except (OSError, ValueError, OverflowError) as error:
        remedy = "name HOST:PORT of a running cluster; `local` starts one on this machine"
        raise refuse("--ray", address, f"nobody answers there ({error})", remedy) from error


class OnRay(Executor):
    """Does one job on every processor of a cluster; the address "local" starts a cluster on this machine."""

    def __init__(self, work: Work, folder: Path, *, address: str = "local", gpus: float = 0):
        try:
            import ray
        except ImportError as missing:
            limit = "it needs Ray, which is not installed"
            raise refuse("--ray", "", limit, "pip install recap-forcing[ray]") from missing
        self._ray: Any = ray
        self._work, self._folder = work, folder.resolve()
        self._under_way: dict[Any, Job] = {}
        self._ours = not ray.is_initialized()
        if self._ours:
            _check_address(address)
            dashboard = False if address == "local" else None
            ray.init(address=address, log_to_driver=False, include_dashboard=dashboard)
        # The runner retries: Ray's own retries would be neither counted nor delayed.
        self._task = ray.remote(num_cpus=1, num_gpus=gpus, max_retries=0)(do_work)

    def close(self) -> None:
        if self._ours:
            self._ray.shutdown()

    def has_room(self) -> bool:
        """Keep every processor busy and one job waiting."""
        return len(self._under_way) < int(self._ray.cluster_resources().get("CPU", 1)) + 1

    def submit(self, batch: Sequence[Job]) -> None:
        for job in batch:
            self._under_way[self._task.remote(self._work, job, self._folder)] = job

    def wait(self, seconds: float) -> list[Done]:
        if not self._under_way:
            time.sleep(seconds)
            return []
        ready, _ = self._ray.wait(list(self._under_way), num_returns=1, timeout=seconds)
        return [self._ended(reference, self._under_way.pop(reference)) for reference in ready]

    def _ended(self, reference: Any, job: Job) -> Done:
        try:
            return Done(job, self._ray.get(reference))
        except self._ray.exceptions.RayTaskError as error:
            return Done(job, None, f"{type(error.cause).__name__}: {error.cause}")
        except self._ray.exceptions.RayError as error:
            return Done(job, None, f"its worker died ({type(error).__name__})", crashed=True)
