"""Splits a sentence into words of one kind each; unknown words are classified by ending and position."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto

from recap.backbones.tiny import words as english
from recap.backbones.tiny.vocabulary import ACTORS, ALIASES, FILLERS, NAMED, SCENES, TIMES, canonical


class Kind(Enum):
    ACTOR = auto()
    SCENE = auto()
    TIME = auto()
    EMPTY = auto()
    # Not in the vocabulary, but something similar is.
    NEAR_ACTOR = auto()
    NEAR_SCENE = auto()
    NEAR_TIME = auto()
    DETERMINER = auto()
    PREPOSITION = auto()
    AND = auto()
    FILLER = auto()
    NEGATION = auto()
    NOT = auto()
    DOUBT = auto()
    CHOICE = auto()
    COLOUR = auto()
    COUNT = auto()
    HARMLESS = auto()
    UNKNOWN = auto()


ACTING = (Kind.ACTOR, Kind.NEAR_ACTOR)
NOUNS = (*ACTING, Kind.SCENE, Kind.TIME, Kind.NEAR_SCENE, Kind.NEAR_TIME)
MODIFIERS = (Kind.HARMLESS, Kind.COLOUR, Kind.COUNT)


@dataclass(frozen=True, slots=True)
class Word:
    # As written, in lower case.
    raw: str
    # As in the tables.
    name: str
    kind: Kind
    # What comes before it: "" for spaces or a hyphen, "," for a pause, "." for the end of a sentence.
    gap: str


_WORD = re.compile(r"[^\W_]+(?:['’][^\W_]+)*")
_EXACT = {
    **dict.fromkeys(english.NEGATORS, Kind.NEGATION),
    **dict.fromkeys(english.NOT, Kind.NOT),
    **dict.fromkeys(english.DOUBTFUL, Kind.DOUBT),
    **dict.fromkeys(english.CHOICES, Kind.CHOICE),
    **dict.fromkeys(english.DETERMINERS, Kind.DETERMINER),
    **dict.fromkeys(english.PREPOSITIONS, Kind.PREPOSITION),
    **dict.fromkeys(english.FUNCTION_WORDS, Kind.FILLER),
    "and": Kind.AND,
}
_BY_FORM = {
    **dict.fromkeys(english.HARMLESS, Kind.HARMLESS),
    **dict.fromkeys(english.COLOURS, Kind.COLOUR),
    **dict.fromkeys(english.COUNTS, Kind.COUNT),
    **dict.fromkeys(english.NEAR_ACTORS, Kind.NEAR_ACTOR),
    **dict.fromkeys(english.NEAR_SCENES, Kind.NEAR_SCENE),
    **dict.fromkeys(english.NEAR_TIMES, Kind.NEAR_TIME),
}
_NAMED_KINDS = {
    **dict.fromkeys(ACTORS, Kind.ACTOR),
    **dict.fromkeys(SCENES, Kind.SCENE),
    **dict.fromkeys(TIMES, Kind.TIME),
    "empty": Kind.EMPTY,
}


def split(text: str) -> list[Word]:
    """Return the words of a text; those that are still unknown are probably nouns."""
    found = [_classify(*each) for each in _joined(list(_raw_words(text.lower())))]
    for index, word in enumerate(found):
        modifier = word.kind is Kind.NEAR_ACTOR and _names_what_follows(found, index)
        if modifier or (word.kind is Kind.UNKNOWN and _is_harmless(found, index)):
            found[index] = replace(word, kind=Kind.HARMLESS)
    return found


def _raw_words(text: str) -> Iterator[tuple[str, str]]:
    end = 0
    for match in _WORD.finditer(text):
        between = text[end : match.start()]
        end = match.end()
        gap = "." if set(between) & set(".!?;") else "," if between.strip("-_'\"‘’“” \t\r\n") else ""
        yield match.group().replace("’", "'"), gap


def _joined(raw: Sequence[tuple[str, str]]) -> Iterator[tuple[str, str, str]]:
    """Yield (written, meant, gap) of each word; a pair with its own meaning counts as one word."""
    index = 0
    while index < len(raw):
        word, gap = raw[index]
        following, between = raw[index + 1] if index + 1 < len(raw) else ("", ".")
        pairs = [(word, form) for form in _forms(following) if (word, form) in english.COMPOUNDS]
        if pairs and not between:
            yield f"{word} {following}", english.COMPOUNDS[pairs[0]], gap
            index += 2
        else:
            yield word, word, gap
            index += 1


def _forms(word: str) -> tuple[str, ...]:
    """Return the word, and the words of which it may be the plural or the third person."""
    endings = (("", ""), ("s", ""), ("es", ""), ("ies", "y"), ("ves", "f"))
    return tuple(word.removesuffix(old) + new for old, new in endings if word.endswith(old))


def _classify(raw: str, word: str, gap: str) -> Word:
    if word.endswith("n't"):
        return Word(raw, word, Kind.NOT, gap)
    word = word.partition("'")[0]
    if word in _EXACT:
        return Word(raw, word, _EXACT[word], gap)
    own = canonical(word)
    if own in _NAMED_KINDS:
        return Word(raw, own, _NAMED_KINDS[own], gap)
    if own in FILLERS:
        return Word(raw, own, _EXACT.get(own, Kind.FILLER), gap)
    for form in _forms(word):
        if form in _BY_FORM:
            return Word(raw, form, _BY_FORM[form], gap)
    if word.isdecimal():
        return Word(raw, word, Kind.FILLER if word == "1" else Kind.COUNT, gap)
    return Word(raw, word, Kind.HARMLESS if re.fullmatch(r"\d+(k|p|d|mm|fps)", word) else Kind.UNKNOWN, gap)


def _is_harmless(found: Sequence[Word], index: int) -> bool:
    """Tell whether an unknown word looks like an adjective, adverb or verb, by its ending and position."""
    word = found[index].name
    if len(word) > 2 and _modifies(found, index) and not _is_misspelt(word):
        return True
    if _is_head(found, index) or _is_misspelt(word):
        return False
    if len(word) >= 5 and word.endswith(("ly", "ing", "ed")):
        return True
    return len(word) >= 4 and word.endswith("s") and _follows_a_subject(found, index)


def _modifies(found: Sequence[Word], index: int) -> bool:
    """Tell whether a known noun follows directly, or after other modifiers: "a fluffy young fox"."""
    for word in found[index + 1 :]:
        if word.gap:
            return False
        if word.kind in NOUNS:
            return True
        if word.kind not in (*MODIFIERS, Kind.UNKNOWN):
            return False
    return False


def _is_head(found: Sequence[Word], index: int) -> bool:
    """Tell whether an article or a preposition belongs to it, as in "a wedding on a beach", or it comes first."""
    for position in range(index, -1, -1):
        if position == 0 or found[position].gap == ".":
            return True
        before = found[position - 1].kind
        if before in (Kind.DETERMINER, Kind.PREPOSITION, Kind.NEGATION):
            return True
        if before not in (*MODIFIERS, Kind.UNKNOWN):
            return False
    return True


def _follows_a_subject(found: Sequence[Word], index: int) -> bool:
    """Tell whether it can be a verb: "a fox sniffs", "a fox happily sniffs", "a fox sits and sniffs"."""
    before = list(reversed(found[:index]))
    if found[index].gap or not before:
        return False
    if before[0].kind is Kind.AND and len(before) > 1:
        return before[1].kind is Kind.HARMLESS
    return before[0].kind in (*ACTING, Kind.HARMLESS)


def _names_what_follows(found: Sequence[Word], index: int) -> bool:
    """Tell whether a noun only qualifies the next one: "a tiger shark", "a train station"."""
    after = found[index + 1] if index + 1 < len(found) else None
    follows = after is not None and not after.gap and after.kind in (*ACTING, Kind.SCENE, Kind.NEAR_SCENE)
    return follows and index > 0 and not found[index].gap and found[index - 1].kind is Kind.DETERMINER


def _is_misspelt(word: str) -> bool:
    """Tell whether it is probably a misspelt word of the vocabulary, unless it ends like an adjective or verb."""
    if word.endswith(("y", "ing", "ed")):
        return False
    return bool(difflib.get_close_matches(word, (*sorted(NAMED), *ALIASES), n=1, cutoff=0.8))
