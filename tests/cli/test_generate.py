"""`recap generate` from outside: stopped by signals, fed by pipes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest


def recap(*words, **more) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "recap", *map(str, words)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | more
    # A shell lets what it starts in the background ignore this signal, tests and their processes too.
    pipes["preexec_fn"] = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)
    return subprocess.Popen(command, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, **pipes)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_stopped_run_says_how_to_continue(tmp_path, number, code):
    folder = tmp_path / "my run"
    process = recap("generate", "a boat", "--seconds", 600, "--backbone", "untrained", "--out", folder)
    limit = time.monotonic() + 120
    while not (folder / "state.safetensors").exists():
        assert time.monotonic() < limit and process.poll() is None
        time.sleep(0.01)
    process.send_signal(number)
    _, message = process.communicate(timeout=60)
    assert process.returncode == code, message
    assert f"recap generate --resume '{folder}'" in message and "Traceback" not in message


OWN = """
from dataclasses import dataclass
from recap.memory.sink import SinkConfig

@dataclass(frozen=True, slots=True)
class Mine(SinkConfig):
    pass
"""


def stop(process, begun):
    """Stop a command by Ctrl-C once this file is there; returns what it said."""
    limit = time.monotonic() + 120
    while not begun():
        assert time.monotonic() < limit and process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, message = process.communicate(timeout=60)
    assert process.returncode == 130 and "Traceback" not in message, message
    return message


def test_a_stopped_run_with_a_memory_of_ones_own_says_how_to_continue_with_it(tmp_path):
    (tmp_path / "users_memory.py").write_text(OWN)
    words = ("a boat", "--seconds", 600, "--backbone", "untrained", "--memory", "users_memory:Mine")
    process = recap("generate", *words, "--out", tmp_path / "run", cwd=tmp_path)
    message = stop(process, (tmp_path / "run" / "state.safetensors").exists)
    assert f"recap generate --resume {tmp_path / 'run'} --trust-code" in message


def test_a_stopped_comparison_says_how_to_continue(tmp_path):
    words = ("a boat", "--seconds", 600, "--backbone", "untrained", "--memories", "none,sink")
    process = recap("compare", *words, "--out", tmp_path / "out")
    message = stop(process, (tmp_path / "out" / "none" / "state.safetensors").exists)
    assert f"stopped; the same command with --out {tmp_path / 'out'} continues it" in message


def test_a_stopped_table_says_how_to_continue(tmp_path):
    """Ctrl-C in a terminal reaches the workers, too, of which nobody wants to read."""
    words = ("motion", "--backbone", "untrained", "--seconds", 300, "--prompts", 2, "--workers", 2)
    process = recap(
        "reproduce",
        *words,
        "--flow",
        "classical",
        "--embedder",
        "hsv",
        "--out",
        tmp_path,
        start_new_session=True,
    )
    workers = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    limit = time.monotonic() + 120
    # The server of the workers, the tracker of resources, and what the server has started.
    while not _working(workers):
        assert time.monotonic() < limit and process.poll() is None
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)
    _, message = process.communicate(timeout=60)
    assert process.returncode == 130 and "Traceback" not in message, message
    assert "stopped; the same command continues; runs that are done are kept" in message


def _working(children):
    """Tell whether a grandchild has used a second of its processor: it is at work."""
    for child in children.read_text().split():
        own = Path(f"/proc/{child}/task/{child}/children")
        for worker in own.read_text().split() if own.exists() else ():
            with suppress(OSError):
                ticks = int(Path(f"/proc/{worker}/stat").read_text().rpartition(")")[2].split()[11])
                if ticks / os.sysconf("SC_CLK_TCK") > 1:
                    return True
    return False


def test_a_list_that_is_not_read_to_its_end_ends_without_a_word(tmp_path):
    process = recap("list")
    assert process.stdout is not None and process.stdout.readline()
    process.stdout.close()
    assert process.stderr is not None
    assert process.stderr.read() == ""
    assert process.wait(timeout=60) in (0, -signal.SIGPIPE)


@pytest.mark.slow
def test_a_script_comes_from_a_file_or_a_stream_and_not_from_a_pipe_nobody_writes_to(tmp_path):
    os.mkfifo(tmp_path / "script.json")
    process = recap("generate", "--script", tmp_path / "script.json", "--backbone", "untrained")
    _, message = process.communicate(timeout=60)
    assert process.returncode == 2 and "is not a regular file" in message
    shots = json.dumps([{"prompt": "a boat", "seconds": 1}])
    words = ("generate", "--script", "/dev/stdin", "--backbone", "untrained", "--out", tmp_path / "run")
    process = recap(*words, stdin=subprocess.PIPE)
    process.communicate(shots, timeout=120)
    assert process.returncode == 0 and Path(tmp_path / "run" / "video.mp4").is_file()
