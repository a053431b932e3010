"""This module makes the page of a table: its figures, numbers and first videos."""

from __future__ import annotations

import base64
import re
import zlib
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from recap.eval.metrics import find_measures
from recap.eval.metrics.bank import sources_by_block
from recap.eval.sampling import InMemoryClip, Pictures
from recap.io.report import Notice
from recap.io.trace import BlockTrace, has_bank, pictures_of_frames
from recap.show.chart import (
    BankHistory,
    Bar,
    Line,
    Place,
    draw_bank,
    interval_chart,
    line_chart,
    panel_chart,
    plane_chart,
)
from recap.show.clips import embed, write_side_by_side
from recap.show.page import Section
from recap.show.sheet import pictures_sheet, png_bytes
from recap.tables.gap_figures import OVER, gap_figures
from recap.tables.recipes import Recipe
from recap.tables.runs import Planned
from recap.tables.table import TIMED, Cell, ScoredRun, judged_as_in_paper, measured_of, plain_name, remarks

MOST_FIGURES = 4
MOMENTS = 5
"""Pictures that a page shows of a run of one shot."""
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
        shown = [Bar(c.row, *c.value[:3], c.paper if judged_as_in_paper(c.backend) else None) for c in own]
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


class Look(NamedTuple):
    """Holds a picture per moment, and the bank, which is None for a memory without one."""

    pictures: Pictures
    moments: Sequence[float]
    bank: BankHistory | None


def look_at(clip: InMemoryClip, trace: Sequence[BlockTrace], shots_s: Sequence[float]) -> Look:
    """Return pictures late in every shot, or at evenly spread moments of a single shot, and the bank in seconds."""
    num_pictures = len(clip.shown)
    duration_s = num_pictures / clip.fps
    if len(shots_s) == 1:
        moments = [duration_s * (i + 0.5) / MOMENTS for i in range(MOMENTS)]
    else:
        ends = np.cumsum(shots_s) * duration_s / sum(shots_s)
        moments = [float(start + 0.7 * (end - start)) for start, end in zip([0.0, *ends], ends, strict=False)]
    pictures: Pictures = np.stack([clip.shown[round(second * clip.fps)] for second in moments])
    return Look(pictures, moments, _history_of(trace, duration_s, clip.fps) if has_bank(trace) else None)


def _history_of(trace: Sequence[BlockTrace], duration_s: float, fps: float) -> BankHistory:
    second_of = {frame: pictures[0] / fps for frame, pictures in pictures_of_frames(trace).items()}
    starts = [second_of[line.first_frame] for line in trace]
    sources = [{second_of[frame]: n for frame, n in slots.items()} for slots in sources_by_block(trace)]
    cuts = [start for start, line in zip(starts, trace, strict=True) if line.clears_prior]
    return BankHistory([*starts[1:], duration_s], sources, cuts)


def pack_look(look: Look) -> dict[str, Any]:
    """Return a look as JSON takes it; pictures as their differences from line to line, a sixth of the bytes."""
    steps = np.diff(look.pictures, axis=1, prepend=np.uint8(0))
    bank = look.bank
    return {
        "moments": list(look.moments),
        "shape": list(look.pictures.shape),
        "pictures": base64.b64encode(zlib.compress(steps.tobytes(), 6)).decode(),
        "bank": bank and [list(bank.ends), [list(slots.items()) for slots in bank.slots], list(bank.cuts)],
    }


def unpack_look(packed: Mapping[str, Any]) -> Look:
    """Return the look that was packed."""
    steps = np.frombuffer(zlib.decompress(base64.b64decode(packed["pictures"])), np.uint8)
    pictures = np.cumsum(steps.reshape(packed["shape"]), axis=1, dtype=np.uint8)
    bank = None
    if packed["bank"] is not None:
        ends, sources, cuts = packed["bank"]
        bank = BankHistory(ends, [dict(map(tuple, each)) for each in sources], cuts)
    return Look(pictures, packed["moments"], bank)
