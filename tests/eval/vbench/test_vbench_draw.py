"""`draw`, then the `run` that its last line names, in an environment that has a stand-in for VBench."""

from __future__ import annotations

import json
import shlex

from typer.testing import CliRunner

from recap.cli.main import app


def recap(*words):
    done = CliRunner().invoke(app, [str(word) for word in words])
    assert done.exit_code == 0, (done.output, done.exception)
    return done


def test_generated_videos_can_be_scored(environment, tmp_path, monkeypatch):
    monkeypatch.setenv("STANDIN_CALLS", str(tmp_path / "calls"))
    monkeypatch.delenv("VBENCH_CACHE_DIR", raising=False)
    out = tmp_path / "videos"
    small = ("--num", 2, "--seeds", 1, "--seconds", 2, "--backbone", "untrained", "--flow", "classical")
    drawn = recap("vbench", "draw", "--suite", "vbench128", "--out", out, "--folder", environment, *small)
    assert len(list(out.iterdir())) == 2
    _, _, following = drawn.stderr.replace("\n", "").rpartition("next: recap ")
    recap(*shlex.split(following), "--dimension", "dynamic_degree")
    scores = json.loads((tmp_path / "videos-vbench" / "scores.json").read_text())
    assert scores["dimensions"]["dynamic_degree"]["num_videos"] == 2
