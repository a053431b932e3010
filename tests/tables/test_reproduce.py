"""A table from recipe to page on the untrained backbone, which is quick; its numbers mean nothing."""

from __future__ import annotations

import base64
import csv
import dataclasses
import json
import re
import shutil

import numpy as np
import pytest
from tables_help import jobs_of

from recap.eval.judges.subject import ProbeWitness
from recap.eval.metrics import all_measures
from recap.eval.scores import Estimate
from recap.eval.witnesses import Box
from recap.registry import ADMISSIONS
from recap.tables.generating import generate_and_score
from recap.tables.page import MARK, figures_of, write_report
from recap.tables.paper_numbers import paper_table
from recap.tables.recipes import Ask, find_recipe
from recap.tables.reproduce import How, reproduce
from recap.tables.table import ScoredRun, as_markdown, build_cells, remarks

SMALL = Ask(backbone="untrained", prompts=2, seeds=1, seconds=4.5, embedder="hsv")
FILES = {
    "record.json", "results.jsonl", "table.csv", "table.md", "sheet.png", "table.json", "figure.svg", "index.html",
    "side-by-side.mp4",
}  # fmt: skip


def quietly(tables, ask, out, **how):
    return reproduce(tables, ask, out, How(**how), notice=lambda _: None)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("results")
    done = quietly(["reappearance", "retention"], SMALL, folder, workers=2)
    assert done.left == 0 and done.num_runs == 16 and not done.errors
    assert done.pages == [folder / name / "index.html" for name in ("reappearance", "retention")]
    return folder


def test_the_folder_is_complete_and_the_page_needs_nothing_else(results):
    folder = results / "reappearance"
    assert {path.name for path in folder.iterdir()} == FILES
    lines = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
    assert len(lines) == 8 and {line["row"] for line in lines} == {"none", "sink", "sink, lambda 5", "recap"}
    assert all(score["backend"] for line in lines for score in line["scores"].values())
    rows = list(csv.DictReader((folder / "table.csv").read_text().splitlines()))
    paper = {row["row"]: row["paper"] for row in rows if row["measure"] == "reappearance_frame"}
    assert paper == {"none": "0.699", "sink": "", "sink, lambda 5": "", "recap": "0.752"}
    page = (folder / "index.html").read_text()
    assert "{{" not in page and page.count("data:image/svg+xml") >= 3 and "data:video/mp4" in page
    assert page.count("bank of recap") == 1 and page.count("stroke-dasharray") == 3  # three cuts
    for about in ("suite", "prompts", "hardware", "commit", "judged"):
        assert f"<th>{about}</th>" in page
    assert not re.search(r'(src|href)="(?!data:)', page)
    assert "<svg" in (folder / "figure.svg").read_text()
    assert (results / "progress.txt").read_text() == "16 of 16 done\n"


def test_bank_slots_are_counted_for_the_row_that_has_a_bank(results):
    table = json.loads((results / "reappearance" / "table.json").read_text())
    assert [c["row"] for c in table["cells"] if c["measure"] == "bank_slots_from_B"] == ["recap"]


def test_asking_again_changes_nothing_and_asking_for_less_is_refused(results):
    folder = results / "retention"
    before = (folder / "results.jsonl").read_bytes(), (results / "runs.jsonl").read_bytes()
    quietly(["retention"], SMALL, results)
    for ask, why in (
        (dataclasses.replace(SMALL, prompts=1), "holds a larger result, of 2 prompts"),
        (dataclasses.replace(SMALL, seconds=9), r"begun with seconds 4.5.* not 9"),
    ):
        with pytest.raises(ValueError, match=why):
            quietly(["retention"], ask, results)
    (results / "identity").mkdir()
    (results / "identity" / "record.json").write_text((folder / "record.json").read_text())
    with pytest.raises(ValueError, match="begun with table 'retention'"):
        quietly(["identity"], SMALL, results)
    shutil.rmtree(results / "identity")
    assert before == ((folder / "results.jsonl").read_bytes(), (results / "runs.jsonl").read_bytes())


