"""What a sentence says is not there: "a beach without a fox", "no people", "neither a bus nor a car"."""

from __future__ import annotations

from collections.abc import Sequence

from recap.backbones.tiny.sentence import ACTING, MODIFIERS, Kind, Word
from recap.backbones.tiny.vocabulary import clipped
from recap.errors import refuse

_CAN_BE_LEFT_OUT = (*ACTING, Kind.NEAR_SCENE, Kind.NEAR_TIME, Kind.UNKNOWN, Kind.HARMLESS)


def leave_out(found: Sequence[Word], text: str) -> tuple[list[Word], list[str]]:
    """The other words, and the names of what is left out as asked; refuses what can be read in two ways."""
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
    """Where the nouns are that one negation leaves out, and where the sentence goes on."""
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
        elif _may_go_on(found, index):
            raise _unclear(text, found[start])
        else:
            return targets, index


def _noun(found: Sequence[Word], index: int, *, strict: bool) -> int | None:
    """The noun of a phrase that begins here; strictly, without adjectives, since "not" may belong to a verb."""
    between = (Kind.DETERMINER, Kind.COUNT) if strict else (Kind.DETERMINER, *MODIFIERS)
    while index < len(found) and not found[index].gap and found[index].kind in between:
        if found[index].kind is Kind.HARMLESS and _ends(found, index + 1):
            break  # "no sky": a noun that is known as harmless
        index += 1
    if index >= len(found) or found[index].gap or found[index].kind not in _CAN_BE_LEFT_OUT:
        return None
    return None if strict and found[index].kind is Kind.HARMLESS else index


def _ends(found: Sequence[Word], index: int) -> bool:
    """Whether no noun can follow here."""
    if index >= len(found) or found[index].gap:
        return True
    return found[index].kind not in (*_CAN_BE_LEFT_OUT, *MODIFIERS, Kind.SCENE, Kind.TIME)


def _may_go_on(found: Sequence[Word], index: int) -> bool:
    """Whether another actor comes next of which it is not clear that it is wanted: "without a fox and a bus"."""
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
