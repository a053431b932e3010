"""The one way in which jobs are done: an executor does them, this loop retries and writes down.

Only the process that runs this loop touches the store, so workers may die at any moment, and so may the loop: the
same call afterwards does what is missing.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from recap.errors import refuse
from recap.tables.jobs import Job, Result
from recap.tables.store import Store

POLL_S = 0.2
REPORT_S = 1.0
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
    if len({job.key for job in jobs}) != len(jobs):
        different = len({job.key for job in jobs})
        raise refuse("jobs", len(jobs), f"only {different} of them differ", "name each job once")
    try:
        return _Loop(store, executor, rules or Rules(), minutes, report, on_result).run(jobs)
    finally:
        executor.close()


class _Batch(NamedTuple):
    began: float
    size: float
    left: set[str]  # keys


class _Loop:
    def __init__(
        self,
        store: Store,
        executor: Executor,
        rules: Rules,
        minutes: float,
        report: Report,
        on_result: Callable[[Job], None],
    ):
        self._store, self._executor, self._rules = store, executor, rules
        self._report, self._on_result = report, on_result
        self._end = time.monotonic() + 60 * minutes
        self._waiting: list[list[Job]] = []
        self._delayed: list[tuple[float, Job]] = []
        self._under_way: dict[str, _Batch] = {}
        self._failures: dict[str, int] = {}
        self._crashes: dict[str, int] = {}
        self._rates: list[float] = []  # seconds per unit of size

    def run(self, jobs: Sequence[Job]) -> Progress:
        missing = [job for job in jobs if not self._store.has(job)]
        self._progress = Progress(len(jobs), len(jobs) - len(missing))
        self._waiting = self._executor.batches(missing)
        reported = 0.0
        while self._waiting or self._delayed or self._under_way:
            self._submit_one()
            ready = self._waiting and self._executor.has_room()
            for done in self._executor.wait(0 if ready else POLL_S):
                self._take(done)
            if time.monotonic() - reported > REPORT_S:
                reported = time.monotonic()
                self._tell()
        self._tell()
        return self._progress

    def _submit_one(self) -> None:
        now = time.monotonic()
        self._waiting += [[job] for due, job in self._delayed if due <= now]
        self._delayed = [(due, job) for due, job in self._delayed if due > now]
        while self._waiting and self._executor.has_room():
            batch = self._waiting.pop(0)
            if not self._has_time_for(batch):
                # Shorter ones may still fit.
                self._progress.late += len(batch)
                continue
            begun = _Batch(now, _size(batch), {job.key for job in batch})
            self._under_way |= dict.fromkeys(begun.left, begun)
            self._executor.submit(batch)
            return

    def _has_time_for(self, batch: Sequence[Job]) -> bool:
        needed = max(self._rates[-6:], default=0.0) * _size(batch) * CAUTION
        return time.monotonic() + needed <= self._end

    def _take(self, done: Done) -> None:
        key = done.job.key
        batch = self._under_way.pop(key)
        batch.left.discard(key)
        if not batch.left:
            self._rates.append((time.monotonic() - batch.began) / batch.size)
        if done.result is not None:
            self._store.add(key, done.result)
            self._progress.done += 1
            self._on_result(done.job)
            return
        counts, most = (
            (self._crashes, self._rules.most_crashes)
            if done.crashed
            else (self._failures, self._rules.most_failures)
        )
        counts[key] = counts.get(key, 0) + 1
        if done.final or counts[key] >= most:
            self._progress.errors[done.job.name] = done.error
            return
        self._progress.retries += 1
        tries = self._failures.get(key, 0) + self._crashes.get(key, 0)
        self._delayed.append((time.monotonic() + self._rules.delay(tries), done.job))

    def _tell(self) -> None:
        self._progress.under_way = len(self._under_way)
        if self._rates:
            # Batches that are under way at the same time share the rate.
            at_once = max(1, len({id(batch) for batch in self._under_way.values()}))
            sizes = [_size(batch) for batch in self._waiting] + [job.size for _, job in self._delayed]
            sizes += [b.size for b in {id(b): b for b in self._under_way.values()}.values()]
            self._progress.left_s = statistics.median(self._rates[-50:]) * sum(sizes) / at_once
        self._report(self._progress)


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
