"""Jobs for the tests, where worker processes find them by name; and a sweep to be killed."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch

from recap.tables.jobs import Job
from recap.tables.pool import run_sweep
from recap.tables.store import Rules

RULES = Rules(lease_s=5, backoff_s=0.01, most_crashes=50)


def draw(payload, folder):
    """A few numbers that depend on the seed alone, and a file; takes as long as the environment says."""
    dice = torch.Generator().manual_seed(payload["seed"])
    numbers = torch.randn(64, 64, generator=dice)
    Path(folder).mkdir(parents=True, exist_ok=True)
    time.sleep(float(os.environ.get("JOB_S", "0")))
    (Path(folder) / "done.txt").write_text(str(payload["seed"]))
    return {"sum": float((numbers @ numbers).sum()), "row": payload["row"], "prompt": payload["prompt"]}


def stumble(payload, folder):
    """Fails twice, then succeeds; some never do."""
    tries = Path(folder)
    tries.mkdir(parents=True, exist_ok=True)
    (tries / f"{time.time_ns()}").touch()
    count = len(list(tries.iterdir()))
    if payload["row"] == "hopeless":
        raise ValueError("no hope")
    if payload["row"] == "fatal":
        os._exit(9)
    if count < 3:
        raise RuntimeError(f"try {count}")
    return {"tries": count}


def linger(payload, folder):
    """As `draw`, but tells its process and waits, so that it can be killed at work."""
    place = Path(folder)
    place.mkdir(parents=True, exist_ok=True)
    first = not (place / "pid").exists()
    (place / "pid.part").write_text(str(os.getpid()))
    (place / "pid.part").rename(place / "pid")
    if first and payload["seed"] == 1:
        time.sleep(float(os.environ.get("LINGER_S", "0")))
    return draw(payload, folder)


def dawdle(payload, folder):
    """Writes down that it was begun, and takes its time the first time."""
    place = Path(folder)
    place.mkdir(parents=True, exist_ok=True)
    first = not (place / "begun").exists()
    with (place / "begun").open("a") as begun:
        begun.write("once\n")
    time.sleep(payload["data"]["takes_s"] if first else 0)
    return {"seed": payload["seed"]}


def jobs(count: int) -> list[Job]:
    return [Job(f"row {i % 4}", f"prompt {i // 4}", i, {"seconds": 1.5}) for i in range(count)]


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    torch.set_num_threads(1)
    run_sweep(jobs(int(sys.argv[2])), "sweep_work:draw", Path(sys.argv[1]), workers=2, rules=RULES)
