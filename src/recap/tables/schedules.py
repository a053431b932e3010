"""This module reads schedules: who is on stage in which shot of a video of minutes, and who is away for how long.

    {"schedules": [{"name": "park bench", "setting": "A park bench, autumn light.", "empty": "Nobody is there.",
      "subjects": {"woman": {"phrase": "the woman in red", "sentence": "A woman in a red coat walks past."}},
      "shots": [{"seconds": 15, "on_stage": ["woman"]}, {"seconds": 15, "on_stage": []}, ...]}]}

`phrase` is what a detector looks for. A shot has a `prompt`, or it is composed of the setting and the sentences of
those on stage (`empty` where there is nobody). Shots begin with a cut unless `cut` is false. A file may hold one
schedule without the outer table. Files of two benchmarks are read, too (see `foreign_schedules`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from recap.config import from_settings
from recap.errors import refuse, unknown_name
from recap.io.files import read_json
from recap.plan import Shot, check_amount, check_shots
from recap.tables.foreign_schedules import read_entity_bench, read_story_mem

MOST_SCHEDULES = 1000
SHAPES = (
    'give {"schedules": [...]}, a table with "subjects" and "shots", one with "entities" and "shots" as in '
    'EntityBench, or one with "scenes" of "video_prompts" as in StoryMem'
)


@dataclass(frozen=True, slots=True)
class StagedSubject:
    """Describes somebody who comes and goes."""

    phrase: str
    sentence: str = ""


@dataclass(frozen=True, slots=True)
class StagedShot:
    """Says who is on stage in a shot, by the names of `subjects`."""

    seconds: float
    on_stage: tuple[str, ...]
    prompt: str = ""
    cut: bool = True


@dataclass(frozen=True, slots=True)
class WrittenSchedule:
    """Holds a schedule as it stands in a file."""

    name: str
    subjects: dict[str, Any]
    shots: tuple[Any, ...]
    setting: str = ""
    empty: str = ""


class Schedule(NamedTuple):
    """Holds the shots of a video, and for each the phrases of those on stage."""

    name: str
    shots: tuple[Shot, ...]
    stage: tuple[tuple[str, ...], ...]

    @property
    def seconds(self) -> float:
        return sum(shot.seconds for shot in self.shots)


def read_schedules(path: Path) -> list[Schedule]:
    """Read the schedules of a JSON file in any of the three forms."""
    return parse_schedules(read_json(path))


def parse_schedules(values: Any) -> list[Schedule]:
    """Read schedules from plain data: one or a list of them, or a table of `schedules`."""
    listed = values
    if isinstance(values, Mapping) and "schedules" in values:
        for name in values:
            if name != "schedules":
                raise unknown_name("schedules setting", name, ("schedules",))
        listed = values["schedules"]
    elif isinstance(values, Mapping):
        listed = [values]
    if not isinstance(listed, list) or not listed:
        raise refuse("schedules", listed, "must be a list of at least 1", SHAPES)
    check_amount("number of schedules", len(listed), MOST_SCHEDULES, "schedules", "split the file")
    found = [_parse(each, f"schedules[{index}]") for index, each in enumerate(listed)]
    names = [each.name for each in found]
    for name in names:
        if names.count(name) > 1:
            raise refuse("name", name, "two schedules have it", "give every schedule a name of its own")
    return found


FOREIGN: Mapping[str, Callable[[Mapping[str, Any], str], dict[str, Any]]] = {
    "entities": read_entity_bench,
    "scenes": read_story_mem,
}
"""The field by which a foreign form is known -> the function that writes it in ours."""


def _parse(values: Any, path: str) -> Schedule:
    if isinstance(values, Mapping) and "subjects" not in values:
        known = next((name for name in FOREIGN if name in values), None)
        if known is None:
            raise refuse(path, sorted(map(str, values)), "is no schedule by its fields", SHAPES)
        values = FOREIGN[known](values, path)
    written = from_settings(WrittenSchedule, values, path)
    subjects = {
        name: from_settings(StagedSubject, each, f"{path}.subjects.{name}")
        for name, each in written.subjects.items()
    }
    phrases = [subject.phrase for subject in subjects.values()]
    for phrase in phrases:
        if not phrase or phrases.count(phrase) > 1:
            limit = "a detector must tell subjects apart"
            raise refuse(f"{path}.subjects", phrase, limit, "give each a phrase of its own")
    if not written.shots:
        raise refuse(f"{path}.shots", [], "at least 1 is needed", "say who is on stage, and for how long")
    shots, stage = [], []
    for index, each in enumerate(written.shots):
        at = f"{path}.shots[{index}]"
        staged = from_settings(StagedShot, each, at)
        cast = _cast(staged, subjects, at)
        prompt = staged.prompt or _compose(written, cast, at)
        shots.append(_shot(prompt, staged, at))
        stage.append(tuple(subject.phrase for subject in cast))
        _check_change(shots, stage, at)
    check_shots(shots)
    return Schedule(written.name, tuple(shots), tuple(stage))


def _cast(staged: StagedShot, subjects: Mapping[str, StagedSubject], at: str) -> list[StagedSubject]:
    for name in staged.on_stage:
        if not isinstance(name, str):
            raise refuse(f"{at}.on_stage", name, "must be a name of subjects", "put it in quotes")
        if name not in subjects:
            raise unknown_name(f"{at}.on_stage", name, subjects)
        if staged.on_stage.count(name) > 1:
            raise refuse(f"{at}.on_stage", name, "is there twice", "name everybody once")
    return [subjects[name] for name in staged.on_stage]


def _compose(written: WrittenSchedule, cast: Sequence[StagedSubject], at: str) -> str:
    """Return the setting and the sentences of those on stage as one prompt."""
    parts = [written.setting, *(subject.sentence for subject in cast)] if cast else [written.setting]
    if not all(parts):
        limit = "it cannot be composed without a setting, and a sentence of everybody on stage"
        raise refuse(f"{at}.prompt", None, limit, "write it, or add what is missing")
    return " ".join([*parts, *([written.empty] if written.empty and not cast else [])])


def _shot(prompt: str, staged: StagedShot, at: str) -> Shot:
    try:
        return Shot(prompt, staged.seconds, staged.cut)
    except ValueError as error:
        limit = "must be above 0 and at most a day"
        raise refuse(f"{at}.seconds", staged.seconds, limit, "15 is what ours have") from error


def _check_change(shots: Sequence[Shot], stage: Sequence[tuple[str, ...]], at: str) -> None:
    """Refuse that somebody comes or goes and nothing tells the model."""
    if (
        len(shots) > 1
        and not shots[-1].cut
        and shots[-1].prompt == shots[-2].prompt
        and stage[-1] != stage[-2]
    ):
        limit = "others are on stage than in the shot before, but there is no cut and the prompt is the same"
        raise refuse(f"{at}.prompt", shots[-1].prompt, limit, "write a prompt that names who is there")
