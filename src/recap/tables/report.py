"""This module makes the report of finished tables: findings, a chart and videos for each, tables folded away.

The page needs no server and prints as it is: a browser makes a PDF of it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from recap.errors import refuse
from recap.io.files import read_json, write_whole
from recap.show.clips import EMBED_LIMIT, embed
from recap.show.page import Measured, Section, build_results_page
from recap.show.report_page import FindingCard, build_report_page
from recap.tables.findings import Claim, Numbers, claim_of, judge_of, plane_of
from recap.tables.page import SIDE_BY_SIDE
from recap.tables.recipes import TABLES

THERE = r"^`recap reproduce (\S+?)(?: --suite (\S+) --backbone (\S+))?`(?:.* prompts (\d+), seeds (\d+),)?"
MARK = "<!-- tables: written by `recap report`, which keeps what stands above this line -->"


class Finished(NamedTuple):
    """Holds a finished table: where it is, what is to be known of it, its section of a page, and what it found."""

    place: Path
    name: str
    about: dict[str, Any]
    section: Section
    claim: Claim | None
    plane: Claim | None
    judge: str
    num_rows: int


def write_report(folders: Sequence[Path], markdown: Path | None = None) -> Path:
    """Read every `<table>/table.json` of the folders; write `report.html` into the first.

    With `markdown` the tables are also written there, below what somebody wrote over them.
    """
    tables = [_read(path) for folder in folders for path in _finished(folder)]
    order = list(TABLES)
    tables.sort(key=lambda table: order.index(table.name) if table.name in order else len(order))
    abouts = {table.name: table.about for table in tables}
    if markdown is not None and len(abouts) < len(tables):
        limit = "two of the folders hold the same table"
        raise refuse("--markdown", str(markdown), limit, "name one folder, or leave --markdown out")
    above = _above(markdown, abouts) if markdown is not None else ""
    # What all tables have in common is shown once, where the page says how it was made.
    first, *others = (table.about for table in tables)
    shared = {name: value for name, value in first.items() if all(o.get(name) == value for o in others)}
    page = folders[0] / "report.html"
    count = "1 table" if len(tables) == 1 else f"{len(tables)} tables"
    subtitle = f"What {count} found. Intervals are 95 %, over whole prompts; differences are paired."
    cards = _cards(tables, shared, page.parent, several=len(abouts) < len(tables))
    write_whole(page, build_report_page("RECAP: results", subtitle, cards, shared).encode())
    if markdown is not None:
        texts = [(table.place / "table.md").read_text(encoding="utf-8").strip() for table in tables]
        # One heading for the file; those of the tables step down.
        body = "\n\n".join(text.replace("# ", "## ", 1) if text.startswith("# ") else text for text in texts)
        write_whole(markdown, f"{above}{MARK}\n\n{body}\n".encode())
    return page


def _finished(folder: Path) -> list[Path]:
    found = sorted(folder.glob("*/table.json")) if folder.is_dir() else []
    if not found:
        limit = "holds no finished table"
        raise refuse("results", str(folder), limit, "recap reproduce TABLE writes one to results/TABLE")
    return found


def _cards(
    tables: Sequence[Finished], shared: dict[str, Any], goal: Path, *, several: bool
) -> list[FindingCard]:
    """Return a card per table, and before them one of identity against motion, of the table with most rows."""
    cards, left = [], EMBED_LIMIT
    widest = max((t for t in tables if t.plane), key=lambda table: table.num_rows, default=None)
    if widest is not None and widest.plane is not None:
        title = f"Of the table {widest.section.title!r}"
        cards.append(FindingCard("identity-motion", title, *widest.plane, judge=widest.judge))
    for number, table in enumerate(tables):
        own = ", ".join(f"{name} {value}" for name, value in table.about.items() if name not in shared)
        link = os.path.relpath(table.place, goal)
        remarks = [*table.section.remarks, *([f"{own}."] if own else [])]
        title = f"{table.section.title} ({table.place.parent.name})" if several else table.section.title
        video, about = "", ""
        if (clip := table.place / SIDE_BY_SIDE).is_file():
            if clip.stat().st_size <= left:
                (video, about), left = embed(clip), left - clip.stat().st_size
            else:
                video, about = f"{link}/{SIDE_BY_SIDE}", "The video is read from a file next to the page."
        section = replace(table.section, remarks=remarks, video=video, video_about=about)
        headline, sentences, chart = table.claim or Claim("Nothing was measured.", [], "")
        own_page = f"{link}/index.html"
        cards.append(
            FindingCard(f"table-{number}", title, headline, sentences, chart, table.judge, section, own_page)
        )
    return cards


def _read(path: Path) -> Finished:
    """Read a finished table and find what it says."""
    table = read_json(path)
    try:
        values = table["section"]
        measured = [Measured(**each) for each in values["measured"]]
        # The last part of the name alone: a stranger's table shows no file from elsewhere.
        sheet = (path.parent / Path(values["sheet"]).name).read_bytes() if values["sheet"] else b""
        section = Section(**{**values, "measured": measured, "sheet": sheet})
        # Whether every part can be shown is found out by showing it.
        build_results_page(section.title, table["table"], [section], table["about"]).encode()
        numbers = Numbers(table["table"], measured[0].ours if measured else "", table["cells"])
        claim, plane, judge = claim_of(numbers, section.figures), plane_of(numbers), judge_of(numbers)
        if (path.parent / "table.md").is_file():
            name, about = table["table"], table["about"]
            return Finished(path.parent, name, about, section, claim, plane, judge, len(numbers.rows))
    except (AttributeError, IndexError, KeyError, TypeError, ValueError, RecursionError, OSError):
        pass
    remedy = "recap reproduce TABLE, asked as before, writes its folder again"
    raise refuse("results", str(path), "is no whole table as this version writes it", remedy)


def _above(markdown: Path, abouts: dict[str, dict[str, Any]]) -> str:
    """Return what somebody wrote over the tables: figures come and go, what they mean is not a command's to say."""
    if not markdown.exists():
        return "# Results\n\n"
    try:
        text, mark, below = markdown.read_bytes().decode().partition(MARK)
    except (IsADirectoryError, UnicodeDecodeError):
        mark = ""
    if not mark:
        limit = "there is something which no `recap report` has written"
        remedy = f"choose another name, or put this line into it: {MARK}"
        raise refuse("--markdown", str(markdown), limit, remedy)
    for table, suite, backbone, *there in re.findall(THERE, below, re.MULTILINE):
        name = f"{table}-{suite}-{backbone}" if suite else table
        here = [abouts.get(name, {}).get(number, 0) for number in ("prompts", "seeds")]
        if name not in abouts or any(a < int(b or 0) for a, b in zip(here, there, strict=True)):
            limit = f"it holds a larger result of {name} than {here[0]} prompts and {here[1]} seeds"
            remedy = "bring it into the folder, or choose another name"
            raise refuse("--markdown", str(markdown), limit, remedy)
    return text
