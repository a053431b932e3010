"""The studio is closed by default: host, origin, token, bounds; whatever comes in, nothing breaks."""

from __future__ import annotations

import gc
import json
import os
import random
import threading
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
from starlette.testclient import TestClient
from starlette.websockets import WebSocketDisconnect

from recap.studio.server import make_app
from recap.studio.settings import Limits, StudioSettings
from recap.studio.studio import Studio
from tests.studio.conftest import HOST, PROMPT, Viewer, begin, wait_for, watch

TOKEN = "correct-horse-battery"


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example", "localhost.evil.example:80", "[::", ""]
)
def test_another_host_name_is_turned_away(client, host):
    answer = client.get("/v1/about", headers={"host": host})
    assert answer.status_code == 403 and "host" in answer.json()["text"]


@pytest.mark.parametrize(
    "origin", ["http://evil.example", "null", "http://127.0.0.1:1", "http://127.0.0.1.evil", "http://[::"]
)
def test_a_page_of_another_site_is_turned_away(client, origin):
    assert client.get("/v1/about", headers={"origin": origin}).status_code == 403
    name = begin(client)
    with pytest.raises(WebSocketDisconnect), watch(client, name, headers={"origin": origin}):
        pass


def test_its_own_page_is_let_in_and_told_what_it_may_load(client):
    answer = client.get("/v1/about", headers={"origin": HOST})
    assert answer.status_code == 200
    assert "default-src 'self'" in answer.headers["content-security-policy"]
    assert "frame-ancestors 'none'" in answer.headers["content-security-policy"]
    assert answer.headers["x-content-type-options"] == "nosniff"


def test_elsewhere_it_needs_a_token_and_asks_everybody_for_it(tmp_path):
    for token in ("", "short", "naïve-but-long-enough"):
        with pytest.raises(ValueError, match="token"):
            StudioSettings(tmp_path, host="0.0.0.0", token=token)
    settings = StudioSettings(tmp_path, backbone="untrained", flow="classical", host="0.0.0.0", token=TOKEN)
    with TestClient(make_app(Studio(settings)), base_url="http://somewhere:8765") as client:
        assert client.get("/v1/sessions").status_code == 401
        assert client.get("/v1/sessions?token=wrong").status_code == 401
        assert client.get("/v1/sessions", headers={"authorization": "Bearer wrong"}).status_code == 401
        assert client.get("/v1/sessions", headers={"authorization": f"Bearer {TOKEN}"}).status_code == 200
        with (
            pytest.raises(WebSocketDisconnect),
            client.websocket_connect("ws://somewhere:8765/v1/sessions/x/stream"),
        ):
            pass
        # A page that was opened with the token has it in a cookie, which scripts cannot read.
        assert "HttpOnly" in client.get(f"/v1/sessions?token={TOKEN}").headers["set-cookie"]
        assert client.get("/v1/sessions").status_code == 200
        assert client.get("/v1/sessions", headers={"origin": "http://evil.example"}).status_code == 403


def test_a_public_one_says_so_and_names_who_may_frame_it(settings, tmp_path):
    for wrong in ("huggingface.co", "https://a.example; script-src *", "http://a.example"):
        with pytest.raises(ValueError, match="framed_by"):
            StudioSettings(tmp_path, framed_by=wrong)
    public = replace(settings, host="0.0.0.0", public=True, framed_by="https://huggingface.co")
    with TestClient(make_app(Studio(public)), base_url="http://somewhere:8765") as client:
        answer = client.get("/v1/sessions")
        assert answer.status_code == 200
        assert "frame-ancestors https://huggingface.co" in answer.headers["content-security-policy"]
        assert client.get("/v1/sessions", headers={"origin": "http://evil.example"}).status_code == 403


