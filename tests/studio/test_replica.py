"""A replica says when it has no room, and when its model is stuck."""

from __future__ import annotations

import asyncio
import re
import threading
import urllib.request
from dataclasses import replace

import pytest
import torch

pytest.importorskip("fastapi")

from recap.studio import messages as say
from recap.studio.cluster.replica import Replica
from recap.studio.cluster.seats import Busy, Seats
from recap.studio.cluster.settings import ClusterSettings
from tests.studio.clusters import TOKEN
from tests.studio.conftest import PROMPT, wait_for

# What docs/how-to/cluster.md promises of a replica.
PROMISED = {
    "recap_blocks_total", "recap_stage_seconds_total", "recap_lead_seconds_least", "recap_lead_seconds_sum",
    "recap_engine_waiting", "recap_memory_bytes", "recap_device_memory_bytes", "recap_sessions",
    "recap_seats_taken", "recap_watchers",
}  # fmt: skip


@pytest.fixture
def replica(tmp_path):
    threads = torch.get_num_threads()
    settings = ClusterSettings(str(tmp_path / "store"), "untrained", "classical", cpus=threads)
    made = Replica(settings, TOKEN, "127.0.0.1")
    yield made
    made.studio.close()


class Seating:
    """Asks one replica, as Ray Serve would."""

    def __init__(self, replica):
        self._replica = replica

    def ask(self):
        request = self._replica.seat()

        class Request:
            def __anext__(self):
                return anext(request)

            def cancel(self):
                pass

        return Request()

    def is_refusal(self, error):
        return False


def test_a_replica_above_its_memory_takes_no_session(replica):
    async def ask(patience_s):
        seat = await Seats(Seating(replica), 4, 2).take(patience_s)
        found = (seat.address, replica._seated)
        seat._watching.cancel()
        return found

    assert asyncio.run(ask(5.0)) == (replica.address, 1)
    replica._settings = replace(replica._settings, memory_gb=0.1)
    with pytest.raises(Busy, match=r"a replica uses \d+\.\d+ GB of its 0\.1; try again") as refused:
        asyncio.run(ask(0.3))
    assert refused.value.field == "sessions"


def test_a_replica_whose_model_is_stuck_is_not_healthy(replica, monkeypatch):
    check = replica.check_health
    asyncio.run(check())
    monkeypatch.setattr("recap.studio.cluster.replica.STUCK_S", 0.0)
    go_on = threading.Event()
    stuck = replica.studio.engine.call(go_on.wait)
    wait_for(stuck.running, "the model's thread")
    asyncio.run(check())
    with pytest.raises(RuntimeError, match="has not come to its next block"):
        asyncio.run(check())
    go_on.set()
    replica.studio.engine.call(lambda: None).result()
    asyncio.run(check())
    monkeypatch.setattr(replica._server, "is_alive", lambda: False)
    with pytest.raises(RuntimeError, match="server ended"):
        asyncio.run(check())


def test_a_replica_tells_prometheus_what_the_page_promises(replica):
    replica.studio.create(say.NewSession(prompt=PROMPT))
    # A block is stored before its times are added up: wait for the sum, not for the store.
    wait_for(lambda: replica._stages.blocks >= 2, "blocks")
    asked = urllib.request.Request(f"{replica.address}/metrics", headers={"Authorization": f"Bearer {TOKEN}"})
    with urllib.request.urlopen(asked) as answer:
        text = answer.read().decode()
    found = dict(re.findall(r"^(recap_\w+)(?:\{.*\})? (\S+)$", text, re.MULTILINE))
    assert set(found) == PROMISED
    assert float(found["recap_blocks_total"]) >= 2 and float(found["recap_memory_bytes"]) > 1e7
    assert set(re.findall(r'stage="(\w+)"', text)) == {"generate", "encode", "store"}
    assert set(re.findall(r"# TYPE (recap_\w+) (?:gauge|counter)", text)) == PROMISED
