"""The notebook runs from top to bottom; its videos are cut to a block or two here."""

from __future__ import annotations

import ast
import html
import json
import re
import sys
from pathlib import Path

import pytest

import recap

NOTEBOOK = Path(__file__).resolve().parents[2] / "examples" / "quickstart.ipynb"
CELLS = json.loads(NOTEBOOK.read_text())["cells"]
CODE = ["".join(cell["source"]) for cell in CELLS if cell["cell_type"] == "code"]


def run_cell(text: str, names: dict[str, object]) -> object:
    """Run a cell and return the value of its last expression, as a notebook shows it."""
    *lines, last = ast.parse(text).body
    ending = [] if isinstance(last, ast.Expr) else [last]
    exec(compile(ast.Module([*lines, *ending], []), "cell", "exec"), names)
    if isinstance(last, ast.Expr):
        return eval(compile(ast.Expression(last.value), "cell", "eval"), names)
    return None


@pytest.mark.slow
def test_every_cell_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("subprocess.run", lambda *_, **__: pytest.fail("the package is here already"))
    names: dict[str, object] = {}
    values = [run_cell(re.sub(r"seconds=\d+", "seconds=0.5", text), names) for text in CODE]
    runs = [value for value in values if isinstance(value, recap.Run)]
    assert len(runs) == 2 and all("<video" in run._repr_html_() for run in runs)
    page = runs[0].show(browser=False).read_text(encoding="utf-8")
    shown = re.fullmatch(r'<iframe srcdoc="([^"]*)" .*></iframe>', values[-1]._repr_html_())
    assert html.unescape(shown[1]) == page
    printed = capsys.readouterr().out
    assert "did you mean 'recap'" in printed and "('a bus on a beach by day',)" in printed


def test_where_the_package_is_missing_it_is_installed_first(monkeypatch):
    commands: list[list[str]] = []
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr("subprocess.run", lambda command, check: commands.append(command))
    run_cell(CODE[0], {})
    assert commands == [[sys.executable, "-m", "pip", "install", "--quiet", "recap-forcing"]]


def test_the_notebook_is_kept_without_results():
    assert all(not cell.get("outputs") and cell.get("execution_count") is None for cell in CELLS)