def test_bounds_are_kept_and_named(settings):
    limits = Limits(
        open_sessions=2, kept_sessions=3, message_bytes=400, upload_bytes=2000, branches=2, disk_bytes=10**9
    )
    studio = Studio(replace(settings, limits=limits))
    with TestClient(make_app(studio), base_url=HOST) as client:
        names = [begin(client) for _ in range(2)]
        refused = client.post("/v1/sessions", json={"prompt": PROMPT})
        assert refused.status_code == 400 and "at most 2" in refused.json()["limit"]
        client.post(f"/v1/sessions/{names[0]}/close")
        client.post(f"/v1/sessions/{begin(client)}/close")
        assert "at most 3" in client.post("/v1/sessions", json={"prompt": PROMPT}).json()["limit"]
        assert client.post("/v1/casts", content=b"x" * 2001).json()["field"] == "body"
        assert client.post("/v1/sessions", content=b"x" * 500).json()["field"] == "body"
        with watch(client, names[1]) as socket:
            viewer = Viewer(socket)
            viewer.until_block(1)
            assert viewer.ask("branch", second=0.1)["type"] == "done"
            assert "at most 2" in viewer.ask("branch", second=0.1)["limit"]
            socket.send_text("x" * 500)
            assert viewer.until("error")["field"] == "message"
        assert len(client.get("/v1/sessions").json()) == 3
        assert client.delete(f"/v1/sessions/{names[0]}").status_code == 200
        assert not (studio.folder.root / "sessions" / names[0]).exists()


def test_a_full_studio_is_said_and_the_session_lives(settings):
    studio = Studio(replace(settings, limits=Limits(disk_bytes=1)))
    with TestClient(make_app(studio), base_url=HOST) as client:
        begin(client)
        wait_for(lambda: next(iter(studio.sessions.values())).store.count("main", 0) == 2, "blocks")
        answer = client.post("/v1/sessions", json={"prompt": PROMPT})
        assert answer.status_code == 400 and answer.json()["field"] == "disk"


def test_a_session_stops_in_words_when_the_studio_is_full(client, studio, monkeypatch):
    monkeypatch.setattr("recap.studio.live.LASTING_EVERY", 3)
    monkeypatch.setattr(studio.folder, "_disk_bytes", 1)
    with monkeypatch.context() as roomy:
        roomy.setattr(studio.folder, "check_room", lambda: None)
        name = begin(client)
    monkeypatch.setattr(studio.sessions[name], "_check_room", studio.folder.check_room)
    with watch(client, name) as socket:
        viewer = Viewer(socket)
        viewer.until_block(0)
        viewer.say("playhead", second=0.1)
        told = viewer.until(lambda e: e.get("type") == "status" and e["state"] == "failed")
        assert "may take" in told["message"] and "delete sessions" in told["message"]


def test_two_studios_do_not_share_a_folder(studio, settings):
    with pytest.raises(ValueError, match="another studio is working in it"):
        Studio(settings)


PATHS = (
    "/v1/sessions/{}",
    "/v1/sessions/{}/tracks/main/branches/0/blocks/0.json",
    "/v1/sessions/{}/tracks/..%2f..%2f/branches/0/init.mp4",
    "/v1/videos/{}",
    "/v1/casts/{}.cast",
)


@pytest.mark.parametrize(
    "name", ["..", "..%2f..%2fetc%2fpasswd", "%00", "x" * 3000, "....//", "con", "0" * 16]
)
def test_no_name_of_a_client_is_a_path(client, name):
    for path in PATHS:
        answer = client.get(path.format(name))
        assert answer.status_code in (400, 404), (path, answer.status_code)
        assert "root:" not in answer.text and "Traceback" not in answer.text


TYPES = (
    "playhead", "play", "pause", "prompt", "drop_cue", "branch", "switch", "pin", "forget", "set", "cast",
    "drop_cast",
)  # fmt: skip
FIELDS = (
    "second", "text", "cut", "reread", "at_s", "playhead_s", "block", "branch", "slots", "name", "reinforcement",
    "capacity_frames", "admission", "v", "id", "type", "__class__",
)  # fmt: skip
VALUES = (
    None, True, 0, -1, 10**30, 1e308, -0.5, "", "x" * 2000, "../../etc/passwd", "\x00", "\ud800", "@fox", [], [0],
    [-1], [[]], [10**20], {}, {"a": {}}, "<script>", "os:system", 0.3, 1, [0, 0], [True],
)  # fmt: skip


