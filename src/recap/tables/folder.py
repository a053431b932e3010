"""This module keeps the folder of a table: whose it is, its files, and what a reader must know of its numbers.

It holds record.json (what was asked), results.jsonl (a line per run), table.csv, table.md, table.json, figure.svg,
sheet.png (the first runs side by side) and index.html. All but the first are written only when every run is there, so
a partial result never takes the place of a complete one.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from recap.errors import refuse
from recap.eval.judged import EMBEDDED
from recap.eval.metrics import find_measures
from recap.fast.threads import QUOTA, fair_threads
from recap.io.files import read_json, write_whole
from recap.io.record import versions
from recap.show.page import Section, build_results_page
from recap.tables.ask import HALVES, Ask
from recap.tables.recipes import Recipe
from recap.tables.runner import canonical
from recap.tables.runs import Planned
from recap.tables.table import COLUMNS, Cell, ScoredRun, as_csv, as_markdown

RECORD, SHEET, TABLE = "record.json", "sheet.png", "table.json"
GROWING = ("prompts", "seeds")
"""A larger number resumes the folder of a smaller one."""
# Where it is not the first of the set.
FIRST_PROMPT = "first_prompt"
LATER = (FIRST_PROMPT, "script", "table_seconds")
"""Older folders lack these."""
LEFT_OUT = "left_out"
VERSIONS = ("recap", "torch")
"""A table has one of each: numbers of two versions of the code do not belong into one table."""


def begun_with(folder: Path) -> dict[str, Any]:
    """Return the record of a table's folder, empty where it was not begun."""
    if not (folder / RECORD).is_file():
        return {}
    found = read_json(folder / RECORD)
    if not isinstance(found, dict) or not found.keys() >= set(GROWING):
        raise refuse("file", str(folder / RECORD), "is not the record of a table", "choose another --out")
    return found


def check_folder(folder: Path, wanted: Mapping[str, Any], rows: Collection[str]) -> None:
    """Refuse a folder that is not new, or is of another question or a larger result, by numbers or by rows."""
    found = begun_with(folder)
    if not found:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise refuse("--out", str(folder), "holds something that is not a table", "choose another --out")
        return
    # A half that is not asked for is not named.
    for name, value in ({"half": "", FIRST_PROMPT: 0} | dict(wanted)).items():
        if name in LATER and name not in found:
            continue
        # A folder that was begun before there was such a setting was begun without it.
        if name not in (*GROWING, LEFT_OUT) and (found.get(name) or None) != (value or None):
            limit = f"it was begun with {name} {found.get(name)!r}, not {value!r}"
            raise refuse("--out", str(folder), limit, "choose another --out, or ask as it was begun")
    if not (folder / TABLE).is_file():
        return
    for name in GROWING:
        if found[name] > wanted[name]:
            limit = f"{folder} holds a larger result, of {found[name]} {name}"
            raise refuse(f"--{name}", wanted[name], limit, "choose another --out, or ask for as many")
    if lost := set(found.get("rows", ())) - set(rows):
        limit = f"it holds a larger result, with the rows {', '.join(sorted(lost))}"
        raise refuse("--out", str(folder), limit, "choose another --out")


def begin_folder(folder: Path, wanted: Mapping[str, Any]) -> None:
    """Make a checked folder; the record of a finished table is kept until the larger one is there."""
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / TABLE).is_file():
        write_whole(folder / RECORD, json.dumps(dict(wanted), indent=2).encode())


def write_table(
    folder: Path,
    recipe: Recipe,
    runs: Sequence[ScoredRun],
    cells: Sequence[Cell],
    section: Section,
    about: Mapping[str, Any],
    left_out: Sequence[str],
    command: str,
) -> None:
    """Write everything that the folder of a finished table holds; `command` made it."""
    record = {**read_json(folder / RECORD), **{name: about[name] for name in GROWING}}
    record |= {LEFT_OUT: left_out, "rows": list(dict.fromkeys(cell.row for cell in cells))}
    # Without the bytes, which are in a file, and the video, which only the table's own page shows.
    shown = asdict(replace(section, sheet=b"", video="")) | {"sheet": SHEET if section.sheet else ""}
    values = [dict(zip(COLUMNS, cell.values(), strict=True)) for cell in cells]
    table = {"table": recipe.name, "about": about, LEFT_OUT: left_out, "cells": values, "section": shown}
    page = build_results_page(recipe.title, command, [section], about)
    texts = {
        "results.jsonl": "".join(canonical(run._asdict()) + "\n" for run in runs),
        "table.csv": as_csv(cells),
        "table.md": as_markdown(recipe, cells, about, left_out, command),
        "figure.svg": section.figures[0] if section.figures else "",
        "index.html": page,
        RECORD: json.dumps(record, indent=2),
        # Last: where this file is, all the others are.
        TABLE: json.dumps(table, indent=1),
    }
    # A smaller table must not stand next to what belongs to a larger one.
    for name in (TABLE, SHEET):
        (folder / name).unlink(missing_ok=True)
    if section.sheet:
        write_whole(folder / SHEET, section.sheet)
    for name, text in texts.items():
        write_whole(folder / name, text.encode())


def about_table(
    recipe: Recipe, ask: Ask, planned: Sequence[Planned], makers: Sequence[Mapping[str, str]]
) -> dict[str, Any]:
    """Return the settings of a table, and what made its runs."""
    # Rounded, as sums of the same length may differ in their last digit.
    lengths = sorted({round(sum(shot.seconds for shot in run.script.shots), 6) for run in planned})
    words = "the embedded world's words" if ask.backbone == EMBEDDED else "sentences"
    suite = f"{recipe.script} prompts of our own, in {words}"
    suite = f"prompts of {Path(ask.prompt_file).name}" if ask.prompt_file else suite
    uses_flow = any(measure.uses_flow for measure in find_measures(recipe.measures))
    names = ("hardware", *VERSIONS, "commit")
    made = {name: " and ".join(sorted({str(maker.get(name, "")) for maker in makers})) for name in names}
    return {
        "suite": f"schedules of {Path(ask.schedules).name}" if ask.schedules else suite,
        "backbone": ask.backbone,
        "prompts": len(ask.numbers()),
        "seeds": len(ask.own_seeds(recipe.seeds)),
        **({"half": HALVES[ask.half]} if ask.half else {}),
        "runs": len(planned),
        "length": " and ".join(f"{seconds:g} s" for seconds in lengths),
        "flow of the bank": ask.flow,
        **({"flow of the judge": ask.judge_flow} if uses_flow else {}),
        "frame embedder": ask.embedder,
        **({"asked in words": ask.judge} if ask.judge else {}),
        "judged": "pictures as generated, not encoded",
        "dtype": ask.dtype,
        **made,
    }


def made_here(device: str, commit: str = "") -> dict[str, str]:
    """Return what makes the results of this process."""
    cuda = device.startswith("cuda") and torch.cuda.is_available()
    hardware = torch.cuda.get_device_name(device) if cuda else _processor()
    own = {name: versions()[name] for name in VERSIONS}
    return {**own, "hardware": hardware, "commit": commit or _commit()}


def cores() -> int:
    """Return how many processors this process may use: fewer than there are, in many containers."""
    return fair_threads(os.cpu_count() or 1, {}, QUOTA)


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{len(names)} cores of {names[0]}" if names else platform.processor() or platform.machine()


def _commit() -> str:
    """Return the commit of the checkout this file lies in, "" for an installed package."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=10"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
