"""This module makes the figures of scores over a gap or a distance, and of the ages of what a bank holds."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from recap.eval.metrics.drift import BY_DISTANCE
from recap.eval.metrics.recurrence import AGES_AT_RETURN, BY_GAP
from recap.show.chart import Line, line_chart
from recap.tables.recipes import Recipe
from recap.tables.table import Cell, ScoredRun, plain_name

AXES = {BY_GAP: ("gap", "seconds away"), BY_DISTANCE: ("distance", "pictures apart")}
OVER = re.compile(rf"(.+)({'|'.join(AXES)})(\d+)")
"""A score at one of several gaps or distances."""
TITLES = {
    "crop": "likeness by crops",
    "vlm": "likeness by the language model",
    "subject": "likeness by colours",
    "frame": "likeness of whole frames",
    "kept": "share of returns that are the same",
    "gate": "share of returns that pass the gate",
}
"""What a score over gaps is of; those whose judge tells instances apart best come first."""


def gap_figures(recipe: Recipe, cells: Sequence[Cell], runs: Sequence[ScoredRun]) -> list[str]:
    """Return a chart per score over gaps or distances, a curve per row; below the first likeness, ages of banks."""
    charts: dict[tuple[str, str], dict[str, dict[int, Cell]]] = {}
    for cell in cells:
        if cell.value.n and (over := OVER.fullmatch(cell.measure)):
            charts.setdefault((over[1], over[2]), {}).setdefault(cell.row, {})[int(over[3])] = cell
    figures = []
    for (name, kind), rows in sorted(charts.items(), key=lambda chart: _rank(chart[0][0])):
        what, axis = AXES[kind]
        lines = [_line(row, points) for row, points in rows.items()]
        figures.append(line_chart(f"{TITLES.get(name, plain_name(name))} over {what}", lines, axis))
        if kind == BY_GAP and len(figures) == 1:
            figures += _ages(recipe, runs)
    return figures


def _rank(name: str) -> int:
    return [*TITLES, name].index(name)


def _line(row: str, points: dict[int, Cell]) -> Line:
    at = sorted(points)
    values = [points[x].value for x in at]
    return Line(row, at, [value.mean for value in values], [(value.low, value.high) for value in values])


def _ages(recipe: Recipe, runs: Sequence[ScoredRun]) -> list[str]:
    """Show how old the slots of banks are as subjects return, the mean of all runs of a row."""
    lines = []
    for row in recipe.rows:
        own = [run.scores for run in runs if run.row == row.name and AGES_AT_RETURN in run.scores]
        found = [scores[AGES_AT_RETURN]["details"] for scores in own]
        if found:
            edges = np.array(found[0]["edges_s"], float)
            shares = np.mean([details["ages"] for details in found], axis=0)
            last = int(np.flatnonzero(shares > 0)[-1]) + 1 if shares.any() else len(shares)
            middles = (edges[:-1] + edges[1:]) / 2
            lines.append(Line(row.name, middles[:last].tolist(), shares[:last].tolist()))
    title = "ages of the bank's slots as a subject returns: share of slots"
    return [line_chart(title, lines, "seconds old")] if lines else []
