"""What the README and the how-to pages show works as printed."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import typer

import recap
from recap.cli.main import app

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
SNIPPETS = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
(EXAMPLE,) = [snippet for snippet in SNIPPETS if "class " in snippet]


def printed_commands() -> list[str]:
    """Every `recap` command in a shell block of the README and of the pages for users."""
    pages = [
        README,
        *(path.read_text() for path in sorted((ROOT / "docs").rglob("*.md")) if path.name != "log.md"),
    ]
    blocks = [block for page in pages for block in re.findall(r"```sh\n(.*?)```", page, flags=re.DOTALL)]
    lines = [line.split(" #")[0].strip() for block in blocks for line in block.splitlines()]
    found = [line.removeprefix(".venv/bin/") for line in lines]
    return sorted({line.removesuffix(" ...") for line in found if re.match(r"recap [a-z]", line)})


COMMANDS = printed_commands()


def parse(command: str) -> None:
    """Parse a command as the command line does, without running it."""
    name, *words = shlex.split(command)
    command_or_group, context = typer.main.get_command(app), None
    while hasattr(command_or_group, "resolve_command"):
        context = command_or_group.make_context(name, list(words), parent=context)
        name, command_or_group, words = command_or_group.resolve_command(context, words)
    command_or_group.make_context(name, list(words), parent=context)


@pytest.mark.usefixtures("plug_in")
@pytest.mark.parametrize("command", COMMANDS)
def test_every_printed_command_is_understood(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for word in shlex.split(command):
        # Some arguments must be files that exist.
        if re.fullmatch(r"[\w/.-]+\.(mp4|json|png|pt)", word):
            (tmp_path / word).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / word).touch()
    parse(command)


def test_a_command_that_does_not_exist_is_not_understood():
    for command in ("recap conjure", "recap generate --no-such-option 3"):
        with pytest.raises(Exception, match=r"[Nn]o such"):
            parse(command)


# Printed commands that cost little, or do with these further options.
CHEAP = {
    'recap generate "a fox on a beach by day"': ["--seconds", "1", "--flow", "classical"],
    "recap list": [],
    "recap weights longlive --dry-run": [],
}


@pytest.mark.parametrize(
    "command", [pytest.param(each, marks=[pytest.mark.slow] if "generate" in each else []) for each in CHEAP]
)
def test_the_cheap_ones_run(command, tmp_path):
    assert command in COMMANDS or f"`{command}`" in README
    done = subprocess.run(
        [sys.executable, "-m", *shlex.split(command), *CHEAP[command]],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    if "generate" in command:
        assert len(list(tmp_path.glob("runs/*/video.mp4"))) == 1


def test_the_script_of_the_picture_is_one_that_runs_take():
    shots = json.loads((ROOT / "docs" / "scripts" / "return.json").read_text())
    config = recap.RunConfig.from_dict({"shots": shots})
    assert [shot.prompt.startswith("a fox") for shot in config.shots] == [False, True, False, True]


def test_the_front_door_is_short():
    assert len(README.splitlines()) < 130


def test_the_lines_of_python_make_a_video(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("webbrowser.open", lambda url: True)
    lines = SNIPPETS[0].replace("seconds=10", 'seconds=1, flow="classical"')
    exec(compile(lines, "README", "exec"), {})
    assert "video.mp4 (9, 128, 208, 3) 1" in capsys.readouterr().out


@pytest.mark.slow
def test_the_loop_of_the_researchers_page_generates_blocks(capsys):
    page = (ROOT / "docs" / "how-to" / "researcher.md").read_text()
    loop = next(
        snippet
        for snippet in re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
        if "rollout" in snippet
    )
    exec(
        compile(loop.replace('"memory": "recap"', '"memory": "recap", "flow": "classical"'), "page", "exec"),
        {},
    )
    assert "torch.Size([1, 9, 3, 128, 208])" in capsys.readouterr().out


def test_the_lines_of_the_directors_page_run(capsys):
    page = (ROOT / "docs" / "how-to" / "direct.md").read_text()
    lines = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)[0]
    exec(compile(lines, "page", "exec"), {})
    out = capsys.readouterr().out.splitlines()
    assert [line.split(" (")[0] for line in out[:4]] == [
        "0 a fox on a beach by day",
        "1 a fox on a beach by day",
        "2 a fox and a bus on a beach by day",
        "3 a fox and a bus on a beach by day",
    ]
    assert out[-1].startswith("3 2 {0: Cue(prompt='a fox on a beach by day'")


@pytest.fixture
def _example(monkeypatch, tmp_path):
    """The memory of the README as a file of the current folder."""
    (tmp_path / "my_memory.py").write_text(EXAMPLE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    yield
    sys.modules.pop("my_memory", None)


@pytest.mark.usefixtures("_example")
def test_the_memory_of_the_readme_is_the_plain_window(backbone):
    """With a window of two blocks, the last block is all that `none` remembers too; of a wider one it drops more."""
    assert len(EXAMPLE.splitlines()) < 20
    shots = [{"prompt": "a red boat", "seconds": 3}, {"prompt": "a house", "seconds": 2}]
    made = {}
    for name in ("none", "my_memory:LastBlockConfig"):
        config = recap.RunConfig.from_dict({"shots": shots, "memory": name})
        memory = recap.build_memory(config, backbone.spec)
        plan = recap.make_plan([config.shots], backbone.spec)
        made[name] = torch.cat([b.latents for b in recap.rollout(backbone, memory, plan, seeds=[0])])
    assert torch.equal(*made.values())
    wide = dataclasses.replace(backbone.spec, window_frames=21)
    for block in recap.rollout(backbone, recap.build_memory(config, wide), plan, seeds=[0]):
        last = block.memory.tokens
    assert last == {"prior": wide.block_tokens, "current": wide.block_tokens}
