"""Which flow fills the bank of a table and which judges it: found out once, written down, and kept to."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import numpy as np
import pytest
from typer.testing import CliRunner

import recap.tables.reproduce as reproduction
from recap.cli.main import app
from recap.config import RunConfig
from recap.eval.motion_judge import build_motion_judge
from recap.eval.sampling import InMemoryClip
from recap.tables import suite_videos
from recap.tables.about import about_this
from recap.tables.batches import main, read_arguments
from recap.tables.drawn_file import RESULTS, append_lines, read_packed
from recap.tables.folder import claim_folder
from recap.tables.imported import import_table
from recap.tables.job import draw_and_score, job_of
from recap.tables.recipes import Ask, find_recipe, plan_runs
from recap.tables.reproduce import reproduce
from recap.tables.scoring import Seen, score

ONE = Ask(backbone="untrained", prompts=1, seeds=1, seconds=1.5)


@pytest.fixture
def drawn_here(monkeypatch):
    """Runs are drawn in this process: workers, once they are there, do not see what a test sets up."""

    def sweep(jobs, work, folder, **_):
        return [draw_and_score(json.loads(job.payload), str(folder / "jobs" / job.key)) for job in jobs]

    monkeypatch.setattr("recap.tables.reproduce.run_sweep", sweep)


def about_of(folder):
    return json.loads((folder / "table.json").read_text())["about"]


def test_every_way_to_a_table_asks_for_auto():
    assert Ask().flow == "auto" and Ask().judge_flow == "classical"
    assert read_arguments(["--out", "x"]).flow == "auto"
    assert read_arguments(["--out", "x"]).judge_flow == "classical"


def test_the_command_asks_for_auto_and_hands_on_who_judges(monkeypatch, tmp_path):
    asked = []

    def note(table, ask, *_, **__):
        asked.append(ask)
        return reproduction.Reproduction(tmp_path, 0, ())

    monkeypatch.setattr("recap.cli.reproduce.reproduce", note)
    for words in ((), ("--flow", "classical", "--judge-flow", "raft-small")):
        assert CliRunner().invoke(app, ["reproduce", "motion", *words]).exit_code == 0
    flows = [(ask.flow, ask.judge_flow) for ask in asked]
    assert flows == [("auto", "classical"), ("classical", "raft-small")]


def test_without_weights_a_table_says_once_that_its_flow_is_classical(drawn_here, tmp_path):
    lines = []
    reproduce("bank", ONE, tmp_path / "bank", embedder="hsv", workers=1, notice=lines.append)
    assert sum("flow: classical" in line for line in lines) == 1
    assert about_of(tmp_path / "bank")["flow of the bank"] == "classical"
    assert json.loads((tmp_path / "bank" / "record.json").read_text())["flow"] == "classical"
    assert "flow of the judge" not in about_of(tmp_path / "bank")  # nobody judged motion


def test_with_weights_it_is_raft_and_a_begun_folder_keeps_to_its_own(
    drawn_here, tmp_path, monkeypatch, random_raft
):
    reproduce("bank", ONE, tmp_path / "begun", embedder="hsv", workers=1, notice=lambda _: None)
    monkeypatch.setenv("RECAP_HOME", str(random_raft))
    reproduce("bank", ONE, tmp_path / "raft", embedder="hsv", workers=1, notice=pytest.fail)
    assert about_of(tmp_path / "raft")["flow of the bank"] == "raft-small"
    before = (tmp_path / "begun" / "results.jsonl").read_bytes()
    reproduce("bank", ONE, tmp_path / "begun", embedder="hsv", workers=1, notice=pytest.fail)
    assert (tmp_path / "begun" / "results.jsonl").read_bytes() == before
    with pytest.raises(ValueError, match="begun with flow 'classical', not 'raft-small'"):
        reproduce("bank", replace(ONE, flow="raft-small"), tmp_path / "begun", embedder="hsv")


@pytest.mark.parametrize("asked", [{"flow": "raft-small"}, {"judge_flow": "raft-small"}])
def test_named_raft_that_cannot_be_had_is_refused_before_anything_is_drawn(tmp_path, monkeypatch, asked):
    monkeypatch.setattr("recap.tables.reproduce.run_sweep", lambda *_, **__: pytest.fail("drawn"))
    ask = replace(ONE, **asked)
    with pytest.raises(ValueError, match=r"flow is 'raft-small'.*RECAP_OFFLINE"):
        reproduce("motion", ask, tmp_path / "out", embedder="hsv", notice=lambda _: None)
    assert not (tmp_path / "out").exists()
    words = [word for name, value in asked.items() for word in (f"--{name.replace('_', '-')}", value)]
    with pytest.raises(ValueError, match=r"flow is 'raft-small'.*RECAP_OFFLINE"):
        main(["--tables", "motion", "--backbone", "untrained", "--embedder", "hsv", "--device", "cpu",
              "--out", str(tmp_path / "batches"), *words])  # fmt: skip
    assert not (tmp_path / "batches" / RESULTS).exists()


def test_a_wrong_judge_is_refused_with_the_nearest(tmp_path):
    with pytest.raises(ValueError, match=r"--judge-flow is 'raft'.*did you mean 'raft-small'"):
        reproduce("motion", replace(ONE, judge_flow="raft"), tmp_path / "out", embedder="hsv")


def test_batches_without_weights_say_so_once_and_write_the_flow_down(tmp_path, capsys):
    words = ["--tables", "bank", "--backbone", "untrained", "--prompts", "1", "--seeds", "1", "--seconds", "1.5",
             "--embedder", "hsv", "--device", "cpu", "--scorers", "1", "--out", str(tmp_path)]  # fmt: skip
    assert main(words)
    assert capsys.readouterr().out.count("flow: classical") == 1
    (about,) = (line["about"] for line in read_packed(tmp_path / RESULTS) if "about" in line)
    assert about["ask"]["flow"] == "classical" and about["tables"]["bank"]["flow of the bank"] == "classical"


def test_batches_go_on_with_the_flow_they_began_with(tmp_path, monkeypatch, random_raft):
    ask = replace(ONE, flow="classical", judge_flow="raft-small")
    told = {"bank": about_this(find_recipe("bank"), ask, "hsv", "pictures")}
    old = asdict(ask)
    del old["judge_flow"]  # as written before there was one
    append_lines(tmp_path / RESULTS, [{"about": {"ask": old, "embedder": "hsv", "tables": told}}])
    monkeypatch.setenv("RECAP_HOME", str(random_raft))
    words = ["--tables", "bank", "--backbone", "untrained", "--prompts", "1", "--seeds", "1", "--seconds", "1.5",
             "--embedder", "hsv", "--device", "cpu", "--scorers", "1", "--out", str(tmp_path)]  # fmt: skip
    assert main(words)
    abouts = [line["about"] for line in read_packed(tmp_path / RESULTS) if "about" in line]
    assert [about["ask"]["flow"] for about in abouts] == ["classical"] * 2
    import_table("bank", tmp_path, tmp_path / "table")
    assert about_of(tmp_path / "table")["flow of the bank"] == "classical"


def test_a_suite_goes_on_with_the_flow_it_began_with(tmp_path, monkeypatch, random_raft):
    (tmp_path / "lines.txt").write_text("\n".join(f"prompt {number}" for number in range(128)))
    template = {"shots": [{"prompt": "", "seconds": 1}], "backbone": "untrained", "flow": "auto"}
    order = suite_videos.Order(
        "moviegen128", RunConfig.from_dict(template), tmp_path / "lines.txt", num=1, seeds=1
    )
    lines = []
    for _ in range(2):
        suite_videos.draw_suite(order, tmp_path, tmp_path / "videos", workers=1, notice=lines.append)
        record = json.loads((tmp_path / "videos-work" / "record.json").read_text())
        assert record["flow"] == "classical"
        monkeypatch.setenv("RECAP_HOME", str(random_raft))
    assert len(lines) == 1 and "flow: classical" in lines[0]


# Who judges motion


def test_judges_of_motion_mark_their_scores(monkeypatch, random_raft):
    pictures = np.random.default_rng(0).integers(0, 256, (9, 48, 64, 3), np.uint8)
    recipe = find_recipe("motion")
    planned = next(plan_runs(recipe, ONE))
    monkeypatch.setenv("RECAP_HOME", str(random_raft))
    found = {}
    for judge in ("classical", "raft-small"):
        data = job_of(planned, recipe, "hsv", judge_flow=judge).data
        scores = score(Seen(data, InMemoryClip(pictures, 16), []), ["motion", "dynamics", "length"])
        looked = [*scores["motion"], scores["dynamics"][1], *scores["length"]]
        assert {each.backend for each in looked} == {"dis" if judge == "classical" else judge}
        found[judge] = scores["motion"][2].value
    assert found["classical"] != found["raft-small"]


def test_a_judge_by_name(monkeypatch, random_raft):
    lines = []
    assert build_motion_judge("auto", notice=lines.append).backend == "dis" and len(lines) == 1
    monkeypatch.setenv("RECAP_HOME", str(random_raft))
    assert build_motion_judge("auto", notice=pytest.fail).backend == "raft-small"
    assert build_motion_judge(notice=pytest.fail).backend == "dis"


def test_the_header_says_which_judge_was_used():
    for judge in ("classical", "raft-small"):
        about = about_this(find_recipe("motion"), replace(ONE, judge_flow=judge), "hsv", "pictures", "abc")
        assert about["flow of the judge"] == judge


def test_jobs_of_the_usual_judge_are_those_that_were_done_before_there_was_a_choice():
    ask = Ask(backbone="untrained", prompts=1, seeds=1, seconds=6, flow="classical")
    for table in ("main", "reappearance", "retention"):
        recipe = find_recipe(table)
        planned = next(plan_runs(recipe, ask))
        usual = job_of(planned, recipe, "hsv")
        assert usual.data.keys() == {"config", "measures", "subject", "embedder", "detector"}
        other = job_of(planned, recipe, "hsv", judge_flow="raft-small")
        assert (other.key != usual.key) == (table != "retention")  # the last looks at no motion


def test_a_folder_begun_before_there_was_a_choice_is_of_the_usual_judge(tmp_path):
    record = {"table": "motion", "prompts": 1, "seeds": 1}
    (tmp_path / "record.json").write_text(json.dumps(record))
    claim_folder(tmp_path, {**record, "judge_flow": "classical"}, set())
    with pytest.raises(ValueError, match="begun with judge_flow 'classical', not 'raft-small'"):
        claim_folder(tmp_path, {**record, "judge_flow": "raft-small"}, set())
