"""A studio on the untrained model, in a folder of its own."""

from __future__ import annotations

import json
import struct
import threading
import time

import pytest
import torch

pytest.importorskip("fastapi")

from starlette.testclient import TestClient

from recap.config import RunConfig
from recap.session import Session
from recap.studio.server import make_app
from recap.studio.settings import Limits, StudioSettings
from recap.studio.studio import Studio

PROMPT = "a red boat"
HOST = "http://127.0.0.1"


@pytest.fixture
def settings(tmp_path):
    return StudioSettings(tmp_path / "studio", backbone="untrained", flow="classical", limits=Limits())


@pytest.fixture
def studio(settings):
    made = Studio(settings)
    yield made
    made.close()
    left = [thread.name for thread in threading.enumerate() if thread.name.startswith("studio-")]
    assert not left, "a thread was left behind"


@pytest.fixture
def client(studio):
    with TestClient(make_app(studio), base_url=HOST, raise_server_exceptions=False) as made:
        yield made


def wait_for(condition, what="it", seconds=120.0):
    """Wait until something holds; the limit is for a test that fails."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"{what} did not come"
        time.sleep(0.005)


def unpack(data):
    """Read a binary message: its header and its bytes."""
    size = struct.unpack_from(">I", data)[0]
    return json.loads(data[4 : 4 + size]), data[4 + size :]


class Viewer:
    """Reads the stream of a session, and keeps all that it got."""

    def __init__(self, socket):
        self.socket = socket
        self.events = []
        self.media = []

    def read(self):
        message = self.socket.receive()
        assert message["type"] == "websocket.send", message
        if message.get("text"):
            event = json.loads(message["text"])
            assert event["v"] == 1
            self.events.append(event)
            return event
        header, data = unpack(message["bytes"])
        assert header["v"] == 1
        self.media.append((header, data))
        return header

    def until(self, wanted, most=5000):
        """Read until an event of this type, or one for which a function is true."""
        for _ in range(most):
            event = self.read()
            if wanted(event) if callable(wanted) else event.get("type") == wanted:
                return event
        raise AssertionError(f"{wanted} did not come")

    def until_block(self, index, track="main"):
        """Read until there is such a block; those that were there before are in the first event."""
        if not self.events:
            self.read()
        first = self.events[0]["blocks"].get(track, [])
        if index < len(first) and not any(e["type"] == "dropped" for e in self.events):
            return first[index]
        return self.until(lambda e: e.get("type") == "block" and e["index"] == index and e["track"] == track)

    def watch_to(self, second):
        """Play as a page does: nothing is on the screen before it is there."""
        while not any(e["type"] == "block" and e["end_s"] > second for e in self.known()):
            self.read()
            self.say("playhead", second=max(0.0, max([e["end_s"] for e in self.known()] or [0.0]) - 0.01))
        self.say("playhead", second=second)

    def known(self):
        """The blocks of the main track that it has heard of."""
        told = [e for e in self.events if e["type"] == "block" and e["track"] == "main"]
        first = [{**b, "type": "block"} for e in self.events[:1] for b in e["blocks"]["main"]]
        return first + told

    def say(self, type, id="", **more):
        self.socket.send_text(json.dumps({"v": 1, "type": type, "id": id, **more}))

    def ask(self, type, **more):
        """Say something, and return the answer to it."""
        mark = f"m{len(self.events)}-{type}"
        self.say(type, mark, **more)
        return self.until(lambda e: e.get("type") in ("done", "error") and e["id"] == mark)


def begin(client, **more):
    answer = client.post("/v1/sessions", json={"prompt": PROMPT, **more})
    assert answer.status_code == 201, answer.text
    return answer.json()["session"]


def watch(client, name, **more):
    return client.websocket_connect(f"ws://127.0.0.1/v1/sessions/{name}/stream", **more)


def twin(live, backbone, **more):
    """A session of the same config, outside of the studio."""
    return Session(RunConfig.from_dict({**live.record.tracks["main"], **more}), backbone=backbone)


def same_memory(one, other):
    for part in ("policy", "decoder"):
        a, b = (getattr(session.snapshot().memory, part) for session in (one, other))
        assert a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def order(client, session, type, /, code=200, **more):
    answer = client.post(f"/v1/sessions/{session}/commands", json={"type": type, **more})
    assert answer.status_code == code, answer.text
    return answer.json()


def play_to(client, studio, name, blocks):
    """Watch until so many blocks are generated, then pause."""
    live = studio.sessions[name]
    while live.next_block < blocks:
        seen = live.next_block - studio.settings.lead_blocks
        order(client, name, "playhead", second=live.clock.start_s(max(0, seen)))
    order(client, name, "pause")
    studio.engine.encoder.submit(lambda: None).result()
    return live
