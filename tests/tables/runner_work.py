"""Work for the tests of the runner, where worker processes find it by name; and a runner to be killed."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch

from recap.tables.executors import Processes
from recap.tables.runner import Job, ResultStore, Rules, run_jobs

RULES = Rules(backoff_s=0.01, most_crashes=50)


def numbers(job, place):
    """A few numbers that depend on the seed alone, and a file; takes as long as the environment says."""
    data = job.data
    dice = torch.Generator().manual_seed(data["seed"])
    values = torch.randn(64, 64, generator=dice)
    place.mkdir(parents=True, exist_ok=True)
    (place / "pid").write_text(str(os.getpid()))
    time.sleep(float(os.environ.get("JOB_S", "0")))
    (place / "done.txt").write_text(str(data["seed"]))
    return {"sum": float((values @ values).sum()), "row": data["row"]}


def stumble(job, tries):
    """Fails twice, then succeeds; some never do."""
    tries.mkdir(parents=True, exist_ok=True)
    (tries / f"{time.time_ns()}").touch()
    count, row = len(list(tries.iterdir())), job.data["row"]
    if row == "hopeless":
        raise ValueError("no hope")
    if row == "fatal":
        os._exit(9)
    if count < 3:
        raise RuntimeError(f"try {count}")
    return {"tries": count}


def linger(job, place):
    """As `numbers`, but one of them tells its process and waits, so that it can be killed at work."""
    place.mkdir(parents=True, exist_ok=True)
    first = not (place / "pid").exists()
    (place / "pid.part").write_text(str(os.getpid()))
    (place / "pid.part").rename(place / "pid")
    if first and job.data["seed"] == 1:
        time.sleep(float(os.environ.get("LINGER_S", "0")))
    return numbers(job, place)


def entries(job, folder):
    """A result of what was asked for."""
    return dict.fromkeys(job.wants, job.data["seed"])


def jobs(count: int) -> list[Job]:
    return [Job(f"job {i}", {"row": f"row {i % 4}", "seed": i}) for i in range(count)]


def run(some, work, folder, *, workers=1, rules=RULES, **how):
    """All results, by processes of this machine."""
    store = ResultStore(folder)
    run_jobs(some, store, Processes(work, folder / "jobs", workers), rules=rules, **how)
    return [store.results[job.key] for job in some]


if __name__ == "__main__":
    # Workers find functions by the name of their module, which is not the name of a script.
    import runner_work

    torch.set_num_threads(1)
    run(jobs(int(sys.argv[2])), runner_work.numbers, Path(sys.argv[1]), workers=2)
