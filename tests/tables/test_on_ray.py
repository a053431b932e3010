"""The same jobs on a real local Ray cluster, one of its workers killed at work."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest
from runner_work import RULES, jobs, linger, run

from recap.tables.executors import OnRay
from recap.tables.runner import ResultStore, canonical, run_jobs


def test_without_ray_it_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    with pytest.raises(ValueError, match=r"pip install recap-forcing\[ray\]"):
        OnRay(linger, tmp_path)


def test_ray_gives_the_same_bytes_as_this_machine_alone(tmp_path, monkeypatch):
    pytest.importorskip("ray")
    here = str(Path(__file__).parent)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH", "")])))
    monkeypatch.setenv("LINGER_S", "20")
    folder = tmp_path / "ray"
    killed = []

    def kill_one_at_work():
        pid = folder / "jobs" / jobs(8)[1].key / "pid"
        while not pid.exists():
            time.sleep(0.05)
        os.kill(int(pid.read_text()), signal.SIGKILL)
        killed.append(pid.read_text())

    thread = threading.Thread(target=kill_one_at_work, daemon=True)
    thread.start()
    store = ResultStore(folder)
    progress = run_jobs(jobs(8), store, OnRay(linger, folder / "jobs"), rules=RULES)
    thread.join(1)
    assert killed and progress.retries == 1
    monkeypatch.setenv("LINGER_S", "0")
    local = run(jobs(8), linger, tmp_path / "local")
    assert canonical([store.results[job.key] for job in jobs(8)]) == canonical(local) and len(local) == 8
