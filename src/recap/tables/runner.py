"""This module does jobs and keeps their results: an executor does them, one loop retries and writes down.

The key of a job is a digest of its data, so the same job is the same in every table, with any number of workers and
in any order; its result must depend on its data alone. Results are the lines of one file that is only ever added to,
by one process at a time. Whoever is killed while writing leaves half a line at the end, which the next writer cuts
off. Several lines may have the same key: their entries add up, and the last one counts.

Only the process that runs the loop touches that file, so workers may die at any moment, and so may the loop: the same
call afterwards does what is missing.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from recap.errors import refuse
from recap.io.files import write_whole
from recap.io.report import Notice

FILE = "runs.jsonl"
FAILED = "failed"
"""The entry of a result that says, by name, why some of the others are missing; these are given up."""
Result = dict[str, Any]
POLL_S = 0.2
REPORT_S = 1.0
# How the error of a job reads that found no room on its disk, or may not write there.
DISK_FAULTS = tuple(f"[Errno {number}]" for number in (errno.ENOSPC, errno.EDQUOT, errno.EROFS))
CAUTION = 1.25
"""A batch may take so much longer than those before it."""


@dataclass(frozen=True)
class Job:
    """Holds the plain data that a function turns into a result.

    `wants` are the entries of the result that are asked for (a result may be added to, entry by entry), `options`
    what else the function has to know, `size` is the length of the work in any unit. The name is for messages.
    """

    name: str
    data: Mapping[str, Any]
    wants: frozenset[str] = frozenset()
    options: Mapping[str, Any] = field(default_factory=dict)
    size: float = 1.0

    @cached_property
    def key(self) -> str:
        return hashlib.sha256(canonical(dict(self.data)).encode()).hexdigest()[:24]


def canonical(value: Any) -> str:
    """Return JSON with one way to write a thing, so that equal data are equal bytes."""
    try:
        return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError) as error:
        limit = f"must be plain JSON data without nan ({error})"
        remedy = "use numbers, texts, lists and tables; None for nan"
        raise refuse("job", str(value)[:80], limit, remedy) from error


class ResultStore:
    """Keeps the results of a folder. To add to them, hold the folder's lock (`recap.io.files.alone_in`)."""

    def __init__(self, folder: Path, made_by: Mapping[str, str] | None = None):
        self.folder, self.file = folder, folder / FILE
        self._made_by = dict(made_by or {})
        self.results: dict[str, Result] = {}
        # By key: what made each part of the result (versions, hardware, commit).
        self.makers: dict[str, list[dict[str, str]]] = {}
        data = self.file.read_bytes() if self.file.is_file() else b""
        self._whole = data.rfind(b"\n") + 1
        for number, line in enumerate(data[: self._whole].splitlines(), 1):
            self._read(line, number)

    def _read(self, line: bytes, number: int) -> None:
        try:
            found = json.loads(line)
            key, result, made_by = found["key"], found["result"], found["made_by"]
            if not (isinstance(key, str) and isinstance(result, dict) and isinstance(made_by, dict)):
                raise TypeError
        except (ValueError, KeyError, TypeError) as error:
            limit = f"line {number} is damaged or is not a result"
            remedy = "copy the file again, or delete that line: what it held is generated again"
            raise refuse("file", str(self.file), limit, remedy) from error
        self.results.setdefault(key, {}).update(result)
        self.makers.setdefault(key, []).append(made_by)

    def has(self, job: Job) -> bool:
        return job.key in self.results and not self.lacks(job)

    def lacks(self, job: Job) -> frozenset[str]:
        """Return the entries that are asked for and not there yet."""
        return job.wants - self.results.get(job.key, {}).keys()

    def add(self, key: str, result: Result) -> None:
        """Write a result down; it survives the end of this process from here on."""
        line = canonical({"key": key, "result": result, "made_by": self._made_by}).encode() + b"\n"
        self.folder.mkdir(parents=True, exist_ok=True)
        with self.file.open("ab") as out:
            if out.tell() > self._whole:
                os.truncate(self.file, self._whole)
            out.write(line)
            out.flush()
        self._whole += len(line)
        self._read(line, 0)

    def makers_of(self, keys: Iterable[str]) -> list[dict[str, str]]:
        """Return what made the results of these keys, each maker once."""
        found = {canonical(maker): maker for key in keys for maker in self.makers.get(key, [])}
        return [found[text] for text in sorted(found)]


class Rules(NamedTuple):
    """Says when a job is given up: after so many exceptions, or workers that died over it.

    `backoff_s` passes before the first retry, twice as long before each further one.
    """

    most_failures: int = 3
    most_crashes: int = 6
    backoff_s: float = 2.0

    def delay(self, tries: int) -> float:
        return float(self.backoff_s * 2 ** (tries - 1))


class Done(NamedTuple):
    """Says how a job ended; `crashed` if the worker died, `final` if trying again is of no use."""

    job: Job
    result: Result | None
    error: str = ""
    crashed: bool = False
    final: bool = False


class Executor(ABC):
    """Does jobs, a batch at a time."""

    def batches(self, jobs: Sequence[Job]) -> list[list[Job]]:
        """Sort jobs into what is submitted together."""
        return [[job] for job in jobs]

    @abstractmethod
    def has_room(self) -> bool:
        """Tell whether another batch may be submitted now."""

    @abstractmethod
    def submit(self, batch: Sequence[Job]) -> None:
        """Begin a batch."""

    @abstractmethod
    def wait(self, seconds: float) -> list[Done]:
        """Return the jobs that have ended; wait for one, but no longer than this."""

    @abstractmethod
    def close(self) -> None:
        """End everything that was started."""


