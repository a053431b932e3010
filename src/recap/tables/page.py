"""This module makes the page of a table: its figures, numbers and first videos."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from pathlib import Path

import numpy as np

from recap.eval.metrics import find_measures
from recap.io.report import Notice
from recap.show.chart import Bar, Line, Place, draw_bank, interval_chart, line_chart, panel_chart, plane_chart
from recap.show.clips import embed, write_side_by_side
from recap.show.page import Section
from recap.show.sheet import pictures_sheet, png_bytes
from recap.tables.gap_figures import OVER, gap_figures
from recap.tables.generating import Look
from recap.tables.recipes import Recipe
from recap.tables.runs import Planned
from recap.tables.table import TIMED, Cell, ScoredRun, measured_of, plain_name, remarks

MOST_FIGURES = 4
SIDE_BY_SIDE = "side-by-side.mp4"
"""The first runs of a table in one video, in its folder."""


def figures_of(recipe: Recipe, cells: Sequence[Cell], runs: Sequence[ScoredRun]) -> list[str]:
    """Return curves where there are any, then an interval chart per measure; the first is the table's figure.

    What no row has a value of is left out.
    """
    cells = [cell for cell in cells if cell.value.n]
    gaps = gap_figures(recipe, cells, runs)
    cells = [cell for cell in cells if not OVER.fullmatch(cell.measure)]
    bars = []
    for measure in dict.fromkeys(cell.measure for cell in cells):
        own = [cell for cell in cells if cell.measure == measure]
        shown = [Bar(c.row, *c.value[:3], c.paper if c.same_judge else None) for c in own]
        bars.append(interval_chart(plain_name(measure), shown))
    others = [
        *_panels(recipe, cells),
        *_plane(recipe, cells),
        *_curves(recipe, runs),
        *_sweeps(recipe, cells),
        *bars,
    ]
    return [*gaps, *others[:MOST_FIGURES]]


def _panels(recipe: Recipe, cells: Sequence[Cell]) -> list[str]:
    """Show the measures that a recipe names side by side, where they were measured."""
    panels = {
        plain_name(measure): [Bar(c.row, *c.value[:3]) for c in cells if c.measure == measure]
        for measure in recipe.panels
    }
    panels = {name: bars for name, bars in panels.items() if bars}
    return [panel_chart(recipe.title, panels, recipe.ours)] if panels else []


def _plane(recipe: Recipe, cells: Sequence[Cell]) -> list[str]:
    """Show the two measures that a recipe names, one over the other, where both were measured."""
    if recipe.plane is None:
        return []
    values = {(cell.row, cell.measure): cell.value[:3] for cell in cells}
    across, up = recipe.plane
    places = [
        Place(row.name, values[row.name, across], values[row.name, up], row.path)
        for row in recipe.rows
        if (row.name, across) in values and (row.name, up) in values
    ]
    return [plane_chart(recipe.title, places, plain_name(across), plain_name(up))] if places else []


def _curves(recipe: Recipe, runs: Sequence[ScoredRun]) -> list[str]:
    """Show likeness to the opening over time, the mean of all runs of a row."""
    charts = []
    for name in dict.fromkeys(n for run in runs for n in run.scores if n.endswith("_end")):
        shown = []
        for row in recipe.rows:
            own = [run.scores[name]["details"] for run in runs if run.row == row.name and name in run.scores]
            if own:
                seconds = max((details["seconds"] for details in own), key=len)
                shown.append(Line(row.name, seconds, _mean_curve([details["curve"] for details in own])))
        label = name.removesuffix("_end").replace("_", ", ")
        charts.append(line_chart(f"{label}: likeness to the opening", shown, "seconds"))
    return charts


def _mean_curve(curves: Sequence[Sequence[float | None]]) -> list[float | None]:
    known = [[y for y in column if y is not None] for column in zip_longest(*curves)]
    return [float(np.mean(column)) if column else None for column in known]


def _sweeps(recipe: Recipe, cells: Sequence[Cell]) -> list[str]:
    """Show what is measured of the first 5, 10, 20 s and so on, and measures over the setting that the rows vary."""
    values = {row.name: row.value for row in recipe.rows if row.value is not None}
    # By title and name of the axis: the cells of every curve.
    charts: dict[tuple[str, str], dict[str, dict[float, Cell]]] = {}
    for cell in cells:
        if timed := re.fullmatch(TIMED, cell.measure):
            curves = charts.setdefault((f"{plain_name(timed[1])} over length", "seconds"), {})
            curves.setdefault(cell.row, {})[float(timed[2])] = cell
        if cell.row in values:
            curves = charts.setdefault((plain_name(cell.measure), recipe.name), {})
            curves.setdefault(plain_name(cell.measure), {})[values[cell.row]] = cell
    return [
        line_chart(title, [_curve(label, points) for label, points in curves.items()], axis)
        for (title, axis), curves in charts.items()
    ]


def _curve(label: str, points: Mapping[float, Cell]) -> Line:
    values = [cell.value for cell in points.values()]
    means = [None if np.isnan(value.mean) else value.mean for value in values]
    return Line(label, list(points), means, [(value.low, value.high) for value in values])


def section_of(
    recipe: Recipe,
    cells: Sequence[Cell],
    runs: Sequence[ScoredRun],
    left_out: Sequence[str],
    first: Planned,
    looks: Mapping[str, Look],
    video: tuple[str, str],
) -> Section:
    """Return the section of a page.

    `looks` show the runs of the first prompt and seed, by row; `video` is a player's source and a remark on it.
    """
    figures, sheet = figures_of(recipe, cells, runs), b""
    if any(measure.shows_bank for measure in find_measures(recipe.measures)):
        figures += [draw_bank(f"bank of {name}", look.bank) for name, look in looks.items() if look.bank]
    if looks:
        labels = [f"{second:.1f} s" for second in next(iter(looks.values())).moments]
        pictures = {name: list(look.pictures) for name, look in looks.items()}
        sheet = png_bytes(pictures_sheet(pictures, labels))
    prompts = " → ".join(shot.prompt.rstrip(".") for shot in first.script.shots)
    return Section(
        title=recipe.title,
        remarks=remarks(recipe.note, left_out),
        measured=measured_of(recipe.ours, cells),
        figures=figures,
        video=video[0],
        video_about=f"The same runs in motion. {video[1]}",
        sheet=sheet,
        sheet_about=f"The first prompt, seed {first.seed}: {prompts}. At a few moments:",
    )


def film_side_by_side(folder: Path, clips: Mapping[str, Path], notice: Notice) -> tuple[str, str]:
    """Write one video of the first runs, by row; return a player's source and a remark.

    Where they were generated without PyAV, or are lost, both are empty and the page does without.
    """
    target = folder / SIDE_BY_SIDE
    if not clips or not all(clip.is_file() for clip in clips.values()):
        return "", ""
    try:
        write_side_by_side(target, clips)
        return embed(target)
    except ValueError as error:
        notice(f"the page shows no video: {error}")
        return "", ""
