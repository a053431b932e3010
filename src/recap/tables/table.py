"""Scores of all runs to the table: per row and measure a mean with its interval, ours against it, and the paper's."""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from recap.eval.judged import EMBEDDED
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
    wilcoxon,
    win_share,
)
from recap.tables.paper_numbers import paper_table, paper_value
from recap.tables.recipes import NONE, Recipe, Row

PAPER_BASE = "Self-Forcing"
PAPER_BACKBONES = {
    "infinite-forcing": "Infinite-Forcing", "longlive": "LongLive", "helios-distilled": "Helios",
    "helios-mid": "Helios", "helios-base": "Helios",
}  # fmt: skip
"""Whose lines of the paper's main table are compared with a backbone's; with all others, Self-Forcing's."""

ROW_COLUMNS = ("method", "config", "row")
"""By one of these columns the paper's tables name their rows."""
FLOW = "total_flow"

REMARK = (
    f"Intervals are 95 %, by resampling whole prompts, none with fewer than {FEWEST_CLUSTERS} prompts. The paper's "
    "numbers are of its own models and judges: compare differences, not levels."
)


@dataclass(frozen=True, slots=True)
class Cell:
    """One measure of one row."""

    row: str
    measure: str
    backend: str
    value: Estimate
    against: Estimate | None  # ours - this row, pair by pair
    wins: float | None  # share of pairs that ours wins
    p: float | None  # Wilcoxon
    paper: float | None

    @property
    def same_judge(self) -> bool:
        """Whether the paper's number may stand in one figure with this one."""
        return self.backend == "native" or self.backend.startswith("dinov2")


@dataclass(frozen=True, slots=True)
class Line:
    """The scores of one run."""

    row: str
    prompt: str
    seed: int
    scores: Mapping[str, Any]


def build_cells(recipe: Recipe, lines: Sequence[Line], backbone: str = EMBEDDED) -> list[Cell]:
    """Every row by every measure, in the recipe's order."""
    by_row: dict[str, dict[tuple[str, int], Line]] = {}
    for line in lines:
        by_row.setdefault(line.row, {})[line.prompt, line.seed] = line
    headlines = [name for measure in find_measures(recipe.measures) for name in measure.headlines]

    def order(name: str) -> tuple[int, str]:
        """Headlines first; numbers in names count as such: 5 s before 10 s."""
        counted = re.sub(r"\d+", lambda number: number[0].zfill(6), name)
        return headlines.index(name) if name in headlines else len(headlines), counted

    cells = []
    for row in recipe.rows:
        if row.name not in by_row:
            continue
        own = by_row[row.name]
        other = recipe.compared_with(row)
        ours = {} if row.name == other else by_row.get(other, {})
        for name in sorted({name for line in own.values() for name in line.scores}, key=order):
            cells.append(_cell(row, name, own, ours, _paper(recipe, row, name, backbone)))
    return cells + _of_whole_rows(recipe, by_row, backbone)


def _of_whole_rows(
    recipe: Recipe, by_row: Mapping[str, Mapping[tuple[str, int], Line]], backbone: str
) -> list[Cell]:
    """How the flows of a row's videos are spread, which no video has by itself."""
    flows = {
        row: {at: Score(**line.scores[FLOW]) for at, line in own.items() if FLOW in line.scores}
        for row, own in by_row.items()
    }
    values = {
        row: [score.value for score in own.values() if score.value is not None] for row, own in flows.items()
    }
    base = next((row.name for row in recipe.rows if row.paper == NONE.paper and values.get(row.name)), "")
    cells = []
    for row in recipe.rows:
        if not values.get(row.name):
            continue
        prompts = [prompt for (prompt, _), score in flows[row.name].items() if score.value is not None]
        for measure, spread in spreads(values[base] if base else values[row.name]).items():
            estimate = cluster_statistic(spread, values[row.name], prompts)
            judge, paper = one_backend(flows[row.name].values()), _paper(recipe, row, measure, backbone)
            cells.append(Cell(row.name, measure, judge, estimate, None, None, None, paper))
    return cells


