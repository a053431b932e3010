"""What a reproduction shows: drawings of its numbers, its tables, and the videos of its first prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from recap.recipes.tables import Planned, Recipe
from recap.reproduction.table import SAID_OF_ALL, Cell, Line, markdown_row
from recap.show.chart import Bar, interval_chart, line_chart
from recap.show.chart import Line as Curve
from recap.show.moments import moments_sheet
from recap.show.preview import embed
from recap.show.results_page import Measured, Section
from recap.show.side_by_side import write_side_by_side
from recap.video import open_clip

MOST_FIGURES = 4
MOMENTS = 5


def figures_of(recipe: Recipe, cells: Sequence[Cell], lines: Sequence[Line]) -> list[str]:
    """Curves where there are any, then an interval chart per measure; the first is the table's figure."""
    curves = _curves(recipe, lines)
    sweeps = _sweeps(recipe, cells)
    bars = [
        interval_chart(
            measure,
            [_bar(cell) for cell in cells if cell.measure == measure],
        )
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


def _sweeps(recipe: Recipe, cells: Sequence[Cell]) -> list[str]:
    """Every measure over the setting that the rows vary."""
    values = {row.name: row.value for row in recipe.rows if row.value is not None}
    if not values or recipe.name == "time":
        return []
    charts = []
    for measure in dict.fromkeys(cell.measure for cell in cells):
        own = [cell for cell in cells if cell.measure == measure and cell.row in values]
        x = [float(values[cell.row] or 0) for cell in own]
        y = [cell.value.mean if cell.value.mean == cell.value.mean else None for cell in own]
        charts.append(line_chart(measure, [Curve(measure, x, y)], recipe.name))
    return charts


def section_of(
    recipe: Recipe,
    cells: Sequence[Cell],
    figures: Sequence[str],
    planned: Sequence[Planned],
    folders: Sequence[Path],
    left_out: Sequence[str],
) -> Section:
    """The section of a page; `folders` are those of the planned runs."""
    said = [recipe.note, SAID_OF_ALL]
    if left_out:
        said.append(f"Left out, as this version cannot draw them: {', '.join(left_out)}.")
    clips = _first_clips(planned, folders)
    video, remark = _side_by_side(clips, folders[0].parent)
    first = planned[0]
    told = " → ".join(shot.prompt for shot in first.script.shots)
    return Section(
        title=recipe.title,
        said=said,
        measured=measured_of(recipe, cells),
        figures=figures,
        video=video,
        video_said=f"The first prompt, seed {first.seed}: {told}. {remark}",
        sheet=moments_sheet(clips, _moments(planned[0], clips)) if clips else None,
        sheet_said="The same runs at a few moments.",
    )


def measured_of(recipe: Recipe, cells: Sequence[Cell]) -> list[Measured]:
    head = ["", "here", "n", f"{recipe.ours} − row", f"{recipe.ours} wins", "p", "paper"]
    return [
        Measured(
            measure,
            next(cell.backend for cell in cells if cell.measure == measure),
            head,
            [markdown_row(cell) for cell in cells if cell.measure == measure],
            recipe.ours,
        )
        for measure in dict.fromkeys(cell.measure for cell in cells)
    ]


def _first_clips(planned: Sequence[Planned], folders: Sequence[Path]) -> dict[str, Path]:
    """The videos of the first prompt and seed, by row; those of equal length only."""
    first = planned[0]
    clips = {
        each.row.name: folder / "video.mp4"
        for each, folder in zip(planned, folders, strict=True)
        if each.script.name == first.script.name and each.seed == first.seed
    }
    lengths = {name: open_clip(path).num_pictures for name, path in clips.items()}
    wanted = lengths[first.row.name]
    return {name: path for name, path in clips.items() if lengths[name] == wanted}


def _side_by_side(clips: Mapping[str, Path], folder: Path) -> tuple[str, str]:
    target = folder / "side-by-side.mp4"
    write_side_by_side(target, clips, lambda: None)
    return embed(target, link=f"work/jobs/{target.name}")


def _moments(first: Planned, clips: Mapping[str, Path]) -> dict[float, str]:
    """The middle of every shot of a script, or evenly spread moments of a single shot."""
    clip = open_clip(next(iter(clips.values())))
    duration = (clip.num_pictures or 1) / clip.fps
    shots = first.script.shots
    if len(shots) == 1:
        times = [duration * (i + 0.5) / MOMENTS for i in range(MOMENTS)]
    else:
        ends = np.cumsum([shot.seconds for shot in shots]) * duration / sum(shot.seconds for shot in shots)
        starts = [0.0, *ends[:-1]]
        times = [float(start + 0.7 * (end - start)) for start, end in zip(starts, ends, strict=True)]
    return {time: f"{time:.1f} S" for time in times}
