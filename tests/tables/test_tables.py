"""Every table of the paper as run configs, and the prompt sets behind them."""

from __future__ import annotations

import csv
from dataclasses import replace

import pytest

from recap.backbones.tiny.vocabulary import SCENES, TIMES, parse_prompt
from recap.config import RunConfig
from recap.eval.metrics import all_measures, find_measure
from recap.eval.scores import Score
from recap.tables.ask import Ask
from recap.tables.baselines import on_backbone
from recap.tables.folder import FIRST_PROMPT, begin_folder, check_folder
from recap.tables.recipes import TABLES, find_recipe
from recap.tables.reproduce import How, reproduce
from recap.tables.runner import ResultStore
from recap.tables.runs import LOOK, TableRuns, plan_runs
from recap.tables.scripts import entering_scripts, identity_scripts, reappearance_scripts, scripts

REAL = "self-forcing"


@pytest.mark.parametrize("name", TABLES)
def test_every_table_gives_configs_that_survive_a_file(name):
    recipe = find_recipe(name)
    assert recipe.name == name and set(recipe.measures) <= set(all_measures())
    assert recipe.ours in {row.name for row in recipe.rows}
    runs = list(plan_runs(recipe, Ask(prompts=2, seeds=2)))
    rows = [row for row in recipe.rows if not row.unknown]
    assert len(runs) == 4 * len(rows)
    assert len({(run.row.name, run.script.name, run.seed) for run in runs}) == len(runs)
    for run in runs:
        assert RunConfig.from_dict(run.config.to_dict()) == run.config


@pytest.mark.parametrize("name", TABLES)
def test_a_table_says_what_its_banks_are_made_of_if_it_has_any(name):
    recipe = find_recipe(name)
    assert any(row.memory["name"] == "recap" for row in recipe.rows)
    assert recipe.measures.count("content") == 1
    bare = replace(recipe, rows=recipe.rows[:1], measures=("identity",))
    assert ("content" in bare.measures) == (recipe.rows[0].memory["name"] == "recap")


def test_less_than_one_is_nothing_to_ask_for():
    for asked in ({"prompts": 0}, {"prompts": -1}, {"seeds": 0}):
        with pytest.raises(ValueError, match=r"is (0|-1): must be 1 or more"):
            Ask(**asked)


def test_too_much_is_refused_before_anything_is_planned():
    """A slip of the keyboard once planned runs until memory was full, or as many processes as runs."""
    with pytest.raises(ValueError, match=r"--seeds is 99999999999999: at most 1,000"):
        Ask(seeds=99_999_999_999_999)
    for name in ("workers", "rows", "scorers"):
        with pytest.raises(ValueError, match=rf"--{name} is 99999999: at most 1,024"):
            How(**{name: 99_999_999})


def test_arms_are_paired_and_prompts_have_their_own_seeds():
    runs = list(plan_runs(find_recipe("identity"), Ask(prompts=2, seeds=2)))
    for start in range(0, len(runs), 4):
        assert len({(run.seed, run.script) for run in runs[start : start + 4]}) == 1
    assert len({run.seed for run in runs}) == 4


def test_what_confirms_had_no_part_in_the_search():
    recipe = find_recipe("reappearance")
    search, confirm = (list(plan_runs(recipe, Ask(half=half))) for half in ("search", "confirm"))
    prompts = [{run.script.name for run in runs} for runs in (search, confirm)]
    assert [len(p) for p in prompts] == [10, 10] and not prompts[0] & prompts[1]
    assert prompts[0] | prompts[1] == {run.script.name for run in plan_runs(recipe, Ask())}
    every = {run.seed for table in TABLES.values() for run in plan_runs(table, Ask())}
    assert {run.seed for run in search} <= every and not {run.seed for run in confirm} & every
    # The search is part of the whole table; to confirm, a row has as many runs as a whole table's.
    assert {run.job.key for run in search} < {run.job.key for run in plan_runs(recipe, Ask())}
    shown = [run for run in confirm if LOOK in run.job.wants]
    assert len(confirm) == 100 * len(recipe.rows) and len(shown) == len(recipe.rows)
    # The last fresh seed is still the prompt's own.
    assert Ask(half="confirm", seeds=250).own_seeds(5)[-1] < 1000
    for ask, limit in (
        ({"half": "first"}, "search or confirm"),
        ({"half": "search", "prompts": 1}, "no halves"),
        ({"half": "confirm", "seeds": 251}, "--seeds is 251: with --half at most 250"),
    ):
        with pytest.raises(ValueError, match=limit):
            Ask(**ask)


