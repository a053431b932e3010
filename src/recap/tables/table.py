"""This module makes tables of scores: by row and measure the mean, its interval, ours against it, and the paper's."""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from recap.eval.judged import BY_SECOND, EMBEDDED, Measure
from recap.eval.metrics import find_measures
from recap.eval.metrics.motion import spreads
from recap.eval.scores import (
    FEWEST_CLUSTERS,
    Estimate,
    Score,
    as_floats,
    cluster_interval,
    cluster_statistic,
    one_backend,
    paired_interval,
    sign_flip_p,
    win_share,
)
from recap.show.page import Measured
from recap.tables.ask import MOST_SEEDS
from recap.tables.paper_numbers import paper_table, paper_value
from recap.tables.recipes import Recipe
from recap.tables.rows import NONE, Row

PAPER_BASE = "Self-Forcing"
# Whose lines of the paper's main table are compared with a backbone's; with all others, Self-Forcing's.
PAPER_BACKBONES = {"infinite-forcing": "Infinite-Forcing", "longlive": "LongLive"}
PAPER_BACKBONES |= dict.fromkeys(("helios-distilled", "helios-mid", "helios-base"), "Helios")
# By one of these columns the paper's tables name their rows.
ROW_COLUMNS = ("method", "config", "row")
FLOW = "total_flow"
# Scores of the first so many seconds.
TIMED = r"(.+)_(\d+)s"
# The standard deviation (n - 1) of the means of the seeds; its n is the number of seeds.
SEED_DEVIATION = "_seed_deviation"

REMARK = (
    "Intervals are 95 %, by resampling whole prompts; p is of the mean difference, by exchanging whole prompts; none "
    f"with fewer than {FEWEST_CLUSTERS} prompts. Where a difference is smaller than a viewer could see, the column "
    "says so in place of p. The paper's numbers are of its own models and judges: compare differences, not levels."
)
COLUMNS = (
    *("row", "measure", "backend", "mean", "low", "high", "n", "prompts", "ours_minus_this"),
    *("difference_low", "difference_high", "ours_higher", "p_by_prompts", "smallest_visible", "paper"),
)


# What pages call judges whose names in the files say little to a reader.
JUDGES = {
    "standin:hsv-8x4x4": "colour histograms (in place of DINOv2)",
    "standin:mobilenetv2": "MobileNetV2 (in place of DINOv2)",
    "probe": "the small model's probe",
    "crops": "the crop embedding of the small model's world",
    "native": "plain arithmetic",
    "dis": "classical flow",
}


class ScoredRun(NamedTuple):
    """Holds the scores of one run, and the key of its job."""

    row: str
    prompt: str
    seed: int
    scores: Mapping[str, Any]
    key: str = ""


@dataclass(frozen=True, slots=True)
class Cell:
    """Holds one measure of one row.

    `against` is ours minus this row, pair by pair, `wins` the share of pairs that ours wins, and `p` is by prompts;
    it is None where the difference is below `visible`, the smallest that a viewer could see.
    """

    row: str
    measure: str
    backend: str
    value: Estimate
    against: Estimate | None
    wins: float | None
    p: float | None
    visible: float
    paper: float | None

    def values(self) -> list[str | float | None]:
        """Return the values of `COLUMNS`, None where there is none."""
        against = self.against[:3] if self.against else (None, None, None)
        numbers = (*self.value, *against, self.wins, self.p, self.visible or None, self.paper)
        known = (None if n is None or not math.isfinite(n) else n for n in numbers)
        return [self.row, self.measure, self.backend, *known]

    def texts(self) -> list[str]:
        """Return what a reader sees: row, value, n, difference, wins, p, the paper's."""
        return [
            self.row,
            _interval(self.value),
            f"{self.value.n} ({self.value.clusters} prompts)" if self.value.n else "none",
            _interval(self.against) if self.against else "",
            "" if self.wins is None or math.isnan(self.wins) else f"{100 * self.wins:.0f} %",
            self._chance(),
            "" if self.paper is None else _short(self.paper),
        ]

    def _chance(self) -> str:
        if self.against is not None and is_unseen(self.against, self.visible):
            return f"not visible (< {_short(self.visible)})"
        return "" if self.p is None or math.isnan(self.p) else f"{self.p:.2g}"


