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
from recap.eval.witnesses import Box
from recap.registry import ADMISSIONS
from recap.tables.ask import Ask
from recap.tables.generating import generate_and_score
from recap.tables.recipes import find_recipe
from recap.tables.report import MARK, write_report
from recap.tables.reproduce import How, reproduce
from recap.tables.table import remarks

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
    # Three cuts, and ours in the panel.
    assert page.count("bank of recap") == 1 and page.count("stroke-dasharray") == 3 + 1
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
    # Of a language model, which this one asks nothing.
    answers = ()

    def find(self, pictures, subject):
        return [Box(0, 0, p.shape[1], p.shape[0]) if p.mean() > 5 else None for p in pictures]


def test_a_detector_gives_public_models_a_subject_score(tmp_path, monkeypatch):
    monkeypatch.setattr("recap.eval.judged.qwen_model", lambda source, device: WholePicture())
    monkeypatch.setattr("recap.eval.judged.QwenDetector", lambda model: model)
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
    with pytest.raises(ValueError, match="--scorers is 3: a process that generates"):
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
    rows = {row.name: not row.unknown for row in find_recipe("admission").rows}
    assert not rows["random"] and rows["recap"]
    notices = []

    def stop(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("recap.tables.reproduce.run_jobs", stop)
    with pytest.raises(KeyboardInterrupt):
        reproduce(["admission"], SMALL, tmp_path / "a", notice=notices.append)
    assert any("'random' is left out" in line for line in notices)


def test_the_report_holds_all_tables(results):
    page = write_report([results], results / "results.md").read_text()
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
    write_report([results], page)
    heading, tables = page.read_text().split(MARK)
    page.write_text(f"{heading}Seen by eye.\n\n{MARK}\nold tables")
    write_report([results], page)
    assert page.read_text() == f"{heading}Seen by eye.\n\n{MARK}{tables}"
    more = page.read_text() + "\n## Camera and object motion\n\n`recap reproduce motion`: ...\n"
    page.write_text(more)
    with pytest.raises(ValueError, match="a larger result of motion than 0 prompts"):
        write_report([results], page)
    assert page.read_text() == more
    grown = re.sub(r"prompts 2, seeds 1,", "prompts 2, seeds 5,", tables)
    page.write_text(f"{heading}{MARK}{grown}")
    with pytest.raises(ValueError, match="a larger result of retention than 2 prompts and 1 seeds"):
        write_report([results], page)
    assert page.read_text() == f"{heading}{MARK}{grown}"
    page.write_text("Somebody's notes")
    with pytest.raises(ValueError, match=r"--markdown .*no `recap report` has written"):
        write_report([results], page)
    assert page.read_text() == "Somebody's notes"
    for other in (tmp_path, tmp_path / "bytes"):
        (tmp_path / "bytes").write_bytes(b"\xff\xfe" + MARK.encode())  # would come back as other bytes
        with pytest.raises(ValueError, match="--markdown"):
            write_report([results], other)


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
    assert "Left out, as their runs are not there: sink." in write_report([tmp_path]).read_text()
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
            write_report([tmp_path])
    (mine / "table.json").write_text(json.dumps(whole))
    (mine / "table.md").unlink()
    with pytest.raises(ValueError, match="is no whole table"):
        write_report([tmp_path])
    assert (tmp_path / "report.html").read_bytes() == before


def test_a_report_of_nothing_is_refused(tmp_path):
    with pytest.raises(ValueError, match="holds no finished table"):
        write_report([tmp_path])


def test_a_csv_tells_its_columns_apart(results):
    with (results / "reappearance" / "table.csv").open() as file:
        head = next(csv.reader(file))
    assert len(head) == len(set(head)) == 15


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
