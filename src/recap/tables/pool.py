"""Doing a sweep on this machine: a pool of processes that are replaced when they die."""

from __future__ import annotations

import multiprocessing
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from recap.errors import refuse
from recap.tables.jobs import Job, Result, find_work
from recap.tables.status import Status, status_of
from recap.tables.store import Rules, Store, name_of
from recap.tables.worker import work_through

POLL_S = 0.05
TELL_S = 1.0
LOOK_S = 1.0  # between two looks for the dead of other pools

Tell = Callable[[Status], None]


def in_silence(status: Status) -> None:
    """Tells nobody."""


def run_sweep(
    jobs: Sequence[Job],
    work: str,
    folder: Path,
    *,
    workers: int = 1,
    threads: int = 1,
    rules: Rules | None = None,
    tell: Tell = in_silence,
) -> list[Result]:
    """Do every job that has no result yet in `folder`; returns the results in the order of the jobs.

    The same call after any kind of death goes on where that left off. `work` is "package.module:name" of a function
    of (job's data, folder of its files). Jobs that fail again and again are given up, and then this refuses.
    """
    if workers < 1:
        raise refuse("workers", workers, "must be 1 or more", "1 does the jobs one by one")
    find_work(work)
    rules = rules or Rules()
    store = Store(folder, rules)
    store.begin(work)
    store.add(jobs)
    store.recover()
    store.retry_failed()
    pool = _Pool(store, work, workers, threads)
    began, told = time.time(), 0.0
    try:
        while pool.tend():
            if time.time() - told > TELL_S:
                tell(status_of(store, workers, began))
                told = time.time()
            time.sleep(POLL_S)
    finally:
        pool.stop()
    tell(status_of(store, workers, began))
    return collect(store, jobs)


def collect(store: Store, jobs: Sequence[Job]) -> list[Result]:
    """The results in the order of the jobs; refuses if any is missing."""
    found = store.results(jobs)
    results = [result for result in found if result is not None]
    if len(results) < len(jobs):
        errors = store.errors()
        missing = next(job for job, result in zip(jobs, found, strict=True) if result is None)
        why = errors.get(missing.key, "not done yet")
        limit = f"{len(jobs) - len(results)} of {len(jobs)} jobs have no result; the first: {why}"
        raise refuse(
            "sweep", str(store.folder), limit, "mend what is wrong and run it again: the rest is kept"
        )
    return results


class _Pool:
    def __init__(self, store: Store, work: str, size: int, threads: int):
        self._store, self._work, self._threads = store, work, threads
        # Children of a server process that has imported everything but used nothing: they start at once, and no
        # thread or GPU of ours is copied into them as a plain fork would.
        self._context: Any = multiprocessing.get_context("forkserver" if sys.platform != "win32" else "spawn")
        if sys.platform != "win32":
            self._context.set_forkserver_preload(["recap.tables.worker", work.partition(":")[0]])
        self._looked = 0.0
        self._size = min(size, max(1, self._open_jobs()))
        self._alive: dict[BaseProcess, str] = {}

    def _open_jobs(self) -> int:
        counts = self._store.counts()
        return counts.waiting + counts.claimed

    def tend(self) -> bool:
        """Replace the dead; False when all is done."""
        for process in [p for p in self._alive if not p.is_alive()]:
            owner = self._alive.pop(process)
            process.join()
            if process.exitcode != 0:
                self._store.release_owner(owner, f"its worker died (exit code {process.exitcode})")
        if self._open_jobs() == 0:
            return bool(self._alive)
        if time.time() - self._looked > LOOK_S:
            self._store.recover(known=self._alive.values())
            self._looked = time.time()
        while len(self._alive) < self._size:
            process = self._context.Process(
                target=work_through,
                args=(str(self._store.folder), self._work, self._store.rules, self._threads),
                daemon=True,
            )
            process.start()
            assert process.pid is not None
            self._alive[process] = name_of(process.pid)
        return True

    def stop(self) -> None:
        for process in self._alive:
            process.terminate()
        for process in self._alive:
            process.join()
