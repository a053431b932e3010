"""A server that is killed loses nothing: what it showed is there again, and continues bit for bit."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
import torch

from recap.session import Session
from recap.studio import messages as say
from recap.studio.settings import StudioSettings
from recap.studio.studio import Studio
from tests.studio.conftest import PROMPT, same_memory, twin, wait_for

SERVER = """
import sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from recap.studio.listening import bound_socket, serve_app
from recap.studio.server import make_app
from recap.studio.settings import StudioSettings
from recap.studio.studio import Studio
settings = StudioSettings(Path(sys.argv[1]), backbone="untrained", flow="classical", port=0)
with bound_socket(settings) as listening:
    print(listening.getsockname()[1], flush=True)
    serve_app(make_app(Studio(settings)), settings, listening)
"""


@pytest.fixture
def server(tmp_path):
    """A real server process; returns its address and the process."""
    process = subprocess.Popen(
        [sys.executable, "-c", SERVER, str(tmp_path / "studio")], stdout=subprocess.PIPE, text=True
    )
    port = int(process.stdout.readline())
    yield f"http://127.0.0.1:{port}", process
    process.kill()
    process.wait()
    process.stdout.close()


def ask(address, path, body=None):
    data = None if body is None else json.dumps(body).encode()
    for _ in range(200):
        try:
            with urllib.request.urlopen(urllib.request.Request(address + path, data), timeout=20) as answer:
                return json.load(answer)
        except ConnectionError:
            time.sleep(0.05)
        except urllib.error.URLError as error:
            if not isinstance(error.reason, ConnectionError):
                raise
            time.sleep(0.05)
    raise AssertionError("the server did not answer")


def direct(address, session, type, /, **more):
    return ask(address, f"/v1/sessions/{session}/commands", {"type": type, **more})


def test_killed_in_the_middle_nothing_shown_is_lost_and_it_continues_bit_for_bit(server, tmp_path, backbone):
    address, process = server
    name = ask(address, "/v1/sessions", {"prompt": PROMPT})["session"]
    blocks = []
    while len(blocks) < 5:
        direct(address, name, "playhead", second=blocks[-1]["start_s"] if blocks else 0.0)
        blocks = ask(address, f"/v1/sessions/{name}")["blocks"]["main"]
    seen = blocks[-1]["index"]
    slot = ask(address, f"/v1/sessions/{name}/tracks/main/branches/0/blocks/{seen}.json")["bank"][3]["slot"]
    direct(address, name, "playhead", second=blocks[-1]["start_s"])
    pinned = direct(address, name, "pin", slots=[slot], name="fox", block=seen)
    direct(address, name, "prompt", text="two birds", playhead_s=blocks[-1]["start_s"])
    direct(address, name, "set", reinforcement=2.0)
    while ask(address, f"/v1/sessions/{name}")["blocks"]["main"][-1]["index"] < pinned["block"] + 1:
        time.sleep(0.02)
    shown = ask(address, f"/v1/sessions/{name}")
    os.kill(process.pid, signal.SIGKILL)
    process.wait()

    studio = Studio(
        StudioSettings(tmp_path / "studio", backbone="untrained", flow="classical", lead_blocks=3)
    )
    try:
        offered = studio.list()
        assert [session["session"] for session in offered] == [name] and not offered[0]["open"]
        live = studio.open(name)
        hello = live.hello()
        assert hello["blocks"]["main"][: len(shown["blocks"]["main"])] == shown["blocks"]["main"]
        assert hello["cues"] == shown["cues"] and hello["changes"] == shown["changes"]
        count = len(hello["blocks"]["main"])
        wait_for(lambda: live.store.count("main", 0) >= count + 3, "blocks")
        studio.command(live, say.PauseMessage()).result()
        made = live.store.read_latents("main", 0, range(count + 3))
    finally:
        studio.close()
    plain = twin(live, backbone)
    for index in range(count + 3):
        if index == pinned["block"]:
            plain.pin([slot], "fox")
            plain.prompt("two birds")
            plain.set(reinforcement=2.0)
        assert torch.equal(plain.step().latents, made[index]), index


def test_half_a_block_of_a_killed_server_does_not_exist(studio, settings):
    live = studio.create(say.NewSession(prompt=PROMPT))
    wait_for(lambda: live.store.count("main", 0) == 2, "the lead")
    name = live.record.id
    studio.close_session(name)
    live.store.path("main", 0, 1, ".json").unlink()
    (live.store.folder / "tracks/main/0/.recap-0123").write_bytes(b"half")
    again = studio.open(name)
    assert len(again.hello()["blocks"]["main"]) == 1
    assert not list(Path(live.store.folder).rglob(".recap-*"))
    wait_for(lambda: again.store.count("main", 0) == 3, "blocks")


def test_a_damaged_session_is_refused_in_words_and_the_others_are_offered(studio):
    live = studio.create(say.NewSession(prompt=PROMPT))
    wait_for(lambda: live.store.count("main", 0) == 2, "the lead")
    studio.close_session(live.record.id)
    other = studio.create(say.NewSession(prompt="two birds"))
    (live.store.folder / "session.json").write_text('{"v": 1}')
    told = {session["session"]: session for session in studio.list()}
    assert "damaged" in told[live.record.id]["message"] and told[other.record.id]["open"]
    with pytest.raises(ValueError, match="its record is damaged"):
        studio.open(live.record.id)
    wait_for(lambda: other.store.count("main", 0) == 2, "the lead")
    other.store.path("main", 0, 0, ".safetensors").write_bytes(b"not latents")
    studio.close_session(other.record.id)
    for state in other.store.folder.rglob("state-*"):
        state.unlink()
    with pytest.raises(ValueError, match="its latents are missing or damaged"):
        studio.open(other.record.id)


def test_a_session_that_was_closed_continues_from_its_state(studio, backbone, monkeypatch):
    """Only the blocks after the last state are read again."""
    monkeypatch.setattr("recap.studio.track.STATE_EVERY", 2)
    live = studio.create(say.NewSession(prompt=PROMPT))
    for seen in range(4):
        wait_for(lambda seen=seen: live.store.count("main", 0) > seen, "a block")
        studio.command(live, say.PlayheadMessage(second=live.clock.start_s(seen))).result()
    wait_for(lambda: live.store.count("main", 0) == 6, "blocks")
    slot = live.store.read_info("main", 0, 3)["bank"][0]["slot"]
    studio.command(live, say.PauseMessage()).result()
    studio.command(live, say.PinMessage(slots=[slot], name="fox", block=3)).result()
    studio.command(live, say.PromptMessage(text="@fox and two birds")).result()
    studio.close_session(live.record.id)
    read = []
    monkeypatch.setattr(
        "recap.session.Session.step",
        lambda self, latents=None, step=Session.step: (read.append(latents is not None), step(self, latents))[
            1
        ],
    )
    again = studio.open(live.record.id)
    studio.command(again, say.PauseMessage()).result()
    assert read.count(True) == 0, "the state of the last block is there"
    plain = twin(again, backbone)
    for _ in range(4):
        plain.step()
    plain.pin([slot], "fox")
    plain.prompt("@fox and two birds")
    for _ in range(again.next_block - 4):
        plain.step()
    same_memory(again.tracks["main"].session, plain)
    assert torch.equal(again.tracks["main"].session.step().latents, plain.step().latents)


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("tracks", "main", "memory"), {"name": "os:system"}),
        (("tracks", "../../x"), {}),
        (("branches", 0, "rule"), "os:system"),
        (
            ("branches", 0, "changes"),
            [{"at": 0, "track": "main", "kind": "cast", "file": "../../x", "words": {}}],
        ),
        (("branches", 0, "parent"), 0),
        (("branches", 0, "id"), "../x"),
        (("cast",), ["../../x"]),
        (("id",), "0" * 16),
        (("current",), 7),
    ],
)
def test_a_record_of_a_stranger_names_no_code_and_no_path(studio, place, value):
    live = studio.create(say.NewSession(prompt=PROMPT))
    studio.close_session(live.record.id)
    record = live.record.to_json()
    table = record
    for key in place[:-1]:
        table = table[key]
    table[place[-1]] = value
    (live.store.folder / "session.json").write_text(json.dumps(record))
    with pytest.raises(ValueError, match=r"damaged|names code"):
        studio.open(live.record.id)
    assert live.record.id in {session["session"] for session in studio.list()}


def test_a_session_with_links_in_it_is_refused(studio, tmp_path):
    live = studio.create(say.NewSession(prompt=PROMPT))
    wait_for(lambda: live.store.count("main", 0) == 2, "the lead")
    studio.close_session(live.record.id)
    (tmp_path / "precious").write_text("mine")
    (live.store.folder / "tracks/main/0/000002.json").symlink_to(tmp_path / "precious")
    with pytest.raises(ValueError, match="has a link or a device"):
        studio.open(live.record.id)
    assert (tmp_path / "precious").read_text() == "mine"