@dataclass(slots=True)
class Progress:
    """Counts jobs: those done, under way, tried again, and not begun for want of time.

    `left_s` is None before anything has ended; `errors` say why jobs were given up, by their names.
    """

    total: int
    done: int = 0
    under_way: int = 0
    retries: int = 0
    late: int = 0
    left_s: float | None = None
    errors: dict[str, str] = field(default_factory=dict)

    @property
    def ended(self) -> int:
        return self.done + self.late + len(self.errors)

    def line(self) -> str:
        """Return the counts in words."""
        counts = {"under way": self.under_way, "retries": self.retries, "given up": len(self.errors)}
        counts["left for want of time"] = self.late
        parts = [f"{self.done} of {self.total} done"]
        parts += [f"{count} {what}" for what, count in counts.items() if count]
        if self.left_s is not None and self.ended < self.total:
            parts.append(f"about {timedelta(seconds=round(self.left_s))} left")
        return ", ".join(parts)


def run_jobs(
    jobs: Sequence[Job],
    store: ResultStore,
    executor: Executor,
    *,
    rules: Rules | None = None,
    minutes: float = math.inf,
    notice: Notice = lambda line: None,
    on_result: Callable[[Job], None] = lambda job: None,
) -> Progress:
    """Do every job that the store lacks; return how that ended.

    `notice` gets a line of progress whenever a job has ended, and progress.txt next to the results holds the last.
    `on_result` is called when a result is stored.
    """
    if (different := len({job.key for job in jobs})) != len(jobs):
        raise refuse("jobs", len(jobs), f"only {different} of them differ", "name each job once")
    missing = [job for job in jobs if not store.has(job)]
    progress = Progress(len(jobs), len(jobs) - len(missing))
    end = time.monotonic() + 60 * minutes
    try:
        _Loop(store, executor, rules or Rules(), end, notice, on_result, progress).run(missing)
    finally:
        executor.close()
    return progress


@dataclass
class _Loop:
    """Makes one call of `run_jobs`, with times of the monotonic clock.

    Of jobs under way, it keeps when their batch began and its size; of those that ended, seconds per unit of that
    size (`rates`). `tries` are counted by key, and by whether the worker died.
    """

    store: ResultStore
    executor: Executor
    rules: Rules
    end: float
    notice: Notice
    on_result: Callable[[Job], None]
    progress: Progress
    waiting: list[list[Job]] = field(default_factory=list)
    delayed: list[tuple[float, Job]] = field(default_factory=list)
    under_way: dict[str, tuple[float, float]] = field(default_factory=dict)
    tries: Counter[tuple[str, bool]] = field(default_factory=Counter)
    rates: list[float] = field(default_factory=list)
    size_ended: float = 0.0
    noticed: int = -1

    def run(self, jobs: Sequence[Job]) -> None:
        self.waiting, self.size = self.executor.batches(jobs), _size(jobs)
        self.began, reported = time.monotonic(), 0.0
        while self.waiting or self.delayed or self.under_way:
            self._submit_one()
            ready = self.waiting and self.executor.has_room()
            for done in self.executor.wait(0 if ready else POLL_S):
                self._take(done)
            if time.monotonic() - reported > REPORT_S:
                reported = time.monotonic()
                self._report()
        self._report()

    def _submit_one(self) -> None:
        now = time.monotonic()
        self.waiting += [[job] for due, job in self.delayed if due <= now]
        self.delayed = [(due, job) for due, job in self.delayed if due > now]
        while self.waiting and self.executor.has_room():
            batch = self.waiting.pop(0)
            if now + max(self.rates[-6:], default=0.0) * _size(batch) * CAUTION > self.end:
                # Shorter ones may still fit.
                self.progress.late += len(batch)
                self.size -= _size(batch)
                continue
            self.under_way |= {job.key: (now, _size(batch)) for job in batch}
            self.executor.submit(batch)
            return

    def _take(self, done: Done) -> None:
        key = done.job.key
        began, size = self.under_way.pop(key)
        self.rates.append((time.monotonic() - began) / size)
        self.size_ended += done.job.size
        if done.result is not None:
            failed = done.result.pop(FAILED, {})
            if done.result:
                self.store.add(key, done.result)
            self.on_result(done.job)
            if failed:
                self.progress.errors[done.job.name] = "; ".join(
                    f"{name}: {why}" for name, why in failed.items()
                )
            else:
                self.progress.done += 1
            return
        if any(mark in done.error for mark in DISK_FAULTS):
            # Every other job would fail as well, after hours of work.
            remedy = "make room there, then give the same command again: finished jobs are kept"
            raise refuse("disk", str(self.store.folder), f"a job could not write ({done.error})", remedy)
        self.tries[key, done.crashed] += 1
        most = self.rules.most_crashes if done.crashed else self.rules.most_failures
        if done.final or self.tries[key, done.crashed] >= most:
            self.progress.errors[done.job.name] = done.error
            return
        self.progress.retries += 1
        self.size += done.job.size
        delay = self.rules.delay(self.tries[key, True] + self.tries[key, False])
        self.delayed.append((time.monotonic() + delay, done.job))

    def _report(self) -> None:
        progress = self.progress
        progress.under_way = len(self.under_way)
        if self.size_ended:
            elapsed = time.monotonic() - self.began
            progress.left_s = elapsed * (self.size - self.size_ended) / self.size_ended
        errors = "".join(f"{name}: {error}\n" for name, error in progress.errors.items())
        write_whole(self.store.folder / "progress.txt", f"{progress.line()}\n{errors}".encode())
        if progress.ended != self.noticed:
            self.noticed = progress.ended
            self.notice(progress.line())


def _size(batch: Sequence[Job]) -> float:
    return sum(job.size for job in batch)
