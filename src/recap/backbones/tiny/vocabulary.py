"""This module lists what the embedded backbone understands: a few actors, in one scene, at one time of day.

    "a fox and a bus on a beach at night"        "an empty beach at night"

A prompt names up to three actors of different kinds, one scene, and a time (by default day). Parsing is strict
here, for tables and training; `reading.py` turns what people write into such a prompt. Every word is one token id:
scene, time, then the actors. For weights whose words have slots, the order of the actors says who is left of whom;
older weights read them in the order of the vocabulary.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from recap.errors import refuse
from recap.io.older import tomllib

ACTORS: tuple[str, ...] = (
    "fox", "cat", "dog", "rabbit", "penguin", "duck", "turtle", "elephant", "sheep", "dinosaur", "snail", "frog",
    "robot", "bear", "car", "bus", "tractor", "boat", "fish", "whale", "bird", "owl", "balloon", "ghost",
)  # fmt: skip
SCENES: tuple[str, ...] = ("beach", "forest", "city", "desert", "snow", "meadow", "sea", "mountains")
TIMES: tuple[str, ...] = ("day", "evening", "night")
MAX_ACTORS = 3

# Ids for: no word; no prompt at all, for guidance and its training; nobody in the scene.
PAD, NULL, EMPTY = 0, 1, 2
WORDS: tuple[str, ...] = ("<pad>", "<null>", "empty", *SCENES, *TIMES, *ACTORS)
FIRST_SCENE = WORDS.index(SCENES[0])
FIRST_TIME = WORDS.index(TIMES[0])
FIRST_ACTOR = WORDS.index(ACTORS[0])
TEXT_LENGTH = 2 + MAX_ACTORS

SCENE_PHRASES = {
    "beach": "on a beach", "forest": "in a forest", "city": "in a city", "desert": "in a desert",
    "snow": "in the snow", "meadow": "in a meadow", "sea": "under the sea", "mountains": "in the mountains",
}  # fmt: skip
_EMPTY_PHRASES = {"snow": "empty snow", "mountains": "empty mountains"}
TIME_PHRASES = {"day": "by day", "evening": "in the evening", "night": "at night"}

TABLES = tomllib.loads((Path(__file__).parent / "words.toml").read_text(encoding="utf-8"))
"""Other English words: what they stand for, and which may be dropped."""
FILLERS = frozenset(TABLES["vocabulary"]["fillers"].split())
ALIASES: dict[str, str] = {
    alias: word for word, aliases in TABLES["alias"].items() for alias in aliases.split()
}
NAMED = frozenset((*ACTORS, *SCENES, *TIMES, "empty"))


@dataclass(frozen=True, slots=True)
class Prompt:
    """Says what one span of a video shows."""

    actors: tuple[str, ...]
    scene: str
    time: str = "day"

    def __post_init__(self) -> None:
        actors = [("actor", actor, ACTORS) for actor in self.actors]
        for field, value, known in [("scene", self.scene, SCENES), ("time", self.time, TIMES), *actors]:
            if value not in known:
                raise _unknown(field, value)
        if len(self.actors) > MAX_ACTORS:
            named = clipped(", ".join(self.actors))
            raise refuse("actors", named, f"at most {MAX_ACTORS} at once", "name fewer, or in later spans")
        if len(set(self.actors)) < len(self.actors):
            limit = "the model was never trained on two of a kind"
            raise refuse("actors", ", ".join(self.actors), limit, "name every kind once")


def parse_prompt(text: str) -> Prompt:
    """Parse a sentence; articles, plurals and a few synonyms are understood."""
    words = [canonical(word) for word in re.findall(r"[^\W_]+", text.lower())]
    words = [word for word in words if word not in FILLERS]
    for word in words:
        if word not in NAMED:
            raise _unknown("prompt word", word)
    actors = tuple(word for word in words if word in ACTORS)
    if actors and "empty" in words:
        raise empty_with(text, actors[0])
    scene = only_one(text, "scene", words, SCENES)
    if scene is None:
        raise no_scene(text)
    return Prompt(actors, scene, only_one(text, "time of day", words, TIMES) or "day")


def prompt_text(prompt: Prompt) -> str:
    """Write a prompt as a sentence, which `parse_prompt` reads back."""
    if not prompt.actors:
        return f"{_EMPTY_PHRASES.get(prompt.scene, f'an empty {prompt.scene}')} {TIME_PHRASES[prompt.time]}"
    named = [f"{'an' if actor[0] in 'aeiou' else 'a'} {actor}" for actor in prompt.actors]
    listed = " and ".join((*((", ".join(named[:-1]),) if named[:-1] else ()), named[-1]))
    return f"{listed} {SCENE_PHRASES[prompt.scene]} {TIME_PHRASES[prompt.time]}"


def token_ids(prompt: Prompt | str, *, as_named: bool = False) -> list[int]:
    """Return the ids of a prompt's words, padded to TEXT_LENGTH; actors are sorted unless `as_named`."""
    if isinstance(prompt, str):
        prompt = parse_prompt(prompt)
    actors = [FIRST_ACTOR + ACTORS.index(actor) for actor in prompt.actors] or [EMPTY]
    if not as_named:
        actors.sort()
    ids = [FIRST_SCENE + SCENES.index(prompt.scene), FIRST_TIME + TIMES.index(prompt.time), *actors]
    return ids + [PAD] * (TEXT_LENGTH - len(ids))


