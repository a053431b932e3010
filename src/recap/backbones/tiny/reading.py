"""Reads what people write as a prompt of the small vocabulary, and reports what it changed.

    "a cute lion runs on a sunny beach"  ->  a cat on a beach;  'cute', 'runs', 'sunny' are left out, ...

A prompt that `parse_prompt` accepts is never changed. In others, harmless words that the model does not know are left
out, other nouns are replaced by the nearest known one, and a missing scene is chosen. Changes are shown as notices.
What cannot be understood is refused in one message, and what is excluded ("no fox") never appears.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from recap.backbones.tiny import vocabulary
from recap.backbones.tiny.sentence import NEAR, Kind, Word, is_named_again, leave_out, split
from recap.backbones.tiny.vocabulary import Prompt, clipped, known_words, parse_prompt
from recap.errors import refuse
from recap.io.report import Notice, each_once

LONGEST = 2000
"""Characters; more cannot describe three actors and a scene."""
MOST_QUOTED = 12
OTHERS = "self-forcing, longlive and the other public models accept any prompt (`recap list`)"
USUAL_SCENE = "beach"
IN_THE_SEA = ("fish", "whale", "boat")


class PromptReading(NamedTuple):
    """Holds a prompt, and notices for the user about what differs from the text."""

    prompt: Prompt
    notices: tuple[str, ...] = ()


class PromptReader:
    """Reads prompts, and shows every notice once, however often the prompts are read."""

    def __init__(self, notice: Notice) -> None:
        self._notice = each_once(notice)

    def __call__(self, text: str) -> Prompt:
        reading = read_prompt(text)
        for line in reading.notices:
            self._notice(line)
        return reading.prompt


# Cached because a judge asks once per picture.
@lru_cache(maxsize=256)
def read_prompt(text: str) -> PromptReading:
    """Return the prompt that a text means; raise ValueError where that is not clear."""
    try:
        return PromptReading(parse_prompt(text))
    except ValueError:
        # The refusal below names all wrong words at once.
        pass
    if len(text) > LONGEST:
        limit = f"it has {len(text)} characters, and at most {LONGEST} are read"
        raise refuse("prompt", clipped(text), limit, "say in one sentence who is where")
    found, unwanted = leave_out(split(text), text)
    _refuse_unclear(found, text)
    actors, replaced = _cast(found, text)
    for actor in actors:
        if actor in unwanted:
            limit = f"it asks for {actor!r} and for none"
            raise refuse("prompt", clipped(text), limit, "keep one of the two")
    scene, time, set_in, unused = _setting(found, text)
    if actors and any(word.name == "empty" for word in found):
        raise vocabulary.empty_with(text, actors[0])
    if scene is None and not actors:
        raise vocabulary.no_scene(text)
    lines = [*_dropped(found, unused), *(_instead(word, shown) for word, shown in (*replaced, *set_in))]
    if unwanted:
        lines.append(f"prompt: left out as asked: {', '.join(unwanted)}")
    if scene is None:
        scene = "sea" if actors[0] in IN_THE_SEA else USUAL_SCENE
        lines.append(f"prompt: no scene is named: the video is set {vocabulary.SCENE_PHRASES[scene]}")
    return PromptReading(Prompt(tuple(actors), scene, time or "day"), tuple(lines))


def _refuse_unclear(found: Sequence[Word], text: str) -> None:
    """Refuse choices, and all unknown words at once."""
    for word in found:
        if word.kind is Kind.CHOICE:
            raise refuse("prompt", clipped(text), f"{word.raw!r} leaves open what to show", "name one")
    unknown = list(dict.fromkeys(word.raw for word in found if word.kind is Kind.UNKNOWN))
    if unknown:
        limit = f"not in the small vocabulary of the embedded backbone: {_quoted(unknown)}"
        guesses = [guess for word in unknown[:MOST_QUOTED] if (guess := _guess(word))]
        guess = f"did you mean {', '.join(guesses)}? " if guesses else ""
        raise refuse("prompt", clipped(text), limit, f"{guess}{known_words()}; {OTHERS}")


def _guess(word: str) -> str:
    """Guess what an unknown word misspells; a lower cutoff would suggest a balloon for a lion."""
    known = sorted(
        {*vocabulary.NAMED, *vocabulary.ALIASES, *(near for table in NEAR.values() for near in table)}
    )
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.8)
    return f"{near[0]!r} for {clipped(word, 30)!r}" if near else ""


def _cast(found: Sequence[Word], text: str) -> tuple[list[str], list[tuple[str, str]]]:
    """Return the actors in the order named, and (written, shown) of those that replace others."""
    taken = {word.name for word in found if word.kind is Kind.ACTOR}
    actors: list[str] = []
    replaced: list[tuple[str, str]] = []
    for index, word in enumerate(found):
        if is_named_again(found, index):
            continue
        if word.kind is Kind.ACTOR:
            actors.append(word.name)
        elif word.kind is Kind.NEAR_ACTOR:
            options = NEAR[word.kind][word.name]
            again = any(word.raw == written for written, _ in replaced)
            free = [] if again else [actor for actor in options if actor not in taken]
            if not free:
                limit = f"{word.raw!r} would be a second {options[0]}, and the model knows one of a kind"
                remedy = f"leave it out, or take another of {known_words()}"
                raise refuse("prompt", clipped(text), limit, remedy)
            taken.add(free[0])
            actors.append(free[0])
            replaced.append((word.raw, free[0]))
    return actors, replaced


def _setting(
    found: Sequence[Word], text: str
) -> tuple[str | None, str | None, list[tuple[str, str]], set[str]]:
    """Return scene, time, (written, shown) of those that replace others, and the words that were not needed.

    A scene of the vocabulary takes precedence over words that are only similar: "on the grass in a city" is a city.
    """
    chosen: list[str | None] = []
    replaced: list[tuple[str, str]] = []
    unused: set[str] = set()
    for what, known, exact, near in (
        ("scene", vocabulary.SCENES, Kind.SCENE, Kind.NEAR_SCENE),
        ("time of day", vocabulary.TIMES, Kind.TIME, Kind.NEAR_TIME),
    ):
        name = vocabulary.only_one(text, what, [word.name for word in found if word.kind is exact], known)
        others = {word.raw: NEAR[near][word.name][0] for word in found if word.kind is near}
        if name is None and others:
            if len(set(others.values())) > 1:
                named = ", ".join(f"{raw!r} ({shown})" for raw, shown in others.items())
                raise refuse("prompt", clipped(text), f"it names more than one {what}: {named}", "keep one")
            name = next(iter(others.values()))
            replaced += others.items()
        else:
            unused |= {raw for raw, shown in others.items() if shown != name}
        chosen.append(name)
    return chosen[0], chosen[1], replaced, unused


def _dropped(found: Sequence[Word], unused: set[str]) -> Iterator[str]:
    """Yield notices about words that were dropped, one per reason."""
    setting = (Kind.NEAR_SCENE, Kind.NEAR_TIME)
    kinds = [Kind.HARMLESS if word.raw in unused and word.kind in setting else word.kind for word in found]
    for reason, why in (
        (Kind.HARMLESS, "left out, as the embedded backbone has no words for it"),
        (Kind.COLOUR, "left out, as colours cannot be asked for"),
        (Kind.COUNT, "numbers cannot be asked for, one of each kind is shown"),
    ):
        names = list(dict.fromkeys(w.raw for w, kind in zip(found, kinds, strict=True) if kind is reason))
        if names:
            yield f"prompt: {_quoted(names)}: {why}"


def _instead(written: str, shown: str) -> str:
    """Return the notice that something else is shown than what was written."""
    if shown in vocabulary.ACTORS:
        thing = f"{'an' if shown[0] in 'aeiou' else 'a'} {shown} is shown instead"
    else:
        thing = f"the video is set {(vocabulary.SCENE_PHRASES | vocabulary.TIME_PHRASES)[shown]}"
    return f"prompt: {clipped(written, 30)!r} is not in the vocabulary: {thing}"


def _quoted(names: Sequence[str]) -> str:
    """List names in quotes, the first of them if they are many."""
    shown = [repr(clipped(name, 30)) for name in names[:MOST_QUOTED]]
    more = len(names) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")
