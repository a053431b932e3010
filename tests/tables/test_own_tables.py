"""Tables, memories and measures of a user: what changed is made again, and mistakes are said."""

from __future__ import annotations

import importlib
import json
import sys

import pytest

from recap.config import RunConfig
from recap.io.code import changed_code, code_of
from recap.io.report import SILENT, Reporter
from recap.run import generate, resume
from recap.show.comparison import compare
from recap.tables.ask import Ask
from recap.tables.generating import generate_and_score
from recap.tables.recipes import Recipe, find_recipe
from recap.tables.reproduce import How, reproduce
from recap.tables.rows import NONE, RECAP, SINK, Row
from recap.tables.runs import plan_runs

ASK = Ask(backbone="untrained", prompts=1, seeds=1, embedder="hsv", device="cpu", flow="classical")
MODULE = """
from dataclasses import dataclass
from recap.eval.judged import Measure
from recap.eval.scores import Score
from recap.memory.sink import SinkConfig
from recap.tables.recipes import Recipe
from recap.tables.rows import NONE, Row

@dataclass(frozen=True, slots=True)
class Mine(SinkConfig):
    reinforcement: float = {default}

def brightness(run):
    return [Score("brightness", {factor} * float(run.sampled.pictures.mean()), "native")]

def broken(run):
    raise KeyError("no such picture")

BRIGHTNESS = Measure("brightness", brightness, headlines=("brightness",))
BROKEN = Measure("broken", broken, headlines=("broken",))
EMPTY = Measure("empty", lambda run: [Score("empty", None, "native")], headlines=("empty",))
ODD = Measure("odd", lambda run: 0.5)

MEASURES = {measures}
OWN = Row("mine", {{"name": "{name}:Mine"}})
TABLE = Recipe("toy", "A toy", (NONE, OWN), MEASURES, seconds={seconds}, ours="mine")
"""
USUAL = {"default": 1.0, "factor": 1.0, "seconds": 1.5}


@pytest.fixture
def write(tmp_path, monkeypatch, request):
    """Write the module of a user, again and again, as she edits it."""
    name = "users_" + request.node.name.partition("[")[0][-40:]
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def write(measures=("BRIGHTNESS",), **values):
        listed = tuple(f"{name}:{measure}" for measure in measures)
        text = MODULE.format(**{**USUAL, **values}, measures=listed, name=name)
        (tmp_path / f"{name}.py").write_text(text)
        sys.modules.pop(name, None)
        importlib.invalidate_caches()
        return f"{name}:TABLE"

    yield write
    sys.modules.pop(name, None)


def make(table, out, said=None, **asked):
    notice = (lambda line: None) if said is None else said.append
    ask = Ask(**{**vars(ASK), **asked})
    return reproduce([table], ask, out, How(workers=1), notice=notice)


def means(out, measure="brightness"):
    cells = json.loads((out / "toy" / "table.json").read_text())["cells"]
    return {cell["row"]: cell["mean"] for cell in cells if cell["measure"] == measure}


def runs_in(out):
    return len((out / "runs.jsonl").read_text().splitlines())


def test_a_measure_that_was_edited_is_measured_again(write, tmp_path):
    out = tmp_path / "out"
    make(write(), out)
    before = means(out)
    make(write(factor=0.5), out)
    assert means(out) == pytest.approx({row: mean / 2 for row, mean in before.items()})
    assert runs_in(out) == 4
    # As it was before, its first scores are still there.
    make(write(), out)
    assert means(out) == before and runs_in(out) == 4


def test_a_measure_that_is_edited_while_a_table_is_made_counts_as_it_was(write, tmp_path):
    """The code that runs is the one that was read, whatever its file holds by now."""
    table, out, said = write(), tmp_path / "out", []
    file = tmp_path / f"{table.partition(':')[0]}.py"
    plain = file.read_text()

    def edit(line):
        said.append(line)
        file.write_text(plain.replace("1.0 * float", "0.5 * float"))

    done = reproduce([table], ASK, out, How(workers=1), notice=edit)
    assert said and not done.errors
    before = means(out)
    make(table, out)
    assert runs_in(out) == 2 and means(out) == before


