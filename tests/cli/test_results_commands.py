"""`recap reproduce` and `recap report` as somebody types them."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from recap.cli.main import app
from recap.tables.ask import Ask
from recap.tables.recipes import find_recipe
from recap.tables.runner import ResultStore
from recap.tables.runs import TableRuns

ASK = Ask(
    backbone="untrained", prompts=1, seeds=2, seconds=4.5, device="cpu", embedder="hsv", flow="classical"
)
TABLE = "retention"


def invoke(*words):
    return CliRunner().invoke(app, [*map(str, words)])


def reproduce(out, *more):
    words = ["--backbone", "untrained", "--prompts", 1, "--seeds", 2, "--seconds", 4.5, "--device", "cpu"]
    return invoke("reproduce", TABLE, *words, "--embedder", "hsv", "--flow", "classical", "--out", out, *more)


@pytest.fixture
def finished(tmp_path):
    """A folder with one finished table, of runs as if generated."""
    score = {"name": "retention_frame_mid", "value": 0.5, "backend": "hsv", "n": 3, "details": {}}
    store = ResultStore(tmp_path / "results", {"recap": "1", "torch": "2", "hardware": "x", "commit": "y"})
    for key in TableRuns([find_recipe(TABLE)], ASK, {TABLE: {}}).jobs:
        # Rows of `untrained` have no judge that could say what a bank holds.
        store.add(key, {TABLE: {score["name"]: score}, "content": {}})
    asked = reproduce(tmp_path / "results")
    assert asked.exit_code == 0, asked.output
    assert asked.stdout.strip() == str(tmp_path / "results" / TABLE / "index.html")
    return tmp_path / "results"


def test_out_of_time_the_command_says_so(tmp_path):
    asked = reproduce(tmp_path, "--minutes", 1e-9)
    assert asked.exit_code == 3 and not asked.stdout
    assert "8 of 8 runs are left; the same command resumes" in asked.stderr.replace("\n", "")


def test_a_report_of_a_folder_and_as_markdown(finished, tmp_path):
    asked = invoke("report", finished, "--markdown", tmp_path / "results.md")
    assert asked.exit_code == 0, asked.output
    assert asked.output.strip() == str(finished / "report.html")
    title = find_recipe(TABLE).title
    assert title in (finished / "report.html").read_text() and title in (tmp_path / "results.md").read_text()


def test_a_report_of_an_empty_folder_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for words in ((tmp_path,), ()):
        asked = invoke("report", *words)
        assert isinstance(asked.exception, ValueError)
        message = str(asked.exception)
        assert "holds no finished table" in message and "recap reproduce TABLE" in message
    assert not list(tmp_path.iterdir())
