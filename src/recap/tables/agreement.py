"""This module says how often two judges of the same runs disagree on which of two rows of a table is better."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import combinations
from typing import NamedTuple

from recap.eval.judged import BY_SECOND, WITNESSES
from recap.eval.metrics import find_measures
from recap.eval.scores import Score
from recap.tables.gap_figures import OVER
from recap.tables.recipes import Recipe
from recap.tables.table import ScoredRun, plain_name, runs_by_row

_BY_WITNESS = re.compile(rf"^(?P<what>.+)_(?P<who>{'|'.join(WITNESSES)})(?P<rest>(_.+)?)$")


class Disagreement(NamedTuple):
    """Holds the share of pairs of runs in which two judges of a score see a difference, and prefer different rows."""

    what: str
    judges: tuple[str, str]
    share: float
    pairs: int


def find_disagreements(recipe: Recipe, runs: Sequence[ScoredRun]) -> list[Disagreement]:
    """Compare all judges of the same thing, over pairs of runs of our row and another, of one prompt and seed.

    Pairs count if the difference is one that a viewer could see, by both judges.
    """
    by_row, found = runs_by_row(runs), []
    for what, names in _judged_alike(runs).items():
        for one, other in combinations(names, 2):
            opposite = total = 0
            for row in recipe.rows:
                ours, own = by_row.get(recipe.compared_with(row), {}), by_row.get(row.name, {})
                for at in ours.keys() & own.keys() if row.name != recipe.compared_with(row) else ():
                    gaps = [_gap(recipe, ours[at], own[at], names[judge]) for judge in (one, other)]
                    if all(gaps):
                        total += 1
                        opposite += gaps[0] * gaps[1] < 0
            if total:
                found.append(Disagreement(what, (one, other), opposite / total, total))
    return found


def describe_disagreements(found: Sequence[Disagreement]) -> str:
    """Say it in a sentence, "" where only one judged."""
    if not found:
        return ""
    parts = [
        f"{plain_name(each.what)} by {' and by '.join(each.judges)} in {each.share:.0%} of {each.pairs}"
        for each in found
    ]
    return (
        "Two judges prefer different rows, of pairs of runs in which both see a difference (50 % would be chance): "
        f"{'; '.join(parts)}."
    )


def _judged_alike(runs: Sequence[ScoredRun]) -> dict[str, dict[str, str]]:
    """Return the scores that several judges gave for the same thing: what -> judge -> name of the score."""
    names = list(dict.fromkeys(name for run in runs for name in run.scores))
    alike: dict[str, dict[str, str]] = {}
    for name in names:
        if name.endswith(BY_SECOND):
            what = name.removesuffix(BY_SECOND)
            if what in names:
                alike[what] = {"the first flow": what, "the second": name}
        elif (match := _BY_WITNESS.match(name)) and not OVER.fullmatch(name):
            alike.setdefault(match["what"] + match["rest"], {})[match["who"]] = name
    return {what: judges for what, judges in alike.items() if len(judges) > 1}


def _gap(recipe: Recipe, ours: ScoredRun, other: ScoredRun, name: str) -> float:
    """Return ours minus the other by one judge; 0 where it is unknown or nobody could see it."""
    scores = [Score(**run.scores[name]) for run in (ours, other) if name in run.scores]
    values = [score.value for score in scores if score.value is not None]
    if len(values) < 2:
        return 0.0
    gap, backend = values[0] - values[1], scores[0].backend
    visible = max(measure.smallest_visible(name, backend) for measure in find_measures(recipe.measures))
    return gap if abs(gap) > visible else 0.0