def test_a_half_of_other_prompts_is_another_question(tmp_path):
    """19 and 20 prompts both have ten in the half that confirms, of which nine are the same."""
    begun = {"table": "reappearance", "half": "confirm", FIRST_PROMPT: 10, "prompts": 10, "seeds": 10}
    begin_folder(tmp_path / "new", begun)
    check_folder(tmp_path / "new", begun, ())
    with pytest.raises(ValueError, match=f"begun with {FIRST_PROMPT} 10, not 9"):
        check_folder(tmp_path / "new", begun | {FIRST_PROMPT: 9}, ())
    with pytest.raises(ValueError, match="begun with half 'confirm', not ''"):
        check_folder(tmp_path / "new", {"table": "reappearance", "prompts": 20, "seeds": 10}, ())
    # Folders from before it was noted are believed.
    begin_folder(tmp_path / "old", {name: begun[name] for name in begun if name != FIRST_PROMPT})
    check_folder(tmp_path / "old", begun, ())


def test_a_timed_run_is_no_run_of_a_batch():
    keys = {
        name: {run.job.key for run in plan_runs(find_recipe(name), Ask())} for name in ("time", "capacity")
    }
    assert not keys["time"] & keys["capacity"]
    assert not keys["time"] & {run.job.key for run in plan_runs(find_recipe("retention-5min"), Ask())}


def test_settings_of_the_paper():
    rows = {row.name: row for row in find_recipe("components").rows}
    assert rows["sink"].memory == {"name": "sink", "reinforcement": 5.0}
    assert rows["bank"].memory["reinforcement"] == 1.0
    assert [row.value for row in find_recipe("capacity").rows] == [0.25, 0.5, 1, 2, 4, 8]
    assert [row.value for row in find_recipe("lambda").rows] == [1, 3, 5, 8, 10, 12]
    assert {run.config.shots[0].seconds for run in plan_runs(find_recipe("time"), Ask(prompts=1))} == {
        60,
        120,
        300,
    }
    assert find_recipe("retention-5min").seconds == 300


@pytest.mark.parametrize("backbone", ["embedded", REAL])
def test_twenty_prompts_and_twenty_scripts_all_different(backbone):
    one, other = identity_scripts(backbone, 60), reappearance_scripts(backbone, 24)
    for made in (one, other):
        assert (
            len(made) == len({script.name for script in made}) == len({script.shots for script in made}) == 20
        )
    for script in other:
        empty, present, again, back = (shot.prompt for shot in script.shots)
        assert empty == again != present == back
        assert [shot.seconds for shot in script.shots] == [3, 6, 7.5, 7.5] and all(
            s.cut for s in script.shots
        )


