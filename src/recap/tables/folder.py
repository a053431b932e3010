"""The folder of a table: whose it is, and its files.

It holds record.json (what was asked), results.jsonl (a line per run), table.csv, table.md, table.json, figure.svg,
sheet.png (the first runs side by side) and index.html. All but the first are written only when every run is there, so
a partial result never takes the place of a complete one.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from recap.config import read_json
from recap.errors import refuse
from recap.eval.motion_judge import USUAL
from recap.io.files import write_whole
from recap.show.results_page import Results, build_results_page
from recap.tables.jobs import canonical
from recap.tables.looks import Look
from recap.tables.page import Video, figures_of, section_of
from recap.tables.recipes import Planned, Recipe
from recap.tables.table import Line, as_csv, as_markdown, build_cells, cell_dict

RECORD, SHEET = "record.json", "sheet.png"
GROWING = ("prompts", "seeds")
"""A larger number goes on with the folder of a smaller one."""
BEFORE = {"judge_flow": USUAL}
"""What records mean that were written before it could be chosen."""


@dataclass(frozen=True, slots=True)
class Finished:
    """All runs of a table, scored."""

    recipe: Recipe
    lines: Sequence[Line]
    keys: Sequence[str]  # of the jobs that the lines are of
    about: Mapping[str, Any]
    first: Planned  # the run that pages show, of the first row
    looks: Mapping[str, Look]  # at the same of all rows
    left_out: Sequence[str] = ()
    video: Video = field(default_factory=Video)


def claim_folder(out: Path, wanted: Mapping[str, Any], rows: Collection[str]) -> None:
    """Make the folder, or see that it is one of this reproduction and not of a larger one, by numbers or by rows."""
    record = out / RECORD
    if out.exists() and (not out.is_dir() or (any(out.iterdir()) and not record.is_file())):
        raise refuse("--out", str(out), "holds something that is no reproduction", "choose another folder")
    if record.is_file():
        found = read_json(record)
        if not isinstance(found, dict) or not found.keys() >= set(GROWING):
            raise refuse("file", str(record), "is no record of a reproduction", "choose another --out")
        found = {**BEFORE, **found}
        for name, value in wanted.items():
            if name not in GROWING and found.get(name) != value:
                limit = f"it was begun with {name} {found.get(name)!r}, not {value!r}"
                raise refuse("--out", str(out), limit, "choose another folder, or ask as it was begun")
        for name in GROWING:
            if (out / "table.json").is_file() and found[name] > wanted[name]:
                limit = f"it holds a larger result, of {found[name]} {name}"
                raise refuse(f"--{name}", wanted[name], limit, "choose another folder, or ask for as many")
        if (out / "table.json").is_file() and (lost := _rows_of(out / "table.json") - set(rows)):
            limit = f"it holds a larger result, with the rows {', '.join(sorted(lost))}"
            raise refuse("--out", str(out), limit, "choose another folder")
    out.mkdir(parents=True, exist_ok=True)
    if not (out / "table.json").is_file() or not record.is_file():
        write_whole(record, json.dumps(dict(wanted), indent=2).encode())


def begun_with(out: Path) -> dict[str, Any]:
    """The record of a folder that was begun, if it has one: where `auto` is asked for, it goes on as it began."""
    found = read_json(out / RECORD) if (out / RECORD).is_file() else {}
    return {**BEFORE, **found} if isinstance(found, dict) and found else {}


def _rows_of(table: Path) -> set[str]:
    """Those that a finished table shows."""
    found = read_json(table)
    try:
        return {cell["row"] for cell in found["cells"]}
    except (KeyError, TypeError) as error:
        raise refuse("file", str(table), "is no table of recap", "choose another folder") from error


def write_table(out: Path, done: Finished) -> None:
    """Everything that a claimed folder holds of a finished table."""
    recipe, about = done.recipe, done.about
    cells = build_cells(recipe, done.lines, about["backbone"])
    record = read_json(out / RECORD) | {name: about[name] for name in GROWING}
    figures = figures_of(recipe, cells, done.lines)
    section = section_of(recipe, cells, figures, done.first, done.looks, done.left_out, done.video)
    page = Results(recipe.title, f"recap reproduce {recipe.name}", [section], about)
    texts = {
        "results.jsonl": "".join(
            canonical({**asdict(line), "key": key}) + "\n"
            for line, key in zip(done.lines, done.keys, strict=True)
        ),
        "table.csv": as_csv(cells),
        "table.md": as_markdown(recipe, cells, about, done.left_out),
        "figure.svg": figures[0] if figures else "",
        "index.html": build_results_page(page),
        RECORD: json.dumps(record, indent=2),
        # Last: whoever finds it finds all the others.
        "table.json": json.dumps(
            {"table": recipe.name, "title": recipe.title, "ours": recipe.ours, "note": recipe.note,
             "about": dict(about), "left_out": list(done.left_out), "cells": [cell_dict(cell) for cell in cells],
             "figures": list(section.figures), "sheet_said": section.sheet_said},
            indent=1,
        ),
    }  # fmt: skip
    (out / "table.json").unlink(missing_ok=True)  # a smaller one: it must not stand beside what is larger
    if section.sheet:
        write_whole(out / SHEET, section.sheet)
    else:
        (out / SHEET).unlink(missing_ok=True)  # of an earlier question
    for name, text in texts.items():
        write_whole(out / name, text.encode())