Scored = Mapping[tuple[str, int], ScoredRun]
"""The runs of a row by prompt and seed."""


def runs_by_row(runs: Sequence[ScoredRun]) -> dict[str, dict[tuple[str, int], ScoredRun]]:
    """Return the runs of every row, by prompt and seed."""
    by_row: dict[str, dict[tuple[str, int], ScoredRun]] = {}
    for run in runs:
        by_row.setdefault(run.row, {})[run.prompt, run.seed] = run
    return by_row


def judged_as_in_paper(backend: str) -> bool:
    """Tell whether the paper's number may stand in one figure with one of this judge."""
    return backend == "native" or backend.startswith(("dinov2", "vbench"))


def is_unseen(difference: Estimate, visible: float) -> bool:
    """Tell whether a difference is one that a viewer could not see."""
    return abs(difference.mean) < visible


def build_cells(recipe: Recipe, runs: Sequence[ScoredRun], backbone: str = EMBEDDED) -> list[Cell]:
    """Return every row by every measure, in the recipe's order."""
    by_row = runs_by_row(runs)
    measures = find_measures(recipe.measures)
    headlines = [name for measure in measures for name in measure.headlines]

    def order(name: str) -> tuple[int, str]:
        """Put headlines first; numbers in names count as such: 5 s before 10 s."""
        counted = re.sub(r"\d+", lambda number: number[0].zfill(6), name)
        plain = name.removesuffix(BY_SECOND)
        return headlines.index(plain) if plain in headlines else len(headlines), counted

    cells = []
    for row in recipe.rows:
        own = by_row.get(row.name, {})
        other = recipe.compared_with(row)
        ours = {} if row.name == other else by_row.get(other, {})
        for name in sorted({name for run in own.values() for name in run.scores}, key=order):
            cells.append(_cell(row, name, own, ours, measures, _paper(recipe, row, name, backbone)))
    return cells + _seed_cells(cells, by_row) + _spread_cells(recipe, by_row, backbone)


def _cell(
    row: Row, measure: str, own: Scored, ours: Scored, measures: Sequence[Measure], paper: float | None
) -> Cell:
    scores = {at: Score(**run.scores[measure]) for at, run in own.items() if measure in run.scores}
    values = {at: score.value for at, score in scores.items()}
    estimate = cluster_interval(list(values.values()), [prompt for prompt, _ in values])
    backend = one_backend(scores.values())
    visible = max(each.smallest_visible(measure, backend) for each in measures)
    against = wins = p = None
    theirs = {
        at: ours[at].scores[measure]["value"] for at in values if at in ours and measure in ours[at].scores
    }
    if theirs:
        # Rounded, so that two rows that are the same do not win and lose by the last bits.
        best = as_floats(list(theirs.values())).round(6).tolist()
        mine = as_floats([values[at] for at in theirs]).round(6).tolist()
        prompts = [prompt for prompt, _ in theirs]
        against, wins = paired_interval(best, mine, prompts), win_share(best, mine)
        p = None if is_unseen(against, visible) else sign_flip_p(best, mine, prompts)
    return Cell(row.name, measure, backend, estimate, against, wins, p, visible, paper)


def _seed_cells(cells: Sequence[Cell], by_row: Mapping[str, Scored]) -> list[Cell]:
    """Say by how much the mean over all prompts differs from seed to seed, of scores over length as in the paper."""
    found = []
    for cell in cells:
        if not re.fullmatch(TIMED, cell.measure):
            continue
        by_seed: dict[int, list[float | None]] = {}
        for (_, seed), run in by_row[cell.row].items():
            by_seed.setdefault(seed % MOST_SEEDS, []).append(run.scores[cell.measure]["value"])
        means = [as_floats(values).mean() for values in by_seed.values()]
        if len(means) > 1:
            deviation = Estimate(
                float(np.std(means, ddof=1)), math.nan, math.nan, len(means), cell.value.clusters
            )
            name = f"{cell.measure}{SEED_DEVIATION}"
            found.append(Cell(cell.row, name, cell.backend, deviation, None, None, None, 0.0, None))
    return found


