"""Killed at random moments, several times in a row, a command that is given again ends as if nothing had happened."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

FAST = ("--backbone", "untrained", "--flow", "classical")
TABLE = ("--backbone", "untrained", "--prompts", "1", "--seeds", "1", "--seconds", "2", "--workers", "2")
COMMANDS: dict[str, tuple[str, ...]] = {
    "generate": ("generate", "a red boat", *FAST, "--seconds", "6", "--rows", "2"),
    "compare": ("compare", "a red boat", *FAST, "--seconds", "2"),
    "reproduce": ("reproduce", "reappearance", *TABLE, "--flow", "classical"),
}
KILLS_IN_A_ROW = 5


def start(*words: object) -> subprocess.Popen[bytes]:
    """Start a command in a session of its own, so that its workers can be killed with it."""
    command = [sys.executable, "-m", "recap", *map(str, words)]
    settings = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=settings, start_new_session=True
    )


def words_of(name: str, out: Path) -> tuple[object, ...]:
    """Return the command that starts the work, or that continues it."""
    if name == "generate" and (out / "run.json").is_file():
        return ("generate", "--resume", out)
    return (*COMMANDS[name], "--out", out)


def finish(name: str, out: Path) -> None:
    process = start(*words_of(name, out))
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors.decode()


def outcome(name: str, out: Path) -> dict[str, object]:
    """Return what must not depend on kills: all of a run but its times, the numbers of a table."""
    if name == "reproduce":
        (table,) = out.rglob("table.json")
        return {"cells": json.loads(table.read_text())["cells"]}
    kinds = ("latents.safetensors", "trace.jsonl", "state.safetensors", "video*.mp4")
    files = [file for kind in kinds for file in out.rglob(kind)]
    strays = [file.name for file in out.rglob(".recap-*")]
    return {"strays": strays, **{str(file.relative_to(out)): file.read_bytes() for file in files}}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> Callable[[str], tuple[dict[str, object], float]]:
    """Run a command to its end, once; returns its outcome and how long it worked after its first file."""
    known: dict[str, tuple[dict[str, object], float]] = {}

    def run(name: str) -> tuple[dict[str, object], float]:
        if name not in known:
            out = tmp_path_factory.mktemp(name) / "out"
            process = start(*words_of(name, out))
            began = first_file(out, process)
            _, errors = process.communicate(timeout=300)
            assert process.returncode == 0, errors.decode()
            known[name] = outcome(name, out), time.monotonic() - began
        return known[name]

    return run


def first_file(out: Path, process: subprocess.Popen[bytes]) -> float:
    """Wait until the command has made something, or has ended; returns the time."""
    while not (out.is_dir() and any(out.iterdir())) and process.poll() is None:
        time.sleep(0.005)
    return time.monotonic()


def attempt(name: str, out: Path, kills: int, seed: int, work_s: float) -> list[float]:
    """Kill a command so many times, each time when it has worked for a random while; returns these times."""
    chance = random.Random(seed)
    moments = []
    for _ in range(kills):
        process = start(*words_of(name, out))
        first_file(out, process)
        # A resumed command finds files at once, so its start counts as work.
        moments.append(chance.uniform(0, work_s))
        time.sleep(moments[-1])
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    finish(name, out)
    return moments


@pytest.mark.parametrize(
    ("name", "kills"),
    [
        pytest.param("generate", 1, marks=pytest.mark.slow),
        pytest.param("compare", 1, marks=pytest.mark.slow),
        pytest.param("reproduce", 1, marks=pytest.mark.slow),
    ],
)
def test_a_few_kills(name: str, kills: int, undisturbed, tmp_path: Path) -> None:
    expected, work_s = undisturbed(name)
    attempt(name, tmp_path / "out", kills, 0, work_s)
    assert outcome(name, tmp_path / "out") == expected


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 8))
@pytest.mark.parametrize("name", COMMANDS)
def test_a_hundred_kills(name: str, seed: int, undisturbed, tmp_path: Path) -> None:
    """Three commands, seven times five kills each: 105."""
    expected, work_s = undisturbed(name)
    moments = attempt(name, tmp_path / "out", KILLS_IN_A_ROW, seed, work_s)
    assert outcome(name, tmp_path / "out") == expected, moments


def children(pid: int) -> list[int]:
    """Return the processes that a process has started."""
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="children are found in /proc")
@pytest.mark.parametrize("victim", ["server", "worker", "both"])
def test_one_killed_helper_of_a_table_is_named_and_nothing_is_lost(tmp_path, undisturbed, victim) -> None:
    out = tmp_path / "out"
    process = start(*words_of("reproduce", out))
    workers: list[int] = []
    while not workers and process.poll() is None:
        servers = [child for child in children(process.pid) if children(child)]
        workers = [worker for server in servers for worker in children(server)]
        time.sleep(0.01)
    assert workers, "the command ended before it had workers"
    chosen = {"server": servers[:1], "worker": workers[:1], "both": [servers[0], workers[0]]}[victim]
    for pid in chosen:
        os.kill(pid, signal.SIGKILL)
    _, errors = process.communicate(timeout=300)
    lines = errors.decode().splitlines()
    assert process.returncode in (0, 2) and "Traceback" not in errors.decode(), errors.decode()
    if process.returncode == 2:
        named = [line for line in lines if line.startswith("error: ")]
        assert len(named) == 1 and ("worker" in named[0] or "process" in named[0]), errors.decode()
    finish("reproduce", out)
    assert outcome("reproduce", out) == undisturbed("reproduce")[0]
