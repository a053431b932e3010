"""`recap study make`: pairs from real run folders, nothing that tells whose a video is, and clear refusals."""

from __future__ import annotations

import json
import re
import shutil
import sys
from dataclasses import replace

import av
import pytest

from recap import generate
from recap.cli import main
from recap.eval.study.design import IDENTICAL, PAIR, Key
from recap.eval.study.votes import A
from recap.io.report import SILENT
from recap.io.run_folder import digest_file
from recap.tables.study.folder import QUESTIONS, StudyAsk, make_study, read_questions, read_study
from recap.tables.study.videos import find_videos
from tests.study.conftest import Writer, fill, session_of, write_table


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two memories by three prompts, one of them with two settings."""
    folder = tmp_path_factory.mktemp("runs")
    small = {"seconds": 0.5, "backbone": "untrained", "flow": "classical", "reporter": SILENT}
    for prompt in ("a red boat", "a blue hat", "a dog"):
        for memory in ("none", "recap"):
            generate(prompt, memory=memory, folder=folder / f"{prompt} {memory}", **small)
    generate("a dog", memory={"name": "recap", "reinforcement": 1.0}, folder=folder / "weak", **small)
    return folder


@pytest.fixture
def recap(monkeypatch, capsys, tmp_path):
    """Run a command in this process; returns exit code, output and errors."""
    monkeypatch.chdir(tmp_path)

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["recap", *map(str, words)])
        with pytest.raises(SystemExit) as stopped:
            main.main()
        printed = capsys.readouterr()
        return stopped.value.code or 0, printed.out.strip(), printed.err.strip()

    return run


def of(runs, *names):
    return [path for path in sorted(runs.iterdir()) if path.name.endswith(names)]


def test_from_runs_to_a_report_by_the_command_line(recap, runs, tmp_path):
    """The folder has nothing that tells memories apart, the key has all; votes become a report."""
    code, out, said = recap(
        "study", "make", *of(runs, "none", " recap"), "--pairs", 3, "--repeats", 1, "--questions", "overall"
    )
    assert code == 0 and out == "study/index.html" and "study.key.json" in said, said
    key = Key.from_dict(json.loads((tmp_path / "study.key.json").read_text()), "key")
    assert read_study(tmp_path / "study").digest == key.study.digest and key.rivals == ["none"]
    assert [facts.kind for facts in key.pairs.values()].count(IDENTICAL) == 2
    assert {facts.prompt for facts in key.pairs.values() if facts.kind == PAIR} == {
        "a red boat",
        "a blue hat",
        "a dog",
    }
    for name, facts in key.pairs.items():
        for file, method in zip(key.study.pairs[name], facts.methods, strict=True):
            source = key.made["sources"][file]
            assert f"{facts.prompt} {method}/video.mp4" in source
            assert packets(tmp_path / "study" / "videos" / file) == packets(source)
            assert digest_file(tmp_path / "study" / "videos" / file) == key.made["sha256"][file]
    check_blind(tmp_path / "study")
    prefer = lambda trial, _: A if key.ours_on_a(trial) else "B"  # noqa: E731
    same = lambda trial, q: "tie" if key.pairs[trial[0]].kind == IDENTICAL else prefer(trial, q)  # noqa: E731
    (tmp_path / "votes.jsonl").write_bytes(
        fill(Writer(key.study, session_of(1), "Anna"), key, same).data
        + fill(Writer(key.study, session_of(2), "Anna", 1), key, same).data
        + fill(Writer(key.study, session_of(3), "Ben", 2), key, lambda *_: A).data
    )
    code, out, said = recap("study", "report", "votes.jsonl", "--key", "study.key.json")
    assert code == 0 and out == "study-report/index.html", said
    assert said.count("several raters gave this name") == 2 and "Ben is left out: failed the checks" in said
    (row,) = json.loads((tmp_path / "study-report" / "report.json").read_text())["questions"][0]["rows"]
    assert row["counted"]["wins"] == 6 and row["counted"]["low"] is None and row["everyone"]["n"] == 9


def packets(path):
    with av.open(str(path)) as container:
        return [bytes(packet) for packet in container.demux(video=0) if packet.size]


def check_blind(folder):
    names = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    videos = [name for name in names if name.startswith("videos/")]
    assert all(re.fullmatch(r"videos/[0-9a-f]{20}\.mp4", name) for name in videos)
    assert set(names) - set(videos) == {
        "index.html",
        "look.css",
        "study.css",
        "study.js",
        "study.json",
        "votes.js",
    }
    assert len({(folder / name).stat().st_mtime for name in videos}) == 1
    for name in ("index.html", "study.json"):
        text = (folder / name).read_text()
        for hint in ('recap"', 'none"', "boat", "runs", "identical", "ours", "memory", "repeat"):
            assert hint not in text, hint
    for name in videos:
        with av.open(str(folder / name)) as container:
            assert set(container.metadata) <= {"major_brand", "minor_version", "compatible_brands", "encoder"}


def test_settings_name_memories_apart(runs):
    named = {video.method for video in find_videos([runs])}
    assert named == {"none", "recap, reinforcement=1.0", "recap, reinforcement=5.0"}


def test_a_table_of_reproduce_and_a_comparisons_folder_are_read(tmp_path):
    table = write_table(tmp_path, 2)
    found = find_videos([table])
    assert {video.method for video in found} == {"recap", "none", "sink"} and len(found) == 6
    shutil.rmtree(tmp_path / "shown")
    with pytest.raises(ValueError, match="none of its videos"):
        find_videos([table])
    (table / "results.jsonl").write_text('{"row": 1}\n')
    with pytest.raises(ValueError, match=r"results\.jsonl is missing or damaged"):
        find_videos([table])


def test_plain_videos_are_named_by_their_folder(tmp_path):
    for memory in ("recap", "none"):
        write_table(tmp_path / memory, 1, (memory,))
        plain = tmp_path / "videos" / memory
        plain.mkdir(parents=True)
        for seed in range(2):
            shutil.copy(tmp_path / memory / "shown" / f"{memory}0" / "video.mp4", plain / f"a-b c-{seed}.mp4")
    folders = [tmp_path / "videos" / memory for memory in ("recap", "none")]
    key = make_study(folders, tmp_path / "out", tmp_path / "k", StudyAsk(2, repeats=0, identical=0))
    assert {(facts.prompt, facts.seed) for facts in key.pairs.values()} == {("a-b c", 0), ("a-b c", 1)}
    (folders[0] / "other.mp4").write_bytes(b"")
    with pytest.raises(ValueError, match=r"other\.mp4.*<prompt>-<seed>"):
        find_videos(folders)


def refused(tmp_path, folders, match, **asked):
    out, key = tmp_path / "out", tmp_path / "key.json"
    with pytest.raises(ValueError, match=match):
        make_study(folders, out, key, StudyAsk(**{"pairs": 1, "repeats": 0, "identical": 0, **asked}))
    assert not out.exists() and not key.exists() and not list(tmp_path.glob(".recap-*"))


def test_what_cannot_be_paired_is_refused_and_nothing_is_written(runs, tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    refused(tmp_path, [empty], "holds no run")
    refused(tmp_path, [tmp_path / "nowhere"], "no such folder")
    refused(tmp_path, of(runs, "none"), "--ours is 'recap': no such name")
    refused(tmp_path, of(runs, " recap"), "all are of this one memory")
    refused(tmp_path, [runs / "a dog none", runs / "a red boat recap"], "no video of")
    refused(tmp_path, of(runs, "none", " recap"), "--pairs is 4", pairs=4)
    two = write_table(tmp_path / "two", 1)
    refused(tmp_path, [two], "--pairs is 1: there are 2 memories")
    refused(tmp_path, [runs], "--ours is 'recap'")
    shutil.copytree(runs / "a dog recap", tmp_path / "twice")
    refused(
        tmp_path,
        [runs / "a dog none", runs / "a dog recap", tmp_path / "twice"],
        "same memory, prompt and seed",
    )


def test_damaged_unfinished_and_unlike_videos_are_refused(runs, tmp_path):
    for name in ("none", "recap"):
        shutil.copytree(runs / f"a dog {name}", tmp_path / "runs" / name)
    own = tmp_path / "runs" / "none"
    video = own / "video.mp4"
    whole = video.read_bytes()
    video.write_bytes(whole[:-10])
    refused(tmp_path, [tmp_path / "runs"], r"video\.mp4")
    video.unlink()
    refused(tmp_path, [tmp_path / "runs"], r"video\.mp4")
    video.write_bytes(whole)
    (own / "summary.json").unlink()
    refused(tmp_path, [tmp_path / "runs"], "not finished")
    (own / "run.json").write_text("{}")
    refused(tmp_path, [tmp_path / "runs"], r"run\.json")
    long = write_table(tmp_path / "long", 1, ("recap",), pictures=9)
    short = write_table(tmp_path / "short", 1, ("none",))
    refused(tmp_path, [long, short], "its width, height, rate and pictures")


@pytest.mark.parametrize(
    ("asked", "match"),
    [
        ({"pairs": 0}, "--pairs"),
        ({"pairs": 501}, "--pairs"),
        ({"pairs": 4, "repeats": 3}, "--repeats"),
        ({"identical": -1}, "--identical"),
        ({"title": " "}, "--title"),
    ],
)
def test_impossible_studies_are_refused(asked, match):
    with pytest.raises(ValueError, match=match):
        StudyAsk(**asked)
    assert StudyAsk().num_repeats == StudyAsk().num_identical == 3


def test_questions():
    assert read_questions([]) == QUESTIONS and list(read_questions(["motion,overall"])) == [
        "motion",
        "overall",
    ]
    assert read_questions(["overall", "face=Which face?"]) == {
        "overall": QUESTIONS["overall"],
        "face": "Which face?",
    }
    for wrong in (
        ["beauty"],
        ["overall", "overall"],
        ["a b=x"],
        ["x=" + "y" * 301],
        [f"q{n}=x" for n in range(11)],
    ):
        with pytest.raises(ValueError, match="question"):
            read_questions(wrong)


def test_an_earlier_study_and_a_key_among_the_videos_are_never_touched(runs, tmp_path):
    ask, folders = StudyAsk(1, repeats=0, identical=0), [runs / "a dog none", runs / "a dog recap"]
    out = tmp_path / "study"
    with pytest.raises(ValueError, match="which raters get"):
        make_study(folders, out, out / "key.json", ask)
    make_study(folders, out, tmp_path / "key.json", ask)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(ValueError, match="is there already"):
        make_study(folders, tmp_path / "other", tmp_path / "key.json", ask)
    with pytest.raises(ValueError, match="holds something"):
        make_study(folders, out, tmp_path / "new.json", replace(ask, seed=1))
    assert before == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    next((out / "videos").iterdir()).unlink()
    with pytest.raises(ValueError, match="a video of the study is missing"):
        read_study(out)
