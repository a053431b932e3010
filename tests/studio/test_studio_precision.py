"""A studio in 8 bits: sessions say so, branches and videos are so, and none goes on in another precision."""

from __future__ import annotations

import io
import json
import zipfile
from dataclasses import replace

import pytest
import torch
from starlette.testclient import TestClient

from recap.backbones.wan.quantised import Int8Linear
from recap.config import RunConfig
from recap.errors import RecapError
from recap.io.report import SILENT
from recap.run import generate, resume
from recap.session import Session
from recap.studio.messages import NewSession
from recap.studio.server import make_app
from recap.studio.studio import Studio, make_config
from tests.studio.conftest import HOST, PROMPT, begin, play_to, same_memory


@pytest.fixture
def coded(settings):
    return replace(settings, precision="int8")


def client_of(studio):
    return TestClient(make_app(studio), base_url=HOST, raise_server_exceptions=False)


def test_a_session_is_continued_in_its_own_precision_only(settings, coded, tmp_path):
    studio = Studio(coded)
    with client_of(studio) as client:
        assert client.get("/v1/about").json()["precision"] == "int8"
        name = begin(client)
        live = play_to(client, studio, name, 3)
        assert live.record.tracks["main"]["precision"] == "int8"
        backbone = live.tracks["main"].session.backbone
        assert isinstance(next(iter(backbone.model.layers())).ffn[0], Int8Linear)
        blocks = live.next_block
        data = client.get(f"/v1/sessions/{name}/run.zip?more_s=0.75").content
    studio.close()

    # A run that is downloaded says it too, and is resumed so.
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        archive.extractall(tmp_path / "out")
    about = json.loads((tmp_path / "out" / "run" / "run.json").read_text())
    assert about["config"]["precision"] == "int8"
    assert resume(tmp_path / "out" / "run", reporter=SILENT).num_blocks >= blocks

    other = Studio(settings)
    with client_of(other) as client:
        answer = client.post(f"/v1/sessions/{name}/open")
        assert answer.status_code == 400 and answer.json()["field"] == "precision"
        assert "start the studio with --precision int8" in answer.json()["remedy"]
        assert not other.sessions and name in other.folder.ids()
        answer = client.post("/v1/sessions/upload-run", content=data)
        assert answer.status_code == 400 and answer.json()["field"] == "precision"
    other.close()

    again = Studio(coded)
    with client_of(again) as client:
        assert client.post(f"/v1/sessions/{name}/open").status_code == 200
        live = play_to(client, again, name, blocks + 1)
        # As a session that was never closed.
        twin = Session(RunConfig.from_dict(live.record.tracks["main"]), reporter=SILENT)
        for _ in range(live.tracks["main"].session.next_block):
            twin.step()
        same_memory(live.tracks["main"].session, twin)
    again.close()


def test_a_session_of_another_model_is_refused_by_name(settings, coded):
    studio = Studio(settings)
    studio.engine.call(lambda: None).result()
    with client_of(studio) as client:
        name = begin(client)
    studio.close()
    other = Studio(replace(coded, backbone="embedded", flow="auto"))
    with pytest.raises(
        RecapError, match=r"backbone is 'untrained'.*start the studio with --backbone untrained"
    ):
        other.open(name)
    other.close()


def test_forks_and_snapshots_keep_the_precision(coded):
    config = make_config(coded, NewSession(prompt=PROMPT))
    session = Session(config, reporter=SILENT)
    session.step()
    fork = session.fork()
    assert fork.config.precision == session.snapshot().config.precision == "int8"
    assert torch.equal(fork.step().latents, session.step().latents)
    full = Session(replace(config, precision="full"), reporter=SILENT)
    with pytest.raises(RecapError, match="another config"):
        full.restore(session.snapshot())


def test_an_uploaded_run_is_continued_in_its_precision(coded, tmp_path):
    plain = make_config(coded, NewSession(prompt=PROMPT)).to_dict()
    plain["shots"][0]["seconds"] = 1.5
    generate(RunConfig.from_dict(plain), tmp_path / "run", reporter=SILENT)
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for path in (tmp_path / "run").iterdir():
            archive.write(path, f"run/{path.name}")
    studio = Studio(coded)
    with client_of(studio) as client:
        answer = client.post("/v1/sessions/upload-run", content=out.getvalue())
        assert answer.status_code == 201, answer.text
    studio.close()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"precision": "fp4"}, "precision is 'fp4': no such name"),
        ({"low_memory": "yes"}, "low_memory is 'yes': no such name"),
        ({"backbone": "helios-mid", "precision": "fp8"}, "only the models of the Wan family"),
    ],
)
def test_what_no_session_could_be_is_refused_before_anything_is_loaded(settings, changes, reason):
    with pytest.raises(RecapError, match=reason):
        Studio(replace(settings, **changes))
    assert not settings.folder.exists()


def test_sessions_take_the_path_that_fits_the_card(settings, monkeypatch):
    """As on a card that is too small for the fast path, for sessions that share a forward."""
    asked = []

    def fit(config, notice):
        asked.append(config)
        notice("memory: the readable path is used")
        return replace(config, eager=True)

    monkeypatch.setattr("recap.studio.studio.fit_card", fit)
    said = []
    studio = Studio(replace(settings, batch=2, low_memory="on"), notice=said.append)
    with client_of(studio) as client:
        name = begin(client)
        session = studio.sessions[name].tracks["main"].session
        assert session.config.eager and session.config.low_memory == "on"
    studio.close()
    (config,) = asked
    assert len(config.seeds) == 2 and config.low_memory == "on"
    assert "memory: the readable path is used" in said
