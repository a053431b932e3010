"""What the page of a table shows: figures of its numbers, its tables, and the videos of its first prompt."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from recap.eval.metrics import find_measures
from recap.show.chart import Bar, draw_bank, interval_chart, line_chart
from recap.show.chart import Line as Curve
from recap.show.clips import embed, write_side_by_side
from recap.show.page import Measured, Section
from recap.show.sheet import pictures_sheet, png_bytes
from recap.tables.looks import Look
from recap.tables.recipes import Planned, Recipe
from recap.tables.table import Cell, Line, markdown_row, remarks, short_name

MOST_FIGURES = 4


def figures_of(recipe: Recipe, cells: Sequence[Cell], lines: Sequence[Line]) -> list[str]:
    """Curves where there are any, then an interval chart per measure; the first is the table's figure."""
    curves = _curves(recipe, lines)
    sweeps = [*_lengths(cells), *_sweeps(recipe, cells)]
    bars = [
        interval_chart(measure, [_bar(cell) for cell in cells if cell.measure == measure])
        for measure in dict.fromkeys(cell.measure for cell in cells)
    ]
    return [*curves, *sweeps, *bars][:MOST_FIGURES]


def _bar(cell: Cell) -> Bar:
    return Bar(cell.row, *cell.value[:3], cell.paper if cell.same_judge else None)


def _curves(recipe: Recipe, lines: Sequence[Line]) -> list[str]:
    """Likeness to the opening over time, the mean of all runs of a row."""
    charts = []
    for name in dict.fromkeys(n for line in lines for n in line.scores if n.endswith("_end")):
        shown = []
        for row in recipe.rows:
            own = [
                line.scores[name]["details"] for line in lines if line.row == row.name and name in line.scores
            ]
            if own:
                seconds = max((details["seconds"] for details in own), key=len)
                shown.append(Curve(row.name, seconds, _mean_curve([details["curve"] for details in own])))
        label = name.removesuffix("_end").replace("_", ", ")
        charts.append(line_chart(f"{label}: likeness to the opening", shown, "seconds"))
    return charts


def _mean_curve(curves: Sequence[Sequence[float | None]]) -> list[float | None]:
    longest = max(len(curve) for curve in curves)
    columns = [[c[i] for c in curves if i < len(c) and c[i] is not None] for i in range(longest)]
    return [float(np.mean(np.array(column, float))) if column else None for column in columns]


def _lengths(cells: Sequence[Cell]) -> list[str]:
    """What is measured of the first 5, 10, 20 s and so on, as a curve a row."""
    points: dict[str, dict[str, dict[float, Cell]]] = {}
    for cell in cells:
        if timed := re.fullmatch(r"(.+)_(\d+)s", cell.measure):
            points.setdefault(timed[1], {}).setdefault(cell.row, {})[float(timed[2])] = cell
    return [
        line_chart(
            f"{name} over length",
            [_curve(row, list(at), list(at.values())) for row, at in rows.items()],
            "seconds",
        )
        for name, rows in points.items()
    ]


def _curve(label: str, x: Sequence[float], cells: Sequence[Cell]) -> Curve:
    values = [cell.value for cell in cells]
    return Curve(label, x, [_known(value.mean) for value in values], [(v.low, v.high) for v in values])


def _known(mean: float) -> float | None:
    return mean if mean == mean else None


def _sweeps(recipe: Recipe, cells: Sequence[Cell]) -> list[str]:
    """Every measure over the setting that the rows vary."""
    values = {row.name: row.value for row in recipe.rows if row.value is not None}
    charts = []
    for measure in dict.fromkeys(cell.measure for cell in cells):
        own = [cell for cell in cells if cell.measure == measure and cell.row in values]
        x = [float(values[cell.row] or 0) for cell in own]
        charts.append(line_chart(measure, [_curve(measure, x, own)], recipe.name))
    return charts


class Video(NamedTuple):
    """A player's source, and a remark for who looks at it; both empty where no video was kept."""

    source: str = ""
    remark: str = ""


def section_of(
    recipe: Recipe,
    cells: Sequence[Cell],
    figures: Sequence[str],
    first: Planned,
    looks: Mapping[str, Look],
    left_out: Sequence[str],
    video: Video,
) -> Section:
    """The section of a page; `looks` show the runs of the first prompt and seed, by row."""
    prompts = " → ".join(shot.prompt.rstrip(".") for shot in first.script.shots)
    labels = [f"{second:.1f} s" for look in looks.values() for second in look.moments]
    shown = {name: list(look.pictures) for name, look in looks.items()}
    return Section(
        title=recipe.title,
        remarks=remarks(recipe.note, left_out),
        measured=measured_of(recipe.ours, cells),
        figures=[*figures, *_timelines(recipe, looks)],
        video=video.source,
        video_about=f"The same runs in motion. {video.remark}",
        sheet=png_bytes(pictures_sheet(shown, labels[: len(labels) // len(looks)])) if looks else b"",
        sheet_about=f"The first prompt, seed {first.seed}: {prompts}. At a few moments:",
    )


def _timelines(recipe: Recipe, looks: Mapping[str, Look]) -> list[str]:
    """What the banks of the shown runs kept, in tables that are about banks."""
    if not any(measure.shows_bank for measure in find_measures(recipe.measures)):
        return []
    return [draw_bank(f"bank of {name}", look.bank) for name, look in looks.items() if look.bank is not None]


def measured_of(ours: str, cells: Sequence[Cell]) -> list[Measured]:
    """A table per measure, with the row `ours` to stand out."""
    name = short_name(ours)
    head = ["", "here", "n", f"{name} − row", f"{name} higher", "p", "paper"]
    found = []
    for measure in dict.fromkeys(cell.measure for cell in cells):
        own = [cell for cell in cells if cell.measure == measure]
        found.append(Measured(measure, own[0].backend, head, [markdown_row(cell) for cell in own], ours))
    return found


def side_by_side(folder: Path, clips: Mapping[str, Path]) -> Video:
    """One video of clips of equal length, by their rows, written into the folder of a table."""
    target = folder / "side-by-side.mp4"
    write_side_by_side(target, clips)
    return Video(*embed(target))
