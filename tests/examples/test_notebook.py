"""The notebook runs from top to bottom; its videos are cut to a block or two here."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

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


def test_every_cell_runs(tmp_path, monkeypatch, capsys):
    opened: list[str] = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("webbrowser.open", opened.append)
    names: dict[str, object] = {}
    values = [run_cell(re.sub(r"seconds=\d+", "seconds=0.5", text), names) for text in CODE]
    runs = [value for value in values if isinstance(value, recap.Run)]
    assert len(runs) == 2 and all("<video" in run._repr_html_() for run in runs)
    assert isinstance(values[-1], Path) and opened == [values[-1].resolve().as_uri()]
    assert "did you mean 'recap'" in capsys.readouterr().out


def test_the_notebook_is_kept_without_results():
    assert all(not cell.get("outputs") and cell.get("execution_count") is None for cell in CELLS)
