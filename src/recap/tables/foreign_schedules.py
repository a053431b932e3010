"""This module reads schedules in the forms of two public benchmarks and writes them in ours.

EntityBench (arXiv 2605.15199) lists the entities of every shot, StoryMem's ST-Bench the prompts of every scene and
where it is cut. Both were written from descriptions; no file of theirs was at hand. A shot of theirs has no length of
its own: it lasts `SHOT_S`, unless it says `seconds` or `duration`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from recap.errors import refuse

SHOT_S = 5.0
"""81 pictures at 16 a second, what the models of these benchmarks generate at once."""
PROMPTS = ("prompt", "video_prompt", "caption", "description")
LENGTHS = ("seconds", "duration")
NAMES = ("id", "name", "entity_id")
CUTS = ("scene_cut", "cut")
PLACES = ("location", "locations", "place", "places", "scene", "background")
"""Kinds of entities that are not on stage, but the stage."""


def read_entity_bench(values: Mapping[str, Any], path: str) -> dict[str, Any]:
    """Write an episode in our form: `entities` with ids and descriptions, `shots` with the ids of those in them.

    Entities are a table of id -> description, a list of tables, or a table of kinds of such; locations are left out.
    """
    entities = _entities(values["entities"], f"{path}.entities")
    shots = []
    for index, shot in enumerate(_list(values.get("shots"), f"{path}.shots")):
        at = f"{path}.shots[{index}]"
        table = _table(shot, at)
        named = _names(table.get("entities"), f"{at}.entities")
        for name in named:
            if name not in entities:
                limit = "is not among the entities"
                raise refuse(f"{at}.entities", name, limit, f"known: {', '.join(entities)}")
        on_stage = [name for name in dict.fromkeys(named) if entities[name] is not None]
        shots.append(_shot(table, at) | {"on_stage": on_stage, "cut": _cut(table, at)})
    subjects = {name: {"phrase": phrase} for name, phrase in entities.items() if phrase is not None}
    name = _first(values, ("name", "title", "episode_id", "id")) or path
    return {"name": str(name), "subjects": subjects, "shots": shots}


def read_story_mem(values: Mapping[str, Any], path: str) -> dict[str, Any]:
    """Write a story in our form; its `characters`, which its own files lack, say who is looked for.

    They are a table of name -> phrase, or a list of names; whoever a prompt names is on stage.
    """
    if "characters" not in values:
        limit = "the prompts of a story do not say who is to be compared"
        remedy = 'add "characters": {"Mira": "the woman with red hair", ...}'
        raise refuse(f"{path}.characters", None, limit, remedy)
    characters = {
        name: phrase or name for name, phrase in _entities(values["characters"], f"{path}.characters").items()
    }
    shots = []
    for number, scene in enumerate(_list(values["scenes"], f"{path}.scenes")):
        at = f"{path}.scenes[{number}]"
        table = _table(scene, at)
        prompts = _list(table.get("video_prompts"), f"{at}.video_prompts")
        key = next((name for name in CUTS if name in table), CUTS[-1])
        cuts = _list(table.get(key, [index == 0 for index in range(len(prompts))]), f"{at}.{key}")
        if len(cuts) != len(prompts):
            limit = f"there are {len(prompts)} video_prompts"
            raise refuse(f"{at}.{key}", cuts, limit, "give one true or false for each")
        for prompt, cut in zip(prompts, cuts, strict=True):
            if not isinstance(prompt, str) or not isinstance(cut, bool):
                limit = "a prompt must be text, and a cut true or false"
                raise refuse(f"{at}.video_prompts", [prompt, cut], limit, "correct it")
            on_stage = [name for name in characters if re.search(rf"\b{re.escape(name)}\b", prompt, re.I)]
            shots.append({"prompt": prompt, "seconds": SHOT_S, "cut": cut, "on_stage": on_stage})
    subjects = {name: {"phrase": phrase} for name, phrase in characters.items()}
    name = _first(values, ("name", "title", "story_name")) or path
    return {"name": str(name), "subjects": subjects, "shots": shots}


def _entities(values: Any, path: str) -> dict[str, str | None]:
    """Return the phrase of every entity by its name, None of a location."""
    found: dict[str, str | None] = {}
    if isinstance(values, Mapping):
        for name, each in values.items():
            if isinstance(each, list):
                # A kind and its entities.
                inner = _entities(each, f"{path}.{name}")
                found |= dict.fromkeys(inner) if name.lower() in PLACES else inner
            else:
                found[name] = _phrase(each, name, f"{path}.{name}")
        return found
    for index, each in enumerate(_list(values, path)):
        at = f"{path}[{index}]"
        if isinstance(each, str):
            found[each] = each
            continue
        name = _first(_table(each, at), NAMES)
        if not isinstance(name, str):
            raise refuse(f"{at}.{NAMES[0]}", name, "every entity needs a name", "write it as text")
        found[name] = _phrase(each, name, at)
    return found


def _phrase(value: Any, name: str, path: str) -> str | None:
    if isinstance(value, str):
        return value
    table = _table(value, path)
    if str(table.get("type", table.get("kind", ""))).lower() in PLACES:
        return None
    phrase = _first(table, ("phrase", "description", "appearance", "name")) or name
    if not isinstance(phrase, str):
        raise refuse(f"{path}.description", phrase, "must be text", "put it in quotes")
    return phrase


def _shot(table: Mapping[str, Any], at: str) -> dict[str, Any]:
    prompt = _first(table, PROMPTS)
    if not isinstance(prompt, str) or not prompt:
        raise refuse(f"{at}.{PROMPTS[0]}", prompt, "must be text", "say what the shot shows")
    seconds = _first(table, LENGTHS)
    return {"prompt": prompt, "seconds": SHOT_S if seconds is None else seconds}


def _cut(table: Mapping[str, Any], at: str) -> bool:
    cut = next((table[name] for name in CUTS if name in table), True)
    if not isinstance(cut, bool):
        raise refuse(f"{at}.scene_cut", cut, "must be true or false", "leave it out for a cut")
    return cut


def _names(values: Any, path: str) -> list[str]:
    """Return the entities of a shot, whether listed or by kind."""
    parts = list(values.values()) if isinstance(values, Mapping) else [values]
    names = [name for part in parts for name in _list(part, path)]
    for name in names:
        if not isinstance(name, str):
            raise refuse(path, name, "must be the name of an entity", "write it as text")
    return names


def _first(table: Mapping[str, Any], names: tuple[str, ...]) -> Any:
    return next((table[name] for name in names if table.get(name) is not None), None)


def _list(value: Any, path: str) -> list[Any]:
    if not isinstance(value, list):
        raise refuse(path, value, "must be a list", "put it in square brackets")
    return value


def _table(value: Any, path: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise refuse(path, value, "must be a table", "put it in braces")
    return value
