"""Bad input: one clear line, exit code 2, and nothing half-written in place of something old."""

from __future__ import annotations

import json
import resource
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.scenes import make_scene, render
from recap.cli import main as cli
from recap.io.video import ClipWriter

BOAT = "a boat on the sea"
UNTRAINED = ("--backbone", "untrained")  # generates in milliseconds


@pytest.fixture(scope="module")
def clip(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("clip") / "clip.mp4"
    scene = make_scene("entering", size=(64, 96), num_pictures=33)
    with ClipWriter(path, scene.size, scene.fps) as writer:
        writer.write(render(scene).pictures)
    return path


@pytest.fixture
def recap(monkeypatch, capsys, tmp_path):
    """Run a command in this process and in an empty folder; returns exit code and what it printed."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["recap", *map(str, arguments)])
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        return stopped.value.code or 0, capsys.readouterr().err

    return run


def refused(outcome, *words):
    code, printed = outcome
    assert code == 2, printed
    # Before the one line there may be the progress of work that went wrong half-way, and the notice about flow.
    usual = ("flow: ", "generating: ", "showing: ", "noticing: ")
    lines = [line for line in printed.splitlines() if not line.startswith(usual)]
    assert len(lines) == 1 and lines[0].startswith("error: "), printed
    for word in words:
        assert str(word) in lines[0], lines[0]


def files_below(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


# --- inspect -------------------------------------------------------------------------------------------------


def made_clip(path, kind, clip):
    if kind == "empty":
        path.write_bytes(b"")
    elif kind == "truncated":
        path.write_bytes(clip.read_bytes()[: clip.stat().st_size * 2 // 3])
    elif kind == "headless":
        path.write_bytes(clip.read_bytes()[200:])
    elif kind == "text":
        path.write_text("these are words, not pictures\n" * 100)
    elif kind == "noise":
        path.write_bytes(np.random.default_rng(0).bytes(100_000))
    elif kind == "folder":
        path.mkdir()
    elif kind == "one-picture":
        with ClipWriter(path, (64, 96), 16) as writer:
            writer.write(torch.rand(1, 3, 64, 96))
    elif kind == "small":
        with ClipWriter(path, (16, 16), 16) as writer:
            writer.write(torch.rand(9, 3, 16, 16))
    return path


@pytest.mark.parametrize(
    ("kind", "word"),
    [
        ("missing", "no such file"),
        ("empty", "empty"),
        ("truncated", "cut off"),
        ("headless", "clip"),
        ("text", "clip"),
        ("noise", "clip"),
        ("folder", "folder"),
        ("one-picture", "picture"),
        ("small", "16x16"),
    ],
)
def test_inspect_refuses_what_is_no_clip_and_keeps_the_old_result(recap, tmp_path, clip, kind, word):
    code, printed = recap("inspect", clip, "--out", "result", "--flow", "classical")
    assert code == 0, printed
    before = files_below(tmp_path / "result")
    bad = made_clip(tmp_path / "bad.mp4", kind, clip)
    refused(recap("inspect", bad, "--out", "result", "--flow", "classical"), word)
    assert files_below(tmp_path / "result") == before
    left = {p.name for p in tmp_path.iterdir()}
    assert left <= {"result", "bad.mp4"}


def test_inspect_refuses_odd_sizes_and_says_how_to_rescale(recap, tmp_path):
    """Lossless, since 4:2:0 video has no odd sizes."""
    import av

    path = tmp_path / "odd.mkv"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("ffv1", rate=16)
        stream.width, stream.height, stream.pix_fmt = 97, 65, "bgr0"
        for value in range(9):
            picture = np.full((65, 97, 3), 20 * value, dtype=np.uint8)
            for packet in stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")):
                container.mux(packet)
        for packet in stream.encode(None):
            container.mux(packet)
    refused(recap("inspect", path, "--flow", "classical"), "97x65", "--size")
    code, printed = recap("inspect", path, "--flow", "classical", "--size", "96x64")
    assert code == 0, printed


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--flow", "clasical"), ("clasical", "classical")),
        (("--flow", "world-flow"), ("world-flow", "`embedded` alone, 208x128", "raft-small or classical")),
        (("--size", "big"), ("--size", "big")),
        (("--size", "97x65"), ("97x65",)),
        (("--capacity-frames", "-1"), ("capacity", "-1")),
        (("--set", "cycle_treshold_px=1"), ("cycle_treshold_px", "cycle_threshold_px")),
        (("--set", "cycle_threshold_px=-1"), ("cycle_threshold_px", "-1")),
        (("--set", "cycle_threshold_px=much"), ("cycle_threshold_px", "much")),
        (("--set", "percentile"), ("--set", "percentile")),
    ],
)
def test_inspect_refuses_bad_options(recap, tmp_path, clip, arguments, words):
    refused(recap("inspect", clip, *arguments), *words)
    assert not (tmp_path / "inspections").exists()


def test_inspect_refuses_a_dot_in_set_and_takes_odd_names(recap, tmp_path, clip):
    refused(recap("inspect", clip, "--set", "a.b=1"), "--set", "a.b=1")
    name = tmp_path / "take:1 \u00fc\udcff.mp4"
    name.write_bytes(clip.read_bytes())
    code, printed = recap("inspect", name.name, "--out", "result", "--flow", "classical")
    assert code == 0, printed


def test_inspect_does_not_swallow_its_own_input(recap, tmp_path, clip):
    assert recap("inspect", clip, "--out", "result", "--flow", "classical")[0] == 0
    inner = tmp_path / "result" / "mine.mp4"
    inner.write_bytes(clip.read_bytes())
    refused(recap("inspect", inner, "--out", "result", "--flow", "classical"), "mine.mp4", "another --out")
    assert inner.read_bytes() == clip.read_bytes()


def test_inspect_does_not_replace_a_folder_of_something_else(recap, tmp_path, clip):
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.txt").write_text("years of work")
    refused(recap("inspect", clip, "--out", "thesis", "--flow", "classical"), "thesis", "another --out")
    assert files_below(tmp_path / "thesis") == {"chapter.txt": b"years of work"}


# --- generate ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), ("prompt",)),
        ((BOAT, "--seconds", "0"), ("seconds", "0")),
        ((BOAT, "--seconds", "-3"), ("seconds", "-3")),
        ((BOAT, "--seconds", "nan"), ("seconds", "nan")),
        ((BOAT, "--rows", "0"), ("rows", "0")),
        ((BOAT, "--backbone", "untraind"), ("untraind", "untrained")),
        ((BOAT, "--backbone", "no.such.module:Name"), ("no.such.module:Name", "package.module:Name")),
        ((BOAT, "--memory", "recpa"), ("recpa", "recap")),
        ((BOAT, "--flow", "raft"), ("raft", "raft-small")),
        ((BOAT, "--device", "tpu"), ("device", "tpu")),
        ((BOAT, "--set", "memory.capacity_frames=-1"), ("capacity_frames", "-1")),
        ((BOAT, "--set", "memory.reinforcement=0"), ("reinforcement", "0")),
        ((BOAT, "--set", "memory.reinforcement=-2"), ("reinforcement", "-2")),
        ((BOAT, "--set", "memory.reinforcment=5"), ("reinforcment", "reinforcement")),
        ((BOAT, "--set", "memory.sink_frames=9"), ("sink_frames", "9")),
        ((BOAT, "--set", "memory.sink_frames=1.5"), ("sink_frames", "1.5", "int")),
        ((BOAT, "--set", "memory.sink_frames=true"), ("sink_frames", "True")),
        ((BOAT, "--set", "admission.percentile=200"), ("percentile", "200")),
        ((BOAT, "--set", "checkpoint_every=0"), ("checkpoint_every", "0")),
        ((BOAT, "--set", "dtype=float31"), ("float31", "float32")),
        ((BOAT, "--set", "memroy.reinforcement=5"), ("memroy", "memory")),
        ((BOAT, "--set", "seeds=3"), ("seeds", "3")),
        (("--script", "missing.json"), ("missing.json",)),
        (("--resume", "missing"), ("missing", "run.json")),
        (("a foks on a beach",), ("foks", "fox")),
        (("a xylophone and a trumpet on a beach",), ("'xylophone', 'trumpet'", "`recap list`")),
        (("a beach without a fox and a bus",), ("'without'", "name only who is there")),
        (("",), ("names no scene",)),
        (("\x1b[31m\u72d0\u72f8\x07",), ("\u72d0\u72f8", "`recap list`")),
        (("<script>alert(1)</script>",), ("'script', 'alert'",)),
        (("nice " * 20_000,), ("100000 characters",)),
        ((BOAT, "--seconds", "1e18"), ("seconds", "1e+18")),
        ((BOAT, "--rows", "3000000"), ("rows", "3000000")),
        ((BOAT, "--device", "meta"), ("device", "meta")),
        ((BOAT, "--set", "memory.capacity_frames=1e12"), ("capacity_frames", "1000")),
        ((BOAT, "--set", f"memory.reinforcement=1{'0' * 400}"), ("reinforcement", "too large")),
        ((BOAT, "--memory", "json:JSONDecoder"), ("json:JSONDecoder", "build")),
        ((BOAT, "--memory", ".x:y"), (".x:y", "package.module:Name")),
        ((BOAT, "--backbone", "json:loads"), ("json:loads", "not a dataclass")),
        ((BOAT, "--script", "s.json"), ("one of the two",)),
        ((BOAT, "--from", "run.json"), ("prompt", "leave out")),
        (("--from", "run.json", "--seed", "5"), ("--seed", "leave out")),
        (("--resume", "run", "--seconds", "77"), ("--seconds", "leave out")),
        (("--resume", "run", "--memory", "none"), ("--memory", "leave out")),
        (("--from", "missing.json"), ("missing.json",)),
    ],
)
def test_generate_refuses_and_makes_nothing(recap, tmp_path, arguments, words):
    refused(recap("generate", *arguments), *words)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("not json", "JSON"),
        ("{}", "no schedule"),
        ('{"subjects": {}, "shots": []}', "name"),
        ("[]", "at least 1"),
        ("[1]", "table"),
        ("[" * 100_000, "JSON"),
        (f'[{{"prompt": "a", "seconds": 1{"0" * 400}}}]', "too large"),
        ('[{"prompt": "a"}]', "seconds"),
        ('[{"prompt": "a", "seconds": "long"}]', "float"),
        ('[{"prompt": 5, "seconds": 1}]', "str"),
        ('[{"prompt": "a", "seconds": 1, "cutt": true}]', "cut"),
    ],
)
def test_generate_refuses_bad_scripts(recap, tmp_path, text, word):
    (tmp_path / "script.json").write_text(text)
    refused(recap("generate", "--script", "script.json"), word)
    assert [p.name for p in tmp_path.iterdir()] == ["script.json"]


def test_generate_uses_the_embedded_backbone_by_default(recap, tmp_path):
    code, printed = recap("generate", BOAT, "--seconds", "0.5", "--memory", "none", "--out", "run")
    assert code == 0, printed
    assert json.loads((tmp_path / "run" / "run.json").read_text())["config"]["backbone"] == {
        "name": "embedded"
    }
    assert (tmp_path / "run" / "video.mp4").is_file()


def test_generate_reports_what_it_shows_instead(recap, tmp_path):
    text = "a cute red lion runs happily"
    code, printed = recap("generate", text, "--seconds", "0.5", "--memory", "none", "--out", "run")
    assert code == 0, printed
    notices = [line for line in printed.splitlines() if line.startswith("prompt: ")]
    assert len(notices) == 4
    for line, words in zip(
        notices, ("'cute', 'runs', 'happily'", "colours", "a cat is shown", "on a beach"), strict=True
    ):
        assert words in line
    assert json.loads((tmp_path / "run" / "run.json").read_text())["config"]["shots"][0]["prompt"] == text


def test_generate_does_not_touch_a_folder_that_holds_something(recap, tmp_path):
    code, printed = recap(
        "generate", BOAT, "--seconds", "1", "--out", "run", *UNTRAINED, "--flow", "classical"
    )
    assert code == 0, printed
    before = files_below(tmp_path / "run")
    refused(recap("generate", BOAT, "--seconds", "1", "--out", "run"), "run", "--resume")
    assert files_below(tmp_path / "run") == before


def test_a_run_repeats_exactly_from_its_own_record(recap, tmp_path):
    first = (
        "generate",
        BOAT,
        "--seconds",
        "2",
        "--seed",
        "7",
        "--memory",
        "sink",
        *UNTRAINED,
        "--out",
        "one",
    )
    assert recap(*first, "--set", "memory.reinforcement=3")[0] == 0
    assert recap("generate", "--from", "one/run.json", "--out", "two")[0] == 0
    for name in ("latents.safetensors", "trace.jsonl", "run.json"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


def test_a_run_repeats_with_another_device_or_setting(recap, tmp_path):
    assert recap("generate", BOAT, "--seconds", "1", "--memory", "sink", *UNTRAINED, "--out", "one")[0] == 0
    record = json.loads((tmp_path / "one" / "run.json").read_text())
    record["config"]["device"] = "cuda"  # as if generated elsewhere
    (tmp_path / "cuda.json").write_text(json.dumps(record))
    for number, override in enumerate((("--device", "cpu"), ("--set", "device=cpu"))):
        code, printed = recap("generate", "--from", "cuda.json", *override, "--out", f"again-{number}")
        assert code == 0, printed
        results = [tmp_path / run / "latents.safetensors" for run in ("one", f"again-{number}")]
        assert results[0].read_bytes() == results[1].read_bytes()


def test_a_damaged_state_is_refused_and_left_alone(recap, tmp_path):
    assert (
        recap("generate", BOAT, "--seconds", "2", "--out", "run", *UNTRAINED, "--flow", "classical")[0] == 0
    )
    (tmp_path / "run" / "summary.json").unlink()
    state = tmp_path / "run" / "state.safetensors"
    state.write_bytes(state.read_bytes()[:100])
    before = files_below(tmp_path / "run")
    refused(recap("generate", "--resume", "run"), "state", "--from-block 0")
    assert files_below(tmp_path / "run") == before


def test_an_output_that_cannot_be_written_is_one_line(recap, tmp_path, clip):
    (tmp_path / "file").write_text("in the way")
    refused(recap("generate", BOAT, "--out", "file/run", "--flow", "classical"), "file")
    refused(recap("inspect", clip, "--out", "file/result", "--flow", "classical"), "file")
    assert (tmp_path / "file").read_text() == "in the way"


@pytest.mark.parametrize("command", ["generate", "inspect"])
def test_a_full_disk_is_one_line_and_leaves_no_result(tmp_path, clip, command):
    """A limit on file sizes fails writes half-way, as a full disk does."""

    def limited():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))

    what = [BOAT, "--seconds", "2", *UNTRAINED] if command == "generate" else [str(clip)]
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "recap",
            command,
            *what,
            "--flow",
            "classical",
            "--out",
            str(tmp_path / "out"),
        ],
        capture_output=True,
        text=True,
        preexec_fn=limited,
    )
    refused((done.returncode, done.stderr), "--out")
    assert not list(tmp_path.rglob("*.mp4")) and not list(tmp_path.rglob("index.html"))


# --- compare -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), ("prompt", "--script")),
        ((BOAT, "--memories", "none,recpa"), ("recpa", "did you mean 'recap'")),
        ((BOAT, "--memories", "none,sink,none"), ("none", "twice")),
        ((BOAT, "--memories", ""), ("--memories", "none,sink,recap")),
        ((BOAT, "--memories", "none,,sink"), ("--memories", "missing")),
        ((BOAT, "--memories", "json:JSONDecoder"), ("json:JSONDecoder", "build")),
        ((BOAT, "--backbone", "untraind"), ("untraind", "untrained")),
        ((BOAT, "--flow", "raft"), ("raft", "raft-small")),
        ((BOAT, "--seconds", "0"), ("seconds", "0")),
        ((BOAT, "--device", "tpu"), ("device", "tpu")),
        ((BOAT, "--set", "memory.reinforcment=5"), ("reinforcment", "reinforcement")),
        ((BOAT, "--memories", "none", "--set", "memory.reinforcement=5"), ("reinforcement",)),
        ((BOAT, "--set", "memory.capacity_frames=-1"), ("capacity_frames", "-1")),
        ((BOAT, "--set", "memory.sink_frames=9"), ("sink_frames", "9")),
        ((BOAT, "--set", "memory=sink"), ("memory=sink", "--memories")),
        ((BOAT, "--rows", "0"), ("rows", "0")),
        ((BOAT, "--from", "run.json"), ("prompt", "leave out")),
        ((BOAT, "--set", "checkpoint_every=0"), ("checkpoint_every", "0")),
        (("--script", "missing.json"), ("missing.json",)),
        (("a dragon on the moon",), ("dragon",)),
    ],
)
def test_compare_refuses_and_makes_nothing(recap, tmp_path, arguments, words):
    refused(recap("compare", *arguments), *words)
    assert list(tmp_path.iterdir()) == []


def test_compare_does_not_write_into_a_folder_of_something_else(recap, tmp_path):
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "index.html").write_text("years of work")
    refused(recap("compare", BOAT, *UNTRAINED, "--out", "thesis"), "thesis", "another folder")
    assert files_below(tmp_path / "thesis") == {"index.html": b"years of work"}


def test_compare_gives_a_setting_to_the_memories_that_have_it(recap, tmp_path):
    arguments = ("--seconds", "1", "--memories", "none,sink", "--set", "memory.reinforcement=3", "--out", "c")
    code, printed = recap("compare", BOAT, *UNTRAINED, *arguments)
    assert code == 0, printed
    recorded = {
        n: json.loads((tmp_path / "c" / n / "run.json").read_text())["config"] for n in ("none", "sink")
    }
    assert recorded["none"]["memory"] == {"name": "none"} and recorded["sink"]["memory"]["reinforcement"] == 3


def test_weights_by_another_name_are_refused(recap):
    refused(recap("weights", "raft-smal"), "raft-smal", "raft-small")


def test_list_names_everything(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["recap", "list"])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert not stopped.value.code
    printed = capsys.readouterr().out
    for name in ("embedded", "untrained", "none", "sink", "recap", "flow", "classical", "raft-small"):
        assert name in printed
    defaults = [line.split()[3] for line in printed.splitlines() if "(default)" in line]
    assert defaults == ["embedded", "recap", "flow", "auto"]


def test_list_memories_tells_what_each_keeps_and_costs(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(sys, "argv", ["recap", "list", "memories"])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert not stopped.value.code
    printed = capsys.readouterr().out
    for name, tokens in (
        ("recap", "7 frames, 10,920 tokens"),
        ("deep-forcing", "16 / 19 frames, 24,960 / 29,640 tokens"),
        ("memrope", "12 frames, 18,720 tokens"),
        ("rolling-sink", "21 frames, 32,760 tokens"),
        ("relax-forcing", "7 frames, 10,920 tokens"),
    ):
        card = printed.split(f"\n{name}\n")[1].split("\n\n")[0]
        lines = {line[:16].strip(): line[16:].strip() for line in card.splitlines()[:7]}
        assert lines["attends to"].startswith(tokens)
        assert lines["training-free"] == "yes" and "arXiv" in lines["paper"]
        assert all(lines[label] for label in ("keeps", "extra memory", "its code"))


def test_the_list_has_the_words_of_the_embedded_backbone(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["recap", "list"])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert not stopped.value.code
    printed = capsys.readouterr().out
    assert "actors: fox, cat" in printed and "scenes: beach" in printed and "take any prompt" in printed


def test_a_list_of_something_else_is_refused(recap):
    refused(recap("list", "memoris"), "memoris", "did you mean 'memories'")


def test_a_clip_that_is_not_there_is_refused_before_flow_is_looked_for(recap):
    code, printed = recap("inspect", "nope.mp4")
    assert code == 2 and printed.startswith("error: ") and "flow: " not in printed, printed
