"""Every job is done once, whoever is killed; the same results with any number of workers."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from runner_work import entries, jobs, numbers, run, stumble

from recap.tables.executors import Processes
from recap.tables.runner import FILE, Done, Job, Progress, ResultStore, Rules, canonical, run_jobs


def test_results_do_not_depend_on_the_number_of_workers(tmp_path):
    reported = []
    alone = run(jobs(12), numbers, tmp_path / "1", notice=reported.append)
    three = run(jobs(12), numbers, tmp_path / "3", workers=3)
    assert canonical(alone) == canonical(three) and len(alone) == 12
    assert reported[-1] == "12 of 12 done"
    assert [result["row"] for result in alone[:4]] == [f"row {i}" for i in range(4)]


def test_what_is_done_is_read_and_what_is_added_is_done(tmp_path):
    first = run(jobs(4), numbers, tmp_path)
    stamps = {path: path.stat().st_mtime_ns for path in tmp_path.glob("jobs/*/done.txt")}
    assert run(jobs(6), numbers, tmp_path)[:4] == first and len(stamps) == 4
    assert all(path.stat().st_mtime_ns == stamp for path, stamp in stamps.items())


def test_a_result_is_added_to_entry_by_entry(tmp_path):
    def asked(*wants):
        return [Job("job", {"seed": 7}, frozenset(wants))]

    assert run(asked("a"), entries, tmp_path) == [{"a": 7}]
    store = ResultStore(tmp_path)
    assert store.lacks(asked("a", "b")[0]) == {"b"} and not store.has(asked("a", "b")[0])
    assert run(asked("b"), entries, tmp_path) == [{"a": 7, "b": 7}]


def test_failures_are_retried_later_and_then_given_up(tmp_path):
    rules = Rules(backoff_s=0.02, most_failures=3, most_crashes=2)
    shaky, hopeless, fatal = (Job(row, {"row": row, "seed": 0}) for row in ("shaky", "hopeless", "fatal"))
    assert run([shaky], stumble, tmp_path, rules=rules) == [{"tries": 3}]
    store, reported = ResultStore(tmp_path), []
    executor = Processes(stumble, tmp_path / "jobs", 1)
    some = [shaky, hopeless, fatal]
    last = run_jobs(some, store, executor, rules=rules, notice=reported.append)
    assert (last.done, last.retries, set(last.errors)) == (1, 3, {"hopeless", "fatal"})
    assert last.errors["fatal"] == "its worker died (exit code 9)"
    assert reported[-1] == "1 of 3 done, 3 retries, 2 given up"
    left = (tmp_path / "progress.txt").read_text().splitlines()
    assert left[0] == reported[-1] and "fatal: its worker died (exit code 9)" in left[1:]
    assert last.errors["hopeless"].startswith("ValueError: no hope")
    assert Rules(backoff_s=2).delay(1) == 2 and Rules(backoff_s=2).delay(4) == 16


def test_what_cannot_be_used_is_refused(tmp_path):
    with pytest.raises(ValueError, match="only 1 of them differ"):
        run([*jobs(1), *jobs(1)], numbers, tmp_path)
    with pytest.raises(ValueError, match="plain JSON data"):
        run([Job("a", {"x": float("nan")})], numbers, tmp_path)


class Instant:
    """An executor that ends every job at once, and lists what was submitted."""

    def __init__(self, seconds=0.0, result=None):
        self.submitted, self._ended, self._seconds, self._result = [], [], seconds, result

    def batches(self, some):
        return [[job] for job in some]

    def has_room(self):
        return True

    def submit(self, batch):
        time.sleep(self._seconds)
        self.submitted += [job.name for job in batch]
        self._ended += [Done(job, {} if self._result is None else self._result) for job in batch]

    def wait(self, seconds):
        ended, self._ended = self._ended, []
        return ended

    def close(self):
        self.closed = True


def test_nothing_begins_that_would_end_too_late_and_shorter_jobs_may_fit(tmp_path):
    some = [Job(name, {"name": name}, size=size) for name, size in (("a", 1), ("long", 1000), ("b", 1))]
    executor = Instant(seconds=0.01)
    progress = run_jobs(some, ResultStore(tmp_path), executor, minutes=2 / 60)
    assert executor.submitted == ["a", "b"] and (progress.done, progress.late) == (2, 1) and executor.closed
    assert progress.line() == "2 of 3 done, 1 left for want of time"
    none = run_jobs(some[1:2], ResultStore(tmp_path), Instant(), minutes=1e-9)
    assert none.late == 1


def test_an_executor_is_closed_whatever_happens(tmp_path):
    executor = Instant()

    def stop(line):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_jobs(jobs(1), ResultStore(tmp_path), executor, notice=stop)
    assert executor.closed


def test_progress_in_words():
    progress = Progress(5, done=1, under_way=2, retries=1, left_s=65, errors={"x": "why"})
    assert progress.line() == "1 of 5 done, 2 under way, 1 retries, 1 given up, about 0:01:05 left"


# The store


def stored(folder, count=3):
    store = ResultStore(folder, {"torch": "1"})
    for number in range(count):
        store.add(f"key {number}", {"value": number / 7})
    return store.file


def test_a_kill_while_writing_costs_the_last_line_at_most(tmp_path):
    file = stored(tmp_path)
    whole = file.read_bytes()
    ends = [i + 1 for i, byte in enumerate(whole) if byte == ord("\n")]
    for cut in range(ends[1], len(whole)):
        file.write_bytes(whole[:cut])
        store = ResultStore(tmp_path)
        assert set(store.results) == {"key 0", "key 1"}
        store.add("key 3", {"value": 3})
        again = ResultStore(tmp_path)
        assert set(again.results) == {"key 0", "key 1", "key 3"} and again.makers["key 0"] == [{"torch": "1"}]


@pytest.mark.parametrize(
    "line", [b"no json", b"\xff", b"[1]", b'{"key": 3, "result": {}, "made_by": {}}', b"{}"]
)
def test_a_damaged_line_among_whole_ones_is_refused_and_nothing_is_lost(tmp_path, line):
    file = stored(tmp_path)
    lines = file.read_bytes().splitlines()
    damaged = b"\n".join([lines[0], line, *lines[1:], b""])
    file.write_bytes(damaged)
    with pytest.raises(
        ValueError, match=rf"{FILE}.*line 2 is damaged.*copy the file again, or delete that line"
    ):
        ResultStore(tmp_path)
    assert file.read_bytes() == damaged


# Kills


def start(folder: Path, count: int) -> subprocess.Popen:
    script = Path(__file__).with_name("runner_work.py")
    environment = {**os.environ, "JOB_S": "0.06", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([sys.executable, script, folder, str(count)], env=environment)


def at_work(folder: Path) -> tuple[int, list[int]]:
    """Jobs done, and the processes of jobs that were begun and have not ended."""
    done = len((folder / FILE).read_bytes().splitlines()) if (folder / FILE).exists() else 0
    begun = [path for path in folder.glob("jobs/*/pid") if not (path.parent / "done.txt").exists()]
    return done, [int(text) for path in begun if (text := path.read_text()) and alive(int(text))]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_200_jobs_killed_20_times_end_as_if_nothing_had_happened(tmp_path):
    """Workers and whole runners, by kill -9, at any moment; 200 results, the same as of an undisturbed run."""
    total, dice = 200, random.Random(8)
    kinds = ["worker"] * 15 + ["runner"] * 5
    dice.shuffle(kinds)
    folder = tmp_path / "killed"
    runner = start(folder, total)
    try:
        for number, kind in enumerate(kinds):
            while True:  # spread over the jobs, and at no particular moment of one
                assert runner.poll() is None, "ended before it was killed 20 times"
                done, workers = at_work(folder)
                if done >= number * 9 and workers:
                    break
                time.sleep(0.02)
            time.sleep(dice.uniform(0, 0.06))
            if kind == "worker":
                try:
                    os.kill(dice.choice(workers), signal.SIGKILL)
                except ProcessLookupError:
                    kinds.append("worker")  # it had just died with an earlier one
            else:
                runner.kill()
                runner.wait()
                runner = start(folder, total)
        assert runner.wait(60) == 0
    finally:
        runner.kill()
        runner.wait()
    again = run(jobs(total), numbers, folder)  # all there: nothing is done again
    undisturbed = run(jobs(total), numbers, tmp_path / "calm", workers=2)
    assert canonical(again) == canonical(undisturbed) and len(again) == total
    keys = [json.loads(line)["key"] for line in (folder / FILE).read_text().splitlines()]
    assert len(keys) == len(set(keys)) == total


def test_an_idle_worker_that_dies_costs_nothing(tmp_path):
    executor = Processes(numbers, tmp_path / "jobs", 1)
    try:
        for job in jobs(2):
            executor.submit([job])
            while not (ended := executor.wait(1)):
                pass
            assert ended[0].result is not None
            executor._workers[0].process.kill()
            executor._workers[0].process.join()
    finally:
        executor.close()
