"""This module makes tables of recipes: what is missing is generated and judged, then tables and pages are written.

`out` holds runs.jsonl, the results of all runs (see `runner`), and a folder per table (see `folder`). What several
tables ask for is generated once. The same call resumes what was stopped, also on another machine that was handed
`out`: where every run is there, nothing is generated.

On a machine without the packages of the command line, run `python3 -m recap.tables.reproduce TABLE ...`.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from recap.config import check_device
from recap.errors import refuse
from recap.eval.metrics import find_measure
from recap.eval.scores import Score
from recap.fast.threads import use_fair_threads
from recap.io.files import alone_in
from recap.io.report import Notice
from recap.plan import check_amount
from recap.tables.agreement import describe_disagreements, find_disagreements
from recap.tables.ask import Ask
from recap.tables.baselines import on_backbone
from recap.tables.batches import ROWS, Batches
from recap.tables.executors import OnRay, Processes
from recap.tables.folder import (
    FIRST_PROMPT,
    LEFT_OUT,
    VERSIONS,
    about_table,
    begin_folder,
    begun_with,
    check_folder,
    cores,
    made_here,
    write_table,
)
from recap.tables.generating import CLIP, generate_and_score
from recap.tables.looks import describe_looks
from recap.tables.page import Look, film_side_by_side, section_of, unpack_look
from recap.tables.preflight import check_judges, find_missing_weights, settle
from recap.tables.recipes import Recipe, find_recipe
from recap.tables.runner import FILE, Executor, Job, ResultStore, run_jobs
from recap.tables.runs import LOOK, TableRuns, entry_of, plan_runs
from recap.tables.table import ScoredRun, build_cells

SHOWN = "shown"
"""Folder of the videos that pages show."""
MOST_AT_ONCE = 1024
SOME_LEFT = 3
"""The exit status where runs are left, for want of time or since they failed."""


@dataclass(frozen=True)
class How:
    """Says how to generate and judge; what is asked for is an `Ask`. `recap reproduce --help` explains its fields."""

    workers: int | None = None
    rows: int | None = None
    scorers: int | None = None
    minutes: float = math.inf
    ray: str = ""
    commit: str = ""
    # Nothing is generated: a table has the rows whose runs are all there, and names the others.
    stored: bool = False

    def __post_init__(self) -> None:
        for name, value, remedy in (
            ("--workers", self.workers, "1 does the runs one by one"),
            ("--rows", self.rows, "leave it out for as many as fit"),
            ("--scorers", self.scorers, "leave it out for most of the cores"),
        ):
            if value is not None and value < 1:
                raise refuse(name, value, "must be 1 or more", remedy)
            check_amount(name, value or 1, MOST_AT_ONCE, "at once", remedy)
        # Written so that nan is refused, too.
        if not self.minutes > 0:
            raise refuse("--minutes", self.minutes, "must be above 0", "leave it out for as long as it takes")


@dataclass(frozen=True, slots=True)
class Reproduction:
    """Says what a call left: the folders of finished tables, runs without a result, and rows left out by table."""

    tables: Mapping[str, Path]
    num_runs: int
    left: int = 0
    errors: Mapping[str, str] = field(default_factory=dict)
    left_out: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def pages(self) -> list[Path]:
        return [folder / "index.html" for folder in self.tables.values()]

    def summary(self) -> list[str]:
        """Return lines for the user: what failed and what is left."""
        lines = [f"given up: {name}: {error}" for name, error in self.errors.items()]
        if self.left:
            lines.append(f"{self.left} of {self.num_runs} runs are left; the same command resumes")
        return lines


def reproduce(
    tables: Sequence[str], ask: Ask, out: Path, how: How | None = None, *, notice: Notice = print
) -> Reproduction:
    """Generate and judge what is missing, and write the tables whose runs are all there."""
    call = _Call(tables, ask, out, how or How(), notice)
    out.mkdir(parents=True, exist_ok=True)
    with alone_in(out, "--out", "another process is writing to it", "wait for it, or choose another --out"):
        return call.finish()


class _Call:
    """Makes one call: everything that can be refused is refused before a file is made."""

    def __init__(self, tables: Sequence[str], ask: Ask, out: Path, how: How, notice: Notice):
        self._out, self._how, self._notice = out, how, notice
        self._recipes = [on_backbone(find_recipe(name), ask.backbone) for name in dict.fromkeys(tables)]
        # A table outside the package is asked for by another name than it has.
        asked = zip(self._recipes, dict.fromkeys(tables), strict=True)
        self._asked_as = {recipe.name: name for recipe, name in asked}
        if len(self._asked_as) < len(self._recipes):
            limit = "two of the tables have the same name, and so the same folder"
            raise refuse("table", ", ".join(tables), limit, "make them one after the other, with two --out")
        for recipe in self._recipes:
            # What cannot be asked is refused before anything is fetched.
            next(plan_runs(recipe, ask), None)
        if out.exists() and not out.is_dir():
            raise refuse("--out", str(out), "is a file", "name a folder")
        self._begun = {recipe.name: begun_with(out / recipe.name) for recipe in self._recipes}
        self._ask = settle(ask, self._recipes, next(filter(None, self._begun.values()), {}), notice)
        self._alone = any(recipe.alone for recipe in self._recipes)
        self._in_batches = not how.ray and (self._ask.device != "cpu" or (how.rows or 1) > 1)
        self._check_how()
        store = ResultStore(out)
        self._left_out = self._find_left_out(store)
        self._runs = TableRuns(self._recipes, self._ask, self._left_out)
        self._made_by = made_here(self._ask.device, how.commit)
        self._check_versions(store)
        for recipe in self._recipes:
            rows = {run.row.name for run in self._runs.tables[recipe.name]}
            check_folder(out / recipe.name, self._record(recipe), rows)

    def _check_how(self) -> None:
        """Refuse what does not go together."""
        how = self._how
        if self._alone:
            limit = "times of runs next to each other, or on other machines, mean nothing"
            for name in ("workers", "rows", "ray"):
                if (value := getattr(how, name)) not in (None, 1, ""):
                    raise refuse(f"--{name}", value, limit, "leave it out: one run at a time, here")
        if how.workers is not None and self._in_batches:
            limit = "one process generates in batches, on a GPU or with --rows"
            raise refuse("--workers", how.workers, limit, "leave it out, or choose --rows and --scorers")
        if how.scorers is not None and not self._in_batches:
            limit = "a process that generates one run at a time judges it, too"
            raise refuse("--scorers", how.scorers, limit, "leave it out, or choose --rows")
        if how.ray and how.rows not in (None, 1):
            raise refuse("--rows", how.rows, "on Ray every task generates one run", "leave it out")

    def _find_left_out(self, store: ResultStore) -> dict[str, dict[str, str]]:
        """Return, by table, the rows that cannot be generated here, and why."""
        left_out = {r.name: {row.name: row.unknown for row in r.rows if row.unknown} for r in self._recipes}
        runs = TableRuns(self._recipes, self._ask, left_out)
        missing = runs.missing(store)
        lacking: Mapping[str, Mapping[str, str]] = {}
        if missing and self._how.stored:
            lacking = runs.incomplete_rows(store)
        elif missing and not self._how.ray:
            # Weights on the machines of a cluster are not known here.
            lacking = self._find_lacking(runs, missing)
        for table, rows in lacking.items():
            left_out[table] |= rows
        for recipe in self._recipes:
            for row, why in left_out[recipe.name].items():
                self._notice(f"{recipe.name}: the row {row!r} is left out: {why}")
            if len(left_out[recipe.name]) == len(recipe.rows):
                if self._how.stored:
                    limit, remedy = (
                        f"no row of it is all there ({why})",
                        "without --stored they are generated",
                    )
                else:
                    limit, remedy = "none of its rows can be generated here", why
                raise refuse("table", recipe.name, limit, remedy)
        return left_out

    def _find_lacking(self, runs: TableRuns, missing: Sequence[Job]) -> dict[str, dict[str, str]]:
        """Return rows that lack weights of their own; refuse what no missing run can do without."""
        ask, keys = self._ask, {job.key for job in missing}
        configs = {
            name: {run.row.name: run.config for run in own if run.job.key in keys}
            for name, own in runs.tables.items()
        }
        try:
            check_device(ask.device, ask.dtype)
        except ValueError as error:
            # Rows that were left out where the others were made stay left out where none can be made.
            former = {name: found.get(LEFT_OUT, ()) for name, found in self._begun.items()}
            if all(rows.keys() <= set(former[name]) for name, rows in configs.items()):
                return {name: dict.fromkeys(rows, "it was left out before") for name, rows in former.items()}
            limit = f"{len(missing)} of {len(runs.jobs)} runs are missing, the first is {missing[0].name}; {error}"
            remedy = "generate them where it can be used, or ask for fewer --prompts or --seeds"
            raise refuse("--device", ask.device, limit, remedy) from error
        check_judges(ask, self._recipes, self._notice)
        return {name: find_missing_weights(rows, self._notice) for name, rows in configs.items() if rows}

    def _check_versions(self, store: ResultStore) -> None:
        """Refuse a table of runs by two versions of the code."""
        for recipe in self._recipes:
            keys = self._runs.keys(recipe.name)
            makers = store.makers_of(keys) + ([self._made_by] if self._runs.missing(store, keys) else [])
            found = sorted({", ".join(f"{name} {maker.get(name)}" for name in VERSIONS) for maker in makers})
            if len(found) > 1:
                limit = f"the runs of {recipe.name} would be made by {' and '.join(found)}"
                raise refuse("--out", str(self._out), limit, "choose another --out, or use one version")

    def _record(self, recipe: Recipe) -> dict[str, Any]:
        """Return what the folder of a table is begun with."""
        # As many as there are, which --half changes: a finished table names the same numbers.
        prompts, seeds = self._ask.numbers(), self._ask.own_seeds(recipe.seeds)
        asked = asdict(self._ask) | {"prompts": len(prompts), "seeds": len(seeds)}
        if not self._ask.half:
            # Folders from before there were halves are the same question.
            del asked["half"]
        if prompts.start:
            # The second half of 19 prompts is as many as that of 20, but others.
            asked[FIRST_PROMPT] = prompts.start
        own = {"script": recipe.script, "table_seconds": recipe.seconds}
        return {"table": recipe.name, **own, **asked, LEFT_OUT: list(self._left_out[recipe.name])}

    def finish(self) -> Reproduction:
        """Do what is missing and write what is complete, alone in the folder."""
        for recipe in self._recipes:
            begin_folder(self._out / recipe.name, self._record(recipe))
        store, runs, errors = ResultStore(self._out, self._made_by), self._runs, {}
        if jobs := runs.missing(store):
            minutes = self._how.minutes
            errors = run_jobs(jobs, store, self._executor(), minutes=minutes, notice=self._notice).errors
        done = [recipe for recipe in self._recipes if not runs.missing(store, runs.keys(recipe.name))]
        for recipe in done:
            self._write(recipe, store)
        left_out = {name: tuple(rows) for name, rows in self._left_out.items()}
        folders = {recipe.name: self._out / recipe.name for recipe in done}
        return Reproduction(folders, len(runs.jobs), len(runs.missing(store)), errors, left_out)

    def _executor(self) -> Executor:
        how, device, shown = self._how, self._ask.device, self._out / SHOWN
        if how.ray:
            return OnRay(generate_and_score, shown, address=how.ray, gpus=float(device != "cpu"))
        if self._in_batches:
            rows, scorers = 1 if self._alone else how.rows or ROWS, how.scorers or max(1, cores() * 3 // 4)
            return Batches(shown, rows, scorers, alone=self._alone, notice=self._notice)
        return Processes(generate_and_score, shown, 1 if self._alone else how.workers or cores())

    def _check_scores(self, key: str, scores: Any, measure: str) -> None:
        """Refuse what somebody wrote into the file of results that are no scores."""
        good = isinstance(scores, dict) and all(
            isinstance(score, dict)
            and isinstance(score.get("value"), int | float | None)
            and {each.name for each in fields(Score)} <= score.keys()
            for score in scores.values()
        )
        if not good:
            limit = f"the {measure} of run {key} has no scores"
            remedy = "copy the file again, or delete the lines of that run: it is generated again"
            raise refuse("file", str(self._out / FILE), limit, remedy)

    def _write(self, recipe: Recipe, store: ResultStore) -> None:
        """Write the files of one finished table."""
        planned, folder = self._runs.tables[recipe.name], self._out / recipe.name
        results = [store.results[run.job.key] for run in planned]
        # Those that came later count where every run has them.
        later = (m for m in recipe.later if all(entry_of(m) in each for each in results))
        measures = [*recipe.measures, *later]
        for run, result in zip(planned, results, strict=True):
            for name in measures:
                self._check_scores(run.job.key, result[entry_of(name)], name)
        for name in (m for m in measures if ":" in m):
            if not any(
                score["value"] is not None for each in results for score in each[entry_of(name)].values()
            ):
                self._notice(f"{recipe.name}: {name} gave no value in any of {len(results)} runs")
        runs, clips = [], {}
        looks: dict[str, Look] = {}
        for run, result in zip(planned, results, strict=True):
            row, key = run.row.name, run.job.key
            scores: dict[str, Any] = {}
            for name in measures:
                scores |= find_measure(name).count_all(result[entry_of(name)])
            runs.append(ScoredRun(row, run.script.name, run.seed, scores, key))
            if LOOK in run.job.wants & result.keys():
                look = unpack_look(result[LOOK])
                # Pages compare runs of one length.
                if look.moments == next(iter(looks.values()), look).moments:
                    looks[row], clips[row] = look, self._out / SHOWN / key / CLIP
        video = film_side_by_side(folder, clips, self._notice)
        left_out = list(self._left_out[recipe.name])
        about = about_table(recipe, self._ask, planned, store.makers_of(self._runs.keys(recipe.name)))
        judges = describe_disagreements(find_disagreements(recipe, runs))
        note = " ".join(filter(None, (recipe.note, judges, describe_looks(recipe, runs))))
        recipe = replace(recipe, measures=tuple(measures), note=note)
        cells = build_cells(recipe, runs, self._ask.backbone)
        section = section_of(recipe, cells, runs, left_out, planned[0], looks, video)
        command = f"recap reproduce {self._asked_as[recipe.name]}"
        write_table(folder, recipe, runs, cells, section, about, left_out, command)


def read_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the words of the plain command: every field of `Ask` and of `How` is an option."""
    summary = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(prog="python3 -m recap.tables.reproduce", description=summary)
    parser.add_argument("tables", nargs="+", metavar="TABLE")
    parser.add_argument("--out", type=Path, default=Path("results"))
    kinds = dict.fromkeys(("prompts", "seeds", "workers", "rows", "scorers"), int)
    for name, default in (asdict(Ask()) | asdict(How())).items():
        option = f"--{name.replace('_', '-')}"
        if isinstance(default, bool):
            parser.add_argument(option, action="store_true")
            continue
        kind = float if name in ("seconds", "minutes") else kinds.get(name, str)
        parser.add_argument(option, type=kind, default=default)
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> int:
    """Run the command for machines without typer; return the exit status."""
    use_fair_threads()
    values = vars(read_arguments(words))
    tables, out = values.pop("tables"), values.pop("out")
    how = How(**{name: values.pop(name) for name in asdict(How())})
    show = partial(print, flush=True)
    done = reproduce(tables, Ask(**values), out, how, notice=show)
    for line in [*done.summary(), *done.pages]:
        show(line)
    return SOME_LEFT if done.left else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ValueError as mistake:
        sys.exit(f"error: {mistake}")
