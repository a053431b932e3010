"""`recap generate` from outside: stopped by signals, fed by pipes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
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
