"""A study is laid out here: the pairs, and the order and sides in which each rater sees them.

What a rater's browser gets (`Study`) names nothing but files with meaningless names. Which video is whose is in the
key (`Key`), which stays with the maker of the study.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from recap.errors import RecapError, refuse
from recap.io.older import Self

VERSION = 1
MOST_PAIRS = 500
# Orders that are made beforehand: every rater gets one of them.
MOST_SHEETS = 64
PAIR, IDENTICAL = "pair", "identical"
FILE = re.compile(r"[0-9a-f]{20}\.mp4")

Trial = tuple[str, bool]
"""A pair, and whether its two videos change sides."""


def canonical_json(value: Any) -> str:
    """Return JSON with one way to write a thing."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


# Without slots, which would leave no room for its digest: that is asked for with every vote.
@dataclass(frozen=True)
class Study:
    """Holds what raters get: questions by their names, pairs of files by their names, and sheets of trials."""

    title: str
    questions: Mapping[str, str]
    pairs: Mapping[str, tuple[str, str]]
    sheets: Sequence[Sequence[Trial]]

    @cached_property
    def digest(self) -> str:
        """Return what every vote names, so that votes on another study are not counted in this one."""
        return hashlib.sha256(canonical_json(self.as_dict()).encode()).hexdigest()[:16]

    @property
    def trials(self) -> int:
        """Return how many pairs a rater sees, checks included."""
        return len(self.sheets[0])

    def as_dict(self) -> dict[str, Any]:
        return {"v": VERSION, **asdict(self)}

    @classmethod
    def from_dict(cls, values: Any, source: str) -> Self:
        """Read a study; refuses what was not written by `recap study make`."""
        match values:
            case {
                "v": 1,
                "title": str(title),
                "questions": dict(questions),
                "pairs": dict(pairs),
                "sheets": list(sheets),
            }:
                own = {name: tuple(files) for name, files in pairs.items() if isinstance(files, list)}
                plans = [_trials(sheet, own) for sheet in sheets]
                whole = plans and len(own) == len(pairs) and all(plans) and len(set(map(len, plans))) == 1
                named = all(len(f) == 2 and all(FILE.fullmatch(str(n)) for n in f) for f in own.values())
                asked = questions and all(isinstance(text, str) for text in questions.values())
                if whole and named and asked:
                    return cls(title, questions, own, plans)
        limit = "is not a study as this version writes it"
        raise refuse("study", source, limit, "put the file back as it was")


def _trials(sheet: Any, pairs: Mapping[str, Any]) -> list[Trial]:
    """Read the trials of a sheet; returns none where any is not one."""
    found = [(name, bool(swapped)) for name, swapped in sheet] if _is_sheet(sheet) else []
    return found if all(name in pairs for name, _ in found) else []


def _is_sheet(sheet: Any) -> bool:
    return isinstance(sheet, list) and all(
        isinstance(each, list | tuple) and len(each) == 2 and isinstance(each[0], str) and each[1] in (0, 1)
        for each in sheet
    )


@dataclass(frozen=True, slots=True)
class PairFacts:
    """Says what a pair is: its kind, its prompt and seed, and whose its two files are, in their order."""

    kind: str
    prompt: str
    seed: int
    methods: tuple[str, str]

    def fits(self, ours: str) -> bool:
        """Tell whether a pair can be what it says: one video is ours and the other is not, or both are the same."""
        texts = all(isinstance(text, str) for text in (self.kind, self.prompt, *self.methods))
        if not texts or len(self.methods) != 2 or not isinstance(self.seed, int):
            return False
        first, second = self.methods
        if self.kind == IDENTICAL:
            return first == second
        return self.kind == PAIR and (first == ours) != (second == ours)


@dataclass(frozen=True, slots=True)
class Key:
    """Says which video is whose; `made` has whatever else is worth knowing of the study."""

    study: Study
    ours: str
    pairs: Mapping[str, PairFacts]
    made: Mapping[str, Any]

    @property
    def rivals(self) -> list[str]:
        """Return the methods that ours is compared with, in the order of the key."""
        names = (name for facts in self.pairs.values() if facts.kind == PAIR for name in facts.methods)
        found = {name for name in names if name != self.ours}
        order = [name for name in self.made.get("methods", ()) if name in found]
        return [*order, *sorted(found - set(order))]

    def rival_of(self, pair: str) -> str:
        """Return whom ours is compared with in a pair."""
        first, second = self.pairs[pair].methods
        return second if first == self.ours else first

    def ours_on_a(self, trial: Trial) -> bool:
        """Tell whether a trial shows ours on side A."""
        return (self.pairs[trial[0]].methods[0] == self.ours) != trial[1]

    def as_dict(self) -> dict[str, Any]:
        """Return the key as its file holds it, with a digest of the rest."""
        pairs = {name: asdict(facts) for name, facts in self.pairs.items()}
        own = {"v": VERSION, "study": self.study.as_dict(), "ours": self.ours}
        own |= {"pairs": pairs, "made": dict(self.made)}
        return {**own, "digest": hashlib.sha256(canonical_json(own).encode()).hexdigest()}

    @classmethod
    def from_dict(cls, values: Any, source: str) -> Self:
        """Read a key; refuses one that was changed."""
        remedy = "put the file back as `recap study make` wrote it"
        known = values.items() if isinstance(values, dict) else ()
        own = {name: value for name, value in known if name != "digest"}
        try:
            whole = hashlib.sha256(canonical_json(own).encode()).hexdigest() == values["digest"]
            study = Study.from_dict(own["study"], source)
            facts = {
                name: PairFacts(**{**f, "methods": tuple(f["methods"])}) for name, f in own["pairs"].items()
            }
            made = cls(study, own["ours"], facts, own["made"])
            order = made.made.get("methods", [])
            fits = isinstance(made.ours, str) and all(pair.fits(made.ours) for pair in facts.values())
            if not fits or not isinstance(order, list) or not all(isinstance(name, str) for name in order):
                raise TypeError
        except (KeyError, TypeError, AttributeError, RecapError, RecursionError) as error:
            raise refuse("--key", source, "is not the key of a study", remedy) from error
        if not whole or facts.keys() != study.pairs.keys():
            raise refuse("--key", source, "was changed since it was written", remedy)
        return made


