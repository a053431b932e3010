"""`recap cast`: a subject of a run is saved, shown, merged, and shown again in another video."""

from __future__ import annotations

import json
import shutil

import pytest

from recap.cli.main import main
from recap.io.cast import read_cast
from recap.show.result import generate


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cast") / "run"
    generate("a red boat", seconds=2.25, backbone="untrained", folder=folder, flow="classical")
    return folder


@pytest.fixture
def recap(monkeypatch, capsys, tmp_path):
    """Give a command, in an empty folder; returns its exit code and what it printed."""
    monkeypatch.chdir(tmp_path)

    def give(*words):
        monkeypatch.setattr("sys.argv", ["recap", *map(str, words)])
        with pytest.raises(SystemExit) as stop:
            main()
        printed = capsys.readouterr()
        return stop.value.code or 0, printed.out + printed.err

    return give


def test_a_box_is_saved_shown_and_merged(run, recap, tmp_path):
    assert recap("cast", "save", run, "--at", 1.0, "--box", "0,0,40,40", "--name", "boat") == (
        0,
        "boat.cast\n",
    )
    (subject,) = read_cast(tmp_path / "boat.cast")
    assert subject.words == "a boat" and subject.about["prompt"] == "a red boat"
    assert subject.about["seed"] == 0 and subject.about["second"] == 1.0
    saved = recap("cast", "save", run, "--at", 1.5, "--box", "8,8,30,30", "--name", "b2", "--words", "a ship")
    assert saved[0] == 0
    code, printed = recap("cast", "show", "boat.cast", "b2.cast", "--out", "both.png")
    assert code == 0 and "@boat: a boat;" in printed and "@b2: a ship;" in printed
    assert (tmp_path / "both.png").read_bytes().startswith(b"\x89PNG")
    assert recap("cast", "merge", "boat.cast", "b2.cast", "--out", "two.cast")[0] == 0
    assert [each.name for each in read_cast(tmp_path / "two.cast")] == ["boat", "b2"]
    options = ("--backbone", "untrained", "--seconds", 0.75, "--flow", "classical", "--out", "new")
    code, printed = recap("generate", "@b2 and a fish", "--cast", "two.cast", *options)
    assert code == 0, printed
    assert (tmp_path / "new" / "subjects.cast").is_file()


def test_a_run_that_names_code_is_refused(run, recap, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    about = json.loads((copy / "run.json").read_text())
    about["config"]["memory"] = {"name": "my_memory:Config"}
    (copy / "run.json").write_text(json.dumps(about))
    code, printed = recap("cast", "save", copy, "--at", 1.0, "--box", "0,0,40,40", "--name", "boat")
    assert code == 2 and "--trust-code" in printed


def test_a_run_without_its_files_is_refused(run, recap, tmp_path):
    for name in ("latents.safetensors", "trace.jsonl"):
        copy = tmp_path / name.partition(".")[0]
        shutil.copytree(run, copy)
        (copy / name).unlink()
        code, printed = recap("cast", "save", copy, "--at", 1.0, "--box", "0,0,40,40", "--name", "boat")
        assert code == 2 and "generate the run again" in printed


@pytest.mark.parametrize("member", ["", " ", "fox=", "none.cast", "none.png"])
def test_a_member_that_is_no_file_is_refused(recap, tmp_path, member):
    code, printed = recap("generate", "a boat", "--backbone", "untrained", "--cast", member, "--out", "new")
    assert (
        code == 2 and "error: " in printed and "Traceback" not in printed and not (tmp_path / "new").exists()
    )


def test_an_option_without_its_value_is_refused_in_words(recap):
    code, printed = recap("generate", "a boat", "--cast")
    assert code == 2 and "requires an argument" in printed and "Traceback" not in printed


def test_without_a_box_what_was_new_is_offered_by_number(run, recap, tmp_path):
    code, printed = recap("cast", "save", run, "--at", 1.0, "--name", "boat")
    assert code == 0
    if "--pick" in printed:
        assert (run / "cast.png").is_file() and not (tmp_path / "boat.cast").exists()
        assert recap("cast", "save", run, "--at", 1.0, "--name", "boat", "--pick", 1)[0] == 0
    assert read_cast(tmp_path / "boat.cast")[0].num_tokens >= 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--at", 99, "--box", "0,0,9,9"), "the video is"),
        (("--at", "nan", "--box", "0,0,9,9"), "the video is"),
        (("--at", 1, "--box", "0,0"), "must be x,y,width,height"),
        (("--at", 1, "--box", "900,900,4,4"), "covers no token"),
        (("--at", 1, "--pick", 99), "there are cut-outs 1 to"),
        (("--at", 1, "--pick", 1, "--box", "0,0,40,40"), "--box says already"),
        (("--at", 1, "--box", "0,0,40,40", "--row", 3), "the run has rows 0 to 0"),
    ],
)
def test_what_cannot_be_saved_is_refused_and_no_file_is_made(run, recap, tmp_path, words, message):
    code, printed = recap("cast", "save", run, "--name", "boat", *words)
    assert code == 2 and message in printed
    assert not list(tmp_path.glob("*.cast"))
