"""All finished tables of a folder on one page, and as Markdown."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from recap.config import read_json
from recap.errors import refuse
from recap.eval.scores import Estimate
from recap.files import write_whole
from recap.recipes.tables import TABLES
from recap.reproduction.page import measured_of
from recap.reproduction.table import Cell
from recap.show.results_page import Results, Section, build_results_page

MARK = "<!-- tables: written by `recap report`, which keeps what stands above this line -->"


def write_report(folder: Path, markdown: Path | None = None) -> Path:
    """Read every `<table>/table.json` and write `report.html` beside them, and Markdown under what it begins with."""
    finished = sorted(folder.glob("*/table.json")) if folder.is_dir() else []
    if not finished:
        limit = "holds no finished table"
        raise refuse("results", str(folder), limit, "recap reproduce TABLE writes one to results/TABLE")
    tables = [read_json(path) for path in finished]
    above = _above(markdown, {table["table"] for table in tables}) if markdown is not None else ""
    order = list(TABLES)
    pairs = sorted(
        zip(tables, finished, strict=True),
        key=lambda pair: order.index(pair[0]["table"]) if pair[0].get("table") in order else len(order),
    )
    shared = _in_common([table["about"] for table in tables])
    sections = [_section(table, path.parent, shared) for table, path in pairs]
    page = folder / "report.html"
    subtitle = f"{len(sections)} of the paper's tables and figures, with our numbers beside its own"
    write_whole(page, build_results_page(Results("RECAP: results", subtitle, sections, shared)).encode())
    if markdown is not None:
        texts = [(path.parent / "table.md").read_text(encoding="utf-8").strip() for _, path in pairs]
        # One heading for the file; those of the tables step down.
        body = "\n\n".join(text.replace("# ", "## ", 1) if text.startswith("# ") else text for text in texts)
        write_whole(markdown, f"{above}{MARK}\n\n{body}\n".encode())
    return page


def _above(markdown: Path, tables: set[str]) -> str:
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
    lost = set(re.findall(r"^`recap reproduce (\S+)`", below, re.MULTILINE)) - tables
    if lost:
        limit = f"it holds tables that these results do not: {', '.join(sorted(lost))}"
        raise refuse(
            "--markdown", str(markdown), limit, "bring theirs into the folder, or choose another name"
        )
    return text


def _in_common(abouts: list[dict[str, Any]]) -> dict[str, Any]:
    """What all tables say alike: told once, where the page says how it was made."""
    first, *others = abouts
    return {name: value for name, value in first.items() if all(o.get(name) == value for o in others)}


def _section(table: dict[str, Any], folder: Path, shared: dict[str, Any]) -> Section:
    recipe = TABLES[table["table"]]()
    cells = [_cell(values) for values in table["cells"]]
    figure = folder / "figure.svg"
    own = {name: value for name, value in table["about"].items() if name not in shared}
    told = ", ".join(f"{name} {value}" for name, value in own.items())
    return Section(
        title=table["title"],
        said=[table["note"], f"{told}. The videos are on this table's own page, {folder.name}/index.html."],
        measured=measured_of(recipe, cells),
        figures=[
            *([figure.read_text(encoding="utf-8")] if figure.is_file() else []),
            *table.get("timelines", []),
        ],
    )


def _cell(values: dict[str, Any]) -> Cell:
    nan = float("nan")

    def estimate(plain: dict[str, Any] | None) -> Estimate | None:
        if plain is None:
            return None
        known: dict[str, Any] = {name: nan if value is None else value for name, value in plain.items()}
        return Estimate(**known)

    value = estimate(values["value"])
    assert value is not None, "a cell has a value"
    return Cell(**{**values, "value": value, "against": estimate(values["against"])})
