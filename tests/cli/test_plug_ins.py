"""Commands that other distributions add: found by their entry point, imported when used, and harmless when broken."""

from __future__ import annotations

import sys
from importlib.metadata import EntryPoints

import pytest

from recap.cli import main, plug_ins

GREETING = """
import typer
app = typer.Typer(rich_markup_mode=None, help="Greet somebody.")
@app.command()
def hello(name: str) -> None:
    print(f"hello {name}")
@app.callback()
def options() -> None: ...
"""


@pytest.fixture
def plug_in(tmp_path, monkeypatch):
    """Return a function that makes a distribution with one command, as pip would leave it on the path."""

    def add(name, target):
        about = tmp_path / f"recap_{name}-1.dist-info"
        about.mkdir()
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: recap-{name}\nVersion: 1\n")
        (about / "entry_points.txt").write_text(f"[{main.PLUG_INS}]\n{name} = {target}\n")

    (tmp_path / "greeting.py").write_text(GREETING)
    monkeypatch.syspath_prepend(tmp_path)
    yield add
    sys.modules.pop("greeting", None)


@pytest.fixture
def recap(monkeypatch, capsys):
    """Run a command in this process; returns exit code, output and errors."""

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["recap", *words])
        with pytest.raises(SystemExit) as stopped:
            main.main()
        printed = capsys.readouterr()
        return stopped.value.code or 0, printed.out, printed.err

    return run


def test_a_plug_in_adds_a_command_and_is_imported_when_it_is_used(plug_in, recap):
    plug_in("greet", "greeting:app")
    assert recap("list", "flows")[0] == 0 and "greeting" not in sys.modules
    assert recap("greet", "hello", "fox") == (0, "hello fox\n", "")
    code, shown, _ = recap("--help")
    assert code == 0 and "Greet somebody." in shown
    code, _, error = recap("grete")
    assert code == 2 and "did you mean 'greet'" in error


@pytest.mark.parametrize("target", ["no_such_module:app", "greeting:nothing", "greeting:hello"])
def test_a_broken_plug_in_breaks_only_its_own_command(plug_in, recap, target):
    plug_in("broken", target)
    plug_in("greet", "greeting:app")
    assert recap("list", "flows")[0] == 0 and recap("greet", "hello", "fox")[0] == 0
    code, shown, _ = recap("--help")
    assert code == 0 and "greet" in shown and "broken" not in shown
    code, _, error = recap("broken", "run", "--fast")
    assert code == 2 and len(error.splitlines()) == 1
    assert error.startswith("error: command is 'broken'") and target in error and "install" in error


def test_without_its_plug_in_vbench_says_how_to_get_it(recap, monkeypatch):
    monkeypatch.setattr(plug_ins, "entry_points", lambda **wanted: EntryPoints())
    for words in (("vbench", "run", "videos"), ("reproduce", "main")):
        code, _, error = recap(*words, "--suite", "vbench128")
        assert code == 2 and len(error.splitlines()) == 1 and "pip install ./integrations/vbench" in error
    code, shown, _ = recap("--help")
    assert code == 0 and "vbench" not in shown