def _cell(
    row: Row,
    measure: str,
    own: Mapping[tuple[str, int], Line],
    ours: Mapping[tuple[str, int], Line],
    paper: float | None,
) -> Cell:
    scores = {at: Score(**line.scores[measure]) for at, line in own.items() if measure in line.scores}
    values = {at: score.value for at, score in scores.items()}
    estimate = cluster_interval(list(values.values()), [prompt for prompt, _ in values])
    against = wins = p = None
    theirs = {
        at: ours[at].scores[measure]["value"] for at in values if at in ours and measure in ours[at].scores
    }
    if theirs:
        # Rounded, lest two rows that are the same win and lose by the last bits.
        best = as_floats(list(theirs.values())).round(6).tolist()
        mine = as_floats([values[at] for at in theirs]).round(6).tolist()
        prompts = [prompt for prompt, _ in theirs]
        against = paired_interval(best, mine, prompts)
        wins, p = win_share(best, mine), wilcoxon(best, mine)
    return Cell(row.name, measure, one_backend(scores.values()), estimate, against, wins, p, paper)


def _paper(recipe: Recipe, row: Row, name: str, backbone: str) -> float | None:
    """What the paper prints for a score of a row."""
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
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(
        ["row", "measure", "backend", "mean", "low", "high", "n", "prompts", "ours_minus_this", "difference_low",
         "difference_high", "ours_higher", "wilcoxon_p", "paper"]
    )  # fmt: skip
    for cell in cells:
        against = cell.against[:3] if cell.against else (None, None, None)
        numbers = [*cell.value, *against, cell.wins, cell.p, cell.paper]
        writer.writerow([cell.row, cell.measure, cell.backend, *(_digits(number) for number in numbers)])
    return out.getvalue()


def remarks(note: str, left_out: Sequence[str]) -> list[str]:
    """What is to be known of a table before its numbers are read."""
    missing = [f"Left out, as they could not be generated: {', '.join(left_out)}."] if left_out else []
    return [text for text in (note, REMARK, *missing) if text]


def as_markdown(
    recipe: Recipe, cells: Sequence[Cell], about: Mapping[str, Any], left_out: Sequence[str] = ()
) -> str:
    """A table per measure."""
    made = ", ".join(f"{name} {value}" for name, value in about.items())
    lines = [f"# {recipe.title}", "", f"`recap reproduce {recipe.name}`: {made}.", ""]
    for remark in remarks(recipe.note, left_out):
        lines += [remark, ""]
    for measure in dict.fromkeys(cell.measure for cell in cells):
        own = [cell for cell in cells if cell.measure == measure]
        lines += [f"**{measure}** (judged by: {own[0].backend})", ""]
        ours = short_name(recipe.ours)
        lines += [f"| row | here | n | {ours} - row | {ours} higher | p | paper |", "|" + "---|" * 7]
        lines += [f"| {' | '.join(markdown_row(cell))} |" for cell in own]
        lines.append("")
    return "\n".join(lines)


def short_name(row: str) -> str:
    """The name of a row without a length."""
    return row.partition(",")[0]


def markdown_row(cell: Cell) -> list[str]:
    """The cell's texts: row, value, n, difference, wins, p, the paper's."""
    return [
        cell.row,
        interval(cell.value),
        f"{cell.value.n} ({cell.value.clusters} prompts)",
        interval(cell.against) if cell.against else "",
        "" if cell.wins is None or math.isnan(cell.wins) else f"{100 * cell.wins:.0f} %",
        "" if cell.p is None or math.isnan(cell.p) else f"{cell.p:.2g}",
        "" if cell.paper is None else _short(cell.paper),
    ]


def interval(estimate: Estimate) -> str:
    if math.isnan(estimate.mean):
        return "–"
    if math.isnan(estimate.low):
        return _short(estimate.mean)
    return f"{_short(estimate.mean)} [{_short(estimate.low)}, {_short(estimate.high)}]"


def _short(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def cell_dict(cell: Cell) -> dict[str, Any]:
    """The cell as JSON takes it."""
    plain = asdict(cell)
    for name in ("value", "against"):
        estimate = getattr(cell, name)
        if estimate is not None:
            plain[name] = {k: _finite(v) for k, v in estimate._asdict().items()}
    return {name: _finite(value) for name, value in plain.items()}


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _digits(value: float | None) -> str:
    return "" if value is None or math.isnan(value) else f"{value:.6g}"
