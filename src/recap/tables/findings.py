"""This module says in sentences what a finished table found, and draws one chart for it.

Every number of a sentence is a cell of the table. A row is above or below another if the interval of their paired
difference leaves out 0 and the difference could be seen; no sentence says which is better.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from recap.show.chart import Bar, Place, interval_chart, plane_chart
from recap.tables.gap_figures import TITLES
from recap.tables.recipes import TABLES
from recap.tables.table import JUDGES, SEED_DEVIATION, TIMED, judged_as_in_paper, plain_name

# What a measure is in a sentence, by the beginning of its name; the first that fits.
PHRASES = (
    ("total_flow", "motion, in pixels a picture,"),
    ("total", "VBench's Total"),
    ("quality", "VBench's Quality"),
    ("semantic", "VBench's Semantic"),
    ("identity", "likeness of the late to the early subject"),
    ("retention", "likeness of the last pictures to the opening"),
    (
        "return_kept",
        "the share of all videos in which the late subject is shown on both visits and is the same",
    ),
    ("return_same", "the share of videos in which the late subject is the same again"),
    ("same_again", "the share of videos in which the subject is the same again"),
    ("reappearance", "likeness of the subject before and after its absence"),
    ("dynamic_degree", "the share of clips that move"),
    ("subject_path", "the way of the subject, in picture widths a second,"),
    ("camera_path", "the way of the camera, in picture widths a second,"),
    ("recurrence_kept", "the share of returns in which the subject is the same again"),
    ("recurrence_gate", "the share of returns whose subject is there before and after, and away between,"),
    ("late_found_on_return", "the share of moments that show the late subject on its return"),
    ("late_haunting", "the share of moments that show the late subject while it is gone"),
    ("haunting", "the share of moments that show a subject nobody asked for"),
    ("bank_overlap", "the overlap of the bank with the best tokens ever offered"),
    ("subject_consistency", "consistency of the subject"),
    ("seconds", "time to generate, in seconds,"),
)
# Read next to the first measure of a table, in this order: what is kept may be paid for with motion.
WATCHED = (
    *(
        "recurrence_gate",
        "subject_path",
        "dynamic_degree",
        "late_found_on_return",
        "late_haunting",
        "haunting",
    ),
)
MOST_WATCHED = 2
# Motion and identity: the first pair that a table has is shown as a plane.
PLANES = (
    *(("subject_path", name) for name in ("identity_crop", "identity_subject")),
    *(("dynamic_degree", name) for name in ("identity_crop", "identity_frame", "subject_consistency")),
)
FEWEST_OF_PLANE = 3
# Where ours is, compared with another row, and how a sentence about it begins.
SIDES = {"higher": "Higher than", "lower": "Lower than", "alike": "Not told apart from"}
MOST_NAMED, MOST_LISTED = 3, 5


class Claim(NamedTuple):
    """Holds what one chart shows: a headline, sentences below it, and the chart as SVG."""

    headline: str
    sentences: list[str]
    chart: str


class Numbers:
    """Holds the cells of a finished table, as table.json has them, by row and measure."""

    def __init__(self, name: str, ours: str, cells: Sequence[Mapping[str, Any]]):
        self.name, self.ours = name, ours
        self._cells = {(cell["row"], cell["measure"]): cell for cell in cells if cell["n"]}
        self.rows: list[str] = list(dict.fromkeys(row for row, _ in self._cells))
        self.measures: list[str] = list(dict.fromkeys(measure for _, measure in self._cells))

    def cell(self, row: str, measure: str) -> Mapping[str, Any]:
        return self._cells.get((row, measure), {})

    def rows_of(self, measure: str) -> list[str]:
        return [row for row in self.rows if (row, measure) in self._cells]

    @property
    def lead(self) -> str:
        """Return the measure that a table is about: its first, by crops where there are any, of the whole length."""
        names = [name for name in self.measures if not name.endswith(SEED_DEVIATION)]
        if timed := [name for name in names if re.fullmatch(TIMED, name)]:
            return timed[-1]
        for name in ("total_flow", "recurrence_kept"):
            if name in names:
                return name
        first = next((name for name in names if not name.startswith("bank_")), "")
        if not first:
            return "bank_overlap" if "bank_overlap" in names else names[0] if names else ""
        crops = first.replace("_subject", "_crop")
        return crops if crops in names else first


def claim_of(numbers: Numbers, figures: Sequence[str]) -> Claim | None:
    """Return what a table says of the measure that it is about, None if nothing was measured."""
    lead = numbers.lead
    if not lead:
        return None
    watched = [name for name in WATCHED if name in numbers.measures and name != lead][:MOST_WATCHED]
    sentences = [*_differences(numbers, lead), *_of_paper(numbers, lead)]
    for name in watched:
        # In how far is in the table, or no reader gets to the end.
        sentences.append(headline_of(numbers, name))
    return Claim(headline_of(numbers, lead), sentences, _chart(numbers, lead, figures))


def _chart(numbers: Numbers, lead: str, figures: Sequence[str]) -> str:
    """Return the table's own curve of a measure where it has one, else bars."""
    recipe = TABLES.get(numbers.name)
    curve = TITLES.get(lead.removeprefix("recurrence_"), "") if lead.startswith("recurrence_") else ""
    if curve:
        return next((each for each in figures if curve in each), "") or _bars(numbers, lead)
    swept = recipe is not None and any(row.value is not None for row in recipe.rows)
    has_curve = swept or lead.endswith("_end") or re.fullmatch(TIMED, lead)
    return figures[0] if figures and has_curve else _bars(numbers, lead)