@pytest.mark.parametrize("backbone", ["embedded", REAL])
def test_a_second_subject_enters_leaves_and_returns_without_a_cut(backbone):
    made = entering_scripts(backbone, 60)
    assert len(made) == len({script.name for script in made}) == len({script.shots for script in made}) == 20
    assert len({script.subject for script in made}) == len({script.late_subject for script in made}) == 20
    timings = [tuple(shot.seconds for shot in script.shots) for script in made]
    for script, (enters, stays, gone, rest) in zip(made, timings, strict=True):
        alone, both, again, back = (shot.prompt for shot in script.shots)
        assert alone == again != both == back and not any(shot.cut for shot in script.shots)
        assert 15 <= enters <= 25 and 8 <= stays <= 12 and 10 <= gone <= 15 and rest >= 8
        assert enters + stays + gone + rest == 60
        assert script.late_subject.split()[-1] in both and script.late_subject.split()[-1] not in alone
        assert script.subject.split()[-1] in alone and script.subject.split()[-1] in both
    # Rows of one batch share their timing; the first five already show all there are.
    assert sorted(timings.count(each) for each in set(timings)) == [4] * 5 and len(set(timings[:5])) == 5
    assert [shot.seconds for shot in entering_scripts(backbone, 30)[0].shots] == [s / 2 for s in timings[0]]


def test_who_enters_late_is_named_with_the_first_and_in_many_scenes():
    worlds = []
    for script in entering_scripts("embedded", 60):
        alone, both = (parse_prompt(shot.prompt) for shot in script.shots[:2])
        assert alone.actors == (script.subject,) and both.actors == (script.subject, script.late_subject)
        worlds.append((alone.scene, alone.time))
    assert {scene for scene, _ in worlds} == set(SCENES) and {time for _, time in worlds} == set(TIMES)


def test_every_memory_and_rule_is_asked_who_entered():
    rows = {row.name for row in find_recipe("entering").rows}
    assert rows == {row.name for table in ("identity", "reappearance-all") for row in find_recipe(table).rows}
    assert len(list(plan_runs(find_recipe("entering"), Ask()))) == len(rows) * 100


def test_the_embedded_world_knows_its_prompts():
    for script in identity_scripts("embedded", 60):
        assert parse_prompt(script.shots[0].prompt).actors == (script.subject,)
    for script in reappearance_scripts("embedded", 24):
        assert [parse_prompt(shot.prompt).actors for shot in script.shots] == [(), (script.subject,)] * 2


def test_a_subject_is_named_in_its_own_prompt():
    """A detector is asked for the phrase, so the prompt must have asked for the same thing."""
    for script in identity_scripts(REAL, 60):
        noun = (
            script.subject.split()[-1]
            if " with " not in script.subject
            else script.subject.split(" with ")[0]
        )
        assert noun.split()[-1].lower() in script.shots[0].prompt.lower(), script.subject


def test_shorter_scripts_keep_their_proportions():
    shots = scripts("reappearance", "embedded", 12, 1)[0].shots
    assert [shot.seconds for shot in shots] == [1.5, 3, 3.75, 3.75]
    runs = list(plan_runs(find_recipe("reappearance"), Ask(prompts=1, seeds=1, seconds=12)))
    assert runs[0].config.shots == shots


def test_what_cannot_be_asked_is_refused():
    with pytest.raises(ValueError, match="did you mean 'reappearance'"):
        find_recipe("reapearance")
    with pytest.raises(ValueError, match="the set has 20"):
        list(plan_runs(find_recipe("identity"), Ask(prompts=21)))
    with pytest.raises(ValueError, match="backbone is 'embeded'"):
        Ask(backbone="embeded")
    with pytest.raises(ValueError, match="--seeds is 0"):
        Ask(seeds=0)


TOY = """
from recap.eval.judged import Measure
from recap.eval.scores import Score
from recap.tables.recipes import Recipe
from recap.tables.rows import RECAP, Row

def brightness(run):
    return [Score("brightness", float("nan") if run.late_subject else float(run.sampled.pictures.mean()), "native")]

BRIGHTNESS = Measure("brightness", brightness, headlines=("brightness",))

def table():
    rows = (Row("none", {"name": "none"}), RECAP)
    return Recipe("toy", "A toy", rows, ("toy_table:BRIGHTNESS",), seconds=1.5)
"""


