"""A cluster without Ray: replicas are real processes, and seats are given by this test instead of Ray Serve."""

from __future__ import annotations

import asyncio
import json
import threading
import time

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("aiohttp")

from recap.studio.cluster.settings import ClusterSettings
from recap.studio.store import MEDIA
from tests.studio.clusters import Processes, Watcher, ask, check_same, hash_of, kept, kill, serving
from tests.studio.conftest import wait_for


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    """One cluster for all tests here, since its processes take seconds to start; the last test kills one."""
    settings = ClusterSettings(
        str(tmp_path_factory.mktemp("cluster") / "store"), "untrained", "classical", replicas=2, sessions=3,
        queue=1, patience_s=1.5,
    )  # fmt: skip
    seating = Processes(settings.store, 2, settings.sessions, settings.queue)
    try:
        with serving(settings, seating) as (front, address):
            yield front, address, seating
    finally:
        seating.close()


@pytest.fixture
def cluster(running):
    yield running
    address = running[1]
    for told in ask(address, "/v1/sessions")[1]:
        assert ask(address, f"/v1/sessions/{told['session']}", method="DELETE")[0] == 200


def begin(address, **more):
    status, hello = ask(address, "/v1/sessions", {"prompt": "a red boat", **more})
    assert status == 201, hello
    return hello["session"]


def count(address, name):
    return len(ask(address, f"/v1/sessions/{name}")[1]["blocks"]["main"])


def test_who_finds_no_seat_is_refused_in_words_and_idle_sessions_make_room(cluster):
    front, address, _ = cluster
    names = [begin(address, seed=seed) for seed in range(6)]
    began = time.monotonic()
    status, refusal = ask(address, "/v1/sessions", {"prompt": "a red boat"})
    assert status == 503 and time.monotonic() - began < 20
    assert "all 6 seats are taken" in refusal["text"] and "try again" in refusal["remedy"]
    # A bad request is refused as by a studio, and costs no seat.
    status, refusal = ask(address, f"/v1/sessions/{names[0]}/commands", {"type": "prompt", "text": ""})
    assert status == 400 and refusal["field"]
    assert ask(address, f"/v1/sessions/{'0' * 16}")[0] == 404
    for seat in front.directory.sessions.values():
        seat.used -= 60
    blocks = count(address, names[5])
    # The one that was idle longest is parked for the newcomer; asked for, it is woken, and another one is parked.
    seventh = begin(address, seed=7)
    parked = [name for name in names if name not in front.directory.sessions]
    assert len(parked) == 1 and parked != [names[5]] and seventh in front.directory.sessions
    told = {one["session"]: one for one in ask(address, "/v1/sessions")[1]}
    assert not told[parked[0]]["open"] and told[parked[0]]["prompt"] == "a red boat" and len(told) == 7
    assert count(address, parked[0]) > 0 and len(front.directory.sessions) == 6
    assert count(address, names[5]) >= blocks
    assert ask(address, f"/v1/sessions/{seventh}/close", {})[1] == {"v": 1, "session": seventh, "open": False}
    assert "is not open" in ask(address, f"/v1/sessions/{seventh}")[1]["text"]
    assert ask(address, f"/v1/sessions/{seventh}/open", {})[1]["session"] == seventh
    assert ask(address, f"/v1/sessions/{seventh}", method="DELETE")[1]["deleted"]
    assert ask(address, f"/v1/sessions/{seventh}/open", {})[0] == 404
    texts = urllib_text(f"{address}/metrics")
    refused = next(line for line in texts if line.startswith("recap_front_refused_total "))
    assert float(refused.split()[1]) == 1
    stages = [
        line for line in texts if line.startswith("recap_stage_seconds_total{") and 'stage="store"' in line
    ]
    assert stages and all('replica="' in line for line in stages)


def urllib_text(address):
    import urllib.request

    with urllib.request.urlopen(address) as answer:
        return answer.read().decode().splitlines()


def test_a_page_and_a_cast_come_from_every_replica_alike(cluster):
    _, address, _ = cluster
    assert any("<title" in line for line in urllib_text(address + "/"))
    name = begin(address, seed=1)
    other = begin(address, seed=2)
    wait_for(lambda: count(address, name) >= 2, "blocks")
    info = json.loads(
        "".join(urllib_text(f"{address}/v1/sessions/{name}/tracks/main/branches/0/blocks/1.json"))
    )
    slots = [slot["slot"] for slot in info["bank"]][:3]
    status, told = ask(address, f"/v1/sessions/{name}/casts", {"name": "fox", "slots": slots, "block": 1})
    assert status == 201, told
    # The other session is on the other replica.
    status, told = ask(address, f"/v1/sessions/{other}/commands", {"type": "cast", "name": "fox"})
    assert status == 200, told
    assert ask(address, f"/v1/sessions/{other}")[1]["cast"] == ["fox"]
    assert [one["name"] for one in ask(address, "/v1/casts")[1]["casts"]] == ["fox"]
    assert ask(address, "/v1/casts/fox", method="DELETE")[0] == 200
    assert not ask(address, "/v1/casts")[1]["casts"]


def test_a_killed_replica_costs_a_pause_and_not_a_bit(cluster, tmp_path, backbone):
    front, address, seating = cluster
    assert ask(address, "/v1/about")[1]["backbone"] == "untrained"
    watchers = [
        Watcher(address, begin(address, seed=seed), 0.05, [(4, {"type": "prompt", "text": "two birds"})])
        for seed in range(3)
    ]
    done = threading.Event()

    def storm():
        wait_for(lambda: all(watcher.seen >= 2 for watcher in watchers), "the first blocks", 60)
        kill(seating.processes[0].pid)
        before = [watcher.seen for watcher in watchers]
        wait_for(
            lambda: all(w.seen >= b + 4 for w, b in zip(watchers, before, strict=True)), "more blocks", 60
        )
        done.set()

    async def watch_all():
        await asyncio.gather(asyncio.to_thread(storm), *(watcher.watch(done) for watcher in watchers))

    asyncio.run(watch_all())
    moved = [watcher for watcher in watchers if watcher.pauses]
    assert front.directory.moves == len(moved) >= 1 and len(front.pauses) == len(moved)
    assert not any(watcher.errors for watcher in watchers if watcher not in moved)
    status, told = ask(address, "/v1/sessions")
    assert status == 200 and len(told) == 3
    frames = []
    for watcher in watchers:
        # The pause is known to the replica that has the session now.
        assert not ask(address, f"/v1/sessions/{watcher.session}")[1]["playing"]
        session = kept(front.settings.store, watcher.session, tmp_path / "read")
        assert check_same(session, backbone) >= 6
        shown = {block: hash_of(session.read("main", 0, block, MEDIA)) for block in watcher.media}
        assert watcher.media == shown
        frames += shown.values()
    assert len(set(frames)) == len(frames), "two sessions have equal frames"
