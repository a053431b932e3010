"""A folder of videos becomes `scores.json`, through a real environment that has a stand-in for VBench."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pytest
import torch
from vbench_standin import GROUPS, LABELLED

from recap.cli import main as cli
from recap.eval.metrics.consistency import mapped
from recap.io.video import ClipWriter
from recap_vbench import suites
from recap_vbench.environment import installed
from recap_vbench.judge import Question, judge
from recap_vbench.records import write_record
from recap_vbench.scores import dimension_score

# One prompt of each group and two seeds: a small vbench128.
# A plug-in of its own: its commands are tested in `make test`, the rest in `make test-slow`.
pytestmark = pytest.mark.slow

SEEDS = 2


@pytest.fixture(autouse=True)
def small(monkeypatch, tmp_path):
    for name, count in (("vbench128", 11), ("moviegen128", 3)):
        smaller = replace(suites.SUITES[name], num_entries=count, seeds=SEEDS)
        monkeypatch.setitem(suites.SUITES, name, smaller)
    monkeypatch.setattr(suites, "GROUPS_OF_128", dict.fromkeys(suites.GROUPS_OF_128, 1))
    monkeypatch.setenv("STANDIN_CALLS", str(tmp_path / "calls"))
    monkeypatch.setenv("STANDIN_DETECTRON", "1")
    monkeypatch.delenv("VBENCH_CACHE_DIR", raising=False)


@pytest.fixture(scope="session")
def clip(tmp_path_factory):
    """Write 40 pictures at 16 per second: two clips of 2 s, or one short clip of 10 s."""
    path = tmp_path_factory.mktemp("made") / "clip.mp4"
    with ClipWriter(path, (32, 32), 16) as writer:
        writer.write(torch.rand(40, 3, 32, 32, generator=torch.Generator().manual_seed(0)))
    return path


@pytest.fixture
def videos(tmp_path, environment, clip):
    folder = tmp_path / "videos"
    folder.mkdir()
    entries = suites.load_entries(suites.SUITES["vbench128"], None, installed(environment).info)
    for entry in entries:
        for seed in range(SEEDS):
            shutil.copy(clip, folder / f"{entry.stem}-{seed}.mp4")
    return folder


def calls(tmp_path) -> list[str]:
    path = tmp_path / "calls"
    return path.read_text().split() if path.exists() else []


def quiet(line):
    pass


def test_averages_by_hand():
    slow = {"a": [0.9, 0.8], "b": [0.6]}
    score = dimension_score("subject_consistency", "vbench", slow, {"a": 0.5})
    high = mapped(0.5, "subject")
    # b has one clip and no fast value.
    fused = [(0.9 + high) / 2, (0.8 + high) / 2, 0.6]
    assert score.value == pytest.approx(fmean(fused)) and score.n == 3
    assert score.details["slow"] == pytest.approx(2.3 / 3)
    assert score.details["fast_raw"] == 0.5 and score.details["fast_mapped"] == pytest.approx(0.932675)
    assert score.details["mean_over_videos"] == pytest.approx((fmean(fused[:2]) + 0.6) / 2)
    # The mapping table has 0 there, which leaves the slow value alone.
    assert dimension_score("subject_consistency", "vbench", {"a": [0.9]}, {"a": 0.0}).value == 0.9
    plain = dimension_score("imaging_quality", "vbench", {"a": [70, 50], "b": [30.0]}, {})
    assert plain.value == pytest.approx(0.5) and plain.details["videos"] == {"a": 0.6, "b": 0.3}
    filtered = {"a": [1.0, 1.0, 1.0], "b": [0.0], "c": []}
    assert dimension_score("temporal_flickering", "v", filtered, {}, over_videos=True).value == 0.5
    assert dimension_score("temporal_flickering", "v", filtered, {}).value == 0.75
    with pytest.raises(ValueError, match="must be a number"):
        dimension_score("scene", "vbench", {"a": [float("nan")]}, {})
    with pytest.raises(ValueError, match="nothing to average"):
        dimension_score("color", "vbench", {"a": []}, {})


def test_all_sixteen_to_a_total(videos, environment, tmp_path):
    out = tmp_path / "out"
    scores = judge(Question(videos, "vbench128"), environment, out, quiet)
    assert scores == json.loads((out / "scores.json").read_text())
    assert scores["complete"] and scores["suite"] == "vbench128" and scores["backend"] == ["vbench 0.1.5"]
    assert scores["versions"]["vbench"] == "0.1.5" and scores["not_complete"] == []
    rows = scores["dimensions"]
    assert set(rows) == set(suites.SUITES["vbench128"].dimensions)
    # Seeds 0 and 1, clips 0 and 1: 0.50, 0.51, 0.60, 0.61.
    assert rows["dynamic_degree"]["value"] == pytest.approx(0.555)
    assert rows["dynamic_degree"]["num_clips"] == 44
    assert rows["imaging_quality"]["value"] == pytest.approx(0.555)
    slow = rows["subject_consistency"]["slow"]
    assert slow == pytest.approx(0.555) and rows["subject_consistency"]["fast_raw"] == 0.5
    assert rows["subject_consistency"]["value"] == pytest.approx((slow + mapped(0.5, "subject")) / 2)
    assert rows["background_consistency"]["value"] == pytest.approx((slow + mapped(0.5, "background")) / 2)
    # Two clips were dropped.
    assert rows["color"]["value"] == pytest.approx(0.55) and rows["color"]["num_clips"] == 2
    assert rows["scene"]["value"] == pytest.approx(0.555) and rows["scene"]["num_videos"] == 2
    assert rows["human_action"]["value"] == 1 and rows["human_action"]["clip_seconds"] == [10]
    # One clip of 10 s per video.
    assert rows["temporal_style"]["value"] == pytest.approx(0.55)
    assert rows["temporal_flickering"]["static_filter"] is False
    assert scores["total"] == pytest.approx((4 * scores["quality"] + scores["semantic"]) / 5)
    assert sorted(calls(tmp_path)) == sorted(rows)


def test_a_second_run_computes_nothing_and_a_stopped_one_resumes(videos, environment, tmp_path, monkeypatch):
    out, few = tmp_path / "out", ("motion_smoothness", "dynamic_degree", "scene")
    monkeypatch.setenv("STANDIN_FAILS", "dynamic_degree")
    with pytest.raises(ValueError, match=r"1 of 3 dimensions failed.*no weights for dynamic_degree.*resumes"):
        judge(Question(videos, "vbench128", few), environment, out, quiet)
    assert "no weights" in (out / "logs" / "dynamic_degree.log").read_text()
    assert set(json.loads((out / "scores.json").read_text())["dimensions"]) == {"motion_smoothness", "scene"}
    monkeypatch.delenv("STANDIN_FAILS")
    judge(Question(videos, "vbench128", few), environment, out, quiet)
    assert calls(tmp_path) == ["motion_smoothness", "dynamic_degree", "scene", "dynamic_degree"]
    before = (out / "scores.json").read_bytes()
    scores = judge(Question(videos, "vbench128", few), environment, out, quiet)
    assert len(calls(tmp_path)) == 4 and (out / "scores.json").read_bytes() == before
    assert not scores["complete"] and "total" not in scores and "quality" not in scores
    assert "imaging_quality" in scores["not_complete"]
    scores = judge(Question(videos, "vbench128", ("color",)), environment, out, quiet)
    # Those of the folder, not only of the run.
    assert set(scores["dimensions"]) == {*few, "color"}


def test_partial_never_replaces_complete(videos, environment, tmp_path):
    out, few = tmp_path / "out", ("motion_smoothness",)
    away = sorted(videos.glob("*.mp4"))[0]
    kept = tmp_path / away.name
    away.rename(kept)
    with pytest.raises(ValueError, match=r"1 videos of vbench128 are missing.*--partial"):
        judge(Question(videos, "vbench128", few), environment, out, quiet)
    assert not out.exists() and calls(tmp_path) == []
    part = judge(Question(videos, "vbench128", few, partial=True), environment, out, quiet)
    row = part["dimensions"]["motion_smoothness"]
    assert not row["complete"] and (row["num_videos"], row["num_videos_of_suite"]) == (21, 22)
    assert "motion_smoothness" in part["not_complete"]
    kept.rename(away)
    whole = judge(Question(videos, "vbench128", few), environment, out, quiet)
    assert whole["dimensions"]["motion_smoothness"]["complete"]
    files = {path: path.read_bytes() for path in out.rglob("*.json")}
    away.rename(kept)
    with pytest.raises(ValueError, match="its motion_smoothness is complete, and of more videos"):
        judge(Question(videos, "vbench128", few, partial=True), environment, out, quiet)
    assert {path: path.read_bytes() for path in out.rglob("*.json")} == files


def test_partial_never_replaces_what_another_run_completed_meanwhile(tmp_path):
    record = {"suite": "vbench128", "prompts_sha256": "list", "key": "all", "complete": True, "sources": {}}
    suite = suites.SUITES["vbench128"]
    write_record(tmp_path, suite, "scene", record)
    with pytest.raises(ValueError, match="complete, and of more videos"):
        write_record(tmp_path, suite, "scene", {**record, "key": "some", "complete": False})
    assert json.loads((tmp_path / "dimensions" / "scene.json").read_text())["complete"]


def test_other_questions_to_a_folder_are_refused(videos, environment, tmp_path):
    out, few = tmp_path / "out", ("temporal_flickering",)
    judge(Question(videos, "vbench128", few), environment, out, quiet)
    with pytest.raises(ValueError, match="complete, and of other settings"):
        judge(Question(videos, "vbench128", few, static_filter=True), environment, out, quiet)
    changed = sorted(videos.glob("*.mp4"))[0]
    with ClipWriter(changed, (32, 32), 16) as writer:
        writer.write(torch.zeros(40, 3, 32, 32))
    with pytest.raises(ValueError, match=r"temporal_flickering is of another"):
        judge(Question(videos, "vbench128", ("scene",)), environment, out, quiet)


def test_partial_leaves_out_what_has_no_video(videos, environment, tmp_path):
    for path in videos.glob("*.mp4"):
        if "thing" not in path.name:
            path.unlink()
    notices = []
    question = Question(videos, "vbench128", ("human_action", "scene"), partial=True)
    scores = judge(question, environment, tmp_path / "out", notices.append)
    assert list(scores["dimensions"]) == ["human_action"] and scores["dimensions"]["human_action"]["complete"]
    assert any("no video of scene" in line for line in notices)


def test_static_filter_keeps_still_clips_of_vbenchs_own_prompts(videos, environment, tmp_path):
    question = Question(videos, "vbench128", ("temporal_flickering",), static_filter=True)
    row = judge(question, environment, tmp_path / "out", quiet)["dimensions"]["temporal_flickering"]
    # One prompt of the group, two seeds; only the second clip of each is still: 0.51 and 0.61.
    assert (row["num_clips"], row["num_videos_of_suite"]) == (2, 2) and row["static_filter"]
    assert row["value"] == pytest.approx(0.56)


def test_moviegen_reads_prompts_from_a_file_and_refuses_another_suites_folder(
    environment, tmp_path, clip, videos
):
    prompts = tmp_path / "prompts.txt"
    texts = ["a boat", "x" * 300, "day/night"]
    prompts.write_text("\n".join(texts))
    own = tmp_path / "movies"
    own.mkdir()
    for stem in ("a boat", "line-002", "line-003"):
        for seed in range(SEEDS):
            shutil.copy(clip, own / f"{stem}-{seed}.mp4")
    out = tmp_path / "out"
    scores = judge(Question(own, "moviegen128", (), prompts), environment, out, quiet)
    assert len(scores["dimensions"]) == 8 and scores["complete"]
    assert "quality" in scores and "total" not in scores
    row = scores["dimensions"]["overall_consistency"]
    # The stand-in's value is the length of the prompt.
    assert row["clip_seconds"] == [2] and row["value"] == pytest.approx(fmean([6, 300, 9]) / 1000)
    with pytest.raises(ValueError, match="it holds scores of moviegen128"):
        judge(Question(videos, "vbench128", ("scene",)), environment, out, quiet)


def test_clips_without_a_value_are_refused(videos, environment, tmp_path, monkeypatch):
    """VBench silently leaves out clips that it cannot read."""
    monkeypatch.setenv("STANDIN_DROPS", "temporal_flickering")
    with pytest.raises(ValueError, match="22 clips have no value"):
        judge(Question(videos, "vbench128", ("temporal_flickering",)), environment, tmp_path / "out", quiet)
    assert not (tmp_path / "out" / "scores.json").exists()


def test_missing_package_is_named(videos, environment, tmp_path, monkeypatch):
    monkeypatch.delenv("STANDIN_DETECTRON")
    with pytest.raises(ValueError, match=r"No module named 'detectron2'.*not on PyPI"):
        judge(Question(videos, "vbench128", ("spatial_relationship",)), environment, tmp_path / "out", quiet)


def test_damaged_video_is_refused_before_any_work(videos, environment, tmp_path):
    broken = sorted(videos.glob("*.mp4"))[3]
    broken.write_bytes(b"not a video")
    with pytest.raises(ValueError, match="not a video"):
        judge(Question(videos, "vbench128"), environment, tmp_path / "out", quiet)
    assert calls(tmp_path) == []


@pytest.fixture
def recap(monkeypatch, capsys):
    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["recap", "vbench", *map(str, arguments)])
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        printed = capsys.readouterr()
        return stopped.value.code or 0, printed.out, printed.err

    return run


def test_paths_may_be_relative(recap, videos, environment, tmp_path, monkeypatch):
    """VBench works in a folder of its own, and once got relative paths that it could not find."""
    monkeypatch.chdir(tmp_path)
    options = ("--suite", "vbench128", "--dimension", "scene", "--out", "there", "--folder", environment)
    code, out, errors = recap("run", "videos", *options)
    assert code == 0, errors
    assert out.strip() == "there/scores.json" and (tmp_path / "there" / "scores.json").exists()


def test_command(recap, videos, environment):
    options = (
        "--suite",
        "vbench128",
        "--dimension",
        "scene",
        "--dimension",
        "color",
        "--folder",
        environment,
    )
    code, out, errors = recap("run", videos, *options)
    assert code == 0, errors
    assert Path(out.strip()) == videos.with_name("videos-vbench") / "scores.json"
    assert "scene: 0.5550 (4 clips of 2 of 2 videos)" in errors and "no Total" in errors


def test_command_without_setup_or_with_a_wrong_suite(recap, videos, tmp_path):
    code, _, errors = recap("run", videos, "--suite", "vbench128", "--folder", tmp_path / "nowhere")
    assert code == 2 and "recap vbench setup" in errors
    code, _, errors = recap("run", videos, "--suite", "vbench", "--folder", tmp_path / "nowhere")
    assert code == 2 and "vbench128" in errors


@pytest.mark.parametrize(
    ("suite", "files", "words"),
    [
        ("vbench128", None, "no such folder"),
        ("vbench128", (), r"no \.mp4 file"),
        ("vbench128", ("notes.txt",), r"no \.mp4 file"),
        ("vbench128", ("a boat.mp4",), r"'a boat\.mp4'.*<prompt>-<seed>\.mp4"),
        ("vbench128", ("a boat-2.mp4",), "seeds of vbench128 are 0 to 1"),
        ("moviegen128", (), r"no \.mp4 file"),
        ("moviegen128", ("a fish-0.mp4",), r"'a fish-0\.mp4'.*moviegen128.*'a boat-0\.mp4'"),
        ("moviegen128", ("a boat-0.mp4",), "5 videos of moviegen128 are missing"),
    ],
)
def test_problems_of_the_videos_are_reported_before_an_environment_is_required(tmp_path, suite, files, words):
    """Nobody should install 3.5 GB to learn that a folder is empty."""
    videos, prompts = tmp_path / "videos", tmp_path / "prompts.txt"
    prompts.write_text("a boat\na house\na tree\n")
    if files is not None:
        videos.mkdir()
        for name in files:
            (videos / name).touch()
    question = Question(videos, suite, prompts=prompts if suite == "moviegen128" else None)
    with pytest.raises(ValueError, match=words):
        judge(question, tmp_path / "nowhere", tmp_path / "out", quiet)
    assert not (tmp_path / "out").exists()


def test_names_are_checked_against_the_users_list_before_vbenchs(tmp_path):
    videos, prompts = tmp_path / "videos", tmp_path / "prompts.txt"
    videos.mkdir()
    prompts.write_text("a boat\na house\n")
    (videos / "a fish-0.mp4").touch()
    with pytest.raises(ValueError, match=r"'a fish-0\.mp4'.*'a boat-0\.mp4'"):
        judge(Question(videos, "vbench128", prompts=prompts), tmp_path / "nowhere", tmp_path / "out", quiet)
    with pytest.raises(ValueError, match="vbench946 has VBench's own list"):
        judge(Question(videos, "vbench946", prompts=prompts), tmp_path / "nowhere", tmp_path / "out", quiet)
    (videos / "a fish-0.mp4").rename(videos / "a boat-0.mp4")
    with pytest.raises(ValueError, match="recap vbench setup"):
        judge(Question(videos, "vbench128", prompts=prompts), tmp_path / "nowhere", tmp_path / "out", quiet)


def test_the_command_reports_it_in_one_line(recap, tmp_path):
    (tmp_path / "videos").mkdir()
    options = ("--suite", "vbench128", "--folder", tmp_path / "nowhere")
    code, _, errors = recap("run", tmp_path / "videos", *options)
    assert code == 2 and errors.count("\n") == 1 and "no .mp4 file in it" in errors and "setup" not in errors


def test_standin_has_the_shape_of_the_real_list():
    assert sum(GROUPS.values()) == 946 and set(LABELLED) == set(suites.LABELLED)
