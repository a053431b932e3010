"""A sweep does every job once, whoever is killed; the same results with any number of workers."""

from __future__ import annotations

import os
import random
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import pytest
from sweep_work import RULES, dawdle, jobs

from recap.tables import pool
from recap.tables.jobs import Job, canonical
from recap.tables.pool import run_sweep
from recap.tables.status import as_time, status_of, sweep_status
from recap.tables.store import Rules, Store, is_dead, own_name
from recap.tables.worker import _Heart, do_one

WORK = "sweep_work:draw"


def store_of(folder: Path, count: int = 3, **rules) -> Store:
    store = Store(folder, Rules(**rules))
    store.begin(WORK)
    store.add(jobs(count))
    return store


def test_results_do_not_depend_on_the_number_of_workers(tmp_path):
    told = []
    alone = run_sweep(jobs(12), WORK, tmp_path / "1", tell=told.append)
    three = run_sweep(jobs(12), WORK, tmp_path / "3", workers=3)
    assert canonical(alone) == canonical(three) and len(alone) == 12
    assert told[-1].counts.done == 12 and told[-1].line() == "12 of 12 done, 0 under way"
    assert [result["row"] for result in alone[:4]] == [f"row {i}" for i in range(4)]


def test_a_finished_sweep_is_read_and_an_enlarged_one_goes_on(tmp_path):
    first = run_sweep(jobs(4), WORK, tmp_path)
    stamps = {path: path.stat().st_mtime_ns for path in tmp_path.glob("jobs/*/done.txt")}
    assert run_sweep(jobs(6), WORK, tmp_path)[:4] == first and len(stamps) == 4
    assert all(path.stat().st_mtime_ns == stamp for path, stamp in stamps.items())


def test_each_job_is_claimed_once(tmp_path):
    one, other = store_of(tmp_path), Store(tmp_path)
    claims = [store.claim("host/1/1") for store in (one, other, one, other)]
    assert len({claim.key for claim in claims[:3]}) == 3 and claims[3] is None


def test_a_late_result_does_not_count(tmp_path):
    """A worker that was taken for dead comes back when somebody else has the job, or has done it."""
    store = store_of(tmp_path, 1, lease_s=-1)
    slow = store.claim("elsewhere/1/1")
    assert store.recover() == 1
    quick = store.claim("elsewhere/2/1")
    assert not store.beat(slow) and not store.finish(slow, {"value": 1})
    assert store.finish(quick, {"value": 2}) and not store.finish(quick, {"value": 3})
    assert store.results(jobs(1)) == [{"value": 2}]


def test_claims_of_dead_processes_are_free_at_once_and_of_living_ones_are_not(tmp_path):
    store = store_of(tmp_path)
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    child.wait()
    host = own_name().split("/")[0]
    store.claim(own_name())
    store.claim(f"{host}/{child.pid}/123")
    store.claim("another-host/1/1")
    assert store.recover() == 1 and store.counts().claimed == 2
    assert not is_dead(own_name()) and is_dead(f"{host}/{os.getpid()}/another-time")


SLOW = Job("row", "prompt", 0, {"takes_s": 1.0})
IMPATIENT = Rules(lease_s=0.4, backoff_s=0.01)


def worked_on_beside_others(folder: Path) -> tuple[bool, Store]:
    """Do the slow job while somebody frees the dead and looks for work; whether that one got it, and the store."""
    mine, others = Store(folder, IMPATIENT), Store(folder, IMPATIENT)
    mine.add([SLOW])
    worker = threading.Thread(target=do_one, args=(mine, mine.claim(own_name()), dawdle))
    worker.start()
    stolen = False
    while worker.is_alive() and not stolen:
        others.recover()
        stolen = others.claim("elsewhere/1/1") is not None
        time.sleep(0.02)
    worker.join()
    return stolen, others


def test_a_job_may_outlive_its_lease_as_long_as_its_heart_beats(tmp_path):
    stolen, store = worked_on_beside_others(tmp_path)
    assert not stolen and store.results([SLOW]) == [{"seed": 0}]
    assert store.counts().retries == 0 and store.job_seconds()[0] > 2 * IMPATIENT.lease_s


def test_without_a_heart_a_job_that_outlives_its_lease_is_claimed_again(tmp_path, monkeypatch):
    monkeypatch.setattr(_Heart, "_beat", lambda self: None)
    stolen, store = worked_on_beside_others(tmp_path)
    assert stolen and store.results([SLOW]) == [None]  # the first one's result came too late


def test_workers_keep_what_takes_longer_than_a_lease(tmp_path, monkeypatch):
    monkeypatch.setattr(pool, "LOOK_S", 0.05)
    assert run_sweep([SLOW], "sweep_work:dawdle", tmp_path, workers=2, rules=IMPATIENT) == [{"seed": 0}]
    assert (tmp_path / "jobs" / SLOW.key / "begun").read_text() == "once\n"
    assert sweep_status(tmp_path).counts.retries == 0


