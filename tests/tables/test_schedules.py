"""Schedules: ours as they are described, files read strictly, and two foreign forms."""

from __future__ import annotations

import copy
import json
from collections import Counter
from itertools import pairwise

import pytest
from tables_help import jobs_of

from recap.backbones.tiny.vocabulary import parse_prompt
from recap.errors import RecapError
from recap.tables.ask import Ask
from recap.tables.batches import kind_of
from recap.tables.recipes import find_recipe
from recap.tables.runs import plan_runs
from recap.tables.schedules import parse_schedules, read_schedules
from recap.tables.scripts import scripts

OURS = {
    "name": "bench",
    "setting": "A bench.",
    "empty": "Nobody.",
    "subjects": {
        "woman": {"phrase": "the woman", "sentence": "A woman sits."},
        "dog": {"phrase": "the dog", "sentence": "A dog runs."},
    },
    "shots": [
        {"seconds": 15, "on_stage": ["woman"]},
        {"seconds": 5, "on_stage": []},
        {"seconds": 10, "on_stage": ["dog", "woman"], "cut": False},
        {"seconds": 10, "on_stage": ["dog"], "prompt": "Only the dog."},
    ],
}


def gaps_of(script):
    """Seconds of absence of every return, whether after a cut or a time away."""
    starts = [sum(shot.seconds for shot in script.shots[:k]) for k in range(len(script.shots) + 1)]
    found = []
    for subject in {name for cast in script.stage for name in cast}:
        there = [k for k, cast in enumerate(script.stage) if subject in cast]
        found += [starts[b] - starts[a + 1] for a, b in pairwise(there)]
    return found


@pytest.mark.parametrize("backbone", ["embedded", "self-forcing"])
def test_ours_last_two_to_five_minutes_with_several_subjects_and_gaps_up_to_90_s(backbone):
    known = scripts("recurrence", backbone, 300.0, 20)
    lengths = [sum(shot.seconds for shot in each.shots) for each in known]
    assert Counter(lengths) == {120: 12, 300: 8}
    assert all(len({name for cast in each.stage for name in cast}) >= 2 for each in known)
    gaps = {number: gaps_of(each) for number, each in enumerate(known)}
    assert all(gaps.values())
    for gap in range(0, 91, 15):
        # Enough schedules of each for an interval.
        assert sum(gap in own for own in gaps.values()) >= 5
    assert max(max(own) for own in gaps.values()) == 90


def test_prompts_of_the_embedded_world_name_whoever_is_on_stage_and_both_worlds_have_one_plan():
    own, public = (scripts("recurrence", name, 300.0, 20) for name in ("embedded", "self-forcing"))
    for one, other in zip(own, public, strict=True):
        assert [parse_prompt(shot.prompt).actors for shot in one.shots] == list(one.stage)
        assert list(map(len, one.stage)) == list(map(len, other.stage))
        for shot, cast in zip(other.shots, other.stage, strict=True):
            assert shot.prompt.startswith(other.shots[0].prompt.split(". ")[0])
            assert len(cast) == shot.prompt.count("in full view")


def test_all_rows_of_a_memory_are_two_batches():
    runs = list(plan_runs(find_recipe("recurrence"), Ask(device="cuda", embedder="hsv", flow="raft-small")))
    memories = {run.row.name for run in runs}
    kinds = Counter(kind_of(run.job) for run in runs)
    assert len(kinds) == 2 * len(memories) and set(kinds.values()) == {36, 24}
    assert sum(shot.seconds for run in runs for shot in run.script.shots) == len(memories) * 3 * 3840


def test_a_job_knows_who_is_on_stage_and_others_have_no_such_entry():
    (job,) = jobs_of("recurrence", "recap")
    assert len(job.data["stage"]) == len(job.data["config"]["shots"]) == 8
    assert "stage" not in jobs_of("entering", "recap")[0].data and "judge" not in job.data


