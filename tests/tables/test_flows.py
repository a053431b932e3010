"""Which flow fills the bank of a table and which judges it: found out once, written down, and kept to."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from tables_help import data_of, jobs_of
from typer.testing import CliRunner

import recap.tables.reproduce as reproduction
from recap.cli.main import app
from recap.eval.judged import JudgedRun, build_motion_judge
from recap.eval.metrics import find_measure
from recap.eval.sampling import InMemoryClip
from recap.tables.ask import Ask
from recap.tables.folder import about_table
from recap.tables.generating import generate_and_score
from recap.tables.preflight import settle
from recap.tables.recipes import find_recipe
from recap.tables.reproduce import read_arguments, reproduce
from recap.tables.runner import Progress
from recap.tables.table import ScoredRun, build_cells

ONE = Ask(backbone="untrained", prompts=1, seeds=1, seconds=1.5, embedder="hsv", device="cpu")


@pytest.fixture
def generated_here(monkeypatch):
    """Runs are generated in this process: workers, once they are there, do not see what a test sets up."""

    def run(jobs, store, executor, **_):
        executor.close()
        for job in jobs:
            store.add(job.key, generate_and_score(job, store.folder / "shown" / job.key))
        return Progress(len(jobs), len(jobs))

    monkeypatch.setattr("recap.tables.reproduce.run_jobs", run)


def about_of(folder):
    return json.loads((folder / "table.json").read_text())["about"]


def test_every_way_to_a_table_asks_for_auto():
    assert Ask().flow == "auto" and Ask().judge_flow == "classical" and Ask().device == "auto"
    arguments = read_arguments(["bank"])
    assert (arguments.flow, arguments.judge_flow, arguments.device) == ("auto", "classical", "auto")


def test_the_command_asks_for_auto_and_hands_on_who_judges(monkeypatch):
    asked = []

    def note(tables, ask, *_, **__):
        asked.append(ask)
        return reproduction.Reproduction({}, 0)

    monkeypatch.setattr("recap.cli.reproduce.reproduce", note)
    for words in ((), ("--flow", "classical", "--judge-flow", "raft-small")):
        assert CliRunner().invoke(app, ["reproduce", "motion", *words]).exit_code == 0
    flows = [(ask.flow, ask.judge_flow, ask.device) for ask in asked]
    assert flows == [("auto", "classical", "auto"), ("classical", "raft-small", "auto")]


def test_without_weights_a_table_says_once_that_its_flow_is_classical(generated_here, tmp_path):
    lines = []
    reproduce(["bank"], ONE, tmp_path, notice=lines.append)
    assert sum("flow: classical" in line for line in lines) == 1
    assert about_of(tmp_path / "bank")["flow of the bank"] == "classical"
    assert json.loads((tmp_path / "bank" / "record.json").read_text())["flow"] == "classical"
    assert "flow of the judge" not in about_of(tmp_path / "bank")  # nobody judged motion


def test_a_table_of_the_embedded_model_on_a_cpu_has_the_paper_s_flow_unless_another_is_named(
    generated_here, tmp_path, monkeypatch, random_raft
):
    """Runs have world-flow there; tables of all models and devices are meant to be compared."""
    recipes, ask = [find_recipe("bank")], Ask(prompts=1, seeds=1, embedder="hsv", device="cpu")
    assert settle(ask, recipes, {}, lambda _: None).flow == "classical"
    monkeypatch.setenv("RECAP_HOME", str(random_raft))
    assert settle(ask, recipes, {}, pytest.fail).flow == "raft-small"
    assert settle(replace(ask, prompts=2, half="search"), recipes, {}, pytest.fail).flow == "raft-small"
    reproduce(["bank"], replace(ask, seconds=1.5, flow="world-flow"), tmp_path, notice=pytest.fail)
    assert about_of(tmp_path / "bank")["flow of the bank"] == "world-flow"


def test_with_weights_it_is_raft_and_a_begun_folder_keeps_to_its_own(
    generated_here, tmp_path, monkeypatch, random_raft
):
    reproduce(["bank"], ONE, tmp_path / "begun", notice=lambda _: None)
    monkeypatch.setenv("RECAP_HOME", str(random_raft))
    reproduce(["bank"], ONE, tmp_path / "raft", notice=pytest.fail)
    assert about_of(tmp_path / "raft" / "bank")["flow of the bank"] == "raft-small"
    before = (tmp_path / "begun" / "runs.jsonl").read_bytes()
    reproduce(["bank"], ONE, tmp_path / "begun", notice=pytest.fail)
    assert (tmp_path / "begun" / "runs.jsonl").read_bytes() == before
    with pytest.raises(ValueError, match="begun with flow 'classical', not 'raft-small'"):
        reproduce(["bank"], replace(ONE, flow="raft-small"), tmp_path / "begun")


@pytest.mark.parametrize("asked", [{"flow": "raft-small"}, {"judge_flow": "raft-small"}])
def test_named_raft_that_cannot_be_had_is_refused_before_anything_is_generated(tmp_path, monkeypatch, asked):
    monkeypatch.setattr("recap.tables.reproduce.run_jobs", lambda *_, **__: pytest.fail("generated"))
    with pytest.raises(ValueError, match=r"flow is 'raft-small'.*RECAP_OFFLINE"):
        reproduce(["motion"], replace(ONE, **asked), tmp_path / "out", notice=lambda _: None)
    assert not (tmp_path / "out").exists()


def test_a_wrong_judge_is_refused_with_the_nearest(tmp_path):
    with pytest.raises(ValueError, match=r"--judge-flow is 'raft'.*did you mean 'raft-small'"):
        reproduce(["motion"], replace(ONE, judge_flow="raft"), tmp_path / "out")


def test_a_flow_that_knows_one_world_judges_none(tmp_path):
    with pytest.raises(
        ValueError, match=r"--judge-flow is 'world-flow'.*known: auto, both, classical, raft-small"
    ):
        reproduce(["motion"], replace(ONE, judge_flow="world-flow"), tmp_path / "out")


# Who judges motion


def test_judges_of_motion_mark_their_scores(monkeypatch, random_raft):
    pictures = np.random.default_rng(0).integers(0, 256, (9, 48, 64, 3), np.uint8)
    monkeypatch.setenv("RECAP_HOME", str(random_raft))
    found = {}
    for judge in ("classical", "raft-small"):
        run = JudgedRun(
            data_of("motion", backbone="untrained", judge_flow=judge), InMemoryClip(pictures, 16), []
        )
        moved, moving, lengths = (find_measure(name).score(run) for name in ("motion", "dynamics", "length"))
        looked = [*moved, moving[1], *lengths]
        assert {each.backend for each in looked} == {"dis" if judge == "classical" else judge}
        found[judge] = moved[2].value
    assert found["classical"] != found["raft-small"]


def test_two_judges_of_motion_have_columns_of_their_own(monkeypatch, random_raft):
    pictures = np.random.default_rng(0).integers(0, 256, (9, 48, 64, 3), np.uint8)
    monkeypatch.setenv("RECAP_HOME", str(random_raft))
    one, two = (
        JudgedRun(data_of("motion", backbone="untrained", judge_flow=judge), InMemoryClip(pictures, 16), [])
        for judge in ("raft-small", "both")
    )
    both = {each.name: each for each in find_measure("dynamics").scores(two)}
    assert both["dynamic_degree"].backend == "dis" and both["dynamic_degree_by_raft"].backend == "raft-small"
    # What needs no flow is there once.
    assert set(both) == {each.name for each in find_measure("dynamics").scores(one)} | {
        "dynamic_degree_by_raft"
    }
    moved = {each.name: each.value for each in find_measure("motion").scores(two)}
    alone = {each.name: each.value for each in find_measure("motion").scores(one)}
    assert {name: moved[f"{name}_by_raft"] for name in alone} == alone and moved["total_flow"] != alone[
        "total_flow"
    ]
    runs = [
        ScoredRun(row, f"p{n}", 0, {name: each.as_dict() for name, each in both.items()})
        for row in ("none", "recap") for n in range(5)
    ]  # fmt: skip
    cells = [cell for cell in build_cells(find_recipe("main"), runs) if cell.row == "none"]
    assert [cell.measure for cell in cells[:2]] == ["dynamic_degree", "dynamic_degree_by_raft"]
    assert cells[0].paper == cells[1].paper == 0.275 and cells[1].texts()[5] == "not visible (< 0.0333)"


def test_a_judge_by_name(monkeypatch, random_raft):
    lines = []
    assert build_motion_judge("auto", notice=lines.append).backend == "dis" and len(lines) == 1
    monkeypatch.setenv("RECAP_HOME", str(random_raft))
    assert build_motion_judge("auto", notice=pytest.fail).backend == "raft-small"
    assert build_motion_judge(notice=pytest.fail).backend == "dis"


def test_the_header_says_which_judge_was_used():
    for judge in ("classical", "raft-small"):
        about = about_table(find_recipe("motion"), replace(ONE, judge_flow=judge), [], [])
        assert about["flow of the judge"] == judge


def test_results_of_two_judges_are_kept_apart():
    one, other = (jobs_of("motion", judge_flow=judge)[0].key for judge in ("classical", "raft-small"))
    assert one != other