def choose_pairs(
    available: Mapping[str, Sequence[tuple[str, str]]], wanted: int, chance: random.Random
) -> dict[str, list[tuple[str, str]]]:
    """Choose as many pairs of every rival (one more of some), and prompts as evenly as they come.

    `available` has, by rival, the prompt and the name of every pair that could be shown.
    """
    rivals = list(available)
    if wanted < len(rivals):
        limit = f"there are {len(rivals)} memories to compare with ours, and each needs a pair"
        raise refuse("--pairs", wanted, limit, "ask for more, or leave out runs")
    share, rest = divmod(wanted, len(rivals))
    more = chance.sample(rivals, rest)
    quota = {rival: share + (rival in more) for rival in rivals}
    for rival, each in quota.items():
        if each > len(available[rival]):
            limit = f"{each} of them would be of {rival}, and {len(available[rival])} of its videos have a partner"
            raise refuse("--pairs", wanted, limit, "ask for fewer, or give more runs")
    left = {rival: chance.sample(list(each), len(each)) for rival, each in available.items()}
    chosen: dict[str, list[tuple[str, str]]] = {rival: [] for rival in rivals}
    used: Counter[str] = Counter()
    own: Counter[tuple[str, str]] = Counter()
    for number in range(max(quota.values())):
        for rival in rivals:
            if number < quota[rival]:
                best = min(left[rival], key=lambda at: (own[rival, at[0]], used[at[0]]))
                left[rival].remove(best)
                chosen[rival].append(best)
                used[best[0]] += 1
                own[rival, best[0]] += 1
    return chosen


def lay_out(
    groups: Sequence[Sequence[str]],
    ours_first: Mapping[str, bool],
    identical: Sequence[str],
    repeats: int,
    chance: random.Random,
) -> list[list[Trial]]:
    """Lay out the sheets; `groups` are the pairs of every rival, `ours_first` whether a pair's first file is ours.

    On every sheet ours is on side A in half of each rival's pairs (one more or less where they are odd). The orders
    are the rows of a Latin square: over all sheets every pair comes at every place as often. Sheets come in twos that
    differ in sides alone. Repeated pairs come late, with their sides changed.
    """
    order = [pair for group in groups for pair in group]
    chance.shuffle(order)
    rotations = min(len(order), MOST_SHEETS // 2)
    sheets = []
    for number in range(rotations):
        start = number * len(order) // rotations
        own = _with_checks(order[start:] + order[:start], identical, repeats, chance)
        # One count through all rivals: each is balanced, and so are all together.
        turns = [pair for group in groups for pair in chance.sample(list(group), len(group))]
        on_a = {pair: bool(place % 2) for place, pair in enumerate(turns)}
        swapped = {pair: ours_first[pair] != on_a[pair] for pair in turns}
        swapped |= {pair: chance.random() < 0.5 for pair in identical}
        seen: set[str] = set()
        sheet: list[Trial] = []
        for pair in own:
            sheet.append((pair, swapped[pair] != (pair in seen)))
            seen.add(pair)
        sheets += [sheet, [(pair, not change) for pair, change in sheet]]
    return sheets


def _with_checks(
    order: Sequence[str], identical: Sequence[str], repeats: int, chance: random.Random
) -> list[str]:
    """Put identical pairs between the others, one of them early, and pairs of the first half again at the end."""
    again = chance.sample(list(order[: max(repeats, len(order) // 2)]), repeats)
    late = list(order[len(order) - len(order) // 3 :])
    early = list(order[: len(order) - len(late)])
    for pair in again:
        late.insert(chance.randint(0, len(late)), pair)
    whole = early + late
    for number, pair in enumerate(chance.sample(list(identical), len(identical))):
        # Each in its own part of the sheet, so that a rater who stops early has met one.
        low, high = (len(whole) * part // len(identical) for part in (number, number + 1))
        whole.insert(chance.randint(max(low, 1), max(high - 1, 1)), pair)
    return whole