def headline_of(numbers: Numbers, measure: str) -> str:
    """Return a measure of ours in a sentence, and how many rows are below it, above it and neither."""
    here = numbers.rows_of(measure)
    row = numbers.ours if numbers.ours in here else here[0]
    text = f"With {row}, {_phrase(measure)} is {_interval(numbers.cell(row, measure))}"
    others = [numbers.cell(other, measure) for other in here if other != row]
    sides = [_side(cell) for cell in others]
    if not others or not any(cell["ours_minus_this"] is not None for cell in others):
        return f"{text}."
    if "no interval" in sides:
        return f"{text}; with {others[0]['prompts']} prompts differences have no interval."
    on_side = {
        side: [cell["row"] for cell, own in zip(others, sides, strict=True) if own == side] for side in SIDES
    }
    counted = [_rows_on(side, rows, len(others)) for side, rows in on_side.items() if rows]
    return f"{text}: {'; '.join(counted)}."


def _rows_on(side: str, rows: Sequence[str], num_others: int) -> str:
    """Name the rows on one side of ours, or count them where they are many."""
    words = "not told apart from" if side == "alike" else f"{side} than with"
    many = f"{len(rows)} of {num_others} other rows"
    return f"{words} {listed(rows) if len(rows) <= MOST_NAMED else many}"


def _differences(numbers: Numbers, measure: str) -> list[str]:
    """Return a sentence per side: from whom ours differs, and by how much."""
    cells = [numbers.cell(row, measure) for row in numbers.rows_of(measure) if row != numbers.ours]
    found = []
    for side, words in SIDES.items():
        # The largest first, as a reader may stop there.
        own = sorted((c for c in cells if _side(c) == side), key=lambda cell: -abs(cell["ours_minus_this"]))
        by = "" if side == "alike" else "by "
        parts = [f"{cell['row']} ({by}{_difference(cell)})" for cell in own[:MOST_LISTED]]
        parts += [f"{len(own) - MOST_LISTED} more"] if len(own) > MOST_LISTED else []
        found += [f"{words} {listed(parts)}."] if parts else []
    return found


def _of_paper(numbers: Numbers, measure: str) -> list[str]:
    rows = [row for row in numbers.rows_of(measure) if numbers.cell(row, measure)["paper"] is not None]
    numbers_there = listed([f"{_short(numbers.cell(row, measure)['paper'])} for {row}" for row in rows])
    return [f"The paper, of its own models and judges, has {numbers_there}."] if rows else []


def _side(cell: Mapping[str, Any]) -> str:
    """Say where ours is: higher, lower, alike, or that there is no interval or no pair."""
    difference, low, high = (cell[name] for name in ("ours_minus_this", "difference_low", "difference_high"))
    if difference is None:
        return "no pair"
    if low is None or high is None:
        return "no interval"
    if abs(difference) < (cell["smallest_visible"] or 0) or low <= 0 <= high:
        return "alike"
    return "higher" if difference > 0 else "lower"


