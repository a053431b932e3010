"""Finds what a sentence excludes: "a beach without a fox", "no people", "neither a bus nor a car"."""

from __future__ import annotations

from collections.abc import Sequence

from recap.backbones.tiny.sentence import ACTING, MODIFIERS, Kind, Word
from recap.backbones.tiny.vocabulary import clipped
from recap.errors import refuse

_CAN_BE_LEFT_OUT = (*ACTING, Kind.NEAR_SCENE, Kind.NEAR_TIME, Kind.UNKNOWN, Kind.HARMLESS)


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
        if index < len(found) and found[index].kind is Kind.CHOICE and found[index].gap != ".":
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
    while index < len(found) and not found[index].gap and found[index].kind in between:
        if found[index].kind is Kind.HARMLESS and _ends(found, index + 1):
            # In "no sky" the harmless word is itself the noun.
            break
        index += 1
    if index >= len(found) or found[index].gap or found[index].kind not in _CAN_BE_LEFT_OUT:
        return None
    return None if strict and found[index].kind is Kind.HARMLESS else index


def _ends(found: Sequence[Word], index: int) -> bool:
    """Tell whether no noun can follow here."""
    if index >= len(found) or found[index].gap:
        return True
    return found[index].kind not in (*_CAN_BE_LEFT_OUT, *MODIFIERS, Kind.SCENE, Kind.TIME)


def _may_continue(found: Sequence[Word], index: int) -> bool:
    """Tell whether another actor follows that may be excluded too: "without a fox and a bus"."""
    if index >= len(found) or found[index].gap == ".":
        return False
    if found[index].kind is Kind.AND:
        index += 1
    elif not found[index].gap:
        return False
    while index < len(found) and found[index].kind in (Kind.DETERMINER, *MODIFIERS):
        index += 1
    return index < len(found) and found[index].kind in (*ACTING, Kind.UNKNOWN)


def _unclear(text: str, word: Word) -> ValueError:
    limit = f"what {word.raw!r} leaves out is not clear to the embedded backbone"
    return refuse("prompt", clipped(text), limit, "name only who is there, and where")
