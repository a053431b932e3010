"""`recap convert` and `recap weights` as commands: what they print, and one line where they refuse."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from recap.backbones.wan.backbone import build_untrained
from recap.backbones.wan.published import SETS
from recap.cli import main as cli


@pytest.fixture
def recap(monkeypatch, capsys, tmp_path):
    """Run a command in this process and in an empty folder; returns exit code, output and what it printed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RECAP_HOME", str(tmp_path / "home"))

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["recap", *map(str, arguments)])
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        return stopped.value.code or 0, *capsys.readouterr()

    return run


@pytest.fixture
def checkpoint(tmp_path) -> Path:
    path = tmp_path / "model.pt"
    torch.save({"generator_ema": build_untrained().model.state_dict()}, path)
    return path


def test_a_checkpoint_is_converted_with_a_bar(recap, checkpoint, tmp_path):
    code, out, printed = recap("convert", checkpoint, "out", "--ema", "--dtype", "float16")
    assert code == 0 and out.split() == ["out/model.safetensors", "out/manifest.json"]
    assert "converting" in printed and "MB" in printed
    assert (tmp_path / "out" / "model.safetensors").stat().st_size > 2 * 434_944


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("model.pt", "out", "--no-ema"), "has no generator"),
        (("model.pt", "out", "--dtype", "float61"), "did you mean 'float16'"),
        (("model.pt", "out", "--lora", "model.pt"), "(generator_ema)"),
        (("model.pt", "."), "it is there already"),
        (("none.pt", "out"), "no such file"),
        (("text.pt", "out"), "text.pt"),
    ],
)
def test_refusals_are_one_line(recap, checkpoint, tmp_path, arguments, words):
    (tmp_path / "text.pt").write_text("words")
    code, out, printed = recap("convert", *arguments)
    assert code == 2 and out == "" and len(printed.splitlines()) == 1
    assert printed.startswith("error: ") and words in printed
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.pt", "text.pt"]


@pytest.mark.parametrize("name", ["raft-small", *SETS])
def test_a_dry_run_prints_licence_and_place(recap, tmp_path, monkeypatch, name):
    monkeypatch.setattr("recap.backbones.wan.published.check_room", lambda *_: None)
    code, out, printed = recap("weights", name, "--dry-run")
    assert code == 0 and out == "" and printed.startswith("licence: ")
    assert "to fetch, to " + str(tmp_path / "home") in printed
    assert not (tmp_path / "home").exists()


def test_unknown_weights_are_refused(recap):
    code, _, printed = recap("weights", "longlife")
    assert code == 2 and "did you mean 'longlive'" in printed and "raft-small" in printed