def test_a_table_and_a_metric_outside_the_package(tmp_path, monkeypatch):
    (tmp_path / "toy_table.py").write_text(TOY)
    monkeypatch.syspath_prepend(tmp_path)
    ask = Ask(backbone="untrained", prompts=1, seeds=1, embedder="hsv", device="cpu", flow="classical")
    done = reproduce(["toy_table:table"], ask, tmp_path / "out", How(workers=1), notice=lambda _: None)
    assert done.left == 0 and done.tables == {"toy": tmp_path / "out" / "toy"}
    rows = list(csv.DictReader((tmp_path / "out" / "toy" / "table.csv").open()))
    shown = [("none", "brightness"), ("recap", "brightness"), ("recap", "bank_edge_share")]
    assert [(row["row"], row["measure"]) for row in rows] == shown
    assert all(0 < float(row["mean"]) < 255 for row in rows[:2])
    for name, why in (("toy_table:nothing", "cannot be imported"), ("toy_table:TOY", "cannot be imported")):
        with pytest.raises(ValueError, match=why):
            find_recipe(name)
    with pytest.raises(ValueError, match="is not a Measure"):
        find_measure("toy_table:brightness")
    with pytest.raises(ValueError, match="did you mean 'identity'"):
        find_measure("identty")


def test_baselines_of_models_that_were_trained_with_a_sink_have_it():
    def rows(table, backbone):
        return on_backbone(find_recipe(table), backbone).rows

    assert rows("main", "self-forcing") == find_recipe("main").rows
    assert rows("main", "embedded") == find_recipe("main").rows
    baseline, ours = rows("main", "infinite-forcing")
    assert baseline.name == "as released" and baseline.memory == {"name": "sink", "sink_frames": 1}
    assert baseline.paper == "Self-Forcing" and not baseline.backbone and ours.name == "recap"
    baseline, sink, ours = rows("main", "longlive")
    assert baseline.memory == {"name": "sink", "sink_frames": 3} and baseline.backbone == {
        "as_released": True
    }
    assert sink.memory["name"] == "sink" and sink.backbone == {}
    (config,) = {
        run.config.backbone.settings.as_released
        for run in plan_runs(on_backbone(find_recipe("main"), "longlive"), Ask("longlive", 1, 1))
        if run.row.name == "as released"
    }
    assert config
    # Of a sweep the row that is the same as the baseline keeps its place in the line.
    front = {row.name: row for row in rows("front", "infinite-forcing")}
    assert front["as released"].path == "sink" and "sink, lambda 1" not in front


def test_a_table_does_without_measures_that_came_after_its_runs(tmp_path):
    recipe, ask = (
        find_recipe("length"),
        Ask(prompts=2, seeds=2, flow="classical", embedder="hsv", device="cpu"),
    )
    runs = TableRuns([recipe], ask, {"length": {}})
    assert all("length_consistency" in job.wants for job in runs.jobs.values())

    def table(folder, *measures):
        store = ResultStore(folder, {"recap": "1", "torch": "2", "hardware": "x", "commit": "y"})
        for number, key in enumerate(runs.jobs):

            def scores(name, number=number):
                return {name: Score(name, 0.5 + 0.1 * (number % 2), "hsv", 2).as_dict()}

            own = {m: scores("subject_consistency_5s") for m in measures}
            store.add(key, {"length": scores("dynamic_degree_5s"), "content": {}, **own})
        assert not reproduce(["length"], ask, folder, notice=lambda _: None).left
        return (folder / "length" / "table.csv").read_text()

    old, new = table(tmp_path / "old"), table(tmp_path / "new", "length_consistency")
    assert "subject_consistency_5s" not in old and "recap,subject_consistency_5s," in new
    # Runs 0, 3, 6, 9 are of the first row: prompt and seed (0, 0), (0, 1), (1, 0), (1, 1).
    (line,) = (line for line in new.splitlines() if line.startswith("none,dynamic_degree_5s_seed_deviation"))
    assert line.split(",")[3:7] == ["0.0707107", "", "", "2"]