def test_failures_are_retried_later_and_then_given_up(tmp_path):
    rules = Rules(backoff_s=0.02, most_failures=3, most_crashes=2)
    work = "sweep_work:stumble"
    assert run_sweep([Job("shaky", "p", 0, {})], work, tmp_path, rules=rules) == [{"tries": 3}]
    both = [Job("shaky", "p", 0, {}), Job("hopeless", "p", 0, {}), Job("fatal", "p", 0, {})]
    with pytest.raises(ValueError, match=r"2 of 3 jobs have no result; the first: ValueError: no hope"):
        run_sweep(both, work, tmp_path, rules=rules)
    status = sweep_status(tmp_path)
    assert (status.counts.done, status.counts.failed) == (1, 2)
    assert any("worker died (exit code 9)" in error for error in status.errors.values())
    assert Rules(backoff_s=2).delay(1) == 2 and Rules(backoff_s=2).delay(4) == 16


def test_what_cannot_be_used_is_refused(tmp_path):
    store_of(tmp_path / "a").close()
    with pytest.raises(ValueError, match="sweep of another work"):
        run_sweep(jobs(1), "sweep_work:stumble", tmp_path / "a")
    with pytest.raises(ValueError, match="cannot be imported"):
        run_sweep(jobs(1), "sweep_work:nothing", tmp_path / "b")
    with pytest.raises(ValueError, match="only 1 of them differ"):
        run_sweep([*jobs(1), *jobs(1)], WORK, tmp_path / "b")
    with pytest.raises(ValueError, match="plain JSON data"):
        run_sweep([Job("a", "b", 0, {"x": float("nan")})], WORK, tmp_path / "b")
    with pytest.raises(ValueError, match="workers is 0"):
        run_sweep(jobs(1), WORK, tmp_path / "b", workers=0)
    with pytest.raises(ValueError, match="holds no sweep"):
        sweep_status(tmp_path / "nowhere")
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "sweep.sqlite").write_bytes(b"no database at all" * 100)
    with pytest.raises(ValueError, match="move it away"):
        Store(tmp_path / "c")


def test_time_left(tmp_path):
    store = store_of(tmp_path)
    assert status_of(store).left_s is None
    claim = store.claim("x/1/1")
    time.sleep(0.05)
    store.finish(claim, {})
    assert 0.05 <= status_of(store).left_s / 2 < 1 and "left" in status_of(store).line()
    assert [as_time(s) for s in (5, 65, 7300)] == ["5 s", "1 min 05 s", "2 h 01 min"]


def start(folder: Path, count: int) -> subprocess.Popen:
    script = Path(__file__).with_name("sweep_work.py")
    environment = {**os.environ, "JOB_S": "0.06", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([sys.executable, script, folder, str(count)], env=environment)


def progress(folder: Path) -> tuple[int, list[str]]:
    """Jobs done, and the workers that hold one; (0, []) before there is anything to read."""
    try:
        with sqlite3.connect(folder / "sweep.sqlite", timeout=10) as db:
            done = db.execute("SELECT COUNT(*) FROM jobs WHERE state = 'done'").fetchone()[0]
            owners = db.execute("SELECT owner FROM jobs WHERE state = 'claimed'").fetchall()
    except sqlite3.OperationalError:
        return 0, []
    finally:
        if "db" in locals():
            db.close()
    return done, [owner for (owner,) in owners if not is_dead(owner)]


def test_200_jobs_killed_20_times_end_as_if_nothing_had_happened(tmp_path):
    """Workers and whole sweeps, by kill -9, at any moment; 200 results, the same as of an undisturbed run."""
    total, dice = 200, random.Random(8)
    kinds = ["worker"] * 15 + ["sweep"] * 5
    dice.shuffle(kinds)
    folder = tmp_path / "killed"
    sweep = start(folder, total)
    try:
        for number, kind in enumerate(kinds):
            while True:  # spread over the sweep, and at no particular moment of a job
                assert sweep.poll() is None, "ended before it was killed 20 times"
                done, owners = progress(folder)
                if done >= number * 9 and owners:
                    break
                time.sleep(0.02)
            time.sleep(dice.uniform(0, 0.06))
            if kind == "worker":
                try:
                    os.kill(int(dice.choice(owners).split("/")[1]), signal.SIGKILL)
                except ProcessLookupError:
                    kinds.append("worker")  # it had just died with an earlier one
            else:
                sweep.kill()
                sweep.wait()
                sweep = start(folder, total)
        assert sweep.wait(60) == 0
    finally:
        sweep.kill()
        sweep.wait()
    again = run_sweep(jobs(total), WORK, folder, rules=RULES)  # all there: nothing is done anew
    undisturbed = run_sweep(jobs(total), WORK, tmp_path / "calm", workers=2)
    assert canonical(again) == canonical(undisturbed) and len(again) == total
    rows = sqlite3.connect(folder / "sweep.sqlite").execute("SELECT state, key FROM jobs").fetchall()
    assert Counter(state for state, _ in rows) == {"done": total} and len({key for _, key in rows}) == total