def nonsense(rng):
    """A message that is wrong in some way, or right by chance."""
    kind = rng.randrange(10)
    if kind == 0:
        return bytes(rng.randrange(256) for _ in range(rng.randrange(60)))
    if kind == 1:
        return rng.choice(
            [b"[" * 5000, b"{", b'""', b"null", b"1e999", b'{"type":', b"\xff\xfe", b'{"v":NaN}']
        )
    message = {"type": rng.choice([*TYPES, "dance", 3])}
    for _ in range(rng.randrange(4)):
        message[rng.choice(FIELDS)] = rng.choice(VALUES)
    data = json.dumps(message).encode()
    if kind == 2:
        place = rng.randrange(len(data))
        data = data[:place] + bytes([rng.randrange(256)]) + data[place + 1 :]
    return data


def test_a_thousand_malformed_messages_and_uploads_break_nothing(client, studio, tmp_path, caplog):
    rng = random.Random(7)
    name = begin(client)
    live = studio.sessions[name]
    outside = {path for path in tmp_path.rglob("*") if studio.folder.root not in path.parents}
    with watch(client, name) as socket:
        viewer = Viewer(socket)
        for number in range(600):
            data = nonsense(rng)
            if number % 2:
                socket.send_bytes(data)
            else:
                socket.send_text(data.decode("utf-8", "replace"))
        assert viewer.ask("pause")["type"] == "done"
    for _ in range(400):
        path = rng.choice(["/v1/sessions", f"/v1/sessions/{name}/commands", "/v1/videos", "/v1/casts",
                           "/v1/sessions/upload-run", f"/v1/sessions/{name}/casts"])  # fmt: skip
        answer = client.post(path, content=nonsense(rng))
        assert answer.status_code < 500 and "Traceback" not in answer.text, (path, answer.text)
    assert not [record for record in caplog.records if record.name == "recap.studio"], caplog.text
    assert studio.sessions[name] is live
    client.post(f"/v1/sessions/{name}/commands", json={"type": "play"})
    # Only what is on disk can have been seen.
    studio.engine.call(live.settle).result()
    count = live.next_block
    client.post(f"/v1/sessions/{name}/commands", json={"type": "playhead", "second": 1e5})
    wait_for(lambda: live.next_block > count, "a block")
    assert {path for path in tmp_path.rglob("*") if studio.folder.root not in path.parents} == outside


def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def open_files():
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.slow
def test_twenty_sessions_opened_and_closed_leave_nothing_behind(client, studio):
    def one():
        name = begin(client)
        live = studio.sessions[name]
        with watch(client, name) as socket:
            Viewer(socket).until_block(1)
        client.delete(f"/v1/sessions/{name}")
        return live

    one()
    gc.collect()
    files = sorted(str(path) for path in studio.folder.root.rglob("*"))
    threads = {thread.name for thread in threading.enumerate() if thread.name.startswith("studio-")}
    handles = open_files()
    before = resident_bytes()
    gone = [weakref.ref(one()) for _ in range(20)]
    gc.collect()
    assert sorted(str(path) for path in studio.folder.root.rglob("*")) == files
    assert {t.name for t in threading.enumerate() if t.name.startswith("studio-")} == threads
    assert open_files() <= handles + 2
    assert resident_bytes() - before < 60 * 2**20
    assert not studio.sessions and len(studio.engine._performers) == 1
    assert [live() for live in gone] == [None] * 20, "something holds on to a session"


def test_every_route_and_message_is_in_the_reference(client):
    api = client.get("/openapi.json").json()
    commands = api["paths"]["/v1/sessions/{name}/commands"]["post"]["requestBody"]["content"]
    told = {
        schema["properties"]["type"]["const"] for schema in commands["application/json"]["schema"]["oneOf"]
    }
    assert told == set(TYPES)
    assert "$ref" not in json.dumps(commands)
    for path, methods in api["paths"].items():
        for about in methods.values():
            assert about.get("description"), path
    page = client.get("/docs").text
    assert all(path in page for path in api["paths"])
    assert "<script" not in page and "http" not in page
