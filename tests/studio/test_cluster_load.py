"""Viewers come until they are refused: the refusals are clear, those who watch keep their rate, memory stays flat."""

from __future__ import annotations

import asyncio
import os
import statistics
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("ray.serve")

from benchmarks.pauses import replica_processes
from benchmarks.studio import resident_mb
from recap.studio.cluster.deploy import Cluster
from recap.studio.cluster.seats import ServeSeating
from recap.studio.cluster.settings import ClusterSettings
from tests.studio.clusters import TOKEN, Watcher, ask, serving

SEATS, ROUNDS, WINDOW_S, INTRUDERS = 6, 3, 12.0, 42
# Seconds between two looks of a viewer. Far below the time of a block, replicas work as fast as they can, and what
# else the machine does shows: RECAP_PACE=0.05, on quiet cores.
PACE_S = float(os.environ.get("RECAP_PACE", "2.0"))


@pytest.fixture
def cluster(tmp_path):
    settings = ClusterSettings(
        str(tmp_path / "store"), "untrained", "classical", replicas=2, sessions=SEATS // 2, cpus=1, queue=2,
        patience_s=2.0, kept_sessions=50,
    )  # fmt: skip
    with Cluster(settings, TOKEN) as made, serving(settings, ServeSeating(made.handle)) as (_, address):
        yield address


@pytest.mark.slow
def test_those_who_watch_keep_their_rate_while_others_are_refused(cluster):
    address = cluster
    names = [
        ask(address, "/v1/sessions", {"prompt": "a boat", "seed": s})[1]["session"] for s in range(SEATS)
    ]
    watchers = [Watcher(address, name, PACE_S) for name in names]
    done = threading.Event()

    async def watch_all():
        await asyncio.gather(*(watcher.watch(done) for watcher in watchers))

    def rate():
        before, began = [watcher.seen for watcher in watchers], time.monotonic()
        time.sleep(WINDOW_S)
        spent = time.monotonic() - began
        return [(watcher.seen - seen) / spent for watcher, seen in zip(watchers, before, strict=True)]

    with ThreadPoolExecutor(12) as pool:
        watching = pool.submit(asyncio.run, watch_all())
        time.sleep(5.0)
        alone, crowded, refusals = [], [], []
        # In turns, since what else this machine does changes meanwhile.
        for _ in range(ROUNDS):
            alone += rate()
            asked = [{"prompt": "a boat", "seed": seed} for seed in range(INTRUDERS // ROUNDS)]
            answers = [pool.submit(ask, address, "/v1/sessions", body) for body in asked]
            crowded += rate()
            refusals += [answer.result() for answer in answers]
        done.set()
        watching.result()
    assert all(status == 503 and f"all {SEATS} seats are taken" in told["text"] for status, told in refusals)
    assert any("2 wait already" in told["text"] for _, told in refusals)
    print(f"blocks/s of a session alone {statistics.mean(alone):.3f} (least {min(alone):.3f}), "
          f"with {len(refusals)} refused {statistics.mean(crowded):.3f} (least {min(crowded):.3f})")  # fmt: skip
    assert statistics.mean(crowded) >= 0.9 * statistics.mean(alone)


@pytest.mark.slow
def test_memory_is_flat_after_500_sessions(cluster):
    address = cluster
    grown = []
    for number in range(500):
        status, hello = ask(address, "/v1/sessions", {"prompt": "a boat", "seed": number})
        assert status == 201, hello
        name = hello["session"]
        if number % 10 == 0:
            while not ask(address, f"/v1/sessions/{name}")[1]["blocks"]["main"]:
                time.sleep(0.02)
        assert ask(address, f"/v1/sessions/{name}/close", {})[0] == 200
        assert ask(address, f"/v1/sessions/{name}", method="DELETE")[0] == 200
        if number % 100 == 99:
            grown.append(max(resident_mb(process) for process in replica_processes(os.getpid())))
    print("MB of the largest replica after each 100 sessions:", [round(one) for one in grown])
    assert grown[-1] < 1.05 * grown[0]
    assert ask(address, "/v1/sessions")[1] == []
