"""This module says which rows of a table differ from ours if one counts how many rows were looked at."""

from __future__ import annotations

import math
from collections.abc import Sequence

from recap.eval.metrics import find_measures
from recap.eval.scores import Score, corrected_p, one_backend
from recap.tables.recipes import Recipe
from recap.tables.table import ScoredRun, plain_name

UNLIKELY = 0.05


def describe_looks(recipe: Recipe, runs: Sequence[ScoredRun]) -> str:
    """Name, for the panels of a recipe, the rows that differ from ours at 5 % over all rows, "" without panels."""
    by_row: dict[str, dict[tuple[str, int], ScoredRun]] = {}
    for run in runs:
        by_row.setdefault(run.row, {})[run.prompt, run.seed] = run
    ours = by_row.pop(recipe.ours, {})
    if not ours or len(by_row) < 2:
        return ""
    found = [
        f"{plain_name(measure)}: {'; '.join(rows) or 'no row'}"
        for measure in recipe.panels
        if (rows := _differing(recipe, measure, ours, by_row)) is not None
    ]
    if not found:
        return ""
    return (
        f"Corrected for {len(by_row)} looks (at most one error in twenty such tables), these differ from "
        f"{recipe.ours} by what could be seen. {'. '.join(found)}."
    )


def _differing(
    recipe: Recipe,
    measure: str,
    ours: dict[tuple[str, int], ScoredRun],
    by_row: dict[str, dict[tuple[str, int], ScoredRun]],
) -> list[str] | None:
    """Return the rows that differ, each with the sign of its own side; None if p is unknown."""
    gaps: dict[str, dict[str, float]] = {}
    means: dict[str, float] = {}
    judges: list[Score] = []
    for row, own in by_row.items():
        pairs = {}
        for at in ours.keys() & own.keys():
            both = [Score(**run.scores[measure]) for run in (ours[at], own[at]) if measure in run.scores]
            values = [score.value for score in both if score.value is not None]
            if len(values) == 2:
                pairs[at] = values[0] - values[1]
                judges += both
        for (prompt, _), gap in pairs.items():
            gaps.setdefault(row, {})[prompt] = gaps.get(row, {}).get(prompt, 0.0) + gap
        if pairs:
            means[row] = sum(pairs.values()) / len(pairs)
    p = corrected_p(gaps)
    if not p or any(map(math.isnan, p.values())):
        return None
    backend = one_backend(judges)
    visible = max(each.smallest_visible(measure, backend) for each in find_measures(recipe.measures))
    return [
        f"{row} ({'lower' if means[row] > 0 else 'higher'}, p {chance:.2g})"
        for row, chance in p.items()
        if chance < UNLIKELY and abs(means[row]) >= visible
    ]