def test_a_process_that_reads_an_edited_file_does_not_work_for_one_that_read_it_before(write, tmp_path):
    (run, *_) = plan_runs(find_recipe(write()), ASK)
    write(factor=0.5)
    with pytest.raises(ValueError, match=r"BRIGHTNESS'?: its file was edited after .*same command again"):
        generate_and_score(run.job, tmp_path)


def test_a_memory_that_was_edited_is_run_again_and_others_are_not(write, tmp_path):
    table = write()
    keys = [{json.loads(line)["key"] for line in _lines(table, tmp_path / "out")}]
    write(default=5.0)
    keys.append({json.loads(line)["key"] for line in _lines(table, tmp_path / "out")})
    assert len(keys[0]) == 2 and keys[0] < keys[1]
    # The measure is in the same file, so the row `none` was measured again under the key it had.
    assert len(keys[1]) == 3


def _lines(table, out):
    make(table, out)
    return (out / "runs.jsonl").read_text().splitlines()


def test_one_broken_measure_leaves_the_others_and_is_tried_once(write, tmp_path):
    out = tmp_path / "out"
    done = make(write(("BRIGHTNESS", "BROKEN")), out)
    assert done.left == 2 and len(done.errors) == 2
    assert all("BROKEN: KeyError: 'no such picture'" in why for why in done.errors.values())
    assert all("BRIGHTNESS" in line and "BROKEN" not in line for line in (out / "runs.jsonl").open())
    assert runs_in(out) == 2 and "retries" not in (out / "progress.txt").read_text()


def test_a_measure_that_returns_no_list_is_named(write, tmp_path):
    done = make(write(("ODD",)), tmp_path / "out")
    (why, *_) = done.errors.values()
    assert "measure is 'odd': its function returned 0.5; return a list of recap.eval.scores.Score" in why


def test_a_measure_without_any_value_is_said(write, tmp_path):
    said = []
    make(write(("BRIGHTNESS", "EMPTY")), tmp_path / "out", said)
    assert sum("EMPTY gave no value in any of 2 runs" in line for line in said) == 1
    assert not any("BRIGHTNESS gave" in line for line in said)


def test_the_same_name_with_another_length_is_refused(write, tmp_path):
    make(write(), tmp_path / "out")
    with pytest.raises(ValueError, match=r"it was begun with table_seconds 1\.5, not 2\.25"):
        make(write(seconds=2.25), tmp_path / "out")


def test_pages_show_the_command_that_was_given(write, tmp_path):
    table = write()
    make(table, tmp_path / "out")
    for name in ("table.md", "index.html"):
        assert f"recap reproduce {table}" in (tmp_path / "out" / "toy" / name).read_text()


def test_two_tables_of_one_name_are_not_made_at_once(write, tmp_path):
    table = write()
    module = importlib.import_module(table.partition(":")[0])
    module.OTHER = module.TABLE
    with pytest.raises(ValueError, match="have the same name, and so the same folder"):
        reproduce([table, table.replace("TABLE", "OTHER")], ASK, tmp_path / "out")


@pytest.mark.parametrize(
    ("rows", "ours", "said"),
    [
        ((SINK, NONE), "recap", "ours of 'mine' is 'recap': .*the rows are sink, none; .*ours='sink'"),
        ((SINK, SINK), "sink", "a row of 'mine' is 'sink': 2 rows have 1 names"),
        ((), "sink", r"rows of 'mine' is '\(\)': a table has at least one"),
    ],
)
def test_rows_that_cannot_be_compared_are_refused(rows, ours, said):
    with pytest.raises(ValueError, match=said):
        Recipe("mine", "Mine", rows, ("identity",), ours=ours)