def test_prompts_are_composed_unless_they_are_written():
    (found,) = parse_schedules(OURS)
    prompts = [shot.prompt for shot in found.shots]
    assert prompts == [
        "A bench. A woman sits.",
        "A bench. Nobody.",
        "A bench. A dog runs. A woman sits.",
        "Only the dog.",
    ]
    assert found.stage == (("the woman",), (), ("the dog", "the woman"), ("the dog",))
    assert [shot.cut for shot in found.shots] == [True, True, False, True] and found.seconds == 40


def without(*path):
    changed = copy.deepcopy(OURS)
    inner = changed
    for step in path[:-1]:
        inner = inner[step]
    del inner[path[-1]]
    return changed


def changed(value, *path):
    made = copy.deepcopy(OURS)
    inner = made
    for step in path[:-1]:
        inner = inner[step]
    inner[path[-1]] = value
    return made


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (5, "schedules is 5: must be a list"),
        ({"schedules": []}, "at least 1"),
        ({"schedules": [OURS], "more": 1}, "more.*no such name"),
        ({"schedules": [OURS, OURS]}, "bench.*two schedules have it"),
        ({"something": 1}, "is no schedule by its fields.*EntityBench"),
        ([3], r"schedules\[0\] is 3: must be a table"),
        (without("name"), r"schedules\[0\]\.name is missing"),
        (without("shots", 1, "seconds"), r"schedules\[0\]\.shots\[1\]\.seconds is missing"),
        (without("setting"), r"shots\[0\]\.prompt is missing: it cannot be composed"),
        (changed([], "shots"), r"schedules\[0\]\.shots is \[\]: at least 1"),
        (changed(["cat"], "shots", 1, "on_stage"), r"shots\[1\]\.on_stage is 'cat': no such name.*known: dog, woman"),
        (changed(["dog", "dog"], "shots", 1, "on_stage"), "there twice"),
        (changed([7], "shots", 1, "on_stage"), r"on_stage is 7: must be a name"),
        (changed("dog", "shots", 1, "on_stage"), r"on_stage is 'dog': must be of type tuple"),
        (changed(-1, "shots", 1, "seconds"), r"shots\[1\]\.seconds is -1.*above 0"),
        (changed("x", "shots", 1, "seconds"), r"shots\[1\]\.seconds is 'x': must be of type float"),
        (changed(1, "shots", 1, "cutt"), "cutt.*did you mean 'cut'"),
        (changed("", "subjects", "dog", "phrase"), "must tell subjects apart"),
        (changed("the woman", "subjects", "dog", "phrase"), "'the woman'.*must tell subjects apart"),
        (changed({"name": "Rex"}, "subjects", "dog"), "subjects.dog setting is 'name'"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named(values, words):
    with pytest.raises(RecapError, match=words):
        parse_schedules(values)


def test_somebody_who_leaves_without_a_word_to_the_model_is_refused():
    shots = [
        {"seconds": 5, "on_stage": ["dog"], "prompt": "A bench.", "cut": True},
        {"seconds": 5, "on_stage": [], "prompt": "A bench.", "cut": False},
    ]
    with pytest.raises(RecapError, match=r"shots\[1\]\.prompt.*there is no cut and the prompt is the same"):
        parse_schedules({**OURS, "shots": shots})


EPISODE = {
    "episode_id": "ep-7",
    "entities": {
        "characters": [{"id": "mira", "description": "the woman with red hair"}, {"id": "tom"}],
        "objects": [{"id": "lamp", "description": "the brass lamp"}],
        "locations": [{"id": "attic", "description": "a dusty attic"}],
    },
    "shots": [
        {"prompt": "Mira enters the attic.", "entities": {"characters": ["mira"], "locations": ["attic"]}},
        {"prompt": "The lamp.", "entities": ["lamp", "attic"], "duration": 8},
        {"prompt": "Mira and Tom.", "entities": ["mira", "tom"], "scene_cut": False},
    ],
}


def test_an_episode_of_entity_bench_is_read():
    (found,) = parse_schedules([EPISODE])
    assert found.name == "ep-7" and [shot.seconds for shot in found.shots] == [5, 8, 5]
    assert found.stage == (
        ("the woman with red hair",),
        ("the brass lamp",),
        ("the woman with red hair", "tom"),
    )
    assert [shot.cut for shot in found.shots] == [True, True, False]


STORY = {
    "story_overview": "Mira finds a lamp.",
    "characters": {"Mira": "the woman with red hair", "Tom": "the boy"},
    "scenes": [
        {"scene_num": 1, "video_prompts": ["Mira walks.", "Tom waits for mira."], "cut": [True, False]},
        {"scene_num": 2, "video_prompts": ["An empty street, a tomb."]},
    ],
}


def test_a_story_of_story_mem_is_read_with_whoever_its_prompts_name():
    (found,) = parse_schedules(STORY)
    mira, tom = STORY["characters"].values()
    assert found.stage == ((mira,), (mira, tom), ())
    assert [shot.cut for shot in found.shots] == [True, False, True] and found.seconds == 15
    scenes = [{"video_prompts": ["Mira walks.", "Mira sits."], "scene_cut": [True, True]}]
    (found,) = parse_schedules({**STORY, "scenes": scenes})
    assert [shot.cut for shot in found.shots] == [True, True]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (
            {**EPISODE, "shots": [{"prompt": "a", "entities": ["nobody"]}]},
            "'nobody': is not among the entities",
        ),
        ({**EPISODE, "shots": [{"entities": []}]}, r"shots\[0\]\.prompt is missing"),
        ({**EPISODE, "shots": [{"prompt": "a", "entities": [4]}]}, "must be the name of an entity"),
        (
            {**EPISODE, "shots": [{"prompt": "a", "entities": [], "duration": "long"}]},
            "must be of type float",
        ),
        ({**EPISODE, "shots": [{"prompt": "a", "entities": [], "scene_cut": "no"}]}, "must be true or false"),
        ({**EPISODE, "entities": 5}, "entities is 5: must be a list"),
        ({**EPISODE, "entities": [{"description": "x"}]}, "every entity needs a name"),
        ({k: v for k, v in STORY.items() if k != "characters"}, "characters is missing.*add"),
        ({**STORY, "scenes": [{"video_prompts": ["a"], "cut": [True, False]}]}, "there are 1 video_prompts"),
        (
            {**STORY, "scenes": [{"video_prompts": ["a"], "scene_cut": True}]},
            "scene_cut is True: must be a list",
        ),
        ({**STORY, "scenes": [{"video_prompts": [5]}]}, "a prompt must be text"),
        ({**STORY, "scenes": [{}]}, "video_prompts is missing: must be a list"),
    ],
)
def test_what_does_not_fit_of_foreign_forms_is_named(values, words):
    with pytest.raises(RecapError, match=words):
        parse_schedules(values)


def test_a_file_takes_the_place_of_ours_where_a_table_has_schedules(tmp_path):
    file = tmp_path / "story.json"
    file.write_text(json.dumps(STORY))
    assert read_schedules(file) == parse_schedules(STORY)
    jobs = jobs_of("recurrence", "recap", backbone="untrained", schedules=str(file))
    assert jobs[0].data["stage"] == [["the woman with red hair"], ["the woman with red hair", "the boy"], []]
    with pytest.raises(RecapError, match=r"'the woman with red hair': no such name.*known: balloon"):
        jobs_of("recurrence", "recap", schedules=str(file))
    with pytest.raises(RecapError, match=r"--schedules.*this table has the prompts of 'entering'"):
        jobs_of("entering", "recap", schedules=str(file))
    with pytest.raises(RecapError, match="the set has 1"):
        jobs_of("recurrence", "recap", backbone="untrained", schedules=str(file), prompts=2)
