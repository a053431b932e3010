"""Reads what people write as a prompt of the small vocabulary, and says what was changed on the way.

    "a cute lion runs on a sunny beach"  ->  a cat on a beach;  'cute', 'runs', 'sunny' are left out, ...

A prompt that `parse_prompt` takes is never changed. In others, words that cannot be drawn and do no harm are left
out, nouns that it has not got become the nearest it has, and a missing scene is chosen. Whatever is changed is a
notice; what cannot be understood is one refusal, and what is not wanted ("no fox") is never drawn.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from recap.backbones.tiny import words as english
from recap.backbones.tiny.negation import leave_out
from recap.backbones.tiny.sentence import Kind, Word, split
from recap.backbones.tiny.vocabulary import (
    ACTORS,
    ALIASES,
    NAMED,
    PLACE,
    SCENES,
    TIMES,
    WHEN,
    Prompt,
    clipped,
    empty_with,
    known_words,
    no_scene,
    only_one,
    parse_prompt,
)
from recap.errors import refuse

LONGEST = 2000
"""Characters; nobody means a page of text for three actors and a scene."""
MOST_QUOTED = 12
OTHERS = "self-forcing, longlive and the other public models take any prompt (`recap list`)"
USUAL_SCENE = "beach"
IN_THE_SEA = ("fish", "whale", "boat")


@dataclass(frozen=True, slots=True)
class Reading:
    """A prompt, and lines for the user about what is drawn otherwise than written."""

    prompt: Prompt
    notices: tuple[str, ...] = ()


class PromptReader:
    """Reads prompts, and gives every notice once, however often and wherever the prompts are read."""

    def __init__(self, notice: Callable[[str], None]) -> None:
        self._notice = notice
        self._shown: set[str] = set()

    def __call__(self, text: str) -> Prompt:
        reading = read_prompt(text)
        for line in reading.notices:
            if line not in self._shown:
                self._shown.add(line)
                self._notice(line)
        return reading.prompt


@lru_cache(maxsize=256)  # a judge asks once per picture
def read_prompt(text: str) -> Reading:
    """The prompt that is meant; ValueError where that is not clear."""
    try:
        return Reading(parse_prompt(text))
    except ValueError:
        pass  # what is wrong with it is said below, of all its words at once
    if len(text) > LONGEST:
        limit = f"it has {len(text)} characters, and {LONGEST} are the most that is read"
        raise refuse("prompt", clipped(text), limit, "say in one sentence who is where")
    found, unwanted = leave_out(split(text), text)
    _refuse_unclear(found, text)
    actors, replaced = _cast(found, text)
    for actor in actors:
        if actor in unwanted:
            raise refuse(
                "prompt", clipped(text), f"it asks for {actor!r} and for none", "keep one of the two"
            )
    scene, time, placed, unused = _place(found, text)
    if actors and any(word.name == "empty" for word in found):
        raise empty_with(text, actors[0])
    if scene is None and not actors:
        raise no_scene(text)
    lines = [*_dropped(found, unused), *(_instead(word, drawn) for word, drawn in (*replaced, *placed))]
    if unwanted:
        lines.append(f"prompt: left out as asked: {', '.join(unwanted)}")
    if scene is None:
        scene = "sea" if actors[0] in IN_THE_SEA else USUAL_SCENE
        lines.append(f"prompt: no scene is named: the video is set {PLACE[scene]}")
    return Reading(Prompt(tuple(actors), scene, time or "day"), tuple(lines))


def _refuse_unclear(found: Sequence[Word], text: str) -> None:
    """Refuse choices, and all unknown words at once."""
    for word in found:
        if word.kind is Kind.CHOICE:
            raise refuse("prompt", clipped(text), f"{word.raw!r} leaves open what is drawn", "name one")
    unknown = list(dict.fromkeys(word.raw for word in found if word.kind is Kind.UNKNOWN))
    if unknown:
        limit = f"not in the small vocabulary of the embedded backbone: {_quoted(unknown)}"
        guesses = [guess for word in unknown[:MOST_QUOTED] if (guess := _guess(word))]
        guess = f"did you mean {', '.join(guesses)}? " if guesses else ""
        raise refuse("prompt", clipped(text), limit, f"{guess}{known_words()}; {OTHERS}")


def _guess(word: str) -> str:
    """What an unknown word may be a misspelling of; a low bar here would offer a balloon for a lion."""
    known = sorted({*NAMED, *ALIASES, *english.NEAR})
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.8)
    return f"{near[0]!r} for {clipped(word, 30)!r}" if near else ""


def _cast(found: Sequence[Word], text: str) -> tuple[list[str], list[tuple[str, str]]]:
    """The actors in the order named, and (written, drawn) of those that stand in for others."""
    taken = {word.name for word in found if word.kind is Kind.ACTOR}
    actors: list[str] = []
    replaced: list[tuple[str, str]] = []
    for word in found:
        if word.kind is Kind.ACTOR:
            actors.append(word.name)
        elif word.kind is Kind.NEAR_ACTOR:
            options = english.NEAR_ACTORS[word.name]
            again = any(word.raw == written for written, _ in replaced)
            free = [] if again else [actor for actor in options if actor not in taken]
            if not free:
                limit = f"{word.raw!r} would be a second {options[0]}, and the model knows one of a kind"
                raise refuse(
                    "prompt", clipped(text), limit, f"leave it out, or take another of {known_words()}"
                )
            taken.add(free[0])
            actors.append(free[0])
            replaced.append((word.raw, free[0]))
    return actors, replaced


def _place(
    found: Sequence[Word], text: str
) -> tuple[str | None, str | None, list[tuple[str, str]], set[str]]:
    """Scene, time, (written, drawn) of those that stand in for others, and words that were not needed.

    A scene of the vocabulary wins over words that only come near to one: "on the grass in a city" is a city.
    """
    chosen: list[str | None] = []
    replaced: list[tuple[str, str]] = []
    unused: set[str] = set()
    for what, known, exact, near, table in (
        ("scene", SCENES, Kind.SCENE, Kind.NEAR_SCENE, english.NEAR_SCENES),
        ("time of day", TIMES, Kind.TIME, Kind.NEAR_TIME, english.NEAR_TIMES),
    ):
        name = only_one(text, what, [word.name for word in found if word.kind is exact], known)
        others = {word.raw: table[word.name][0] for word in found if word.kind is near}
        if name is None and others:
            if len(set(others.values())) > 1:
                named = ", ".join(f"{raw!r} ({drawn})" for raw, drawn in others.items())
                raise refuse("prompt", clipped(text), f"it names more than one {what}: {named}", "keep one")
            name = next(iter(others.values()))
            replaced += others.items()
        else:
            unused |= {raw for raw, drawn in others.items() if drawn != name}
        chosen.append(name)
    return chosen[0], chosen[1], replaced, unused


def _dropped(found: Iterable[Word], unused: set[str]) -> Iterator[str]:
    """Notices about words that change nothing, a line for each reason."""
    written = [
        replace(word, kind=Kind.HARMLESS)
        if word.raw in unused and word.kind in (Kind.NEAR_SCENE, Kind.NEAR_TIME)
        else word
        for word in found
    ]
    for kind, why in (
        (Kind.HARMLESS, "left out, as the embedded backbone has no words for it"),
        (Kind.COLOUR, "left out, as colours cannot be asked for"),
        (Kind.COUNT, "numbers cannot be asked for, one of each kind is drawn"),
    ):
        names = list(dict.fromkeys(word.raw for word in written if word.kind is kind))
        if names:
            yield f"prompt: {_quoted(names)}: {why}"


def _instead(written: str, drawn: str) -> str:
    if drawn in ACTORS:
        thing = f"{'an' if drawn[0] in 'aeiou' else 'a'} {drawn} is drawn instead"
    else:
        thing = f"the video is set {PLACE[drawn] if drawn in PLACE else WHEN[drawn]}"
    return f"prompt: {clipped(written, 30)!r} is not in the vocabulary: {thing}"


def _quoted(names: Sequence[str]) -> str:
    shown = [repr(clipped(name, 30)) for name in names[:MOST_QUOTED]]
    more = len(names) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")