def null_token_ids() -> list[int]:
    """Return the ids that stand for no prompt at all."""
    return [NULL] + [PAD] * (TEXT_LENGTH - 1)


def prompt_from_ids(ids: list[int]) -> Prompt:
    """Return the prompt of these ids from `token_ids`, with its actors in the order of the ids."""
    words = [WORDS[index] for index in ids if index not in (PAD, EMPTY)]
    if len(words) < 2 or words[0] not in SCENES or words[1] not in TIMES:
        raise refuse("ids", ids, "not scene, time, actors", "pass what token_ids returned")
    return Prompt(tuple(words[2:]), words[0], words[1])


def canonical(word: str) -> str:
    """Return the vocabulary's word for a plural or an alias; other words are returned unchanged."""
    singular = (word, re.sub(r"s$", "", word), re.sub(r"es$", "", word), re.sub(r"ies$", "y", word))
    for form in singular:
        if form in NAMED or form in FILLERS:
            return form
        if form in ALIASES:
            return ALIASES[form]
    return word


def only_one(text: str, what: str, words: Iterable[str], known: tuple[str, ...]) -> str | None:
    """Return the only word that is known, or None; two different ones are refused."""
    found = list(dict.fromkeys(word for word in words if word in known))
    if len(found) > 1:
        limit = f"it names more than one {what}: {', '.join(found)}"
        raise refuse("prompt", clipped(text), limit, "keep one")
    return found[0] if found else None


def no_scene(text: str) -> ValueError:
    """Make the error of a prompt without a scene."""
    where = ", ".join(SCENE_PHRASES.values())
    return refuse("prompt", clipped(text), "it names no scene", f"say where: {where}")


def empty_with(text: str, actor: str) -> ValueError:
    """Make the error of a prompt that is empty and has an actor."""
    return refuse("prompt", clipped(text), f"it is empty and has {actor!r}", "drop one of the two")


def clipped(text: str, most: int = 80) -> str:
    """Shorten a text so that a message can quote it in one line."""
    return text if len(text) <= most else f"{text[: most - 1]}…"


def known_words() -> str:
    """List all words of the vocabulary in one line."""
    return f"actors: {', '.join(ACTORS)}; scenes: {', '.join(SCENES)}; times: {', '.join(TIMES)}"


def _unknown(field: str, word: str) -> ValueError:
    """Make the error of a word that is not in the vocabulary."""
    near = difflib.get_close_matches(word, (*sorted(NAMED), *ALIASES), n=3, cutoff=0.5)
    guess = f"did you mean {' or '.join(repr(name) for name in near)}? " if near else ""
    limit = "not in the small vocabulary of the embedded backbone"
    return refuse(field, clipped(word), limit, f"{guess}{known_words()}")
