"""The folder of a table: whose it is, and its files.

It holds record.json (what was asked), results.jsonl (a line per run), table.csv, table.md, table.json, figure.svg,
sheet.png (the first runs side by side) and index.html. All but the first are written only when every run is there, so
a partial result never takes the place of a complete one.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from recap.config import read_json
from recap.errors import refuse
from recap.io.files import write_whole
from recap.show.page import build_results_page
from recap.tables.jobs import canonical
from recap.tables.looks import Look
from recap.tables.page import Video, figures_of, section_of
from recap.tables.recipes import Planned, Recipe
from recap.tables.table import Line, as_csv, as_markdown, build_cells, cell_dict

RECORD, SHEET, TABLE = "record.json", "sheet.png", "table.json"
GROWING = ("prompts", "seeds")
"""A larger number resumes the folder of a smaller one."""
LEFT_OUT = "left_out"


@dataclass(frozen=True, slots=True)
class Finished:
    """All runs of a table, scored."""

    recipe: Recipe
    lines: Sequence[Line]
    keys: Sequence[str]  # of the jobs that the lines are of
    about: Mapping[str, Any]
    first: Planned  # the run that pages show, of the first row
    looks: Mapping[str, Look]  # the same run of all rows
    left_out: Sequence[str]
    video: Video


def begun_with(folder: Path) -> dict[str, Any]:
    """The record of a table's folder, empty where it was not begun."""
    if not (folder / RECORD).is_file():
        return {}
    found = read_json(folder / RECORD)
    if not isinstance(found, dict) or not found.keys() >= set(GROWING):
        raise refuse("file", str(folder / RECORD), "is not the record of a table", "choose another --out")
    return found


def check_folder(folder: Path, wanted: Mapping[str, Any], rows: Collection[str]) -> None:
    """See that a folder is new, or of the same question and of no larger result, by numbers or by rows."""
    found = begun_with(folder)
    if not found:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise refuse("--out", str(folder), "holds something that is not a table", "choose another --out")
        return
    for name, value in wanted.items():
        if name not in (*GROWING, LEFT_OUT) and found.get(name) != value:
            limit = f"it was begun with {name} {found.get(name)!r}, not {value!r}"
            raise refuse("--out", str(folder), limit, "choose another --out, or ask as it was begun")
    if not (folder / TABLE).is_file():
        return
    for name in GROWING:
        if found[name] > wanted[name]:
            limit = f"{folder} holds a larger result, of {found[name]} {name}"
            raise refuse(f"--{name}", wanted[name], limit, "choose another --out, or ask for as many")
    if lost := _rows_of(folder / TABLE) - set(rows):
        limit = f"it holds a larger result, with the rows {', '.join(sorted(lost))}"
        raise refuse("--out", str(folder), limit, "choose another --out")


def begin_folder(folder: Path, wanted: Mapping[str, Any]) -> None:
    """Make a checked folder; the record of a finished table is kept until the larger one is there."""
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / TABLE).is_file():
        write_whole(folder / RECORD, json.dumps(dict(wanted), indent=2).encode())


def _rows_of(table: Path) -> set[str]:
    """The rows that a finished table shows."""
    found = read_json(table)
    try:
        return {cell["row"] for cell in found["cells"]}
    except (KeyError, TypeError) as error:
        raise refuse("file", str(table), "is not a table of recap", "choose another --out") from error


def write_table(folder: Path, done: Finished) -> None:
    """Everything that the folder of a finished table holds."""
    recipe, about = done.recipe, done.about
    cells = build_cells(recipe, done.lines, about["backbone"])
    record = {**read_json(folder / RECORD), LEFT_OUT: list(done.left_out), **{n: about[n] for n in GROWING}}
    figures = figures_of(recipe, cells, done.lines)
    section = section_of(recipe, cells, figures, done.first, done.looks, done.left_out, done.video)
    page = build_results_page(recipe.title, f"recap reproduce {recipe.name}", [section], about)
    texts = {
        "results.jsonl": "".join(
            canonical({**asdict(line), "key": key}) + "\n"
            for line, key in zip(done.lines, done.keys, strict=True)
        ),
        "table.csv": as_csv(cells),
        "table.md": as_markdown(recipe, cells, about, done.left_out),
        "figure.svg": figures[0] if figures else "",
        "index.html": page,
        RECORD: json.dumps(record, indent=2),
        # Last: whoever finds it finds all the others.
        TABLE: json.dumps(
            {"table": recipe.name, "title": recipe.title, "ours": recipe.ours, "note": recipe.note,
             "about": dict(about), "left_out": list(done.left_out), "cells": [cell_dict(cell) for cell in cells],
             "figures": list(section.figures), "sheet_said": section.sheet_about},
            indent=1,
        ),
    }  # fmt: skip
    # A smaller table must not stand next to what belongs to a larger one.
    (folder / TABLE).unlink(missing_ok=True)
    if section.sheet:
        write_whole(folder / SHEET, section.sheet)
    else:
        (folder / SHEET).unlink(missing_ok=True)
    for name, text in texts.items():
        write_whole(folder / name, text.encode())
