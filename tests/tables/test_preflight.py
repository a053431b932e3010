"""Weights that are missing are found before anything is generated, and cost only the rows that need them."""

from __future__ import annotations

import json

import pytest

from recap.backbones.wan.family import SelfForcingConfig
from recap.tables.ask import Ask
from recap.tables.reproduce import How, reproduce

SMALL = Ask(backbone="untrained", prompts=1, seeds=1, seconds=3, embedder="hsv")


@pytest.fixture(autouse=True)
def nothing_installed(tmp_path, monkeypatch):
    monkeypatch.setenv("RECAP_HOME", str(tmp_path / "no-weights"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "no-hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "no-hub"))


def never(*_, **__):
    pytest.fail("something was generated")


@pytest.mark.parametrize(
    ("backbone", "options", "why"),
    [
        ("self-forcing", {}, r"weights is 'self-forcing'.*`recap weights self-forcing` fetches"),
        ("helios-distilled", {}, r"`recap weights helios-distilled` fetches"),
        ("untrained", {"flow": "raft-small"}, "raft"),
        ("untrained", {"flow": "world-flow"}, r"`embedded` alone.*not those of `untrained`.*raft-small"),
        ("untrained", {"detector": "qwen2.5-vl"}, r"qwen2.5-vl.*hf download"),
        ("untrained", {"detector": "qwen2.5-vl=/nowhere"}, r"is '/nowhere'"),
        ("untrained", {"detector": "yolo"}, r"--detector is 'yolo'"),
        ("untrained", {"embedder": "dinov2=/nowhere"}, r"is '/nowhere'.*dinov2=FOLDER"),
    ],
)
def test_what_no_run_can_do_without_is_refused_before_any(tmp_path, monkeypatch, backbone, options, why):
    monkeypatch.setattr("recap.tables.reproduce.run_jobs", never)
    asked = {"prompts": 1, "seeds": 1, "seconds": 3, "flow": "classical", "embedder": "hsv", **options}
    with pytest.raises(ValueError, match=why):
        reproduce(["reappearance"], Ask(backbone=backbone, **asked), tmp_path / "out", notice=lambda _: None)
    assert not (tmp_path / "out").exists()


def test_a_row_whose_own_weights_are_missing_is_left_out_and_named(tmp_path):
    notices = []
    done = reproduce(["admission"], SMALL, tmp_path, How(workers=1), notice=notices.append)
    assert done.left_out == {"admission": ("diversity",)} and done.num_runs == 8
    assert any("'diversity' is left out" in line and "hf download" in line for line in notices)
    assert any("no --detector" in line for line in notices)
    table = json.loads((tmp_path / "admission" / "table.json").read_text())
    assert table["left_out"] == ["diversity"] and table["about"]["runs"] == 8
    assert "their runs are not there: diversity" in (tmp_path / "admission" / "table.md").read_text()


def test_a_lost_video_costs_no_table(tmp_path):
    reproduce(["bank"], SMALL, tmp_path, How(workers=1), notice=lambda _: None)
    assert "<video" in (tmp_path / "bank" / "index.html").read_text()
    (video,) = tmp_path.glob("shown/*/video.mp4")
    video.write_bytes(b"damaged")
    notices = []
    reproduce(["bank"], SMALL, tmp_path, How(workers=1), notice=notices.append)
    assert any("shows no video" in line for line in notices)
    assert "<video" not in (tmp_path / "bank" / "index.html").read_text()
    assert (tmp_path / "bank" / "sheet.png").is_file()


def test_parts_that_are_named_by_path_need_not_be_installed():
    named = {"checkpoint": "a.pt", "prompt_embeds": "b.safetensors", "autoencoder": "c.pth"}
    SelfForcingConfig(**named).check_files()
    SelfForcingConfig(**named | {"prompt_embeds": "", "text_encoder": "d", "tokenizer": "e"}).check_files()
    for lacking in named:
        with pytest.raises(ValueError, match="`recap weights self-forcing` fetches"):
            SelfForcingConfig(**named | {lacking: ""}).check_files()
