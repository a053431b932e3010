"""Videos for programs on a cluster: they survive the replica that generates them, and the front."""

from __future__ import annotations

import urllib.request

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("aiohttp")

from recap.studio.cluster.settings import ClusterSettings
from tests.studio.clusters import Processes, ask, kill, serving
from tests.studio.conftest import wait_for

LONG = {"prompt": "a red boat", "seconds": 8.0, "seed": 3}


@pytest.fixture
def cluster(tmp_path):
    settings = ClusterSettings(str(tmp_path / "store"), "untrained", "classical", replicas=2, sessions=2)
    seating = Processes(settings.store, 2, settings.sessions, settings.queue)
    try:
        yield settings, seating
    finally:
        seating.close()


def status(address, name):
    return ask(address, f"/v1/videos/{name}")[1]["status"]


def content(address, name):
    with urllib.request.urlopen(f"{address}/v1/videos/{name}/content") as answer:
        assert answer.headers["content-type"] == "video/mp4" and name in answer.headers["content-disposition"]
        return answer.read()


def test_a_video_outlives_its_replica_and_the_front_to_the_same_bits(cluster):
    settings, seating = cluster
    with serving(settings, seating) as (front, address):
        for wrong in ({"seconds": 0.0}, {"memory": "os:system"}, {"prompt": " "}, {"cast": ["nobody"]}):
            code, told = ask(address, "/v1/videos", {**LONG, **wrong})
            assert code in (400, 404) and told["type"] == "error", wrong
        code, told = ask(address, "/v1/videos", LONG)
        assert code == 202 and told["status"] == "queued" and told["seconds"] == 8.0
        first = told["id"]
        assert ask(address, f"/v1/videos/{first}/content")[1]["remedy"] == "ask again later"
        wait_for(lambda: 0 < ask(address, f"/v1/videos/{first}")[1]["progress"] < 100, "progress")
        (number,) = [number for number, taken in seating.taken.items() if taken]
        kill(seating.processes[number].pid)
        wait_for(lambda: status(address, first) == "completed", "the video")
        done = content(address, first)
        second = ask(address, "/v1/videos", LONG)[1]["id"]
        third = ask(address, "/v1/videos", {**LONG, "seed": 4})[1]["id"]
        wait_for(lambda: status(address, second) == "in_progress", "the second video")
        assert [one["id"] for one in ask(address, "/v1/videos")[1]["videos"]] == [first, second, third]
        assert ask(address, f"/v1/videos/{third}", method="DELETE")[1]["deleted"]
        assert ask(address, f"/v1/videos/{third}")[0] == 404
        assert front.desk.waiting == 1
    # The front that comes next finds both, and goes on with the one that was not finished.
    with serving(settings, seating) as (front, address):
        assert content(address, first) == done
        wait_for(lambda: status(address, second) == "completed", "the second video")
        assert content(address, second) == done
        for name in (first, second):
            assert ask(address, f"/v1/videos/{name}", method="DELETE")[0] == 200
        assert ask(address, "/v1/videos")[1]["videos"] == [] and not front.directory.store.names("videos")
