"""This module reads the paper's own numbers, as printed; percentages unless a column says otherwise."""

from __future__ import annotations

import csv
from functools import cache
from importlib import resources

from recap.errors import unknown_name

_FOLDER = resources.files("recap.tables").joinpath("paper")
TABLES = tuple(sorted(file.name.removesuffix(".csv") for file in _FOLDER.iterdir()))


@cache
def paper_table(name: str) -> tuple[dict[str, str], ...]:
    """Return the rows of one of the paper's tables, by column name."""
    if name not in TABLES:
        raise unknown_name("paper table", name, TABLES)
    text = _FOLDER.joinpath(f"{name}.csv").read_text(encoding="utf-8")
    return tuple(csv.DictReader(text.splitlines()))


def paper_value(table: str, column: str, /, **wanted: str) -> float | None:
    """Return one cell, None where the paper prints nothing."""
    rows = (row for row in paper_table(table) if all(row.get(k) == value for k, value in wanted.items()))
    text = next(rows, {}).get(column)
    return float(text) if text else None
