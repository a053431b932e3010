"""Scored folders side by side, and tables of the paper from prompts to a page, with the stand-in for VBench."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from statistics import fmean

import numpy as np
import pytest
from typer.testing import CliRunner

from recap.cli import main
from recap.tables.report import write_report
from recap_vbench import suites
from recap_vbench.records import write_record, write_scores
from recap_vbench.scores import DIMENSIONS, QUALITY, dimension_score
from recap_vbench.suites import find_suite
from recap_vbench.table import read_scored, shares
from recap_vbench.whole import SuiteTables, make_tables

DIGEST = "d" * 64
PROMPTS, SEEDS = 12, 2


def scored(
    folder, better=0.0, *, digest=DIGEST, backend="vbench 0.1.5", only=tuple(DIMENSIONS), complete=True
):
    """Write scores as `recap vbench run` does: quality on all prompts, a semantic dimension on some of them."""
    suite = find_suite("vbench128")
    for name in only:
        # What a video is like depends on dimension, prompt and seed; `better` is added to all.
        dice = np.random.default_rng(list(DIMENSIONS).index(name))
        prompts = range(PROMPTS) if name in QUALITY else range(0, PROMPTS, 3)
        videos = [f"prompt {p}-{s}.mp4" for p in prompts for s in range(SEEDS)]
        scale = 100 if name == "imaging_quality" else 1
        clips = {v: [scale * (x + better) for x in dice.uniform(0.2, 0.8, 3)] for v in videos}
        if name == "color":
            # VBench drops clips of this one, so that its mean over clips is not the one over videos.
            clips[videos[0]] = clips[videos[0]][:1]
        score = dimension_score(name, backend, clips, {}).as_dict()
        record = {
            "key": name, "complete": complete, "suite": suite.name, "prompts_sha256": digest, "score": score,
            "settings": {"static_filter": False}, "versions": {"vbench": "0.1.5"}, "clips": clips, "sources": {},
            "num_videos_of_suite": len(videos),
        }  # fmt: skip
        write_record(folder, suite, name, record)
    return write_scores(folder, suite, digest)


def invoke(*words):
    return CliRunner().invoke(main.app, [str(word) for word in words])


def table(out):
    with (out / "table.csv").open() as file:
        return {(line["row"], line["measure"]): line for line in csv.DictReader(file)}


def test_shares_of_videos_have_the_scores_as_their_means(tmp_path):
    scores = scored(tmp_path)
    found = shares(folder := read_scored(tmp_path))
    assert len(folder.videos) == PROMPTS * SEEDS
    for name in ("quality", "semantic", "total"):
        assert fmean(found[name].values()) == pytest.approx(scores[name], abs=1e-12)
    for name, values in folder.values.items():
        assert fmean(values.values()) == pytest.approx(scores["dimensions"][name]["value"], abs=1e-12)


def test_folders_side_by_side_are_paired_and_have_the_papers_column(tmp_path):
    base, ours = scored(tmp_path / "none-vbench"), scored(tmp_path / "recap-vbench", 0.1)
    done = invoke(
        "vbench", "table", tmp_path / "none", tmp_path / "recap-vbench",
        "--paper", "Self-Forcing", "--paper", "Self-Forcing+Ours", "--out", tmp_path / "out",
    )  # fmt: skip
    assert done.exit_code == 0, done.exception
    assert done.stdout.strip() == str(tmp_path / "out" / "index.html")
    cells = table(tmp_path / "out")
    assert len(cells) == 2 * (len(DIMENSIONS) + 3)
    total, mine = cells["none", "total"], cells["recap", "total"]
    assert float(total["mean"]) == pytest.approx(base["total"], rel=1e-5)
    assert float(mine["mean"]) == pytest.approx(ours["total"], rel=1e-5)
    assert (total["paper"], mine["paper"]) == ("0.759", "0.795")
    assert float(total["ours_minus_this"]) == pytest.approx(ours["total"] - base["total"], rel=1e-5)
    assert total["prompts"] == str(PROMPTS) and total["ours_higher"] == ""
    moves = cells["none", "dynamic_degree"]
    # Every pair differs by the same amount: the interval is that, and all prompts say the same.
    assert [float(moves[n]) for n in ("ours_minus_this", "difference_low", "difference_high")] == [0.1] * 3
    assert float(moves["p_by_prompts"]) == pytest.approx(2 / 2**PROMPTS) and moves["paper"] == "0.275"
    assert moves["ours_higher"] == "1"
    text = (tmp_path / "out" / "table.md").read_text()
    assert text.index("**total**") < text.index("**quality**") < text.index("**subject consistency**")
    # A report has it like any other table.
    assert "folders side by side" in write_report([tmp_path]).read_text()


def test_without_all_dimensions_there_are_no_sums(tmp_path):
    scored(tmp_path / "a", only=QUALITY)
    scored(tmp_path / "b", 0.1, complete=False)
    assert invoke("vbench", "table", tmp_path / "a", tmp_path / "b", "--out", tmp_path / "out").exit_code == 0
    names = {(row, measure) for row, measure in table(tmp_path / "out") if measure not in DIMENSIONS}
    assert names == {("a", "quality")}


@pytest.mark.parametrize(
    ("other", "words", "message"),
    [
        ({"digest": "e" * 64}, (), "its list of prompts is e"),
        ({"backend": "vbench 0.2"}, (), "its backend is vbench 0.2"),
        ({}, ("--ours", "c"), "is none of the rows"),
        ({}, ("--paper", "Self-Forcing"), "there are 2 folders"),
        ({}, ("--paper", "", "--paper", "Ours"), "the paper's main table has no such row"),
    ],
)
def test_what_does_not_compare_is_refused_and_nothing_written(tmp_path, other, words, message):
    scored(tmp_path / "a")
    scored(tmp_path / "b", **other)
    done = invoke("vbench", "table", tmp_path / "a", tmp_path / "b", *words, "--out", tmp_path / "out")
    assert isinstance(done.exception, ValueError) and message in str(done.exception)
    assert not (tmp_path / "out").exists()


def test_bad_folders_are_refused(tmp_path):
    for folder, message in ((tmp_path / "none", "has no scores.json"), (tmp_path / "a", "is not what")):
        if folder.name == "a":
            scored(folder)
            (folder / "scores.json").write_text("{}")
        done = invoke("vbench", "table", folder, "--out", tmp_path / "out")
        assert isinstance(done.exception, ValueError) and message in str(done.exception)
    done = invoke("vbench", "table", tmp_path / "a", tmp_path / "b" / "a", "--out", tmp_path / "out")
    assert "there is a row 'a' already" in str(done.exception)
    record = tmp_path / "b"
    scored(record)
    broken = record / "dimensions" / "scene.json"
    broken.write_text(json.dumps({**json.loads(broken.read_text()), "clips": {}}))
    assert "is not what" in str(invoke("vbench", "table", record, "--out", tmp_path / "out").exception)


def test_a_larger_table_is_never_replaced(tmp_path):
    for name in "abc":
        scored(tmp_path / name)
    places = [tmp_path / name for name in "abc"]
    assert invoke("vbench", "table", *places, "--out", tmp_path / "out").exit_code == 0
    done = invoke("vbench", "table", *places[:2], "--out", tmp_path / "out")
    assert "it holds a larger result, with the rows c" in str(done.exception)
    # Nor by other folders under the same names.
    before = (tmp_path / "out" / "table.csv").read_bytes()
    swapped = [f"a={places[1]}", f"b={places[0]}", places[2]]
    done = invoke("vbench", "table", *swapped, "--out", tmp_path / "out")
    assert "its row a is of ../a, not of ../b" in str(done.exception)
    assert (tmp_path / "out" / "table.csv").read_bytes() == before
    assert invoke("vbench", "table", *places, "--out", tmp_path / "out").exit_code == 0


def test_what_is_not_of_vbench_or_not_installed_is_refused(tmp_path):
    words = ("--suite", "vbench128", "--backbone", "untrained", "--out", tmp_path / "out")
    for more, message in (
        (("identity", *words), "the paper's scores of it are not VBench's"),
        (("mian", *words), "mian"),
        (("main", *words, "--embedder", "dinov2"), "VBench judges a suite"),
        (("main", *words, "--rows", 3), "VBench judges a suite"),
        (("main", *words), "run `recap vbench setup` first"),
    ):
        done = invoke("reproduce", *more)
        assert isinstance(done.exception, ValueError) and message in str(done.exception), done.exception
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_table_of_the_paper_in_one_go(environment, tmp_path, monkeypatch):
    """Prompts, videos, scores and a table; the next table shares what is the same, and a second call does nothing."""
    smaller = replace(suites.SUITES["vbench128"], num_entries=11, seeds=1)
    monkeypatch.setitem(suites.SUITES, "vbench128", smaller)
    monkeypatch.setattr(suites, "GROUPS_OF_128", dict.fromkeys(suites.GROUPS_OF_128, 1))
    monkeypatch.setenv("STANDIN_CALLS", str(tmp_path / "calls"))
    monkeypatch.setenv("STANDIN_DETECTRON", "1")
    monkeypatch.delenv("VBENCH_CACHE_DIR", raising=False)
    asked = SuiteTables(("main",), "vbench128", "untrained", flow="classical", device="cpu", seconds=2.0)
    notes: list[str] = []
    (page,) = make_tables(asked, environment, tmp_path / "out", notes.append)
    assert page == tmp_path / "out" / "main-vbench128-untrained" / "index.html" and page.is_file()
    cells = table(page.parent)
    assert {row for row, _ in cells} == {"none", "sink", "recap"}
    assert cells["recap", "total"]["paper"] == "0.795" and float(cells["recap", "total"]["mean"]) > 0
    assert cells["sink", "subject_consistency"]["n"] == "11"
    assert (
        "`recap reproduce main --suite vbench128 --backbone untrained`"
        in (page.parent / "table.md").read_text()
    )
    judged = (tmp_path / "calls").read_text()
    made = sorted(path.name for path in (tmp_path / "out" / "vbench128").iterdir())
    assert [name.partition("-")[0] for name in made] == ["none"] * 3 + ["recap"] * 3 + ["sink"] * 3
    make_tables(asked, environment, tmp_path / "out", notes.append)
    assert (tmp_path / "calls").read_text() == judged
    with pytest.raises(ValueError, match="it was begun with length '2 s', not '3 s'"):
        make_tables(replace(asked, seconds=3.0), environment, tmp_path / "out", notes.append)
    # Its rows `none` and `recap` are `sink` and `recap` of the first.
    two = replace(asked, tables=("components",))
    kept = [two.folder(row, tmp_path / "out").is_dir() for row in two.recipes()[0].rows]
    assert kept == [True, False, False, True]


def test_sweeps_have_the_papers_sums():
    capacity, lambdas = SuiteTables(("capacity", "lambda"), "vbench128", "infinite-forcing").recipes()
    totals = [row.printed["total"] for row in capacity.rows]
    assert totals == pytest.approx([0.796, 0.797, 0.797, 0.798, 0.798, 0.793])
    assert [row.printed["quality"] for row in lambdas.rows][:2] == pytest.approx([0.828, 0.83])
    assert lambdas.rows[2].printed["semantic"] == pytest.approx(0.657)
