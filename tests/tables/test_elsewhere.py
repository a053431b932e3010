"""Results that were made on another machine: the same command on them makes the table and generates nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, replace

import pytest

from recap.io.files import alone_in
from recap.tables import reproduce as module
from recap.tables.ask import Ask
from recap.tables.recipes import find_recipe
from recap.tables.reproduce import How, main, read_arguments, reproduce
from recap.tables.runner import FILE, ResultStore
from recap.tables.runs import TableRuns

TABLE = "retention"
ASK = Ask(
    backbone="untrained", prompts=1, seeds=2, seconds=4.5, device="cuda", embedder="hsv", flow="classical"
)
HERE = {"recap": "1", "torch": "2", "hardware": "a GPU", "commit": "abc"}


def made(out, table=TABLE, ask=ASK, *, rows=(), value=0.5, **other):
    """Results of all runs, as if they had come from a machine with a GPU."""
    recipe = find_recipe(table)
    store = ResultStore(out, {**HERE, **other})
    for run in TableRuns([recipe], ask, {table: {}}).tables[table]:
        if not rows or run.row.name in rows:
            score = {"name": "retention_frame_mid", "value": value, "backend": "hsv", "n": 3, "details": {}}
            store.add(run.job.key, {measure: {"retention_frame_mid": score} for measure in recipe.measures})
    return store


def table_of(out, table=TABLE):
    return json.loads((out / table / "table.json").read_text())


@pytest.fixture(autouse=True)
def nothing_is_generated(monkeypatch):
    monkeypatch.setattr(module, "run_jobs", lambda *_, **__: pytest.fail("something was generated"))


def quietly(out, ask=ASK, tables=(TABLE,), **how):
    return reproduce(tables, ask, out, How(**how), notice=lambda _: None)


def test_a_table_is_made_where_its_device_is_not(tmp_path):
    made(tmp_path)
    done = quietly(tmp_path)
    assert done.left == 0 and done.num_runs == 8
    about = table_of(tmp_path)["about"]
    assert (about["hardware"], about["commit"], about["torch"]) == ("a GPU", "abc", "2")
    quietly(tmp_path, replace(ASK, device="auto", flow="auto", embedder="auto"))  # as the folder was begun
    assert json.loads((tmp_path / TABLE / "record.json").read_text())["device"] == "cuda"


def test_runs_that_are_missing_are_named(tmp_path):
    made(tmp_path, rows=("none", "recap", "sink, lambda 5"))
    with pytest.raises(ValueError, match=r"2 of 8 runs are missing, the first is sink of retention.*--seeds"):
        quietly(tmp_path)
    with pytest.raises(ValueError, match=r"16 of 16 runs are missing"):
        quietly(tmp_path / "empty", replace(ASK, seeds=4))
    assert not (tmp_path / "empty").exists()


def test_what_is_stored_is_published_with_the_names_of_what_is_missing(tmp_path):
    store = made(tmp_path, rows=("none", "recap"))
    half = TableRuns([find_recipe(TABLE)], ASK, {TABLE: {}}).tables[TABLE]
    first = next(run for run in half if run.row.name == "sink")
    store.add(first.job.key, store.results[half[0].job.key])
    notices = []
    done = reproduce([TABLE], ASK, tmp_path, How(stored=True), notice=notices.append)
    assert done.left == 0 and done.num_runs == 4
    assert done.left_out == {TABLE: ("sink", "sink, lambda 5")} and table_of(tmp_path)["about"]["runs"] == 4
    assert "the row 'sink' is left out: 1 of 2 runs are missing" in notices[0]
    assert "lambda 5' is left out: 2 of 2 runs are missing" in notices[1]
    for page in ("table.md", "index.html"):
        text = (tmp_path / TABLE / page).read_text()
        assert "Left out, as their runs are not there: sink, sink, lambda 5." in text
    # A larger store makes the whole table, and what is whole is not replaced by less.
    whole = tmp_path / FILE
    part = whole.read_bytes()
    made(tmp_path, rows=("sink", "sink, lambda 5"))
    assert quietly(tmp_path, stored=True).left_out == {TABLE: ()} and table_of(tmp_path)["left_out"] == []
    whole.write_bytes(part)
    with pytest.raises(ValueError, match=r"larger result, with the rows sink, sink, lambda 5"):
        quietly(tmp_path, stored=True)


def test_of_an_empty_store_nothing_is_published(tmp_path):
    with pytest.raises(ValueError, match=r"table is 'retention': no row of it is all there.*2 of 2 runs"):
        quietly(tmp_path / "none", stored=True)
    assert not (tmp_path / "none").exists()
    assert read_arguments([TABLE, "--stored"]).stored and not read_arguments([TABLE]).stored


def test_fewer_seeds_than_were_made_may_be_asked_for(tmp_path):
    made(tmp_path)
    assert quietly(tmp_path, replace(ASK, seeds=1)).num_runs == 4
    assert quietly(tmp_path).num_runs == 8  # more may follow
    with pytest.raises(ValueError, match="holds a larger result, of 2 seeds"):
        quietly(tmp_path, replace(ASK, seeds=1))


def test_rows_left_out_where_the_others_were_made_stay_left_out(tmp_path):
    made(tmp_path, rows=("none", "recap", "sink, lambda 5"))
    (tmp_path / TABLE).mkdir()
    record = {"table": TABLE, **asdict(ASK), "left_out": ["sink"]}
    (tmp_path / TABLE / "record.json").write_text(json.dumps(record))
    assert quietly(tmp_path).left_out == {TABLE: ("sink",)}
    assert table_of(tmp_path)["left_out"] == ["sink"]
    made(tmp_path, rows=("sink",))
    assert quietly(tmp_path).left_out == {TABLE: ()}  # once it is there it is shown
    before = (tmp_path / TABLE / "table.json").read_bytes()
    lines = (tmp_path / FILE).read_text().splitlines()[:6]
    (tmp_path / FILE).write_text("".join(line + "\n" for line in lines))
    with pytest.raises(ValueError, match=r"2 of 8 runs are missing"):
        quietly(tmp_path)
    assert (tmp_path / TABLE / "table.json").read_bytes() == before


def test_two_versions_are_not_mixed_and_two_machines_are_both_named(tmp_path):
    for name in ("recap", "torch"):
        made(tmp_path / name, rows=("none",))
        made(tmp_path / name, rows=("sink", "sink, lambda 5", "recap"), **{name: "0.0"})
        with pytest.raises(ValueError, match=f"would be made by .*{name} 0.0"):
            quietly(tmp_path / name)
    made(tmp_path, rows=("none",), hardware="one")
    made(tmp_path, rows=("sink", "sink, lambda 5", "recap"), hardware="two", commit="def")
    quietly(tmp_path)
    about = table_of(tmp_path)["about"]
    assert (about["hardware"], about["commit"]) == ("one and two", "abc and def")


def test_a_run_made_for_one_table_serves_another(tmp_path):
    one, other = "reappearance", "reappearance-all"
    made(tmp_path, one, rows=("recap",), commit="first")
    made(
        tmp_path,
        other,
        rows=[row.name for row in find_recipe(other).rows if row.name != "recap"],
        commit="second",
    )
    quietly(tmp_path, tables=[other])
    shown = table_of(tmp_path, other)
    assert {cell["row"] for cell in shown["cells"]} == {row.name for row in find_recipe(other).rows}
    assert shown["about"]["commit"] == "first and second"


def test_results_by_other_settings_are_not_taken(tmp_path):
    made(tmp_path, ask=replace(ASK, seconds=9))
    made(tmp_path, ask=replace(ASK, embedder="mobilenetv2"))
    made(tmp_path, ask=replace(ASK, device="cpu"))
    with pytest.raises(ValueError, match="8 of 8 runs are missing"):
        quietly(tmp_path)


def test_two_processes_do_not_share_a_folder(tmp_path):
    made(tmp_path)
    with (
        alone_in(tmp_path, "", "", ""),
        pytest.raises(ValueError, match=r"--out .* another process .* choose another"),
    ):
        quietly(tmp_path)


def test_the_plain_command_takes_what_the_other_takes(tmp_path, capsys):
    words = [TABLE, "--backbone", "untrained", "--prompts", "1", "--seeds", "2", "--seconds", "4.5", "--device",
             "cuda", "--embedder", "hsv", "--flow", "classical", "--out", str(tmp_path)]  # fmt: skip
    made(tmp_path)
    assert main(words) == 0
    assert str(tmp_path / TABLE / "index.html") in capsys.readouterr().out
    arguments = read_arguments(
        [*words, "--minutes", "9", "--rows", "100", "--scorers", "7", "--commit", "abc"]
    )
    assert (arguments.minutes, arguments.rows, arguments.scorers, arguments.commit) == (9, 100, 7, "abc")


def test_the_exit_status_tells_that_runs_are_left(tmp_path):
    words = [TABLE, "--backbone", "untrained", "--prompts", "1", "--seeds", "1", "--seconds", "1.5", "--embedder",
             "hsv", "--device", "cpu", "--flow", "classical",
             "--minutes", "1e-9", "--out", str(tmp_path)]  # fmt: skip
    program = [sys.executable, "-m", "recap.tables.reproduce", *words]
    done = subprocess.run(program, check=False, capture_output=True, text=True)
    assert done.returncode == 3 and "4 of 4 runs are left; the same command resumes" in done.stdout
    assert not (tmp_path / FILE).exists() and not (tmp_path / TABLE / "table.json").exists()


def test_a_machine_without_video_libraries_and_commands_can_make_tables():
    program = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("av", "typer", "rich", "transformers", "torchvision", "ray"):
            raise ImportError(name)
sys.meta_path.insert(0, Missing())
import recap.tables.reproduce
"""
    subprocess.run([sys.executable, "-c", program], check=True)
