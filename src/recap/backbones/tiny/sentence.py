"""Splits a sentence into words of one kind each, and finds what it excludes: "a beach without a fox", "no people".

Words are looked up in words.toml; those that are not there are classified by ending and position.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import auto

from recap.backbones.tiny import vocabulary
from recap.backbones.tiny.vocabulary import NAMED, TABLES, canonical, clipped
from recap.errors import refuse
from recap.io.older import StrEnum


class Kind(StrEnum):
    """Names the kind of a word; the lists of words.toml have these names."""

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
CAN_BE_EXCLUDED = (*ACTING, Kind.NEAR_SCENE, Kind.NEAR_TIME, Kind.UNKNOWN, Kind.HARMLESS)


# Before a subject that was named already, the first mean that one, the others one more.
SAME = ("the", "this", "that", "its")
ANOTHER = ("other", "second", "next", "new")


@dataclass(frozen=True, slots=True)
class Word:
    """Holds one word of a sentence, or a pair with its own meaning."""

    # As written, in lower case.
    raw: str
    # As in the tables.
    name: str
    kind: Kind
    # What comes before it: "" for spaces or a hyphen, "," for a pause, "." for the end of a sentence.
    gap: str


_END = Word("", "", Kind.FILLER, ".")


_WORD = re.compile(r"[^\W_]+(?:['’][^\W_]+)*")
COMPOUNDS: dict[str, str] = TABLES["compound"]
EXACT = {word: Kind(kind) for kind, words in TABLES["exact"].items() for word in words.split()}
NEAR = {
    Kind(kind): {word: near.split() for near, words in TABLES[kind].items() for word in words.split()}
    for kind in ("near_actor", "near_scene", "near_time")
}
"""For each word that is not in the vocabulary, those that may replace it, the most similar first."""
_BY_FORM = {word: Kind(kind) for kind, words in TABLES["form"].items() for word in words.split()}
_BY_FORM |= {word: kind for kind, table in NEAR.items() for word in table}
_NAMED_KINDS = {
    **dict.fromkeys(vocabulary.ACTORS, Kind.ACTOR),
    **dict.fromkeys(vocabulary.SCENES, Kind.SCENE),
    **dict.fromkeys(vocabulary.TIMES, Kind.TIME),
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
    """Yield each word as written, and its gap."""
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
        pairs = [pair for form in _forms(following) if (pair := f"{word} {form}") in COMPOUNDS]
        if pairs and not between:
            yield f"{word} {following}", COMPOUNDS[pairs[0]], gap
            index += 2
        else:
            yield word, word, gap
            index += 1


def _forms(word: str) -> tuple[str, ...]:
    """Return the word, and the words of which it may be the plural or the third person."""
    endings = (("", ""), ("s", ""), ("es", ""), ("ies", "y"), ("ves", "f"))
    return tuple(word.removesuffix(old) + new for old, new in endings if word.endswith(old))


def _classify(raw: str, word: str, gap: str) -> Word:
    """Look a word up, as written or in one of its forms."""
    if word.endswith("n't"):
        return Word(raw, word, Kind.NOT, gap)
    word = word.partition("'")[0]
    if word in EXACT:
        return Word(raw, word, EXACT[word], gap)
    own = canonical(word)
    if own in _NAMED_KINDS:
        return Word(raw, own, _NAMED_KINDS[own], gap)
    if own in vocabulary.FILLERS:
        return Word(raw, own, EXACT.get(own, Kind.FILLER), gap)
    for form in _forms(word):
        if form in _BY_FORM:
            return Word(raw, form, _BY_FORM[form], gap)
    if word.isdecimal():
        return Word(raw, word, Kind.FILLER if word == "1" else Kind.COUNT, gap)
    return Word(raw, word, Kind.HARMLESS if re.fullmatch(r"\d+(k|p|d|mm|fps)", word) else Kind.UNKNOWN, gap)


def _at(found: Sequence[Word], index: int) -> Word:
    """Return the word at an index, or the end of a sentence after the last."""
    return found[index] if index < len(found) else _END


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


def is_named_again(found: Sequence[Word], index: int) -> bool:
    """Tell whether a subject was named before and is meant again, as in "a fox on a beach. The fox runs"."""
    word, before = found[index], index - 1
    if word.kind not in ACTING or all(each.name != word.name for each in found[:index]):
        return False
    while before > 0 and found[before].kind in MODIFIERS and found[before].raw not in ANOTHER:
        before -= 1
    joined = found[before - 1].kind is Kind.AND
    return before > 0 and found[before].raw in SAME and not joined


def _modifies(found: Sequence[Word], index: int) -> bool:
    """Tell whether a known noun follows directly, or after other modifiers: "a fluffy young fox"."""
    index += 1
    while not _at(found, index).gap and found[index].kind in (*MODIFIERS, Kind.UNKNOWN):
        index += 1
    return not _at(found, index).gap and found[index].kind in NOUNS


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
    after = _at(found, index + 1)
    follows = not after.gap and after.kind in (*ACTING, Kind.SCENE, Kind.NEAR_SCENE)
    return follows and index > 0 and not found[index].gap and found[index - 1].kind is Kind.DETERMINER


def _is_misspelt(word: str) -> bool:
    """Tell whether it is probably a misspelt word of the vocabulary, unless it ends like an adjective or verb."""
    if word.endswith(("y", "ing", "ed")):
        return False
    return bool(difflib.get_close_matches(word, (*sorted(NAMED), *vocabulary.ALIASES), n=1, cutoff=0.8))


def leave_out(found: Sequence[Word], text: str) -> tuple[list[Word], list[str]]:
    """Return the remaining words and the names of what is excluded; refuse what can be read in two ways."""
    kept: list[Word] = []
    unwanted: list[str] = []
    index = 0
    while index < len(found):
        word = found[index]
        if word.kind is Kind.DOUBT:
            raise _unclear(text, word)
        if word.kind not in (Kind.NEGATION, Kind.NOT):
            kept.append(word)
            index += 1
            continue
        targets, index = _targets(found, index, text)
        unwanted += [found[target].name for target in targets]
    return kept, list(dict.fromkeys(unwanted))


def _targets(found: Sequence[Word], start: int, text: str) -> tuple[list[int], int]:
    """Return the indices of the nouns that one negation excludes, and of the word after them."""
    targets: list[int] = []
    index = start + 1
    while True:
        target = _noun(found, index, strict=found[start].kind is Kind.NOT)
        if target is None:
            raise _unclear(text, found[start])
        targets.append(target)
        index = target + 1
        if _at(found, index).kind is Kind.CHOICE and found[index].gap != ".":
            index += 1
        elif _may_continue(found, index):
            raise _unclear(text, found[start])
        else:
            return targets, index


def _noun(found: Sequence[Word], index: int, *, strict: bool) -> int | None:
    """Return the index of the noun of the phrase that begins here.

    With `strict`, no adjectives may come before it, because "not" may belong to a verb.
    """
    between = (Kind.DETERMINER, Kind.COUNT) if strict else (Kind.DETERMINER, *MODIFIERS)
    while not _at(found, index).gap and found[index].kind in between:
        after = _at(found, index + 1)
        noun_may_follow = not after.gap and after.kind in (*CAN_BE_EXCLUDED, *NOUNS, *MODIFIERS)
        if found[index].kind is Kind.HARMLESS and not noun_may_follow:
            # In "no sky" the harmless word is itself the noun.
            break
        index += 1
    noun = _at(found, index)
    if noun.gap or noun.kind not in CAN_BE_EXCLUDED or (strict and noun.kind is Kind.HARMLESS):
        return None
    return index


def _may_continue(found: Sequence[Word], index: int) -> bool:
    """Tell whether another actor follows that may be excluded too: "without a fox and a bus"."""
    word = _at(found, index)
    if word.gap == "." or not (word.gap or word.kind is Kind.AND):
        return False
    if word.kind is Kind.AND:
        index += 1
    while _at(found, index).kind in (Kind.DETERMINER, *MODIFIERS):
        index += 1
    return _at(found, index).kind in (*ACTING, Kind.UNKNOWN)


def _unclear(text: str, word: Word) -> ValueError:
    """Make the error of a negation that can be read in two ways."""
    limit = f"what {word.raw!r} leaves out is not clear to the embedded backbone"
    return refuse("prompt", clipped(text), limit, "name only who is there, and where")
