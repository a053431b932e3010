"""The paper's own numbers, as printed, to compare with ours; percentages unless a column says otherwise."""

from __future__ import annotations

import csv
from functools import cache
from importlib import resources

from recap.errors import unknown_name

_FOLDER = resources.files("recap.tables").joinpath("paper")
TABLES = tuple(
    sorted(file.name.removesuffix(".csv") for file in _FOLDER.iterdir() if file.name.endswith(".csv"))
)


@cache
def paper_table(name: str) -> tuple[dict[str, str], ...]:
    """Rows of one of the paper's tables, by column name."""
    if name not in TABLES:
        raise unknown_name("paper table", name, TABLES)
    text = _FOLDER.joinpath(f"{name}.csv").read_text(encoding="utf-8")
    return tuple(csv.DictReader(text.splitlines()))


def paper_value(table: str, column: str, /, **wanted: str) -> float | None:
    """One cell, None where the paper prints nothing."""
    for row in paper_table(table):
        if all(row.get(key) == value for key, value in wanted.items()):
            text = row.get(column) or ""
            return float(text) if text else None
    return None
