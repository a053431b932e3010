"""What somebody sees who types the commands for the first time."""

from __future__ import annotations

import io
import json
import re
import shlex
import subprocess
import sys

import pytest
import torch
import typer
from rich.console import Console

from recap.cli import console, main
from recap.cli.examples import EXAMPLES
from recap.cli.settings import full_config
from recap.config import check_device
from recap.flow import resolve_flow
from recap.io.report import SILENT, Reporter
from recap.io.video import ClipWriter

COMMAND = typer.main.get_command(main.app)
SMALL = ("--backbone", "untrained", "--flow", "classical")


def all_commands(command, name=""):
    for word, each in getattr(command, "commands", {}).items():
        path = f"{name} {word}".strip()
        yield from all_commands(each, path) if hasattr(each, "commands") else [(path, each)]


COMMANDS = dict(all_commands(COMMAND))


@pytest.fixture
def recap(monkeypatch, capsys, tmp_path):
    """Run a command in this process and in an empty folder; returns exit code, output and errors."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["recap", *map(str, arguments)])
        with pytest.raises(SystemExit) as stopped:
            main.main()
        printed = capsys.readouterr()
        return stopped.value.code or 0, printed.out, printed.err

    return run


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_examples_that_parse(name):
    lines = re.findall(r"^  (recap .*)$", EXAMPLES[name], flags=re.MULTILINE)
    assert lines and COMMANDS[name].epilog == EXAMPLES[name]
    for line in lines:
        words = shlex.split(line)[1:]
        path, rest = name.split(), words[len(name.split()) :]
        assert words[: len(path)] == path
        COMMANDS[name].make_context(name, rest)


def test_the_help_names_every_command_in_full_and_completion(recap):
    code, shown, _ = recap("--help")
    assert code == 0 and "..." not in shown.split("Commands:")[1] and "--install-completion" in shown
    assert "Examples:" in shown


def test_an_unknown_command_is_answered_with_a_guess(recap):
    code, _, error = recap("gen")
    assert code == 2 and error.startswith("error: command is 'gen'") and "did you mean 'generate'" in error
    assert "cast," in error and "study," in error


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("generate", "--secs", "4"), "--secs"),
        (("inspect",), "clip"),
        (("show", "a", "b"), "b"),
        (("generate", "x", "--seconds", "many"), "--seconds"),
    ],
)
def test_wrong_words_are_refused_in_one_line_like_wrong_values(recap, words, named):
    code, _, error = recap(*words)
    assert code == 2 and len(error.splitlines()) == 1, error
    assert error.startswith("error: ") and named in error and "--help" in error


def test_weights_without_a_name_lists_the_names(recap):
    code, _, error = recap("weights")
    assert code == 2 and "raft-small" in error and "longlive" in error and len(error.splitlines()) == 1


def test_no_words_show_the_help(recap):
    code, out, error = recap()
    assert code == 2 and "Commands:" in out + error


def test_the_version_says_what_a_bug_report_needs(recap):
    code, out, _ = recap("--version")
    assert code == 0 and torch.__version__ in out and out.startswith("recap ")


def test_generate_names_folder_page_and_length_and_show_makes_the_page_again(recap, tmp_path):
    code, out, error = recap("generate", "a red boat", "--seconds", "1", "--memory", "none", *SMALL)
    assert code == 0, error
    (folder,) = (tmp_path / "runs").iterdir()
    assert re.fullmatch(r"\d{8}-\d{6}-a-red-boat-none", folder.name)
    assert out.strip() == str((folder / "video.mp4").relative_to(tmp_path))
    assert "length: 0.56 s where 1 s" in error and "index.html" in error
    assert "generating: 0 of 1 blocks\n" in error and "generating: 1 of 1 blocks, " in error
    assert not (folder / ".lock").exists() and not (folder / "work").exists()
    (folder / "index.html").unlink()
    code, out, error = recap("show", folder)
    assert code == 0 and out.strip() == str(folder / "index.html") and (folder / "index.html").is_file()
    code, _, error = recap("show", tmp_path)
    assert code == 2 and "run.json" in error


def test_show_opens_the_page_when_asked(recap, tmp_path, monkeypatch):
    opened = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    recap("generate", "a red boat", "--seconds", "1", "--memory", "none", *SMALL, "--out", "run")
    code, out, _ = recap("show", "run", "--open")
    assert (
        code == 0
        and opened == [(tmp_path / "run" / "index.html").as_uri()]
        and out.strip() == "run/index.html"
    )


def test_compare_takes_what_generate_takes():
    options = {
        name: {word for p in COMMANDS[name].params for word in p.opts} for name in ("generate", "compare")
    }
    assert options["generate"] - options["compare"] == {"--memory", "--resume", "--from-block"}


def test_compare_repeats_a_run_with_other_memories_and_a_batch_has_a_page_per_row(recap, tmp_path):
    words = ("a red boat", "--seconds", "1", "--seed", "7", "--rows", "2", "--memory", "none", *SMALL)
    assert recap("generate", *words, "--out", "run")[0] == 0
    code, out, error = recap("compare", "--from", "run/run.json", "--memories", "none,sink", "--out", "both")
    assert code == 0, error
    assert json.loads((tmp_path / "both/sink/run.json").read_text())["config"]["seeds"] == [7, 8]
    assert out.strip() == "both/index.html" and (tmp_path / "both/row-1.html").is_file()
    same = [(tmp_path / name / "latents.safetensors").read_bytes() for name in ("run", "both/none")]
    assert same[0] == same[1]


def test_compare_hands_its_options_to_every_run(recap, tmp_path):
    options = ("--dtype", "bfloat16", "--eager", "--memories", "none,sink", "--seconds", "1")
    code, out, error = recap("compare", "a red boat", *SMALL, *options)
    assert code == 0, error
    (folder,) = (tmp_path / "runs").iterdir()
    assert re.fullmatch(r"\d{8}-\d{6}-a-red-boat-compare", folder.name) and out.strip().endswith("index.html")
    for name in ("none", "sink"):
        config = json.loads((folder / name / "run.json").read_text())["config"]
        assert config["dtype"] == "bfloat16" and config["eager"] is True and config["device"] == "cpu"
    code, _, error = recap("compare", "a red boat", "--decoder", "tiny")
    assert code == 2 and "--decoder" in error and "--backbone" in error
    code, _, error = recap("compare", "a red boat", "--image", "a.png", "--continue", "b.mp4")
    assert code == 2 and "use one of the two" in error


def test_settings_are_applied_whatever_their_order():
    shots = {"shots": [{"prompt": "a boat", "seconds": 1}], "memory": None}
    config = full_config(shots, ["memory.reinforcement=3", "memory=sink", "device=auto"])
    assert config.memory.name == "sink" and config.memory.settings.reinforcement == 3
    assert full_config(shots, ["memory.reinforcement=3"]).memory.name == "recap"


@pytest.mark.parametrize(
    ("what", "first", "others"),
    [
        ("backbones", "embedded", "deep-forcing"),
        ("flows", "world-flow", "self-forcing"),
        ("admissions", "flow", "memrope"),
    ],
)
def test_one_kind_can_be_listed(recap, monkeypatch, what, first, others):
    monkeypatch.setenv("COLUMNS", "200")
    code, out, _ = recap("list", what)
    assert code == 0 and first in out and others not in out


def test_the_videos_of_two_runs_are_inspected_in_two_folders(recap, tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.json").write_text("{}")
        with ClipWriter(tmp_path / name / "video.mp4", (64, 96), 16) as clip:
            clip.write(torch.rand(5, 3, 64, 96))
        assert recap("inspect", f"{name}/video.mp4", "--flow", "classical")[0] == 0
    assert sorted(path.name for path in (tmp_path / "inspections").iterdir()) == ["one-video", "two-video"]
    assert "<title>one/video.mp4</title>" in (tmp_path / "inspections/one-video/index.html").read_text()


def test_a_log_gets_a_line_every_few_seconds(monkeypatch, capsys):
    clock = [100.0]
    monkeypatch.setattr(console.time, "monotonic", lambda: clock[0])
    with console.progress_bar("generating", "blocks") as reporter:
        for done in range(11):
            reporter.progress(done, 10, 2.0 if done else 0.0)
            clock[0] += 2.0
        reporter.progress(10, 10, 2.0)
    lines = capsys.readouterr().err.splitlines()
    assert [int(line.split()[1]) for line in lines] == [0, 3, 6, 9, 10]
    assert (
        lines[0] == "generating: 0 of 10 blocks"
        and lines[-1] == "generating: 10 of 10 blocks, 2.0 pictures/s"
    )


def test_a_terminal_shows_that_the_model_is_loaded_and_then_a_bar(monkeypatch):
    screen = io.StringIO()
    monkeypatch.setattr(console, "_console", Console(file=screen, force_terminal=True, width=100))
    with (
        console.progress_bar("generating", "blocks", "loading the model") as generating,
        console.progress_bar("showing", "pictures") as showing,
    ):
        for reporter in (generating, showing):
            for done in range(3):
                reporter.progress(done, 2, 4.0)
    shown = screen.getvalue()
    assert shown.index("loading the model") < shown.index("generating") < shown.index("showing")
    assert "2/2" in shown and "4.0 pictures/s" in shown


def test_the_rate_is_the_mean_of_the_run(tmp_path, monkeypatch):
    from recap.config import RunConfig
    from recap.run import generate

    shots = [{"prompt": "a boat", "seconds": 2}]
    config = RunConfig.from_dict({"shots": shots, "backbone": "untrained", "memory": "none"})
    clock = [0.0]

    def tick() -> float:
        clock[0] += 1.0
        return clock[0]

    monkeypatch.setattr("recap.run.time.perf_counter", tick)
    rates, times = [], []

    def progress(done: int, total: int, rate: float) -> None:
        rates.append(rate)
        times.append(clock[0])

    generate(config, tmp_path / "run", reporter=Reporter(SILENT.notice, progress))
    pictures = [0, 9, 21, 33]
    started = times[0] + 1
    assert rates[1:] == [count / (now - started) for count, now in zip(pictures[1:], times[1:], strict=True)]


def test_a_device_that_is_not_there_is_refused_with_the_reason(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(ValueError, match="built for the CPU only"):
        check_device("cuda:99" if torch.cuda.is_available() else "cuda", "float32")
    if not torch.cuda.is_available():
        monkeypatch.setattr(torch.version, "cuda", "12.8")
        with pytest.raises(ValueError, match="no usable NVIDIA GPU or driver"):
            check_device("cuda", "float32")


def test_without_weights_and_opencv_one_sentence_names_both(monkeypatch):
    monkeypatch.setitem(sys.modules, "cv2", None)
    notices = []
    with pytest.raises(ValueError, match=r"recap weights raft-small.*opencv-python-headless"):
        resolve_flow("auto", notices.append)
    assert notices == []


def test_missing_weights_are_reported_before_anything_else(recap):
    code, _, error = recap("generate", "a red boat", "--backbone", "self-forcing")
    loading, refusal = error.splitlines()
    assert code == 2 and loading == "generating: loading the model", error
    assert "recap weights self-forcing" in refusal


def test_a_missing_prompt_reads_as_a_sentence(recap):
    code, _, error = recap("generate")
    assert code == 2 and "prompt is missing" in error and "None" not in error


def test_plain_progress_reaches_a_log_of_the_real_command(tmp_path):
    words = [
        "generate",
        "a red boat",
        "--seconds",
        "1",
        "--memory",
        "none",
        *SMALL,
        "--out",
        str(tmp_path / "run"),
    ]
    done = subprocess.run([sys.executable, "-m", "recap", *words], capture_output=True, text=True, check=True)
    lines = done.stderr.splitlines()
    assert lines[0] == "generating: loading the model"
    assert any("generating: 1 of 1 blocks" in line for line in lines) and "\x1b" not in done.stderr