def _spread_cells(recipe: Recipe, by_row: Mapping[str, Scored], backbone: str) -> list[Cell]:
    """Say how the flows of a row's videos are spread, which no video has by itself."""
    flows: dict[str, list[tuple[str, Score]]] = {}
    for name, own in by_row.items():
        scores = [(run.prompt, Score(**run.scores[FLOW])) for run in own.values() if FLOW in run.scores]
        flows[name] = [(prompt, score) for prompt, score in scores if score.value is not None]
    values = {name: [score.value or 0.0 for _, score in own] for name, own in flows.items()}
    base = next((row.name for row in recipe.rows if row.paper == NONE.paper and values.get(row.name)), "")
    cells = []
    for row in recipe.rows:
        if not values.get(row.name):
            continue
        prompts = [prompt for prompt, _ in flows[row.name]]
        judge = one_backend(score for _, score in flows[row.name])
        for measure, spread in spreads(values[base or row.name]).items():
            estimate = cluster_statistic(spread, values[row.name], prompts)
            paper = _paper(recipe, row, measure, backbone)
            cells.append(Cell(row.name, measure, judge, estimate, None, None, None, 0.0, paper))
    return cells


def _paper(recipe: Recipe, row: Row, name: str, backbone: str) -> float | None:
    """Return what the paper prints for a score of a row, by whichever flow."""
    name = name.removesuffix(BY_SECOND)
    if name in row.printed:
        return row.printed[name]
    columns = {name: at for measure in find_measures(recipe.measures) for name, at in measure.paper.items()}
    if not (row.paper and recipe.paper_table and name in columns):
        return None
    column, scale = columns[name]
    method = row.paper.replace(PAPER_BASE, PAPER_BACKBONES.get(backbone, PAPER_BASE), 1)
    named = next(each for each in ROW_COLUMNS if each in paper_table(recipe.paper_table)[0])
    found = paper_value(recipe.paper_table, column, **recipe.paper_key, **{named: method})
    return None if found is None else found * scale


def as_csv(cells: Sequence[Cell]) -> str:
    """Return a line per cell; what is not known is empty."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(COLUMNS)
    for cell in cells:
        writer.writerow([v if v is None or isinstance(v, str) else f"{v:.6g}" for v in cell.values()])
    return out.getvalue()


def remarks(note: str, left_out: Sequence[str]) -> list[str]:
    """Return what is to be known of a table before its numbers are read."""
    missing = f"Left out, as their runs are not there: {', '.join(left_out)}." if left_out else ""
    return [text for text in (note, REMARK, missing) if text]


def measured_of(ours: str, cells: Sequence[Cell]) -> list[Measured]:
    """Return a table per measure that any row has a value of, with the row `ours` to stand out."""
    # Without a length.
    name = ours.partition(",")[0]
    head = ["row", "here", "n", f"{name} - row", f"{name} higher", "p", "paper"]
    found = []
    for measure in dict.fromkeys(cell.measure for cell in cells):
        own = [cell for cell in cells if cell.measure == measure]
        if any(cell.value.n for cell in own):
            judge = " ".join(JUDGES.get(word, word) for word in own[0].backend.split(" "))
            found.append(Measured(plain_name(measure), judge, head, [cell.texts() for cell in own], ours))
    return found


def plain_name(measure: str) -> str:
    """Return what pages call a measure; files keep its name in code."""
    return measure.replace("_", " ")


def as_markdown(
    recipe: Recipe,
    cells: Sequence[Cell],
    about: Mapping[str, Any],
    left_out: Sequence[str] = (),
    command: str = "",
) -> str:
    """Return a page with a table per measure; `command` made it, by default `recap reproduce`."""
    command = command or f"recap reproduce {recipe.name}"
    made = ", ".join(f"{name} {value}" for name, value in about.items())
    lines = [f"# {recipe.title}", "", f"`{command}`: {made}.", ""]
    for remark in remarks(recipe.note, left_out):
        lines += [remark, ""]
    for table in measured_of(recipe.ours, cells):
        lines += [f"**{table.name}** (judged by: {table.judge})", ""]
        rows = [table.head, ["---"] * len(table.head), *table.rows]
        lines += [*(f"| {' | '.join(row)} |" for row in rows), ""]
    return "\n".join(lines)


def _interval(estimate: Estimate) -> str:
    if math.isnan(estimate.mean):
        return "–"
    if math.isnan(estimate.low):
        return _short(estimate.mean)
    return f"{_short(estimate.mean)} [{_short(estimate.low)}, {_short(estimate.high)}]"


def _short(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"
