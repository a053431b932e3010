"""`recap sweep status` and `recap report` as somebody types them."""

from __future__ import annotations

from dataclasses import asdict

import pytest
from typer.testing import CliRunner

from recap.cli.main import app
from recap.eval.scores import Score
from recap.tables.about import about_this
from recap.tables.drawn_file import append_lines, run_line
from recap.tables.draws import collect_draws
from recap.tables.imported import import_table
from recap.tables.jobs import Job
from recap.tables.recipes import Ask, find_recipe
from recap.tables.store import Rules, Store


def begin_sweep(work, *, done=0, claimed=0, failed=0, waiting=0):
    """A sweep as it stands in the midst of things; nobody works on it."""
    store = Store(work, Rules(most_failures=1))
    store.begin("sweep_work:draw")
    store.add([Job("row", "prompt", seed, {}) for seed in range(done + claimed + failed + waiting)])
    for _ in range(done):
        store.finish(store.claim("elsewhere/1/1"), {})
    for _ in range(failed):
        store.fail(store.claim("elsewhere/1/1"), "ValueError: no hope")
    for _ in range(claimed):
        store.claim("elsewhere/1/1")
    store.close()


@pytest.fixture
def results(tmp_path, monkeypatch):
    """Two tables under way in `results`, and one that was imported and has no sweep."""
    monkeypatch.chdir(tmp_path)
    begin_sweep(tmp_path / "results" / "main" / "work", done=4)
    begin_sweep(tmp_path / "results" / "retention" / "work", done=2, claimed=1, waiting=3)
    (tmp_path / "results" / "bank").mkdir()
    return tmp_path / "results"


def status(*words):
    return CliRunner().invoke(app, ["sweep", "status", *map(str, words)])


MAIN = "main: 4 of 4 done, 0 under way"
RETENTION = "retention: 2 of 6 done, 1 under way, 3 waiting, about 0 s left"


@pytest.mark.parametrize("words", [(), ("results",), (".",)])
def test_every_sweep_of_a_folder_has_a_line(results, words):
    asked = status(*words)
    above = "results/" if words == (".",) else ""
    assert asked.exit_code == 0, asked.output
    assert asked.output.splitlines() == [above + MAIN, above + RETENTION]


@pytest.mark.parametrize("folder", ["results/retention", "results/retention/work"])
def test_a_tables_folder_and_its_work_are_the_same_sweep(results, folder):
    assert status(folder).output.splitlines() == [RETENTION]


def test_from_within_a_folder_its_table_is_named(results, monkeypatch):
    monkeypatch.chdir(results / "retention" / "work")
    assert status(".").output.splitlines() == [RETENTION]


def test_what_was_given_up_and_why(results):
    begin_sweep(results / "time" / "work", done=1, failed=1)
    first, why = status(results / "time").output.splitlines()
    assert first == "time: 1 of 2 done, 0 under way, 1 retries, 1 given up" and why.endswith(
        ": ValueError: no hope"
    )


def test_folders_without_a_sweep_are_refused_and_nothing_is_made_there(results, tmp_path):
    for folder, word in ((results / "bank", "no sweep"), (tmp_path / "nowhere", "no such folder")):
        asked = status(folder)
        assert isinstance(asked.exception, ValueError)
        assert (
            word in (said := str(asked.exception)) and "recap reproduce TABLE" in said and str(folder) in said
        )
    assert not list((results / "bank").iterdir()) and not (tmp_path / "nowhere").exists()


def report(*words):
    return CliRunner().invoke(app, ["report", *map(str, words)])


@pytest.fixture
def finished(tmp_path):
    """A folder with one finished table, of runs as if drawn."""
    ask, table = Ask(backbone="untrained", prompts=1, seeds=2, seconds=4.5), "retention"
    told = {table: about_this(find_recipe(table), ask, "hsv", "pictures", "abc")}
    runs = [
        run_line(d, {table: [Score("retention_frame", 0.5, "hsv", 3)]})
        for d in collect_draws([table], ask, "hsv")
    ]
    append_lines(
        tmp_path / "drawn.gz", [{"about": {"ask": asdict(ask), "embedder": "hsv", "tables": told}}, *runs]
    )
    import_table(table, tmp_path / "drawn.gz", tmp_path / "results" / table, ask.prompts, ask.seeds)
    return tmp_path / "results"


def test_a_report_of_a_folder_and_as_markdown(finished, tmp_path):
    asked = report(finished, "--markdown", tmp_path / "results.md")
    assert asked.exit_code == 0, asked.output
    assert asked.output.strip() == str(finished / "report.html")
    title = find_recipe("retention").title
    assert title in (finished / "report.html").read_text() and title in (tmp_path / "results.md").read_text()


def test_a_report_of_an_empty_folder_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for words in ((tmp_path,), ()):
        asked = report(*words)
        assert isinstance(asked.exception, ValueError)
        said = str(asked.exception)
        assert "holds no finished table" in said and "recap reproduce TABLE" in said
    assert not list(tmp_path.iterdir())
