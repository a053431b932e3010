"""A suite's videos on the untrained backbone: whole, under VBench's names, nobody else's touched, come what may."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from recap.cli.main import app
from recap.config import RunConfig
from recap.io.video import open_clip
from recap.tables.runner import Progress
from recap_vbench import videos
from recap_vbench.suites import SUITES, find_videos, load_entries
from recap_vbench.videos import Order, generate_suite, work_folder

# A plug-in of its own: its commands are tested in `make test`, the rest in `make test-slow`.
pytestmark = pytest.mark.slow

MOVIE = SUITES["moviegen128"]
TEXTS = ["A red boat sails past a house", "half a/b", "word " * 60, *(f"a prompt {n}" for n in range(125))]
NAMES = {f"{stem}-{seed}.mp4" for stem in (TEXTS[0], "line-002") for seed in range(2)}
NO_ENVIRONMENT = Path("/nowhere")  # MovieGen's prompts come in a file


@pytest.fixture(scope="module")
def lines(tmp_path_factory):
    path = tmp_path_factory.mktemp("prompts") / "moviegen.txt"
    path.write_text("\n".join(TEXTS))
    return path


def order(lines, *, num=2, seeds=2, seconds=2.0, **values):
    shots = [{"prompt": "", "seconds": seconds}]
    template = {"shots": shots, "backbone": "untrained", "flow": "classical", **values}
    return Order("moviegen128", RunConfig.from_dict(template), lines, num, seeds)


def make(asked, out, **how):
    return generate_suite(asked, NO_ENVIRONMENT, out, **{"workers": 1, "notice": lambda _: None, **how})


def names_in(folder):
    return {path.name for path in folder.iterdir()}


def bytes_in(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def made(tmp_path_factory, lines):
    """Two prompts, two seeds: the folder of the videos."""
    out = tmp_path_factory.mktemp("made") / "videos"
    reported = []
    done = make(order(lines), out, report=reported.append)
    assert done == (4, False) and reported[-1] == "4 of 4 done"
    return out


def test_names_are_those_that_the_judge_wants(made, lines):
    assert names_in(made) == NAMES
    found = find_videos(made, MOVIE, {entry.stem for entry in load_entries(MOVIE, lines, "")})
    assert sorted(found) == [(stem, seed) for stem in (TEXTS[0], "line-002") for seed in range(2)]
    assert all(open_clip(path).num_pictures > 16 for path in found.values())
    assert len({path.read_bytes() for path in found.values()}) == 4


def test_prompts_and_seeds_pair_the_memories(made):
    configs = [json.loads(path.read_text())["config"] for path in work_folder(made).glob("jobs/*/run.json")]
    found = {(config["shots"][0]["prompt"], *config["seeds"]) for config in configs}
    assert found == {(TEXTS[0], 0), (TEXTS[0], 1), (TEXTS[1], 1000), (TEXTS[1], 1001)}
    assert not list(work_folder(made).glob("jobs/*/*.safetensors"))


def test_the_same_again_generates_nothing_and_puts_back_what_was_lost(made, lines):
    before = bytes_in(made)
    (made / "line-002-1.mp4").unlink()
    make(order(lines), made)
    assert bytes_in(made) == before


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"memory": "sink"}, "begun with memory 'recap', not 'sink'"),
        ({"memory": {"name": "recap", "reinforcement": 1.0}}, r"begun with memory .*5\.0.*not .*1\.0"),
        ({"backbone": {"name": "untrained", "seed": 3}}, "begun with backbone"),
        ({"seconds": 3.0}, r"begun with seconds 2\.0, not 3\.0"),
        ({"admission": "random"}, "begun with admission 'flow', not 'random'"),
        ({"num": 1}, "begun with 2 prompts, not 1"),
        ({"seeds": 1}, "begun with 2 seeds, not 1"),
    ],
)
def test_another_question_to_the_same_folder_is_refused(made, lines, asked, message):
    before = bytes_in(made)
    with pytest.raises(ValueError, match=message):
        make(order(lines, **asked), made)
    assert bytes_in(made) == before


def test_other_prompts_are_refused(made, tmp_path):
    other = tmp_path / "other.txt"
    other.write_text("\n".join(reversed(TEXTS)))
    with pytest.raises(ValueError, match="begun with prompts_sha256"):
        make(order(other), made)


def test_a_video_that_failed_is_named_with_its_reason(lines, tmp_path, monkeypatch):
    failed = Progress(2, errors={f"{TEXTS[0]}-0.mp4": "ValueError: no hope"})
    monkeypatch.setattr(videos, "run_jobs", lambda *_, **__: failed)
    why = r"2 of 2 jobs have no result; the first: A red boat .*-0\.mp4: ValueError: no hope"
    with pytest.raises(ValueError, match=why):
        make(order(lines, num=1), tmp_path / "videos")


def test_a_trial_grows(lines, tmp_path, monkeypatch):
    out = tmp_path / "videos"
    make(order(lines, num=1, seeds=1), out)
    first = bytes_in(out)

    def no_link(*_):
        raise PermissionError("no hard links here")

    monkeypatch.setattr(os, "link", no_link)  # as on a stick: the rest is copied
    make(order(lines, num=1, seeds=2), out)
    assert names_in(out) == {f"{TEXTS[0]}-0.mp4", f"{TEXTS[0]}-1.mp4"}
    assert first.items() <= bytes_in(out).items()


@pytest.mark.parametrize("name", [f"{TEXTS[0]}-1.mp4", "somebody else's.mp4"])
def test_files_of_others_are_refused_before_anything_is_generated(lines, tmp_path, name, monkeypatch):
    monkeypatch.setattr(videos, "run_jobs", lambda *_, **__: pytest.fail("something was generated"))
    out = tmp_path / "videos"
    out.mkdir()
    (out / name).write_bytes(b"mine")
    with pytest.raises(ValueError, match="move it away"):
        make(order(lines), out)
    assert bytes_in(out) == {name: b"mine"}


def test_a_file_that_comes_meanwhile_is_not_overwritten(lines, tmp_path):
    out = tmp_path / "videos"

    def put(progress):
        out.mkdir(exist_ok=True)
        (out / f"{TEXTS[0]}-0.mp4").write_bytes(b"mine")

    with pytest.raises(ValueError, match="was not made by this command"):
        make(order(lines, num=1, seeds=1), out, report=put)
    assert bytes_in(out) == {f"{TEXTS[0]}-0.mp4": b"mine"}
    (out / f"{TEXTS[0]}-0.mp4").unlink()
    make(order(lines, num=1, seeds=1), out)
    assert open_clip(out / f"{TEXTS[0]}-0.mp4").num_pictures > 16


def test_what_cannot_be_generated_is_refused_before_a_folder_is_made(lines, tmp_path, monkeypatch):
    monkeypatch.setenv("RECAP_HOME", str(tmp_path / "no-weights"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "no-hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "no-hub"))
    for asked, message in (
        ({"backbone": "embedded"}, r"2 of 2 prompts are not in its words.*'A red boat.*take self-forcing"),
        ({"backbone": "self-forcing"}, "`recap weights self-forcing` fetches"),
        ({"flow": "raft-small"}, "raft-small"),
        ({"admission": "diversity"}, "admission is 'diversity': cannot be had here"),
        ({"num": 129}, "--num is 129: moviegen128 has 128"),
        ({"seeds": 6}, "--seeds is 6: moviegen128 has 5"),
    ):
        with pytest.raises(ValueError, match=message):
            make(order(lines, **asked), tmp_path / "videos")
    with pytest.raises(ValueError, match="--workers is 0"):
        generate_suite(order(lines), tmp_path, tmp_path / "videos", workers=0)
    assert not list(tmp_path.glob("videos*"))
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="it is a file"):
        make(order(lines), tmp_path / "file")
    assert not (tmp_path / "file-work").exists()


def test_a_work_folder_of_somebody_else_is_refused(lines, tmp_path):
    (tmp_path / "videos-work").mkdir()
    (tmp_path / "videos-work" / "mine.txt").touch()
    with pytest.raises(ValueError, match="holds something else"):
        make(order(lines), tmp_path / "videos")


def test_the_command_says_what_is_next(made, lines):
    words = [
        "vbench",
        "draw",
        "--suite",
        "moviegen128",
        "--prompts",
        lines,
        "--out",
        made,
        "--num",
        2,
        "--seeds",
        2,
    ]
    words += ["--seconds", 2, "--backbone", "untrained", "--flow", "classical", "--workers", 1]
    done = CliRunner().invoke(app, [str(word) for word in words])
    assert done.exit_code == 0, done.output
    assert done.stdout.splitlines() == [str(made)]
    wanted = f"recap vbench run {made} --suite moviegen128 --prompts {lines} --partial"
    assert wanted in done.stderr.replace("\n", "") and "4 of 4 done" in done.stderr
    refused = CliRunner().invoke(app, [*map(str, words), "--set", "seeds=[1]"])
    assert refused.exit_code != 0 and "the suite determines it" in str(refused.exception)


def test_it_resumes_with_the_flow_it_began_with(tmp_path, monkeypatch, random_raft):
    (tmp_path / "lines.txt").write_text("\n".join(f"prompt {number}" for number in range(128)))
    template = {"shots": [{"prompt": "", "seconds": 1}], "backbone": "untrained", "flow": "auto"}
    order = Order("moviegen128", RunConfig.from_dict(template), tmp_path / "lines.txt", num=1, seeds=1)
    lines = []
    for _ in range(2):
        generate_suite(order, tmp_path, tmp_path / "videos", workers=1, notice=lines.append)
        record = json.loads((tmp_path / "videos-work" / "record.json").read_text())
        assert record["flow"] == "classical"
        monkeypatch.setenv("RECAP_HOME", str(random_raft))
    assert len(lines) == 1 and "flow: classical" in lines[0]


def test_killed_in_the_midst_it_ends_as_undisturbed(lines, tmp_path, made):
    out = tmp_path / "videos"
    words = [
        "--suite",
        "moviegen128",
        "--prompts",
        lines,
        "--out",
        out,
        "--num",
        2,
        "--seeds",
        2,
        "--seconds",
        2,
    ]
    words += ["--backbone", "untrained", "--flow", "classical", "--workers", 1]
    command = [sys.executable, "-m", "recap", "vbench", "draw", *map(str, words)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    limit = time.monotonic() + 60
    while len(list(work_folder(out).glob("jobs/*/run.json"))) < 2:  # one is done, another begun
        assert process.poll() is None and time.monotonic() < limit
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not out.exists() or names_in(out) < NAMES
    make(order(lines), out)
    assert names_in(out) == NAMES
    for trace in work_folder(made).glob("jobs/*/trace.jsonl"):
        again = work_folder(out) / "jobs" / trace.parent.name / "trace.jsonl"
        assert again.read_bytes() == trace.read_bytes()
    for name in NAMES:  # not their bytes: x264 was seen to encode equal pictures to unequal ones now and then
        one, two = (np.stack(list(open_clip(place / name).pictures())) for place in (out, made))
        assert one.shape == two.shape and np.abs(one.astype(int) - two).mean() < 1
