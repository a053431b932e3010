"""A killed run, resumed in a new process, ends in the same latents, trace and bank as an undisturbed one."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from safetensors.torch import load_file

TRIES = 20
SCRIPT = '[{"prompt": "a red boat", "seconds": 5}, {"prompt": "a blue house", "seconds": 4}]'
# The state holds the bank, the novelty's maps and the decoder's stream.
SAME_BYTES = (
    "latents.safetensors",
    "trace.jsonl",
    "state.safetensors",
    "run.json",
    "video-0.mp4",
    "video-1.mp4",
)
OTHERS = {"index.html", "manifest.jsonl", "summary.json", "timing.jsonl"}


def recap(*arguments: str | Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "recap", *map(str, arguments)]
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=one_thread)


def start(folder: Path, script: Path, length: int) -> subprocess.Popen[bytes]:
    how = ("--backbone", "untrained", "--rows", "2", "--flow", "classical")
    blocks = ("--set", f"backbone.frames_per_block={length}")
    return recap("generate", "--script", script, *how, *blocks, "--out", folder)


def finish(process: subprocess.Popen[bytes]) -> None:
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors.decode()


@pytest.fixture(scope="module")
def script(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("script") / "script.json"
    path.write_text(SCRIPT)
    return path


@pytest.fixture(scope="module", params=[3, pytest.param(1, marks=pytest.mark.slow)])
def length(request) -> int:
    """Frames of a block."""
    return request.param


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, script, length) -> tuple[Path, float]:
    """A whole run, and how long it worked from its first file to its end."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    process = start(folder, script, length)
    wait_for(folder / "run.json")
    began = time.monotonic()
    finish(process)
    return folder, time.monotonic() - began


def lines_of(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def whole_blocks(folder: Path) -> int:
    return len([line for line in lines_of(folder / "trace.jsonl") if line.endswith("}")])


def saved_block(folder: Path) -> int:
    state = folder / "state.safetensors"
    return int(load_file(state)["next_block"]) if state.exists() else 0


def wait_for(path: Path) -> None:
    limit = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < limit, f"{path} did not appear"
        time.sleep(0.002)


def test_killed_at_a_random_moment_and_resumed_equals_undisturbed(tmp_path, script, length, undisturbed):
    whole, seconds = undisturbed

    def attempt(number: int) -> int:
        """Returns how many blocks were whole when the run was killed."""
        folder = tmp_path / str(number) / "run"
        process = start(folder, script, length)
        wait_for(folder / "run.json")
        time.sleep(random.Random(number).uniform(0, 1.1 * seconds))
        process.send_signal(signal.SIGKILL)
        process.communicate()
        generated, next_block = whole_blocks(folder), saved_block(folder)
        # At most the block being saved, unless writing was slow: then states rest (LONG_WRITE_S), as on a busy disk.
        assert 0 <= generated - next_block <= 5
        times = lines_of(folder / "timing.jsonl")[:next_block]
        finish(recap("generate", "--resume", folder))
        assert lines_of(folder / "timing.jsonl")[:next_block] == times, "whole blocks are not generated again"
        for name in SAME_BYTES:
            assert (folder / name).read_bytes() == (whole / name).read_bytes(), f"try {number}: {name}"
        names = {path.name for path in folder.iterdir()} - {".lock"}
        assert names == {*SAME_BYTES, *OTHERS}  # nothing that the kill cut short is left over
        return next_block

    with ThreadPoolExecutor(2) as pool:
        stops = list(pool.map(attempt, range(TRIES)))
    assert len(set(stops)) > 3, f"the kills must fall on different blocks, not {stops}"


def test_a_finished_run_is_left_as_it_is(undisturbed):
    whole, _ = undisturbed
    before = {path.name: path.stat().st_mtime_ns for path in whole.iterdir() if path.name != ".lock"}
    finish(recap("generate", "--resume", whole))
    assert {p.name: p.stat().st_mtime_ns for p in whole.iterdir() if p.name != ".lock"} == before
