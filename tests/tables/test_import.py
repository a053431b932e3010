"""What batches left, made a table: only whole results of the same question, and never less than was there."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest
from typer.testing import CliRunner

from recap.cli.main import app
from recap.eval.scores import Score
from recap.tables.about import about_this
from recap.tables.drawn_file import RESULTS, append_lines, run_line
from recap.tables.draws import collect_draws
from recap.tables.imported import import_table
from recap.tables.recipes import Ask, find_recipe

TABLE = "retention"
ASK = Ask(backbone="untrained", prompts=1, seeds=2, seconds=4.5)


def about(ask=ASK, **other):
    told = about_this(find_recipe(TABLE), ask, "hsv", "pictures", "abc") | other
    return {"about": {"ask": asdict(ask), "embedder": "hsv", "tables": {TABLE: told}}}


def drawn(ask=ASK, value=0.5, rows=("none", "sink", "sink, lambda 5", "recap")):
    """Lines of all runs, as if drawn."""
    return [
        run_line(draw, {TABLE: [Score("retention_frame", value, "hsv", 3)]})
        for draw in collect_draws([TABLE], ask, "hsv")
        if draw.wanted[0].job.row in rows
    ]


def told(what, row, why="so"):
    return {what: {"table": TABLE, "row": row, "why": why}}


def written(file, lines):
    file.parent.mkdir(parents=True, exist_ok=True)
    append_lines(file, lines)
    return file


def table_of(out):
    return json.loads((out / "table.json").read_text())


def values(out):
    return {cell["value"]["mean"] for cell in table_of(out)["cells"]}


def test_a_table_with_fewer_rows_does_not_replace_a_complete_one(tmp_path):
    whole = written(tmp_path / "whole" / RESULTS, [about(), *drawn()])
    others = drawn(rows=("none", "recap", "sink, lambda 5"))
    fewer = written(tmp_path / "fewer" / RESULTS, [about(), told("left_out", "sink"), *others])
    out = tmp_path / "out"
    assert import_table(TABLE, fewer, out).left_out == ("sink",)
    assert import_table(TABLE, whole, out).left_out == ()  # more may follow
    before = (out / "table.json").read_bytes()
    with pytest.raises(
        ValueError, match=r"--out .* larger result, with the rows sink; choose another folder"
    ):
        import_table(TABLE, fewer, out)
    assert (out / "table.json").read_bytes() == before


def test_a_row_left_out_once_and_drawn_later_is_there(tmp_path):
    file = written(tmp_path / RESULTS, [about(), told("left_out", "sink"), *drawn()])
    assert import_table(TABLE, file, tmp_path / "out").left_out == ()
    part = drawn(rows=("sink",))[:1]
    others = drawn(rows=("none", "recap", "sink, lambda 5"))
    file = written(tmp_path / "part" / RESULTS, [about(), told("left_out", "sink"), *part, *others])
    with pytest.raises(ValueError, match="1 of 8 runs of retention are missing"):
        import_table(TABLE, file, tmp_path / "other")


def test_the_file_named_is_the_file_read(tmp_path):
    written(tmp_path / RESULTS, [about(), *drawn(value=0.25)])
    copy = written(tmp_path / "copy.jsonl.gz", [about(), *drawn(value=0.75)])
    import_table(TABLE, copy, tmp_path / "out")
    assert values(tmp_path / "out") == {0.75}
    for place in ("nothing", "nothing.jsonl.gz"):
        with pytest.raises(ValueError, match=r"--import .* no such file or folder"):
            import_table(TABLE, tmp_path / place, tmp_path / "b")
    assert not (tmp_path / "b").exists()


def test_of_two_results_the_later_folder_by_number_counts(tmp_path):
    for number in (2, 10, 9):
        written(tmp_path / "all" / str(number) / RESULTS, [about(), *drawn(value=number / 16)])
    import_table(TABLE, tmp_path / "all", tmp_path / "out")
    assert values(tmp_path / "out") == {10 / 16}


def test_results_of_other_settings_are_not_taken(tmp_path):
    strange = [
        {**line, "jobs": [[*job[:-1], "0" * 24] for job in line["jobs"]], "scores": {TABLE: {}}}
        for line in drawn()
    ]
    file = written(tmp_path / "a" / RESULTS, [about(), *strange])
    with pytest.raises(ValueError, match="8 of them are there, but were drawn by other settings"):
        import_table(TABLE, file, tmp_path / "out")
    said = []
    append_lines(file, drawn(value=0.75))
    append_lines(file, strange)
    import_table(TABLE, file, tmp_path / "out", notice=said.append)
    assert values(tmp_path / "out") == {0.75} and "other settings" in said[0] and len(said) == 1


def test_keys_are_those_of_the_device_that_drew(tmp_path, monkeypatch):
    monkeypatch.setattr("recap.config.check_place", lambda device, dtype: None)
    there = replace(ASK, device="cuda")
    lines = drawn(there)
    monkeypatch.undo()
    asked = about(hardware="a GPU")
    asked["about"]["ask"]["device"] = "cuda"
    file = written(tmp_path / RESULTS, [asked, *lines])
    assert import_table(TABLE, file, tmp_path / "out").num_runs == 8
    assert lines[0]["jobs"][0][-1] in (tmp_path / "out" / "results.jsonl").read_text()


def test_two_versions_are_not_mixed_and_two_machines_are_both_named(tmp_path):
    for name in ("recap", "torch"):
        file = written(tmp_path / name / RESULTS, [about(), about(**{name: "0.0"}), *drawn()])
        with pytest.raises(ValueError, match=f"mixes results of .*'{name}'"):
            import_table(TABLE, file, tmp_path / "out")
    runs = drawn()
    lines = [about(hardware="one"), *runs[:3], about(hardware="two"), *runs[3:], about(hardware="idle")]
    import_table(TABLE, written(tmp_path / RESULTS, lines), tmp_path / "out")
    assert table_of(tmp_path / "out")["about"]["hardware"] == "one and two"


def test_a_run_drawn_for_one_table_serves_another_that_wants_the_same_job(tmp_path):
    """Batches count a job as done by its key, so the import must find it by its key."""
    one, other = "reappearance", "reappearance-all"

    def lines(table, rows, commit):
        told = {name: about_this(find_recipe(name), ASK, "hsv", "pictures", commit) for name in (table,)}
        yield {"about": {"ask": asdict(ASK), "embedder": "hsv", "tables": told}}
        for draw in collect_draws([table], ASK, "hsv"):
            if (draw.wanted[0].job.row == "recap") == rows:
                others = {measure: [] for measure in find_recipe(table).measures}
                yield run_line(draw, {**others, one: [Score("reappearance_frame", 0.5, "hsv", 3)]})

    def of_two(folder, last):
        written(tmp_path / folder / "1" / RESULTS, lines(one, True, "first"))
        written(tmp_path / folder / "2" / RESULTS, last)
        return tmp_path / folder

    rest = list(lines(other, False, "second"))
    import_table(other, of_two("a", rest), tmp_path / "out")
    made = table_of(tmp_path / "out")
    assert {cell["row"] for cell in made["cells"]} == {row.name for row in find_recipe(other).rows}
    assert made["about"]["commit"] == "first and second"
    rest[0]["about"]["tables"][other]["torch"] = "0.0"
    with pytest.raises(ValueError, match=r"mixes results of .*'torch'"):
        import_table(other, of_two("b", rest), tmp_path / "never")


def test_what_is_no_result_of_batches_is_refused(tmp_path):
    rows = [row.name for row in find_recipe(TABLE).rows]
    strange = about()
    strange["about"]["ask"]["colour"] = "red"
    blind = [{**line, "scores": {"identity": {}}} for line in drawn()]
    half = [{**line, "scores": {TABLE: {"x": {"name": "x"}}}} for line in drawn()]
    for name, lines, why in (
        ("a", [about(), *(told("left_out", row) for row in rows)], "all rows of retention were left out"),
        ("b", [about(), *blind], "has no scores of 'retention'"),
        ("c", [about(), 7], "'7', which is no object"),
        ("d", [strange, *drawn()], r"fields \['colour'\], which this version does not know"),
        ("e", [about(), *half], "not as batches write it"),
        ("f", [about(), {"jobs": [[TABLE, "none"]]}], "not as batches write it"),
        ("g", [{"about": {"tables": {TABLE: {}}}}], "does not say what was asked"),
    ):
        file = written(tmp_path / name / RESULTS, lines)
        with pytest.raises(ValueError, match=why):
            import_table(TABLE, file, tmp_path / "out")
    file = written(tmp_path / RESULTS, [about(), *drawn()])
    for many in ({"prompts": 0}, {"prompts": 1, "seeds": 0}):
        with pytest.raises(ValueError, match="is 0: must be 1 or more"):
            import_table(TABLE, file, tmp_path / "out", **many)
    assert not (tmp_path / "out").exists()


def test_a_refusal_says_what_was_given_up(tmp_path):
    lines = [about(), told("gave_up", "sink", "RuntimeError: NaN"), *drawn(rows=("none", "recap"))]
    file = written(tmp_path / RESULTS, lines)
    with pytest.raises(ValueError, match=r"4 of 8 .*; given up: sink \(RuntimeError: NaN\); draw them"):
        import_table(TABLE, file, tmp_path / "out")


def test_rows_unknown_here_are_named_as_left_out(tmp_path, monkeypatch):
    recipe = find_recipe(TABLE)
    file = written(tmp_path / RESULTS, [about(), *drawn()])
    more = replace(recipe, rows=(*recipe.rows, replace(recipe.rows[0], name="new", memory={"name": "new"})))
    monkeypatch.setattr("recap.tables.imported.find_recipe", lambda name: more)
    assert import_table(TABLE, file, tmp_path / "out").left_out == ("new",)
    assert "could not be drawn: new" in (tmp_path / "out" / "index.html").read_text()


def test_the_command_reads_the_file_and_says_what_it_skips(tmp_path):
    file = written(tmp_path / RESULTS, [about(), *drawn()])
    out = tmp_path / "out"
    done = CliRunner().invoke(app, ["reproduce", TABLE, "--import", str(file), "--out", str(out)])
    assert done.exit_code == 0 and str(out / "index.html") in done.output.replace("\n", "")


def test_looks_lie_beside_the_file(tmp_path):
    file = written(tmp_path / "a" / RESULTS, [about(), *drawn()])
    (tmp_path / "a" / "looks.jsonl.gz").write_bytes(b"nothing packed")
    with pytest.raises(ValueError, match=r"looks.jsonl.gz.*cannot be read"):
        import_table(TABLE, file, tmp_path / "out")
