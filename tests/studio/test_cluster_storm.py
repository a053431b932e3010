"""Replicas and nodes of a real Ray cluster are killed at random; every session ends as if nothing had happened."""

from __future__ import annotations

import asyncio
import os
import random
import statistics
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

pytest.importorskip("ray.serve")

from benchmarks.pauses import replica_processes
from recap.studio.cluster.deploy import NAME, Cluster, deployment_options
from recap.studio.cluster.replica import Replica
from recap.studio.cluster.seats import ServeSeating
from recap.studio.cluster.settings import ClusterSettings
from recap.studio.cluster.snapshots import open_store
from recap.studio.store import MEDIA
from tests.studio.clusters import (
    TOKEN,
    RayNodes,
    Watcher,
    ask,
    check_same,
    hash_of,
    kept,
    kill,
    running_replicas,
    seats_taken,
    serving,
)
from tests.studio.conftest import wait_for

# At full size, 50 sessions and 20 kills, it takes a quarter of an hour on two cores: RECAP_STORM=full.
SESSIONS, KILLS = (50, 20) if os.environ.get("RECAP_STORM") == "full" else (12, 5)
REPLICAS, PACE_S = 3, 4.0


@pytest.fixture
def nodes():
    made = RayNodes(REPLICAS)
    yield made
    made.close()


def settings_of(tmp_path, **more):
    plain = {"backbone": "untrained", "flow": "classical", "replicas": REPLICAS, "cpus": 1, "patience_s": 60}
    return ClusterSettings(str(tmp_path / "store"), **{**plain, **more})


def load():
    """What else this machine does decides how long pauses are."""
    return f"load {os.getloadavg()[0]:.1f}"


def storm(nodes, rng, watching):
    """Kill a replica, or now and then a node, at random moments."""
    for number in range(KILLS):
        # Not faster than replicas come back, but for every fifth: without any, only the start of one is measured.
        while number % 5 != 4 and running_replicas() < REPLICAS - 1 and not watching.done():
            time.sleep(0.5)
        time.sleep(rng.uniform(0.5, 6.0))
        if watching.done():
            return
        if number % 7 == 3:
            print(f"kill {number}: node {(which := rng.randrange(REPLICAS))}, {load()}", flush=True)
            nodes.lose(which)
        else:
            while not (found := replica_processes(os.getpid())):
                time.sleep(0.2)
            print(f"kill {number}: one of {len(found)} replicas, {load()}", flush=True)
            kill(rng.choice(found))
    time.sleep(10.0)


@pytest.mark.slow
def test_sessions_survive_kills_of_replicas_and_nodes_bit_for_bit(tmp_path, nodes, backbone):
    settings = settings_of(tmp_path, sessions=25, queue=100)
    rng = random.Random(0)
    with (
        Cluster(settings, TOKEN) as cluster,
        serving(settings, ServeSeating(cluster.handle)) as (front, address),
    ):
        watchers = []
        for number in range(SESSIONS):
            status, hello = ask(address, "/v1/sessions", {"prompt": "a red boat", "seed": number})
            assert status == 201, hello
            orders = [
                (rng.randrange(1, 12), {"type": "prompt", "text": f"boat {number}"}),
                (rng.randrange(12, 18), {"type": "set", "reinforcement": 2.0 + number % 3}),
            ]
            watchers.append(Watcher(address, hello["session"], PACE_S, orders if number % 2 else ()))

        done = threading.Event()

        async def watch_all():
            await asyncio.gather(*(watcher.watch(done) for watcher in watchers))

        began = time.monotonic()
        with ThreadPoolExecutor(1) as pool:
            watching = pool.submit(asyncio.run, watch_all())
            # Ray starts nodes on the main thread only.
            try:
                storm(nodes, rng, watching)
            finally:
                done.set()
            watching.result()
        print(f"{SESSIONS} sessions, {KILLS} kills in {time.monotonic() - began:.0f} s", flush=True)
        assert len(ask(address, "/v1/sessions")[1]) == SESSIONS
        wait_for(lambda: seats_taken(address) == len(front.directory.sessions), "an end of unused seats")
        moves, waits = front.directory.moves, sorted(front.pauses)
    pauses = sorted(pause for watcher in watchers for pause in watcher.pauses)
    assert pauses and moves
    print(f"{moves} moves; from the loss to the next hello: median {statistics.median(waits):.2f} s, "
          f"the longest {waits[-1]:.2f} s", flush=True)  # fmt: skip
    print(f"{len(pauses)} pauses until the next block: median {statistics.median(pauses):.2f} s, "
          f"the longest {pauses[-1]:.2f} s", flush=True)  # fmt: skip
    blocks, frames = 0, {}
    for watcher in watchers:
        session = kept(str(tmp_path / "store"), watcher.session, tmp_path / "read")
        blocks += check_same(session, backbone)
        shown = {
            block: hash_of(session.read("main", session.record.current, block, MEDIA))
            for block in watcher.media
        }
        assert watcher.media == shown, "somebody saw other frames than those of their session"
        frames[watcher.session] = set(shown.values())
    assert len(set.union(*frames.values())) == sum(map(len, frames.values())), (
        "two sessions have equal frames"
    )
    print(f"{blocks} blocks equal an undisturbed run bit for bit")
    assert open_store(str(tmp_path / "store")).children("sessions") == sorted(frames)


@pytest.mark.slow
def test_sessions_of_a_drained_replica_go_on_elsewhere(tmp_path, backbone):
    from ray import serve

    settings = settings_of(tmp_path, replicas=2, sessions=4)
    with (
        Cluster(settings, TOKEN) as cluster,
        serving(settings, ServeSeating(cluster.handle)) as (front, address),
    ):
        names = [
            ask(address, "/v1/sessions", {"prompt": "a boat", "seed": s})[1]["session"] for s in range(4)
        ]
        watchers = [Watcher(address, name, 0.5) for name in names]
        assert len({seat.address for seat in front.directory.sessions.values()}) == 2
        done = threading.Event()

        async def watch_all():
            await asyncio.gather(*(watcher.watch(done) for watcher in watchers))

        with ThreadPoolExecutor(1) as pool:
            watching = pool.submit(asyncio.run, watch_all())
            try:
                wait_for(lambda: all(watcher.seen >= 2 for watcher in watchers), "blocks", 120)
                fewer = serve.deployment(Replica, **deployment_options(replace(settings, replicas=1)))
                serve.run(fewer.bind(settings, TOKEN, "127.0.0.1"), name=NAME, route_prefix=None)
                wait_for(
                    lambda: front.directory.moves and len(replica_processes(os.getpid())) == 1,
                    "the end of one",
                    120,
                )
                seen = [watcher.seen for watcher in watchers]
                wait_for(
                    lambda: all(w.seen > s + 2 for w, s in zip(watchers, seen, strict=True)), "more", 120
                )
            finally:
                done.set()
            watching.result()
        print(f"{front.directory.moves} moves, pauses {[round(pause, 2) for pause in front.pauses]} s")
    for name in names:
        assert check_same(kept(settings.store, name, tmp_path / "read"), backbone) >= 5
