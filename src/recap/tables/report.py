"""All finished tables of a folder on one page, and as Markdown."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from recap.config import read_json
from recap.errors import refuse
from recap.eval.scores import Estimate
from recap.io.files import write_whole
from recap.show.results_page import Results, Section, build_results_page
from recap.tables.folder import SHEET
from recap.tables.page import measured_of
from recap.tables.recipes import TABLES
from recap.tables.table import Cell, remarks

THERE = r"^`recap reproduce (\S+)`(?:.* prompts (\d+), seeds (\d+),)?"
PARTS = dict.fromkeys(("table", "title", "ours", "note", "sheet_said"), str) | {
    "about": dict,
    "left_out": list,
    "cells": list,
    "figures": list,
}
MARK = "<!-- tables: written by `recap report`, which keeps what stands above this line -->"


def write_report(folder: Path, markdown: Path | None = None) -> Path:
    """Read every `<table>/table.json`; write `report.html` next to them, and Markdown below what it begins with."""
    finished = sorted(folder.glob("*/table.json")) if folder.is_dir() else []
    if not finished:
        limit = "holds no finished table"
        raise refuse("results", str(folder), limit, "recap reproduce TABLE writes one to results/TABLE")
    tables = [_read(path) for path in finished]
    above = (
        _above(markdown, {table["table"]: table["about"] for table in tables}) if markdown is not None else ""
    )
    order = {name: number for number, name in enumerate(TABLES)}
    pairs = sorted(
        zip(tables, finished, strict=True), key=lambda pair: order.get(pair[0]["table"], len(order))
    )
    shared = _in_common([table["about"] for table in tables])
    sections = [_section(table, path.parent, shared) for table, path in pairs]
    page = folder / "report.html"
    subtitle = f"{len(sections)} tables and figures; the paper's numbers next to ours, where it has them"
    write_whole(page, build_results_page(Results("RECAP: results", subtitle, sections, shared)).encode())
    if markdown is not None:
        texts = [(path.parent / "table.md").read_text(encoding="utf-8").strip() for _, path in pairs]
        # One heading for the file; those of the tables step down.
        body = "\n\n".join(text.replace("# ", "## ", 1) if text.startswith("# ") else text for text in texts)
        write_whole(markdown, f"{above}{MARK}\n\n{body}\n".encode())
    return page


def _read(path: Path) -> dict[str, Any]:
    """A table whose every part can be shown."""
    table = read_json(path)
    try:
        # Made once to see that they can be: a page of it is written in the midst of others.
        _section(table, path.parent, {})
        plain = all(isinstance(table[name], kind) for name, kind in PARTS.items())
        listed = all(isinstance(text, str) for text in (*table["left_out"], *table["figures"]))
        if plain and listed and table["about"].keys() >= {"prompts", "seeds"}:
            (path.parent / "table.md").read_bytes()
            return dict(table)
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError, FileNotFoundError):
        pass
    remedy = "recap reproduce TABLE, asked as before, writes its folder again"
    raise refuse("results", str(path), "is no whole table as this version writes it", remedy)


def _above(markdown: Path, tables: dict[str, dict[str, Any]]) -> str:
    """What somebody wrote over the tables: figures come and go, what they mean is not a command's to say."""
    if not markdown.exists():
        return "# Results\n\n"
    try:
        text, mark, below = markdown.read_bytes().decode().partition(MARK)
    except (IsADirectoryError, UnicodeDecodeError):
        mark = ""
    if not mark:
        limit = "there is something which no `recap report` has written"
        raise refuse(
            "--markdown", str(markdown), limit, f"choose another name, or put this line into it: {MARK}"
        )
    for name, prompts, seeds in re.findall(THERE, below, re.MULTILINE):
        found = tables.get(name, {"prompts": 0, "seeds": 0})
        if name not in tables or found["prompts"] < int(prompts or 0) or found["seeds"] < int(seeds or 0):
            limit = f"it holds a larger result of {name} than {found['prompts']} prompts and {found['seeds']} seeds"
            raise refuse(
                "--markdown", str(markdown), limit, "bring it into the folder, or choose another name"
            )
    return text


def _in_common(abouts: list[dict[str, Any]]) -> dict[str, Any]:
    """What all tables have in common is shown once, where the page says how it was made."""
    first, *others = abouts
    return {name: value for name, value in first.items() if all(o.get(name) == value for o in others)}


def _section(table: dict[str, Any], folder: Path, shared: dict[str, Any]) -> Section:
    cells = [_cell(values) for values in table["cells"]]
    sheet = folder / SHEET
    own = {name: value for name, value in table["about"].items() if name not in shared}
    about = ", ".join(f"{name} {value}" for name, value in own.items())
    return Section(
        title=table["title"],
        said=[
            *remarks(table["note"], table["left_out"]),
            f"{about}. Its own page: {folder.name}/index.html.",
        ],
        measured=measured_of(table["ours"], cells),
        figures=table["figures"],
        sheet=sheet.read_bytes() if sheet.is_file() else b"",
        sheet_said=table["sheet_said"],
    )


def _cell(values: dict[str, Any]) -> Cell:
    nan = float("nan")

    def estimate(plain: dict[str, Any] | None) -> Estimate | None:
        if plain is None:
            return None
        known: dict[str, Any] = {name: nan if value is None else value for name, value in plain.items()}
        return Estimate(**known)

    value = estimate(values["value"])
    if value is None:
        raise TypeError("a cell has a value")
    return Cell(**{**values, "value": value, "against": estimate(values["against"])})
