"""The server of a study: the studio's guard in front, known files alone, votes that are checked and bounded."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import urllib.request

import pytest

pytest.importorskip("fastapi")

from starlette.testclient import TestClient

from recap.eval.study.box import BallotBox
from recap.studio.settings import StudioSettings
from recap.studio.voting import MOST_BODY_BYTES, make_voting_app
from recap.tables.study.folder import StudyAsk, make_study
from tests.study.conftest import Writer, session_of, write_table

HOST = "http://127.0.0.1"


@pytest.fixture
def study(tmp_path):
    table = write_table(tmp_path / "table", 2, ("recap", "none"))
    return make_study(
        [table], tmp_path / "study", tmp_path / "key.json", StudyAsk(2, identical=1, repeats=0)
    ).study


@pytest.fixture
def client(tmp_path, study):
    files = ["index.html", "study.js", *(f"videos/{file}" for pair in study.pairs.values() for file in pair)]
    box = BallotBox(tmp_path / "votes.jsonl", study)
    app = make_voting_app(tmp_path / "study", files, box, StudioSettings(tmp_path / "study"))
    with TestClient(app, base_url=HOST, raise_server_exceptions=False) as made:
        yield made


def test_strangers_are_turned_away(client):
    assert client.get("/", headers={"host": "evil.example"}).status_code == 403
    assert client.post("/v1/votes", headers={"origin": "http://evil.example"}).status_code == 403
    page = client.get("/")
    assert page.status_code == 200 and "default-src 'self'" in page.headers["content-security-policy"]


def test_a_token_is_asked_for_elsewhere(tmp_path, study):
    settings = StudioSettings(tmp_path, host="0.0.0.0", token="correct-horse-battery")
    app = make_voting_app(tmp_path / "study", ["index.html"], BallotBox(tmp_path / "v", study), settings)
    with TestClient(app, base_url="http://lab:80") as client:
        assert client.get("/").status_code == 401
        assert client.get("/?token=correct-horse-battery").status_code == 200
        assert client.get("/v1/study").status_code == 200, "by the cookie"


def test_only_files_of_the_study_are_shown(client, study, tmp_path):
    (tmp_path / "study" / "secret.txt").write_text("x")
    for name in (
        "secret.txt",
        "../key.json",
        "%2e%2e/key.json",
        "videos/../study.json",
        "videos/",
        "v1/",
        "/etc/passwd",
    ):
        assert client.get(f"/{name}").status_code == 404, name
    file = next(iter(study.pairs.values()))[0]
    part = client.get(f"/videos/{file}", headers={"range": "bytes=0-9"})
    assert part.status_code == 206 and len(part.content) == 10 and part.headers["content-type"] == "video/mp4"


def test_votes_are_taken_once_checked_and_bounded(client, study, tmp_path):
    anna, other = Writer(study, session_of(1), "Anna"), Writer(study, session_of(2), "anna")
    assert client.get("/v1/study").json() == {"v": 1, "study": study.digest, "sheet": 0}
    assert client.post("/v1/votes", content=anna.data).json()["kept"] == 1
    anna.vote(0, dict.fromkeys(study.questions, "A"))
    for _ in range(2):
        assert client.post("/v1/votes", content=anna.data).json()["kept"] == 2
    taken = client.post("/v1/votes", content=other.data)
    assert taken.status_code == 400 and "somebody else has taken part under this name" in taken.json()["text"]
    for bad in (
        b"",
        b"x",
        b"{}",
        anna.lines[1].replace(b'"A"', b'"B"'),
        b"\xff" * 100,
        b"x" * (MOST_BODY_BYTES + 1),
    ):
        answer = client.post("/v1/votes", content=bad)
        assert answer.status_code == 400 and answer.json()["type"] == "error", bad[:40]
    assert (tmp_path / "votes.jsonl").read_bytes() == anna.data
    assert client.get("/v1/study").json()["sheet"] == 1
    assert str(tmp_path) not in taken.text


def test_the_real_command_keeps_votes_when_it_is_killed(study, tmp_path):
    command = [
        sys.executable,
        "-m",
        "recap",
        "study",
        "serve",
        str(tmp_path / "study"),
        "--no-open",
        "--port",
        "0",
    ]
    server = subprocess.Popen(
        [*command, "--votes", str(tmp_path / "v.jsonl")], stderr=subprocess.PIPE, text=True
    )
    try:
        address = re.search(r"http://\S+", server.stderr.readline())[0]
        anna = Writer(study, session_of(1), "Anna")
        anna.vote(0, dict.fromkeys(study.questions, "tie"))
        for _ in range(2):
            with urllib.request.urlopen(f"{address}v1/votes", data=anna.data, timeout=30) as answer:
                assert json.load(answer) == {"v": 1, "kept": 2}
    finally:
        server.kill()
        server.wait()
    assert (tmp_path / "v.jsonl").read_bytes() == anna.data
    assert BallotBox(tmp_path / "v.jsonl", study).add(anna.data) == 2


def test_a_full_disk_is_said_and_nothing_is_half_written(client, study, tmp_path, monkeypatch):
    anna = Writer(study, session_of(1), "Anna")

    def full(_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("recap.eval.study.box.os.fsync", full)
        answer = client.post("/v1/votes", content=anna.data)
    assert answer.status_code == 400 and "could not be written" in answer.json()["text"]
    assert (tmp_path / "votes.jsonl").read_bytes() == b""
    assert client.post("/v1/votes", content=anna.data).json()["kept"] == 1
