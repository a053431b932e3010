"""`make demo`, at the length of a blink."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from recap.backbones.tiny.vocabulary import parse_prompt
from recap.cli import demo
from recap.eval.judges.probe import Probe, save_probe
from recap.io.video import open_clip
from recap.plan import Shot

PAGE = Path("demo/index.html")


@pytest.fixture
def short(monkeypatch, tmp_path):
    """Every shot has two blocks of an untrained model, in an empty folder; whatever the probe has learnt."""
    monkeypatch.chdir(tmp_path)
    save_probe(Probe(), tmp_path / "probe.safetensors")
    monkeypatch.setattr("recap.eval.judges.probe.SHIPPED", tmp_path / "probe.safetensors")
    tales = [
        replace(tale, shots=tuple(Shot(shot.prompt, 1.5, shot.cut) for shot in tale.shots), seeds=seeds)
        for tale, seeds in zip(demo.TALES, ((0, 1), (0,)), strict=True)
    ]
    monkeypatch.setattr(demo, "TALES", tuple(tales))
    monkeypatch.setattr(demo, "MEMORIES", ("none", "recap"))
    monkeypatch.setattr(demo, "BACKBONE", "untrained")


def times(name: str) -> bytes:
    return Path("demo", name, "timing.jsonl").read_bytes()


def test_the_demo_resumes_where_it_was_stopped_and_starts_again_where_it_was_finished(
    short, capsys, monkeypatch
):
    demo.demo("classical")
    printed = capsys.readouterr()
    assert printed.out.rstrip().endswith(f"Look at {PAGE}") and "it is" not in printed.err
    assert re.search(r"The same fox came back in [012] of 2 with", printed.out)
    assert re.search(r"The same bus came back in [01] of 1 with", printed.out)
    assert Path("demo/figure.png").read_bytes().startswith(b"\x89PNG")
    assert open_clip("demo/demo.gif").num_pictures is None or open_clip("demo/demo.gif").num_pictures > 10
    assert not list(Path("demo").rglob("state.safetensors"))

    first = times("return/none"), times("return/recap")
    PAGE.unlink()
    shutil.rmtree("demo/return/recap")  # as if killed between the two
    demo.demo("classical")
    assert "it is resumed" in capsys.readouterr().err
    assert times("return/none") == first[0] and times("return/recap") != first[1] and PAGE.is_file()

    PAGE.unlink()
    monkeypatch.setattr(demo, "TALES", (replace(demo.TALES[0], seeds=(5,)),))
    demo.demo("classical")
    assert "another script: it is generated again" in capsys.readouterr().err and PAGE.is_file()
    assert "Seed 5" in PAGE.read_text()

    demo.demo("classical")
    assert "a finished demo: it is generated again" in capsys.readouterr().err


@pytest.mark.slow
def test_the_page_says_the_verdict_plays_by_itself_and_loads_nothing(short, capsys):
    Path("demo").mkdir()
    Path("demo/mine.txt").write_text("not the demo's")
    demo.demo("classical")
    page, printed = PAGE.read_text(), capsys.readouterr().out
    (title,) = re.findall("<h1>(.*?)</h1>", page)
    assert title.startswith("The same fox came back in ") and title in printed
    players = re.findall("<video [^>]*>", page)
    assert len(players) == 2 * 2 + 2
    assert all('src="data:video/mp4;base64,' in player for player in players)
    assert all(" muted autoplay loop playsinline " in player for player in players)
    assert "default-src 'none'" in page and "http:" not in page and "https:" not in page
    assert page.count('class="wall"') == 3 and page.count("In the bank at the return:") == 3
    for link in re.findall(r'href="([^"]+)"', page):
        assert Path("demo", link).is_file()
    assert Path("demo/mine.txt").is_file()


def test_the_scripts_are_visits_that_the_backbone_can_show():
    for tale, cut in ((demo.RETURN, True), (demo.ENTERING, False)):
        casts = [parse_prompt(shot.prompt).actors for shot in tale.shots]
        assert [tale.subject in cast for cast in casts] == [False, True, False, True]
        assert all(shot.cut == cut for shot in tale.shots)
    assert demo.RETURN.seeds == (0, 1, 2)
    # What is in the opening frame is kept by a sink.
    assert parse_prompt(demo.RETURN.shots[0].prompt).actors == ()