def plane_of(numbers: Numbers) -> Claim | None:
    """Return identity against motion, with the rows that no other has more of both marked; None without both."""
    for motion, identity in PLANES:
        rows = [row for row in numbers.rows_of(identity) if numbers.cell(row, motion)]
        if len(rows) >= FEWEST_OF_PLANE and numbers.ours in rows:
            break
    else:
        return None
    recipe = TABLES.get(numbers.name)
    paths = {row.name: row.path for row in recipe.rows} if recipe else {}
    places = [
        Place(row, _span(numbers.cell(row, motion)), _span(numbers.cell(row, identity)), paths.get(row, ""))
        for row in rows
    ]
    labels = plain_name(motion), plain_name(identity)
    chart = plane_chart("Identity against motion", places, *labels, front=True)
    sides = {
        row: (_side(numbers.cell(row, identity)), _side(numbers.cell(row, motion)))
        for row in rows
        if row != numbers.ours
    }
    beaten = [row for row, both in sides.items() if both == ("higher", "higher")]
    better = [row for row, both in sides.items() if both == ("lower", "lower")]
    traded = [row for row, both in sides.items() if set(both) == {"higher", "lower"}]
    headline = f"Identity against motion: {_none_or(better)} more of both than {numbers.ours}."
    sentences = [
        f"{numbers.ours} has more of both than {listed(beaten)}." if beaten else "",
        f"One is paid for with the other between {numbers.ours} and {listed(traded)}." if traded else "",
        "All others are not told apart in one of the two."
        if len(better + beaten + traded) < len(sides)
        else "",
        "The wide line joins rows that, by their means, no other row exceeds in both.",
    ]
    return Claim(headline, [text for text in sentences if text], chart)


def _none_or(rows: Sequence[str]) -> str:
    return f"{listed(rows)} {'has' if len(rows) == 1 else 'have'}" if rows else "no other row has"


def _bars(numbers: Numbers, measure: str) -> str:
    bars = []
    for row in numbers.rows_of(measure):
        cell = numbers.cell(row, measure)
        paper = cell["paper"] if judged_as_in_paper(cell["backend"]) else None
        bars.append(Bar(row, *_span(cell), paper))
    return interval_chart(plain_name(measure), bars)


def judge_of(numbers: Numbers) -> str:
    """Return who judged the measure that a table is about."""
    lead = numbers.lead
    backend = numbers.cell(numbers.rows_of(lead)[0], lead)["backend"] if lead else ""
    return " ".join(JUDGES.get(word, word) for word in backend.split(" "))


def _span(cell: Mapping[str, Any]) -> tuple[float, float, float]:
    low, high = (math.nan if cell[name] is None else cell[name] for name in ("low", "high"))
    return cell["mean"], low, high


def _phrase(measure: str) -> str:
    timed = re.fullmatch(TIMED, measure)
    plain = next((words for start, words in PHRASES if measure.startswith(start)), plain_name(measure))
    return f"{plain} in the first {timed[2]} s" if timed else plain


def _interval(cell: Mapping[str, Any]) -> str:
    if cell["low"] is None or cell["high"] is None:
        return _short(cell["mean"])
    return f"{_short(cell['mean'])} [{_short(cell['low'])}, {_short(cell['high'])}]"


def _difference(cell: Mapping[str, Any]) -> str:
    names = ("ours_minus_this", "difference_low", "difference_high")
    value, low, high = (cell[name] for name in names)
    # The side is in the words, so that a reader sees no minus of a minus.
    sign = -1 if _side(cell) == "lower" else 1
    ends = sorted((sign * low, sign * high))
    return f"{_short(sign * value)} [{_short(ends[0])}, {_short(ends[1])}]"


def _short(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.2g}" if abs(value) < 0.1 else f"{value:.3g}"


def listed(parts: Sequence[str]) -> str:
    """Join parts; names of rows and intervals have commas of their own."""
    comma = "; " if any("," in part for part in parts) else ", "
    return " and ".join(filter(None, [comma.join(parts[:-1]), parts[-1]])) if parts else ""
