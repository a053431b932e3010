"""From recipes to tables: what is missing is generated and judged, then tables, figures and pages are written.

`out` holds runs.jsonl, the results of all runs (see `store`), and a folder per table (see `folder`). What several
tables ask for is generated once. The same call resumes what was stopped, also on another machine that was handed
`out`: where every run is there, nothing is generated.

On a machine without the packages of the command line, run `python3 -m recap.tables.reproduce TABLE ...`.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from recap.config import check_place
from recap.errors import refuse
from recap.fast.threads import use_fair_threads
from recap.io.files import alone_in, write_whole
from recap.io.report import Notice
from recap.tables.about import VERSIONS, about_table, cores, made_here
from recap.tables.batches import ROWS, Batches
from recap.tables.folder import LEFT_OUT, Finished, begin_folder, begun_with, check_folder, write_table
from recap.tables.generating import CLIP, LOOK
from recap.tables.jobs import Job
from recap.tables.looks import unpack_look
from recap.tables.on_ray import OnRay
from recap.tables.page import Video, side_by_side
from recap.tables.preflight import check_judges, find_missing_weights, settle
from recap.tables.processes import Processes
from recap.tables.recipes import Ask, Recipe, find_recipe, plan_runs
from recap.tables.runner import Executor, Progress, Report, each_change, run_jobs, silent
from recap.tables.runs import TableRuns, same_prompt
from recap.tables.store import Store, makers_of
from recap.tables.table import Line

WORK = "recap.tables.generating:generate_and_score"
SHOWN = "shown"
"""Folder of the videos that pages show."""
SOME_LEFT = 3
"""The exit status where runs are left, for want of time or since they failed."""


@dataclass(frozen=True)
class How:
    """How to generate and judge; what is asked for is an `Ask`."""

    workers: int | None = None  # processes on CPUs; None takes one per core
    rows: int | None = None  # runs in one batch; None takes 1 on CPUs and as many as fit on a GPU
    scorers: int | None = None  # processes that judge while a device generates; None takes most of the cores
    minutes: float = math.inf  # no batch begins that would end later
    ray: str = ""  # address of a Ray cluster
    commit: str = ""  # of the code, where git cannot tell

    def __post_init__(self) -> None:
        for name, remedy in (
            ("workers", "1 does the runs one by one"), ("rows", "leave it out for as many as fit"),
            ("scorers", "leave it out for most of the cores"),
        ):  # fmt: skip
            value = getattr(self, name)
            if value is not None and value < 1:
                raise refuse(f"--{name}", value, "must be 1 or more", remedy)
        # Written so that nan is refused, too.
        if not self.minutes > 0:
            raise refuse("--minutes", self.minutes, "must be above 0", "leave it out for as long as it takes")


@dataclass(frozen=True, slots=True)
class Reproduction:
    """What a call left: finished tables, and why others are not."""

    tables: Mapping[str, Path]  # folders of the finished ones
    num_runs: int
    left: int = 0  # runs without a result
    errors: Mapping[str, str] = field(default_factory=dict)
    left_out: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # rows by table

    @property
    def pages(self) -> list[Path]:
        return [folder / "index.html" for folder in self.tables.values()]


def reproduce(
    tables: Sequence[str],
    ask: Ask,
    out: Path,
    how: How | None = None,
    *,
    report: Report = silent,
    notice: Notice = print,
) -> Reproduction:
    """Generate and judge what is missing, and write the tables whose runs are all there."""
    call = _Call(tables, ask, out, how or How(), notice)
    out.mkdir(parents=True, exist_ok=True)
    with alone_in(out, "--out", "another process is writing to it", "wait for it, or choose another --out"):
        return call.finish(report)


class _Call:
    """One call: everything that can be refused is refused before a file is made."""

    def __init__(self, tables: Sequence[str], ask: Ask, out: Path, how: How, notice: Notice):
        self._out, self._how, self._notice = out, how, notice
        self._recipes = [find_recipe(name) for name in dict.fromkeys(tables)]
        for recipe in self._recipes:
            # What cannot be asked is refused before anything is fetched.
            next(plan_runs(recipe, ask), None)
        if out.exists() and not out.is_dir():
            raise refuse("--out", str(out), "is a file", "name a folder")
        self._begun = {recipe.name: begun_with(out / recipe.name) for recipe in self._recipes}
        begun = next((found for found in self._begun.values() if found), {})
        self._ask = settle(ask, self._recipes, begun, notice)
        self._alone = any(recipe.alone for recipe in self._recipes)
        self._check_how()
        store = Store(out)
        self._left_out = self._find_left_out(store)
        self._runs = TableRuns(self._recipes, self._ask, self._left_out)
        self._made_by = made_here(self._ask.device, how.commit)
        self._check_versions(store)
        for recipe in self._recipes:
            rows = {run.row for run in self._runs.tables[recipe.name]}
            check_folder(out / recipe.name, self._record(recipe), rows)

    def _check_how(self) -> None:
        """Refuse what does not go together."""
        how = self._how
        if self._alone:
            limit = "times of runs next to each other, or on other machines, mean nothing"
            for name in ("workers", "rows", "ray"):
                if (value := getattr(how, name)) not in (None, 1, ""):
                    raise refuse(f"--{name}", value, limit, "leave it out: one run at a time, here")
        in_batches = self._ask.device != "cpu" or (how.rows or 1) > 1
        if how.workers is not None and in_batches and not how.ray:
            limit = "one process generates in batches, on a GPU or with --rows"
            raise refuse("--workers", how.workers, limit, "leave it out, or choose --rows and --scorers")
        if how.scorers is not None and (how.ray or not in_batches):
            limit = "whoever generates one run at a time judges it, too"
            raise refuse("--scorers", how.scorers, limit, "leave it out, or choose --rows")
        if how.ray and how.rows not in (None, 1):
            raise refuse("--rows", how.rows, "on Ray every task generates one run", "leave it out")

    def _find_left_out(self, store: Store) -> dict[str, dict[str, str]]:
        """By table, the rows that cannot be generated here, and why."""
        why = "this version has no such memory or admission rule"
        left_out = {r.name: {row.name: why for row in r.rows if not row.available} for r in self._recipes}
        runs = TableRuns(self._recipes, self._ask, left_out)
        if missing := runs.missing(store):
            for table, rows in self._find_lacking(runs, missing).items():
                left_out[table] |= rows
        for recipe in self._recipes:
            for row, why in left_out[recipe.name].items():
                self._notice(f"{recipe.name}: the row {row!r} is left out: {why}")
            if len(left_out[recipe.name]) == len(recipe.rows):
                raise refuse("table", recipe.name, "none of its rows can be generated here", why)
        return left_out

    def _find_lacking(self, runs: TableRuns, missing: Sequence[Job]) -> dict[str, dict[str, str]]:
        """Rows that lack weights of their own; refuses what no missing run can do without.

        Weights on the machines of a cluster are not known here.
        """
        ask, keys = self._ask, {job.key for job in missing}
        if self._how.ray:
            return {}
        lacking = {name: [run for run in own if run.key in keys] for name, own in runs.tables.items()}
        try:
            check_place(ask.device, ask.dtype)
        except ValueError as error:
            # Rows that were left out where the others were made stay left out where none can be made.
            former = {name: found.get(LEFT_OUT, ()) for name, found in self._begun.items()}
            if all(run.row in former[name] for name, own in lacking.items() for run in own):
                return {name: dict.fromkeys(rows, "it was left out before") for name, rows in former.items()}
            limit = f"{len(missing)} of {len(runs.jobs)} runs are missing, the first is {missing[0].name}; {error}"
            remedy = "generate them where it can be used, or ask for fewer --prompts or --seeds"
            raise refuse("--device", ask.device, limit, remedy) from error
        check_judges(ask, self._recipes, self._notice)
        return {
            name: find_missing_weights({run.row: run.planned.config for run in own}, self._notice)
            for name, own in lacking.items()
            if own
        }

    def _check_versions(self, store: Store) -> None:
        """Refuse a table of runs by two versions of the code."""
        for recipe in self._recipes:
            keys = self._runs.keys(recipe.name)
            makers = makers_of(store, keys) + ([self._made_by] if self._runs.missing(store, keys) else [])
            found = sorted({", ".join(f"{name} {maker.get(name)}" for name in VERSIONS) for maker in makers})
            if len(found) > 1:
                limit = f"the runs of {recipe.name} would be made by {' and '.join(found)}"
                raise refuse("--out", str(self._out), limit, "choose another --out, or use one version")

    def _record(self, recipe: Recipe) -> dict[str, Any]:
        """What the folder of a table is begun with."""
        asked = {
            **asdict(self._ask),
            "backbone": self._ask.backbone_name,
            "seeds": self._ask.seeds or recipe.seeds,
        }
        return {"table": recipe.name, **asked, LEFT_OUT: list(self._left_out[recipe.name])}

    def finish(self, report: Report) -> Reproduction:
        """Do what is missing and write what is complete, alone in the folder."""
        for recipe in self._recipes:
            begin_folder(self._out / recipe.name, self._record(recipe))
        store = Store(self._out, self._made_by)
        jobs = self._runs.missing(store)
        errors = self._run(jobs, store, report).errors if jobs else {}
        done = [r for r in self._recipes if not self._runs.missing(store, self._runs.keys(r.name))]
        for recipe in done:
            self._write(recipe, store)
        left_out = {name: tuple(rows) for name, rows in self._left_out.items()}
        folders = {recipe.name: self._out / recipe.name for recipe in done}
        return Reproduction(folders, len(self._runs.jobs), len(self._runs.missing(store)), errors, left_out)

    def _run(self, jobs: Sequence[Job], store: Store, report: Report) -> Progress:
        how, device, shown = self._how, self._ask.device, self._out / SHOWN
        executor: Executor
        if how.ray:
            executor = OnRay(WORK, shown, address=how.ray, gpus=float(device != "cpu"))
        elif device != "cpu" or (how.rows or 1) > 1:
            rows, scorers = 1 if self._alone else how.rows or ROWS, how.scorers or max(1, cores() * 3 // 4)
            executor = Batches(shown, rows, scorers, alone=self._alone, notice=self._notice)
        else:
            executor = Processes(WORK, shown, 1 if self._alone else how.workers or cores())

        def write_progress(progress: Progress) -> None:
            errors = "".join(f"{name}: {error}\n" for name, error in progress.errors.items())
            write_whole(self._out / "progress.txt", f"{progress.line()}\n{errors}".encode())
            report(progress)

        return run_jobs(jobs, store, executor, minutes=how.minutes, report=write_progress)

    def _write(self, recipe: Recipe, store: Store) -> None:
        """The files of one finished table."""
        runs, results, folder = self._runs.tables[recipe.name], store.results, self._out / recipe.name
        lines = [
            Line(run.row, run.planned.script.name, run.planned.seed,
                 {name: score for measure in recipe.measures for name, score in results[run.key][measure].items()})
            for run in runs
        ]  # fmt: skip
        first = runs[0].planned
        shown = {run.row: run.key for run in runs if same_prompt(run.planned, first)}
        looks = {row: unpack_look(results[key][LOOK]) for row, key in shown.items() if LOOK in results[key]}
        # Pages compare runs of one length.
        alike = {
            row: look for row, look in looks.items() if look.moments == next(iter(looks.values())).moments
        }
        video = self._video(folder, {row: self._out / SHOWN / shown[row] / CLIP for row in alike})
        keys, left_out = [run.key for run in runs], tuple(self._left_out[recipe.name])
        about = about_table(recipe, self._ask, len(runs), makers_of(store, keys))
        write_table(folder, Finished(recipe, lines, keys, about, first, alike, left_out, video))

    def _video(self, folder: Path, clips: Mapping[str, Path]) -> Video:
        """The first runs in motion; where they were generated without PyAV, or are lost, the page does without."""
        if not clips or not all(clip.is_file() for clip in clips.values()):
            return Video()
        try:
            return side_by_side(folder, clips)
        except ValueError as error:
            self._notice(f"the page shows no video: {error}")
            return Video()


def read_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python3 -m recap.tables.reproduce",
                                     description=(__doc__ or "").partition("\n")[0])  # fmt: skip
    parser.add_argument("tables", nargs="+", metavar="TABLE")
    parser.add_argument("--out", type=Path, default=Path("results"))
    for name, default in asdict(Ask()).items():
        kind = {"prompts": int, "seeds": int, "seconds": float}.get(name, str)
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, default=default)
    for name, default in asdict(How()).items():
        kind = {"minutes": float, "ray": str, "commit": str}.get(name, int)
        parser.add_argument(f"--{name}", type=kind, default=default)
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> int:
    """The command for machines without typer; returns the exit status."""
    use_fair_threads()
    values = vars(read_arguments(words))
    tables, out = values.pop("tables"), values.pop("out")
    how = How(**{name: values.pop(name) for name in asdict(How())})
    done = reproduce(tables, Ask(**values), out, how, report=each_change(_print), notice=_print)
    for line in [*summary_of(done), *map(str, done.pages)]:
        _print(line)
    return SOME_LEFT if done.left else 0


def _print(line: str) -> None:
    print(line, flush=True)


def summary_of(done: Reproduction) -> list[str]:
    """Lines for whoever gave the command: what failed and what is left."""
    lines = [f"given up: {name}: {error}" for name, error in done.errors.items()]
    if done.left:
        lines.append(f"{done.left} of {done.num_runs} runs are left; the same command resumes")
    return lines


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ValueError as mistake:
        sys.exit(f"error: {mistake}")
