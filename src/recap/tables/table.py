"""Scores of all runs to the table: per row and measure a mean with its interval, ours against it, and the paper's."""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from recap.eval.metrics.motion import spreads
from recap.eval.scores import (
    FEWEST_CLUSTERS,
    Estimate,
    Score,
    as_floats,
    cluster_interval,
    cluster_statistic,
    count_wins,
    one_backend,
    paired_interval,
    wilcoxon,
)
from recap.tables.paper_numbers import paper_value
from recap.tables.recipes import NONE, Recipe, Row
from recap.tables.scripts import EMBEDDED

PAPER_COLUMNS = {
    "identity_frame": ("frame_sim", 1.0), "identity_subject": ("crop_sim", 1.0),
    "reappearance_frame": ("frame_sim", 1.0), "reappearance_subject": ("crop_sim", 1.0),
    "retention_frame_start": ("start", 1.0), "retention_frame_mid": ("mid", 1.0), "retention_frame_end": ("end", 1.0),
    "temporal_flickering": ("TF", 0.01), "dynamic_degree": ("DD", 0.01), "subject_consistency": ("SC", 0.01),
    "background_consistency": ("BC", 0.01), "camera_flow": ("camera_flow", 1.0), "object_flow": ("object_flow", 1.0),
    "object_fraction": ("object_fraction", 1.0), "total_flow": ("total_flow", 1.0),
    "drift_tail": ("drift_tail", 1 / 128), "total_flow_sd": ("total_flow_sd", 1.0),
}  # fmt: skip
"""Measure -> the paper's column for it, and what makes it 0..1."""

FIRST = (
    "return_subject", "late_found_on_return", "late_haunting", "return_frame",
    "reappearance_subject", "reappearance_subject_verified", "identity_subject", "retention_subject_end",
    "reappearance_frame", "identity_frame", "retention_frame_end", "dynamic_degree", "attention_sink",
)  # fmt: skip
"""What a table is about stands first; the rest follows by name."""

ROW_COLUMN = {
    "main": "method", "ablation": "row", "identity": "config", "retention": "method", "motion": "config",
}  # fmt: skip


PAPER_BASE = "Self-Forcing"
PAPER_BACKBONES = {
    "infinite-forcing": "Infinite-Forcing", "longlive": "LongLive", "helios-distilled": "Helios",
    "helios-mid": "Helios", "helios-base": "Helios",
}  # fmt: skip
"""Whose lines of the paper's main table stand beside a backbone's; beside all others, Self-Forcing's."""

FLOW = "total_flow"

SAID_OF_ALL = (
    f"Intervals are 95 %, whole prompts drawn anew, none with fewer than {FEWEST_CLUSTERS} prompts. The paper's "
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
        """Whether the paper's number may stand in one drawing with this one."""
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
    cells = []
    for row in recipe.rows:
        if row.name not in by_row:
            continue
        own = by_row[row.name]
        names = {name for line in own.values() for name in line.scores}
        for measure in sorted(names, key=_place):
            ours = {} if row.name == (beside := recipe.ours_beside(row)) else by_row.get(beside, {})
            cells.append(_cell(row, measure, own, ours, _paper(recipe, row, measure, backbone)))
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
            told = cluster_statistic(spread, values[row.name], prompts)
            judge, paper = one_backend(flows[row.name].values()), _paper(recipe, row, measure, backbone)
            cells.append(Cell(row.name, measure, judge, told, None, None, None, paper))
    return cells


def _place(measure: str) -> tuple[int, str]:
    """Its place in a table; numbers in names count as such: 5 s before 10 s."""
    counted = re.sub(r"\d+", lambda number: number[0].zfill(6), measure)
    return FIRST.index(measure) if measure in FIRST else len(FIRST), counted


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
        wins, p = count_wins(best, mine).share, wilcoxon(best, mine)
    return Cell(
        row.name,
        measure,
        one_backend(scores.values()),
        estimate,
        against,
        wins,
        p,
        paper,
    )


def _paper(recipe: Recipe, row: Row, measure: str, backbone: str) -> float | None:
    if recipe.name == "time":
        column = "ours_s" if row.paper == "ours" else "baseline_s"
        return paper_value("speed", column, length_min=f"{row.value:g}") if measure == "seconds" else None
    if recipe.paper_table == "scalars":
        return paper_value("scalars", "oracle_overlap") if measure == "bank_overlap" else None
    if recipe.name == "lambda" and measure == "attention_sink" and row.value == 5:
        return paper_value("scalars", "sink_mass_lambda5")
    if not row.paper or measure not in PAPER_COLUMNS or recipe.paper_table not in ROW_COLUMN:
        return None
    column, scale = PAPER_COLUMNS[measure]
    method = row.paper.replace(PAPER_BASE, PAPER_BACKBONES.get(backbone, PAPER_BASE), 1)
    wanted = {**recipe.paper_key, ROW_COLUMN[recipe.paper_table]: method}
    found = paper_value(recipe.paper_table, column, **wanted)
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


def remarks(recipe: Recipe, left_out: Sequence[str]) -> list[str]:
    """What is to be known of a table before its numbers are read."""
    missing = [f"Left out, as they could not be drawn: {', '.join(left_out)}."] if left_out else []
    return [text for text in (recipe.note, SAID_OF_ALL, *missing) if text]


def as_markdown(
    recipe: Recipe, cells: Sequence[Cell], about: Mapping[str, Any], left_out: Sequence[str] = ()
) -> str:
    """A table per measure."""
    told = ", ".join(f"{name} {value}" for name, value in about.items())
    lines = [f"# {recipe.title}", "", f"`recap reproduce {recipe.name}`: {told}.", ""]
    for remark in remarks(recipe, left_out):
        lines += [remark, ""]
    for measure in dict.fromkeys(cell.measure for cell in cells):
        own = [cell for cell in cells if cell.measure == measure]
        lines += [f"**{measure}** (judged by: {own[0].backend})", ""]
        lines += [
            f"| row | here | n | {recipe.ours_said} - row | {recipe.ours_said} higher | p | paper |",
            "|" + "---|" * 7,
        ]
        lines += [f"| {' | '.join(markdown_row(cell))} |" for cell in own]
        lines.append("")
    return "\n".join(lines)


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
