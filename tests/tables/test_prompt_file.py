"""Prompts of a file in place of ours, for tables of one scene."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from recap.cli import main
from recap.errors import RecapError
from recap.tables.ask import Ask
from recap.tables.recipes import TABLES
from recap.tables.runs import plan_runs
from recap.tables.scripts import MOST_PROMPTS


def planned(table, file, **asked):
    return list(plan_runs(TABLES[table], Ask(prompt_file=str(file), device="cpu", **asked)))


@pytest.fixture
def write(tmp_path):
    def write(text):
        file = tmp_path / "prompts.txt"
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
        return file

    return write


def test_every_line_is_a_prompt_and_may_name_its_subject(write):
    file = write("a red boat at sea\tthe boat\n\n  two dogs run  \n")
    runs = planned("motion", file, prompts=2, seeds=1, backbone="untrained")
    assert [run.script.shots[0].prompt for run in runs[::3]] == ["a red boat at sea", "two dogs run"]
    assert [run.script.subject for run in runs[::3]] == ["the boat", "two dogs run"]
    assert {run.row.name for run in runs} == {"none", "sink", "recap"}


def test_in_the_embedded_world_the_subject_is_who_is_named(write):
    (run, *_) = planned("motion", write("a fox on a beach by day"), prompts=1, seeds=1)
    assert run.script.subject == "fox"


def test_runs_of_our_own_prompts_are_shared_with_those_of_a_file(write):
    own = next(plan_runs(TABLES["motion"], Ask(prompts=1, device="cpu")))
    (same, *_) = planned("motion", write(own.script.shots[0].prompt), prompts=1)
    assert same.job.key == own.job.key


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("", "has 0 prompts"),
        (b"\xff\xfe", "is not text"),
        ("\tthe boat", "line 1.*no prompt before the tab"),
        ("a fox\n" * (MOST_PROMPTS + 1), f"has {MOST_PROMPTS + 1} prompts"),
    ],
)
def test_what_is_no_list_of_prompts_is_refused(write, text, wrong):
    with pytest.raises(RecapError, match=f"--prompt-file.*{wrong}"):
        planned("motion", write(text), prompts=1, backbone="untrained")


def test_nobody_the_embedded_world_knows_is_refused(write):
    with pytest.raises(RecapError, match=r"line 2.*names nobody"):
        planned("motion", write("a fox on a beach by day\na teapot"), prompts=2)


def test_more_prompts_than_the_file_has_are_refused(write):
    with pytest.raises(RecapError, match="--prompts is 2: the set has 1"):
        planned("motion", write("a fox on a beach by day"), prompts=2)


def test_tables_of_several_shots_take_none(write):
    with pytest.raises(RecapError, match=r"--prompt-file.*the prompts of 'reappearance'"):
        planned("reappearance", write("a fox on a beach by day"), prompts=1)


def test_a_table_of_a_file_says_so_and_has_all_its_prompts(write, tmp_path):
    file = write("a fox on a beach by day\na cat in a forest by night\n")
    words = f"reproduce bank --seeds 1 --seconds 3 --flow classical --device cpu --embedder hsv --prompt-file {file}"
    done = CliRunner().invoke(main.app, [*words.split(), "--out", str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    text = (tmp_path / "out" / "bank" / "table.md").read_text()
    assert "suite prompts of prompts.txt" in text and "prompts 2" in text


def test_a_file_that_is_not_there_is_refused(tmp_path):
    done = CliRunner().invoke(main.app, ["reproduce", "bank", "--prompt-file", str(tmp_path / "none.txt")])
    assert "--prompt-file" in str(done.exception) and "cannot be read" in str(done.exception)
