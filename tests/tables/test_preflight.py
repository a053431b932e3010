"""Weights that are missing are found before anything is drawn, and cost no more rows than those that need them."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from recap.backbones.wan.family import SelfForcingConfig
from recap.cli.main import app
from recap.tables.recipes import Ask
from recap.tables.reproduce import reproduce

SMALL = Ask(backbone="untrained", prompts=1, seeds=1, seconds=3)


@pytest.fixture(autouse=True)
def nothing_installed(tmp_path, monkeypatch):
    monkeypatch.setenv("RECAP_HOME", str(tmp_path / "no-weights"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "no-hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "no-hub"))


def never(*_, **__):
    pytest.fail("the sweep was begun")


@pytest.mark.parametrize(
    ("backbone", "options", "told"),
    [
        ("self-forcing", {}, r"weights is 'self-forcing'.*`recap weights self-forcing` fetches"),
        ("helios-distilled", {}, r"`recap weights helios-distilled` fetches"),
        ("untrained", {"flow": "raft-small"}, "raft"),
        ("untrained", {"detector": "qwen2.5-vl"}, r"qwen2.5-vl.*hf download"),
        ("untrained", {"detector": "qwen2.5-vl=/nowhere"}, r"is '/nowhere'"),
        ("untrained", {"detector": "yolo"}, r"--detector is 'yolo'"),
        ("untrained", {"workers": 0}, r"--workers is 0: must be 1 or more"),
        ("untrained", {"embedder": "dinov2=/nowhere"}, r"is '/nowhere'.*dinov2=FOLDER"),
    ],
)
def test_what_no_run_can_do_without_is_refused_before_any(tmp_path, monkeypatch, backbone, options, told):
    monkeypatch.setattr("recap.tables.reproduce.run_sweep", never)
    ask = Ask(backbone=backbone, prompts=1, seeds=1, seconds=3, flow=options.pop("flow", "classical"))
    with pytest.raises(ValueError, match=told):
        reproduce("reappearance", ask, tmp_path / "out", **{"embedder": "hsv"} | options)
    assert not (tmp_path / "out").exists()


def test_a_row_whose_own_weights_are_missing_is_left_out_and_said(tmp_path):
    said = []
    done = reproduce("admission", SMALL, tmp_path / "a", embedder="hsv", workers=1, notice=said.append)
    assert done.left_out == ("diversity",) and done.num_runs == 7
    assert any("'diversity' is left out" in line and "hf download" in line for line in said)
    assert any("no --detector" in line for line in said)
    table = json.loads((tmp_path / "a" / "table.json").read_text())
    assert table["left_out"] == ["diversity"] and table["about"]["runs"] == 7
    assert "could not be drawn: diversity" in (tmp_path / "a" / "table.md").read_text()


def test_a_lost_video_costs_its_pictures_and_no_table(tmp_path):
    out = tmp_path / "b"
    reproduce("bank", SMALL, out, embedder="hsv", workers=1)
    assert (out / "sheet.png").is_file()
    for video in out.glob("work/jobs/*/video.mp4"):
        video.write_bytes(b"damaged")
    said = []
    reproduce("bank", SMALL, out, embedder="hsv", workers=1, notice=said.append)
    assert any("shows no pictures" in line for line in said)
    assert (out / "table.json").is_file() and not (out / "sheet.png").exists()


def test_an_import_takes_no_options_that_it_would_ignore(tmp_path):
    for option in (("--backbone", "longlive"), ("--seconds", "5"), ("--embedder", "hsv"), ("--workers", "2")):
        done = CliRunner().invoke(app, ["reproduce", "bank", "--import", str(tmp_path), *option])
        assert done.exit_code != 0
        assert "with --import nothing is drawn" in str(done.exception or "") + done.output


def test_parts_that_are_named_by_path_need_not_be_installed():
    named = {"checkpoint": "a.pt", "prompt_embeds": "b.safetensors", "autoencoder": "c.pth"}
    SelfForcingConfig(**named).check_files()
    SelfForcingConfig(**named | {"prompt_embeds": "", "text_encoder": "d", "tokenizer": "e"}).check_files()
    for lacking in named:
        with pytest.raises(ValueError, match="`recap weights self-forcing` fetches"):
            SelfForcingConfig(**named | {lacking: ""}).check_files()