def test_one_row_is_compared_with_nobody():
    assert Recipe("mine", "Mine", (SINK,), ("identity",)).rows == (SINK,)


@pytest.mark.parametrize("memory", [{"reinforcement": 5.0}, "sink"])
def test_a_row_without_the_name_of_its_memory_is_refused(memory):
    with pytest.raises(ValueError, match=r"memory of row 'mine' is .*has no \"name\"; for example"):
        Row("mine", memory)


def test_a_row_left_out_says_which_word_is_unknown(tmp_path):
    odd = Recipe("odd", "Odd", (RECAP, Row("typed", RECAP.memory, "flw")), ("dynamics",), seconds=1.5)
    assert odd.rows[1].unknown == "this version has no admission rule 'flw'"
    both = Row("both", {"name": "recpa"}, "flw")
    assert both.unknown == "this version has no memory 'recpa' and no admission rule 'flw'"
    assert not RECAP.unknown and not Row("own", {"name": "my:Memory"}, "my:Rule").unknown


def test_a_function_that_makes_no_recipe_is_refused(monkeypatch):
    module = type(sys)("users_recipes")
    module.takes = lambda number: None
    monkeypatch.setitem(sys.modules, "users_recipes", module)
    with pytest.raises(ValueError, match=r"table is 'users_recipes:takes': cannot be made \(TypeError"):
        find_recipe("users_recipes:takes")


def test_code_is_known_by_the_file_it_is_in(write, tmp_path):
    name = write().replace("TABLE", "Mine")
    config = {"memory": {"name": name}, "admission": {"name": "flow"}, "flow": "auto", "device": "cuda:0"}
    recorded = code_of(config)
    assert set(recorded) == {name} and not changed_code(recorded, config)
    # Runs of before had no such entry.
    assert not changed_code(None, config)
    write(default=3.0)
    assert changed_code(recorded, config) == [name]


def test_a_resumed_run_says_that_its_memory_changed(write, tmp_path):
    config = {"shots": [{"prompt": "a red boat", "seconds": 1.5}], "backbone": "untrained", "device": "cpu"}
    name, said = write().replace("TABLE", "Mine"), []
    generate(RunConfig.from_dict({**config, "memory": name}), tmp_path / "run", reporter=SILENT)
    reporter = Reporter(said.append)
    resume(tmp_path / "run", reporter=reporter, trust_code=True)
    assert not said
    write(default=3.0)
    resume(tmp_path / "run", reporter=reporter, trust_code=True)
    assert said == [f"{name} has changed since the run began: the rest is generated by the new code"]


def test_a_comparison_refuses_runs_of_code_that_changed(write, tmp_path):
    config = RunConfig.from_dict(
        {"shots": [{"prompt": "a red boat", "seconds": 1.5}], "backbone": "untrained", "device": "cpu"}
    )
    name = write().replace("TABLE", "Mine")
    compare(config, [{"name": "none"}, {"name": name}], tmp_path / "out")
    compare(config, [{"name": "none"}, {"name": name}], tmp_path / "out")
    write(factor=0.5)
    with pytest.raises(ValueError, match="changed since its run began; choose another folder"):
        compare(config, [{"name": "none"}, {"name": name}], tmp_path / "out")


@pytest.mark.parametrize("wrong", [{"value": "abc"}, {"value": [1]}, 3])
def test_scores_that_are_none_are_refused_by_their_file(write, tmp_path, wrong):
    table, out = write(), tmp_path / "out"
    make(table, out)
    lines = [json.loads(line) for line in (out / "runs.jsonl").read_text().splitlines()]
    (entry,) = (name for name in lines[0]["result"] if "BRIGHTNESS" in name)
    score = lines[0]["result"][entry]["brightness"]
    lines[0]["result"][entry]["brightness"] = {**score, **wrong} if isinstance(wrong, dict) else wrong
    (out / "runs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(ValueError, match=rf"runs\.jsonl.*BRIGHTNESS of run {lines[0]['key']} has no scores"):
        make(table, out)
