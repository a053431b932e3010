"""Makes tables of the paper with VBench, from prompts to a page: generates a suite per row, has it judged, tables it.

`recap reproduce TABLE --suite SUITE` comes here. OUT/SUITE has a folder of videos per memory, which tables share, and
its scores next to it; OUT/TABLE-SUITE-BACKBONE is the table. Everything resumes by the same command.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from recap.config import RunConfig
from recap.errors import refuse, unknown_name
from recap.io.report import Notice
from recap.tables.baselines import on_backbone
from recap.tables.folder import begun_with
from recap.tables.paper_numbers import paper_value
from recap.tables.preflight import find_missing_weights
from recap.tables.recipes import TABLES, Recipe
from recap.tables.rows import Row
from recap.tables.runner import canonical
from recap_vbench.environment import installed
from recap_vbench.judge import Question, judge
from recap_vbench.suites import find_suite
from recap_vbench.table import read_scored, write_vbench_table
from recap_vbench.videos import Order, generate_suite

SCORED = ("main", "rivals", "components", "admission", "capacity", "lambda")
"""The tables of the paper that are VBench's scores."""
SWEEPS = {"capacity": "capacity_frames", "lambda": "lambda"}
"""The sweeps of the paper, by the table of ours."""
SUMS = {"quality": "Q", "semantic": "Sem", "total": "Total"}
NUM_VALUES = 6


@dataclass(frozen=True, slots=True)
class SuiteTables:
    """Says which tables are wanted, of which suite, on what; None takes the suite's own."""

    tables: tuple[str, ...]
    suite: str
    backbone: str
    flow: str = "auto"
    device: str = "auto"
    dtype: str = "auto"
    seconds: float = 60.0
    prompts: Path | None = None
    num: int | None = None
    seeds: int | None = None
    workers: int | None = None

    def table_name(self, recipe: Recipe) -> str:
        """Return the name of a table and of its folder: a recipe has one per suite and backbone."""
        return f"{recipe.name}-{self.suite}-{self.backbone.replace(':', '-')}"

    @property
    def about(self) -> dict[str, str]:
        """Return the settings that all rows of a table share."""
        return {"length": f"{self.seconds:g} s", "flow of the bank": self.flow, "dtype": self.dtype}

    def recipes(self) -> list[Recipe]:
        """Return the recipes, with the baseline of the backbone and the paper's sums of a sweep."""
        for name in self.tables:
            if name not in TABLES:
                raise unknown_name("table", name, TABLES)
            if name not in SCORED:
                limit = "the paper's scores of it are not VBench's"
                raise refuse(
                    "--suite", self.suite, f"{name}: {limit}", f"leave it out, or ask for {', '.join(SCORED)}"
                )
        found = [on_backbone(TABLES[name], self.backbone) for name in dict.fromkeys(self.tables)]
        return [
            replace(recipe, rows=tuple(_with_sums(recipe, row) for row in recipe.rows)) for recipe in found
        ]

    def template(self, row: Row) -> RunConfig:
        """Return the settings of the videos of a row."""
        return RunConfig.from_dict(
            {
                "shots": [{"prompt": "", "seconds": self.seconds}],
                "backbone": {"name": self.backbone, **row.backbone},
                "memory": dict(row.memory),
                "admission": {"name": row.admission, **row.settings},
                "flow": self.flow,
                "device": self.device,
                "dtype": self.dtype,
                **row.sampling,
            }
        )

    def folder(self, row: Row, out: Path) -> Path:
        """Return where the videos of a row are: rows of two tables with the same settings have the same."""
        config = self.template(row).to_dict()
        digest = hashlib.sha256(canonical(config).encode()).hexdigest()[:8]
        return out / self.suite / f"{row.memory['name']}-{digest}"


def _with_sums(recipe: Recipe, row: Row) -> Row:
    """Add what the paper prints of a sweep: Q, Sem and Total alone."""
    sweep = SWEEPS.get(recipe.name)
    if sweep is None or row.value is None:
        return row
    columns = [f"v{number}" for number in range(1, NUM_VALUES + 1)]
    at = next((c for c in columns if paper_value("sweeps", c, sweep=sweep, metric="value") == row.value), "")
    values = {name: paper_value("sweeps", at, sweep=sweep, metric=metric) for name, metric in SUMS.items()}
    return replace(row, printed={name: None if v is None else v / 100 for name, v in values.items()})


def make_tables(asked: SuiteTables, environment: Path, out: Path, notice: Notice = print) -> list[Path]:
    """Generate, judge and table what was asked for; return the pages."""
    recipes, suite = asked.recipes(), find_suite(asked.suite)
    # Before hours of generating: without VBench nothing of it could be judged.
    installed(environment)
    for recipe in recipes:
        _check_begun(out / asked.table_name(recipe), asked)
    left_out = {recipe.name: _left_out(asked, recipe, notice) for recipe in recipes}
    for recipe in recipes:
        for name, why in left_out[recipe.name].items():
            notice(f"{recipe.name}: the row {name!r} is left out: {why}")
        if len(left_out[recipe.name]) == len(recipe.rows):
            why = next(iter(left_out[recipe.name].values()))
            raise refuse("table", recipe.name, "none of its rows can be generated here", why)
    wanted = {
        asked.folder(row, out): row for r in recipes for row in r.rows if row.name not in left_out[r.name]
    }
    for number, (folder, row) in enumerate(wanted.items(), start=1):
        notice(f"{number} of {len(wanted)} memories: {row.name}, videos in {folder}")
        order = Order(suite.name, asked.template(row), asked.prompts, asked.num, asked.seeds)
        _, complete = generate_suite(
            order, environment, folder, workers=asked.workers, report=notice, notice=notice
        )
        question = Question(folder, suite.name, prompts=asked.prompts, partial=not complete)
        judge(question, environment, folder.with_name(f"{folder.name}-vbench"), notice)
    return [_write(asked, recipe, list(left_out[recipe.name]), out) for recipe in recipes]


def _check_begun(folder: Path, asked: SuiteTables) -> None:
    """Refuse the folder of a table that was made with other settings, before anything is generated."""
    found = begun_with(folder)
    for name, value in asked.about.items():
        if found and found.get(name) != value:
            limit = f"it was begun with {name} {found.get(name)!r}, not {value!r}"
            raise refuse("--out", str(folder), limit, "choose another --out, or ask as it was begun")


def _left_out(asked: SuiteTables, recipe: Recipe, notice: Notice) -> dict[str, str]:
    """Return the rows that cannot be generated here, and why."""
    configs: Mapping[str, RunConfig] = {
        row.name: asked.template(row) for row in recipe.rows if not row.unknown
    }
    missing = {row.name: row.unknown for row in recipe.rows if row.unknown}
    return {**missing, **(find_missing_weights(configs, notice) if configs else {})}


def _write(asked: SuiteTables, recipe: Recipe, left_out: list[str], out: Path) -> Path:
    folders = {
        row.name: read_scored(asked.folder(row, out)) for row in recipe.rows if row.name not in left_out
    }
    name = asked.table_name(recipe)
    return write_vbench_table(
        out / name,
        replace(recipe, name=name, title=f"{recipe.title} ({asked.suite}, {asked.backbone})"),
        folders,
        command=f"recap reproduce {recipe.name} --suite {asked.suite} --backbone {asked.backbone}",
        backbone=asked.backbone,
        about=asked.about,
        left_out=left_out,
    )
