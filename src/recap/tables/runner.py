"""The one way in which jobs are done: an executor does them, this loop retries and writes down.

Only the process that runs this loop touches the store, so workers may die at any moment, and so may the loop: the
same call afterwards does what is missing.
"""

from __future__ import annotations

import errno
import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from recap.errors import refuse
from recap.tables.jobs import Job, Result
from recap.tables.store import Store

POLL_S = 0.2
REPORT_S = 1.0
# How the error of a job reads that found no room on its disk, or may not write there.
DISK_FAULTS = tuple(f"[Errno {number}]" for number in (errno.ENOSPC, errno.EDQUOT, errno.EROFS))
CAUTION = 1.25
"""A batch may take so much longer than those before it."""


@dataclass(frozen=True, slots=True)
class Rules:
    """When a job is given up, and how long to wait before it is tried again."""

    most_failures: int = 3  # exceptions
    most_crashes: int = 6  # workers that died over it
    backoff_s: float = 2.0  # before the first retry; doubled for each further one

    def delay(self, tries: int) -> float:
        return float(self.backoff_s * 2 ** max(0, tries - 1))


class Done(NamedTuple):
    """How a job ended."""

    job: Job
    result: Result | None
    error: str = ""
    crashed: bool = False  # the worker died
    final: bool = False  # trying again is of no use


class Executor(Protocol):
    """Does jobs, a batch at a time."""

    def batches(self, jobs: Sequence[Job]) -> list[list[Job]]:
        """Sort jobs into what is submitted together."""

    def has_room(self) -> bool:
        """Whether another batch may be submitted now."""

    def submit(self, batch: Sequence[Job]) -> None: ...

    def wait(self, seconds: float) -> list[Done]:
        """The jobs that have ended; waits for one, but no longer than this."""

    def close(self) -> None:
        """End everything that was started."""


@dataclass(slots=True)
class Progress:
    total: int
    done: int = 0
    under_way: int = 0
    retries: int = 0
    late: int = 0  # not begun for want of time
    left_s: float | None = None  # None before anything has ended
    errors: dict[str, str] = field(default_factory=dict)  # of jobs that were given up, by name

    def line(self) -> str:
        parts = [f"{self.done} of {self.total} done"]
        parts += [f"{self.under_way} under way"] if self.under_way else []
        parts += [f"{self.retries} retries"] if self.retries else []
        parts += [f"{len(self.errors)} given up"] if self.errors else []
        parts += [f"{self.late} left for want of time"] if self.late else []
        if self.left_s is not None and self.done + self.late + len(self.errors) < self.total:
            parts.append(f"about {as_time(self.left_s)} left")
        return ", ".join(parts)


Report = Callable[[Progress], None]


def silent(progress: Progress) -> None:
    """Reports nothing."""


def each_change(show: Callable[[str], None]) -> Report:
    """A report that shows a line whenever a job has ended."""
    shown: list[tuple[int, int, int]] = []

    def report(progress: Progress) -> None:
        ended = progress.done, progress.late, len(progress.errors)
        if shown[-1:] != [ended]:
            shown.append(ended)
            show(progress.line())

    return report


def run_jobs(
    jobs: Sequence[Job],
    store: Store,
    executor: Executor,
    *,
    rules: Rules | None = None,
    minutes: float = math.inf,
    report: Report = silent,
    on_result: Callable[[Job], None] = lambda job: None,
) -> Progress:
    """Do every job that the store lacks; returns how that ended. `on_result` is called when a result is stored."""
    if (different := len({job.key for job in jobs})) != len(jobs):
        raise refuse("jobs", len(jobs), f"only {different} of them differ", "name each job once")
    try:
        end = time.monotonic() + 60 * minutes
        return _Loop(store, executor, rules or Rules(), end, report, on_result).run(jobs)
    finally:
        executor.close()


class _Batch(NamedTuple):
    began: float
    size: float
    left: set[str]  # keys


