"""How a sweep stands, for a progress line and for whoever asks from outside."""

from __future__ import annotations

import os
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

from recap.errors import refuse
from recap.tables.store import FILE, Counts, Store


@dataclass(frozen=True, slots=True)
class Status:
    counts: Counts
    elapsed_s: float
    left_s: float | None  # None while no job has been finished
    errors: dict[str, str]

    def line(self) -> str:
        counts = self.counts
        parts = [f"{counts.done} of {counts.total} done", f"{counts.claimed} under way"]
        if counts.waiting:
            parts.append(f"{counts.waiting} waiting")
        if counts.retries:
            parts.append(f"{counts.retries} retries")
        if counts.failed:
            parts.append(f"{counts.failed} given up")
        if self.left_s is not None and counts.waiting + counts.claimed:
            parts.append(f"about {as_time(self.left_s)} left")
        return ", ".join(parts)


def status_of(store: Store, workers: int = 1, began: float | None = None) -> Status:
    """The state of an open store; the time left follows from how long finished jobs took."""
    counts, took = store.counts(), store.job_seconds()
    open_jobs = counts.waiting + counts.claimed
    # The median of the last ones: earlier ones may be of a shorter kind, and one may have hung.
    left = statistics.median(took[-50:]) * open_jobs / max(1, workers) if took else None
    elapsed = 0.0 if began is None else time.time() - began
    return Status(counts, elapsed, left, store.errors())


def find_sweeps(folder: Path) -> list[Path]:
    """The folders of all sweeps of a folder: itself, or below it."""
    begin = (
        "recap reproduce TABLE begins one in results/TABLE; name that, or the folder it was given by --out"
    )
    if not folder.is_dir():
        raise refuse("sweep", str(folder), "there is no such folder", begin)
    found = []
    for place, below, files in os.walk(folder.resolve()):
        if FILE in files:
            found.append(Path(place))
            below.clear()  # thousands of files of its jobs
    if not found:
        raise refuse("sweep", str(folder), "holds no sweep, nor does a folder below it", begin)
    return sorted(found)


def sweep_status(folder: Path) -> Status:
    """The state of the sweep in a folder, whether or not it is under way."""
    if not (folder / FILE).is_file():
        raise refuse("sweep", str(folder), "holds no sweep", "name the folder that a sweep was run in")
    store = Store(folder)
    try:
        return status_of(store, max(1, store.counts().claimed))
    finally:
        store.close()


def as_time(seconds: float) -> str:
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