class WholePicture:
    """A detector for which the subject fills the picture, except where it is dark."""

    backend = "whole picture"

    def find(self, pictures, subject):
        return [Box(0, 0, p.shape[1], p.shape[0]) if p.mean() > 5 else None for p in pictures]


def test_a_detector_gives_public_models_a_subject_score(tmp_path, monkeypatch):
    monkeypatch.setattr("recap.eval.judged._qwen", lambda source, device: WholePicture())
    job = jobs_of("reappearance", backbone="untrained", seconds=9, detector="qwen2.5-vl")[0]
    scores = generate_and_score(job, tmp_path / "run")["reappearance"]
    assert scores["reappearance_subject"]["backend"] == "standin:hsv-8x4x4 in whole picture"
    assert scores["found_in_B"]["value"] == 1 and scores["verified"]["value"] == 0  # it is there in C, too
    assert scores["reappearance_subject_verified"]["value"] is None


def test_foreign_folders_and_parallel_clocks_are_refused(tmp_path):
    (tmp_path / "identity").mkdir()
    (tmp_path / "identity" / "mine.txt").touch()
    with pytest.raises(ValueError, match="something that is not a table"):
        quietly(["identity"], SMALL, tmp_path)
    for how in ({"workers": 2}, {"rows": 2}, {"ray": "local"}):
        with pytest.raises(ValueError, match=rf"--{next(iter(how))} is .*mean nothing"):
            quietly(["time"], SMALL, tmp_path, **how)
    for broken in ([], {"table": "identity"}):
        (tmp_path / "bank").mkdir(exist_ok=True)
        (tmp_path / "bank" / "record.json").write_text(json.dumps(broken))
        with pytest.raises(ValueError, match="is not the record of a table"):
            quietly(["bank"], SMALL, tmp_path)
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ValueError, match=r"--out .* is a file"):
        quietly(["bank"], SMALL, tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize(
    ("how", "field"),
    [({"rows": 0}, "--rows"), ({"scorers": 0}, "--scorers"), ({"minutes": 0}, "--minutes"),
     ({"minutes": float("nan")}, "--minutes"), ({"workers": 0}, "--workers")],
)  # fmt: skip
def test_settings_that_mean_nothing_are_refused(how, field):
    with pytest.raises(ValueError, match=f"{field} is"):
        How(**how)


def test_workers_do_not_generate_in_batches(tmp_path):
    for how in ({"workers": 2, "rows": 4},):
        with pytest.raises(ValueError, match="--workers is 2"):
            quietly(["bank"], SMALL, tmp_path / "new", **how)
    with pytest.raises(ValueError, match="--scorers is 3: whoever generates"):
        quietly(["bank"], SMALL, tmp_path / "new", scorers=3)
    with pytest.raises(ValueError, match="--rows is 4: on Ray"):
        quietly(["bank"], SMALL, tmp_path / "new", rows=4, ray="local")
    assert not (tmp_path / "new").exists()


def test_every_measure_has_something_to_say_of_one_run(tmp_path):
    every = tuple(name for name in all_measures() if name != "reappearance")
    recipe = dataclasses.replace(find_recipe("identity"), measures=every)
    job = jobs_of(recipe, "recap", backbone="untrained", seconds=6)[0]
    assert job.options["trace_offered"]
    result = generate_and_score(job, tmp_path / "run")
    assert result.keys() == {*every, "look"}
    scores = {name: score for measure in every for name, score in result[measure].items()}
    assert {score["backend"] for score in scores.values()} == {"native", "dis", "standin:hsv-8x4x4"}
    for name in ("identity_frame", "retention_frame_end", "dynamic_degree", "temporal_flickering", "camera_flow",
                 "subject_consistency", "dynamic_degree_5s", "bank_mean_age", "attention_sink",
                 "block_s"):  # fmt: skip
        assert scores[name]["value"] is not None or name == "identity_frame", name
    assert scores["bank_overlap_lowest"]["value"] == 1.0
    assert sum(s["value"] for n, s in scores.items() if n.startswith("attention_")) == pytest.approx(
        1, abs=1e-3
    )


def test_rows_that_do_not_exist_here_are_left_out_and_named(tmp_path, monkeypatch):
    """Before anything is generated."""
    monkeypatch.delitem(ADMISSIONS, "random", raising=False)
    rows = {row.name: row.available for row in find_recipe("admission").rows}
    assert not rows["random"] and rows["recap"]
    notices = []

    def stop(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("recap.tables.reproduce.run_jobs", stop)
    with pytest.raises(KeyboardInterrupt):
        reproduce(["admission"], SMALL, tmp_path / "a", notice=notices.append)
    assert any("'random' is left out" in line for line in notices)


def test_the_report_holds_all_tables(results):
    page = write_report(results, results / "results.md").read_text()
    assert page.index("Identity retention over 60 s") < page.index("Controlled reappearance")
    assert "{{" not in page and page.count("bank of recap") == 1  # what the bank of the first run remembered
    for table in ("reappearance", "retention"):  # complete in itself: the runs side by side are in the page
        sheet = (results / table / "sheet.png").read_bytes()
        assert sheet.startswith(b"\x89PNG") and base64.b64encode(sheet).decode() in page
    assert page.count("The first prompt, seed 0") == 2 and "likeness to the opening" in page
    for field in ("suite", "backbone", "hardware", "commit", "judged", "prompts", "seeds"):
        assert f"<th>{field}</th>" in page or f"{field} " in page, field
    written = (results / "results.md").read_text()
    assert written.startswith("# Results") and written.count("\n## ") == 2 and "hsv" in written


def test_a_report_keeps_what_was_written_over_its_tables(results, tmp_path):
    page = tmp_path / "results.md"
    write_report(results, page)
    heading, tables = page.read_text().split(MARK)
    page.write_text(f"{heading}Seen by eye.\n\n{MARK}\nold tables")
    write_report(results, page)
    assert page.read_text() == f"{heading}Seen by eye.\n\n{MARK}{tables}"
    more = page.read_text() + "\n## Camera and object motion\n\n`recap reproduce motion`: ...\n"
    page.write_text(more)
    with pytest.raises(ValueError, match="a larger result of motion than 0 prompts"):
        write_report(results, page)
    assert page.read_text() == more
    grown = re.sub(r"prompts 2, seeds 1,", "prompts 2, seeds 5,", tables)
    page.write_text(f"{heading}{MARK}{grown}")
    with pytest.raises(ValueError, match="a larger result of retention than 2 prompts and 1 seeds"):
        write_report(results, page)
    assert page.read_text() == f"{heading}{MARK}{grown}"
    page.write_text("Somebody's notes")
    with pytest.raises(ValueError, match=r"--markdown .*no `recap report` has written"):
        write_report(results, page)
    assert page.read_text() == "Somebody's notes"
    for other in (tmp_path, tmp_path / "bytes"):
        (tmp_path / "bytes").write_bytes(b"\xff\xfe" + MARK.encode())  # would come back as other bytes
        with pytest.raises(ValueError, match="--markdown"):
            write_report(results, other)


def test_a_report_says_what_was_left_out_and_refuses_what_it_cannot_read(results, tmp_path):
    whole = json.loads((results / "retention" / "table.json").read_text())
    mine = tmp_path / "retention"
    mine.mkdir()
    (mine / "table.md").write_text("# Identity")
    section = whole["section"]
    shutil.copy(results / "retention" / "sheet.png", mine)
    (mine / "table.json").write_text(
        json.dumps(whole | {"section": section | {"remarks": remarks("", ["sink"])}})
    )
    assert "Left out, as they could not be generated: sink." in write_report(tmp_path).read_text()
    before = (tmp_path / "report.html").read_bytes()
    measured = section["measured"][0]
    for broken in (
        {"table": "retention"},
        whole | {"table": ["x"]},
        [],
        whole | {"section": section | {"measured": [measured | {"rows": [[None]]}]}},
        whole | {"section": section | {"measured": [{"name": "none"}]}},
        whole | {"section": section | {"sheet": "lost.png"}},
    ):
        (mine / "table.json").write_text(json.dumps(broken))
        with pytest.raises(ValueError, match="is no whole table as this version writes it"):
            write_report(tmp_path)
    (mine / "table.json").write_text(json.dumps(whole))
    (mine / "table.md").unlink()
    with pytest.raises(ValueError, match="is no whole table"):
        write_report(tmp_path)
    assert (tmp_path / "report.html").read_bytes() == before


def test_a_report_of_nothing_is_refused(tmp_path):
    with pytest.raises(ValueError, match="holds no finished table"):
        write_report(tmp_path)


def score(value, backend="x", name="identity_frame"):
    return {name: {"name": name, "value": value, "backend": backend, "n": 1, "details": {}}}


def test_the_table_compares_pairs_and_shows_the_paper():
    recipe = find_recipe("identity")
    lines = [
        ScoredRun(row, f"p{prompt}", seed, score(0.5 + 0.2 * (row == "recap") + 0.01 * prompt))
        for prompt in range(5) for seed in range(2) for row in ("none", "recap")
    ]  # fmt: skip
    none, ours = build_cells(recipe, lines)
    assert none.value.mean == pytest.approx(0.52) and (none.value.n, none.value.clusters) == (10, 5)
    assert none.against == pytest.approx(Estimate(0.2, 0.2, 0.2, 10, 5)) and none.wins == 1
    assert ours.against is None and (none.paper, ours.paper) == (0.745, 0.850)
    text = as_markdown(recipe, [none, ours], {"backbone": "made up"})
    assert "| none | 0.52 [" in text and "0.745" in text and "judged by: x" in text
    same = [ScoredRun("recap", line.prompt, line.seed, score(0.5 + 1e-9 * line.seed)) for line in lines[::2]]
    even = [ScoredRun("none", line.prompt, line.seed, score(0.5)) for line in same]
    tied = build_cells(recipe, [*even, *same])[0]
    assert tied.against == Estimate(0, 0, 0, 10, 5) and tied.wins == 0.5
    lines[0] = ScoredRun("none", "p0", 0, score(0.5, "y"))
    with pytest.raises(ValueError, match="one judge"):
        build_cells(recipe, lines)


def test_each_backbone_stands_next_to_its_own_line_of_the_paper():
    recipe = find_recipe("main")
    scores = {
        "dynamic_degree": {"name": "dynamic_degree", "value": 0.5, "backend": "dis", "n": 1, "details": {}}
    }
    lines = [ScoredRun(row, "p", 0, scores) for row in ("none", "sink", "recap")]
    shown = {
        backbone: [cell.paper for cell in build_cells(recipe, lines, backbone)]
        for backbone in ("self-forcing", "embedded", "longlive")
    }
    assert shown["self-forcing"] == shown["embedded"] == pytest.approx([0.275, 0.304, 0.581])
    baseline, sink, ours = shown["longlive"]
    assert sink is None  # the paper has no such line
    numbers = {row["method"]: float(row["DD"]) / 100 for row in paper_table("main")}
    assert (baseline, ours) == pytest.approx((numbers["LongLive"], numbers["LongLive+Ours"]))


def test_times_are_compared_at_one_length_and_next_to_the_papers():
    recipe = find_recipe("time")
    lines = [
        ScoredRun(row.name, "p", 0, score(row.seconds * (1 + (row.paper == "ours")), "native", "seconds"))
        for row in recipe.rows
    ]
    cells = {cell.row: cell for cell in build_cells(recipe, lines)}
    assert [cells[f"none, {m} min"].against.mean for m in (1, 2, 5)] == [60, 120, 300]
    assert cells["recap, 5 min"].against is None
    assert (cells["none, 5 min"].paper, cells["recap, 5 min"].paper) == (1435, 2239)
    written = as_markdown(recipe, list(cells.values()), {})
    assert "| recap - row | recap higher |" in written and "| 1435 |" in written


def test_rows_of_motion_say_how_their_videos_are_spread():
    flows = {"none": [1, 1, 1, 1, 3], "sink": [1, 1, 1, 1, 1], "recap": [2, 2, 2, 2, 2.5]}
    lines = [
        ScoredRun(row, f"p{prompt}", 0, {"total_flow": {"name": "total_flow", "value": float(value), "backend": "dis",
                                                  "n": 1, "details": {}}})
        for row, values in flows.items() for prompt, value in enumerate(values)
    ]  # fmt: skip
    cells = {(cell.row, cell.measure): cell for cell in build_cells(find_recipe("motion"), lines)}
    assert [cells[row, "drift_tail"].value.mean for row in flows] == [0.2, 0, 0]
    assert [cells[row, "drift_tail_of_baseline"].value.mean for row in flows] == [0.2, 0, 0.2]
    tail = cells["none", "drift_tail"]
    assert tail.value.low == 0 < tail.value.high <= 1 and tail.paper == pytest.approx(37 / 128)
    assert cells["recap", "total_flow_sd"].paper == 1.9 and cells["sink", "total_flow_sd"].paper is None
    assert (
        cells["none", "total_flow_sd"].value.mean == pytest.approx(0.8)
        and not cells["none", "drift_tail"].against
    )


def test_a_csv_tells_its_columns_apart(results):
    with (results / "reappearance" / "table.csv").open() as file:
        head = next(csv.reader(file))
    assert len(head) == len(set(head)) == 14


def test_lengths_stand_in_order_and_are_shown_as_a_curve():
    lines = [
        ScoredRun(row, f"p{prompt}", 0, {
            name: {"name": name, "value": 0.1 * prompt, "backend": "dis", "n": 1, "details": {}}
            for name in ("dynamic_degree_10s", "dynamic_degree_5s")
        })
        for row in ("none", "recap") for prompt in range(5)
    ]  # fmt: skip
    recipe = find_recipe("length")
    cells = build_cells(recipe, lines)
    assert [cell.measure for cell in cells[:2]] == ["dynamic_degree_5s", "dynamic_degree_10s"]
    first = figures_of(recipe, cells, lines)[0]
    assert "dynamic degree over length" in first and first.count("<polyline") == 2


def test_no_figure_is_empty():
    """Curves over a setting are only of tables that vary one."""
    recipe = find_recipe("identity")
    runs = [ScoredRun(row, f"p{n}", 0, score(0.1 * n)) for row in ("none", "recap") for n in range(5)]
    (figure,) = figures_of(recipe, build_cells(recipe, runs), runs)
    assert ">none<" in figure and ">recap<" in figure


def test_a_measure_without_a_value_has_no_figure_and_no_table():
    """And pages have plain words where files have names of code."""
    recipe = find_recipe("reappearance")
    about = {"backend": "standin:hsv-8x4x4 in whole picture", "n": 1, "details": {}}
    values = {"found_in_B": 0.5, "reappearance_subject": None}
    scores = {name: {"name": name, "value": value, **about} for name, value in values.items()}
    runs = [ScoredRun("none", f"p{n}", 0, scores) for n in range(5)]
    cells = build_cells(recipe, runs)
    (figure,) = figures_of(recipe, cells, runs)
    assert ">found in B<" in figure
    page = as_markdown(recipe, cells, {})
    assert "reappearance" not in page.partition("**")[2] and "found_in" not in page and "standin" not in page
    assert "**found in B** (judged by: colour histograms (in place of DINOv2) in whole picture)" in page


def test_the_probe_is_a_witness():
    """Two pictures alike are 1 apart from nothing; the probe's own judgements are tested with it."""
    witness = ProbeWitness()
    pictures = np.zeros((3, 128, 208, 3), np.uint8)
    found, colours = witness.look(pictures, "fox")
    assert found.shape == (3,) and colours.shape == (3, 3)
    red, blue = np.array([[1, 0, 0]], np.float32), np.array([[0, 0, 1]], np.float32)
    assert witness.likeness(red, red)[0, 0] == pytest.approx(1) and witness.likeness(red, blue)[0, 0] == 0
    shown = witness.where(pictures, "fox")
    assert shown.shape == (3, 8, 13) and (shown.any(axis=(1, 2)) == found).all()
    for ask in (witness.look, witness.where):
        with pytest.raises(ValueError, match="did you mean 'fox'"):
            ask(pictures, "foxx")
    with pytest.raises(ValueError, match="multiples of 16"):
        witness.look(pictures[:, :100], "fox")
