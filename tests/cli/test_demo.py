"""`make demo`, at the length of a blink."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from recap.backbones.tiny.vocabulary import parse_prompt
from recap.cli import demo
from recap.eval.judges.probe import Probe, save_probe
from recap.plan import Shot


@pytest.fixture
def short(monkeypatch, tmp_path):
    """Two blocks with two memories, in an empty folder; whatever the probe has learnt."""
    monkeypatch.chdir(tmp_path)
    save_probe(Probe(), tmp_path / "probe.safetensors")
    monkeypatch.setattr("recap.eval.judges.probe.SHIPPED", tmp_path / "probe.safetensors")
    shots = tuple(Shot(shot.prompt, 0.75, shot.cut) for shot in demo.SHOTS[:2])
    monkeypatch.setattr(demo, "SHOTS", shots)
    monkeypatch.setattr(demo, "MOMENTS", {0.5: "a fox", 1.0: "both"})
    monkeypatch.setattr(demo, "MEMORIES", ("none", "sink"))


def times(name: str) -> bytes:
    return Path("demo/comparison", name, "timing.jsonl").read_bytes()


def test_the_demo_resumes_where_it_was_stopped_and_starts_again_where_it_was_finished(
    short, capsys, monkeypatch
):
    demo.demo()
    printed = capsys.readouterr()
    page, figure = Path("demo/comparison/index.html"), Path("demo/figure.png")
    assert printed.out.rstrip().endswith(f"Look at {page}") and "demo" not in printed.err.replace("demo/", "")
    assert page.stat().st_size > 20_000 and figure.read_bytes().startswith(b"\x89PNG")
    assert '<video src="data:video/mp4;base64,' in page.read_text() and "the bus" in page.read_text()

    assert not list(Path("demo").rglob("state.safetensors"))
    first = times("none"), times("sink")
    page.unlink()
    shutil.rmtree("demo/comparison/sink")  # as if killed between the two
    demo.demo()
    assert "it is resumed" in capsys.readouterr().err
    assert times("none") == first[0] and times("sink") != first[1] and page.is_file()

    demo.demo()
    assert "generated again" in capsys.readouterr().err
    assert times("none") != first[0]

    page.unlink()
    monkeypatch.setattr(demo, "SHOTS", demo.SHOTS[1:])
    monkeypatch.setattr(demo, "MOMENTS", {0.5: "both"})
    demo.demo()
    assert "another script" in capsys.readouterr().err and page.is_file()


def test_the_script_is_a_minute_in_one_take_that_the_backbone_can_show():
    casts = [set(parse_prompt(shot.prompt).actors) for shot in demo.SHOTS]
    assert sum(shot.seconds for shot in demo.SHOTS) == 60 and not any(shot.cut for shot in demo.SHOTS)
    first, both, second, again = casts
    assert len(first) == len(second) == 1 and first != second and both == again == first | second
    assert max(demo.MOMENTS) < 60