@dataclass
class _Loop:
    store: Store
    executor: Executor
    rules: Rules
    end: float  # on the monotonic clock
    report: Report
    on_result: Callable[[Job], None]
    waiting: list[list[Job]] = field(default_factory=list)
    delayed: list[tuple[float, Job]] = field(default_factory=list)
    under_way: dict[str, _Batch] = field(default_factory=dict)
    tries: Counter[tuple[str, bool]] = field(default_factory=Counter)
    """By key, and whether the worker died."""
    rates: list[float] = field(default_factory=list)
    """Seconds per unit of size, of every batch."""

    def run(self, jobs: Sequence[Job]) -> Progress:
        missing = [job for job in jobs if not self.store.has(job)]
        self._progress = Progress(len(jobs), len(jobs) - len(missing))
        self.waiting = self.executor.batches(missing)
        reported = 0.0
        while self.waiting or self.delayed or self.under_way:
            self._submit_one()
            ready = self.waiting and self.executor.has_room()
            for done in self.executor.wait(0 if ready else POLL_S):
                self._take(done)
            if time.monotonic() - reported > REPORT_S:
                reported = time.monotonic()
                self._tell()
        self._tell()
        return self._progress

    def _submit_one(self) -> None:
        now = time.monotonic()
        self.waiting += [[job] for due, job in self.delayed if due <= now]
        self.delayed = [(due, job) for due, job in self.delayed if due > now]
        while self.waiting and self.executor.has_room():
            batch = self.waiting.pop(0)
            if not self._has_time_for(batch):
                # Shorter ones may still fit.
                self._progress.late += len(batch)
                continue
            begun = _Batch(now, _size(batch), {job.key for job in batch})
            self.under_way |= dict.fromkeys(begun.left, begun)
            self.executor.submit(batch)
            return

    def _has_time_for(self, batch: Sequence[Job]) -> bool:
        needed = max(self.rates[-6:], default=0.0) * _size(batch) * CAUTION
        return time.monotonic() + needed <= self.end

    def _take(self, done: Done) -> None:
        key = done.job.key
        batch = self.under_way.pop(key)
        batch.left.discard(key)
        if not batch.left:
            self.rates.append((time.monotonic() - batch.began) / batch.size)
        if done.result is not None:
            self.store.add(key, done.result)
            self._progress.done += 1
            self.on_result(done.job)
            return
        if any(mark in done.error for mark in DISK_FAULTS):
            # Every other job would fail as well, after hours of work.
            remedy = "make room there, then give the same command again: finished jobs are kept"
            raise refuse("disk", str(self.store.folder), f"a job could not write ({done.error})", remedy)
        self.tries[key, done.crashed] += 1
        most = self.rules.most_crashes if done.crashed else self.rules.most_failures
        if done.final or self.tries[key, done.crashed] >= most:
            self._progress.errors[done.job.name] = done.error
            return
        self._progress.retries += 1
        delay = self.rules.delay(self.tries[key, True] + self.tries[key, False])
        self.delayed.append((time.monotonic() + delay, done.job))

    def _tell(self) -> None:
        self._progress.under_way = len(self.under_way)
        if self.rates:
            begun = {id(batch): batch.size for batch in self.under_way.values()}
            to_do = (
                sum(begun.values()) + sum(map(_size, self.waiting)) + sum(job.size for _, job in self.delayed)
            )
            # Batches that are under way at the same time share the rate.
            self._progress.left_s = statistics.median(self.rates[-50:]) * to_do / max(1, len(begun))
        self.report(self._progress)


def collect(jobs: Sequence[Job], store: Store, progress: Progress) -> list[Result]:
    """The results in the order of the jobs; refuses if one is missing."""
    missing = [job for job in jobs if not store.has(job)]
    if missing:
        why = progress.errors.get(missing[0].name, "not done yet")
        limit = f"{len(missing)} of {len(jobs)} jobs have no result; the first: {missing[0].name}: {why}"
        remedy = "mend what is wrong and run it again: the rest is kept"
        raise refuse("folder", str(store.folder), limit, remedy)
    return [store.results[job.key] for job in jobs]


def _size(batch: Sequence[Job]) -> float:
    return sum(job.size for job in batch)


def as_time(seconds: float) -> str:
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
