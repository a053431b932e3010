"""`recap vbench` as a user meets it: its options, its help, and a whole way from prompts to scores."""

from __future__ import annotations

import ast
import json
import re
import shlex
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

import recap
from recap.cli import main
from recap_vbench.command import EXAMPLES, app
from tests.conftest import PLUG_IN

OPTIONS = {
    "setup": {"--folder", "--dry-run"},
    "prompts": {"--suite", "--out", "--prompts", "--folder"},
    "draw": {
        "--suite", "--out", "--prompts", "--backbone", "--memory", "--set", "--flow", "--seconds", "--seeds", "--num",
        "--workers", "--device", "--dtype", "--folder",
    },
    "run": {
        "--suite", "--dimension", "--prompts", "--static-filter", "--partial", "--device", "--out", "--folder",
    },
    "table": {"--ours", "--paper", "--out"},
    "reproduce": {
        "--suite", "--prompts", "--backbone", "--flow", "--seconds", "--seeds", "--num", "--workers", "--device",
        "--dtype", "--out", "--folder",
    },
}  # fmt: skip
COMMANDS = typer.main.get_command(app).commands


def test_commands_and_options_do_not_swell_by_accident():
    options = {name: {word for p in each.params for word in p.opts} for name, each in COMMANDS.items()}
    assert {
        name: {word for word in words if word.startswith("--")} for name, words in options.items()
    } == OPTIONS


@pytest.mark.parametrize("name", OPTIONS)
def test_every_command_has_an_example_that_parses(name):
    assert EXAMPLES[name] in COMMANDS[name].epilog
    command, group, part, *rest = shlex.split(EXAMPLES[name])
    assert (command, group, part) == ("recap", "vbench", name)
    COMMANDS[name].make_context(name, rest)


def test_recap_finds_the_plug_in(monkeypatch, capsys):
    for words, wanted in ((["--help"], "Score videos with VBench-Long."), (["vbench", "see"], "see")):
        monkeypatch.setattr(sys, "argv", ["recap", *words])
        with pytest.raises(SystemExit) as stopped:
            main.main()
        printed = capsys.readouterr()
        assert wanted in printed.out + printed.err
    assert stopped.value.code == 2 and re.fullmatch("error: .*--help`\n", printed.err)


def test_the_package_does_not_need_the_plug_in():
    for path in Path(recap.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                assert not (node.module or "").startswith("recap_vbench"), path
            elif isinstance(node, ast.Import):
                assert not any(alias.name.startswith("recap_vbench") for alias in node.names), path


def invoke(*words):
    done = CliRunner().invoke(main.app, [str(word) for word in words])
    assert done.exit_code == 0, (done.output, done.exception)
    return done


def test_generated_videos_can_be_scored(environment, tmp_path, monkeypatch):
    """`draw`, then the `run` that its last line names, in an environment that has a stand-in for VBench."""
    monkeypatch.setenv("STANDIN_CALLS", str(tmp_path / "calls"))
    monkeypatch.delenv("VBENCH_CACHE_DIR", raising=False)
    out = tmp_path / "videos"
    small = ("--num", 2, "--seeds", 1, "--seconds", 2, "--backbone", "untrained", "--flow", "classical")
    made = invoke("vbench", "draw", "--suite", "vbench128", "--out", out, "--folder", environment, *small)
    assert len(list(out.iterdir())) == 2
    _, _, following = made.stderr.replace("\n", "").rpartition("next: recap ")
    invoke(*shlex.split(following), "--dimension", "dynamic_degree")
    scores = json.loads((tmp_path / "videos-vbench" / "scores.json").read_text())
    assert scores["dimensions"]["dynamic_degree"]["num_videos"] == 2


def test_prompts_of_a_suite_are_written_a_line_each(environment, tmp_path):
    out = tmp_path / "vbench128.txt"
    invoke("vbench", "prompts", "--suite", "vbench128", "--out", out, "--folder", environment)
    lines = out.read_text().splitlines()
    assert len(set(lines)) == 128 and all(lines)


def test_the_wheel_has_the_data_and_the_entry_point(tmp_path):
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(command, cwd=PLUG_IN, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("recap_vbench-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (points,) = [archive.read(name).decode() for name in names if name.endswith("entry_points.txt")]
    for path in (PLUG_IN / "src").rglob("*.*"):
        assert path.suffix == ".pyc" or str(path.relative_to(PLUG_IN / "src")) in names
    assert "[recap.commands]\nvbench = recap_vbench.command:app" in points
