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
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from recap.config import check_place
from recap.errors import refuse
from recap.eval.judged import EMBEDDED
from recap.eval.metrics import find_measures
from recap.fast.threads import use_fair_threads
from recap.io.files import alone_in, write_whole
from recap.run import Notice
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
from recap.tables.recipes import Ask, Planned, Recipe, find_recipe, plan_runs
from recap.tables.runner import Executor, Progress, Report, run_jobs, silent
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


class _Line(NamedTuple):
    """A run as a table asks for it."""

    planned: Planned
    key: str


class _Plan:
    """The runs of all tables, each once, and who asks for them."""

    def __init__(self, recipes: Sequence[Recipe], ask: Ask, left_out: Mapping[str, Mapping[str, str]]):
        self.jobs: dict[str, Job] = {}
        self.lines: dict[str, list[_Line]] = {}
        for recipe in recipes:
            planned = [each for each in plan_runs(recipe, ask) if each.row.name not in left_out[recipe.name]]
            self.lines[recipe.name] = [
                _Line(each, self._add(each, recipe, ask, shown=_same_run(each, planned[0])))
                for each in planned
            ]

    def _add(self, planned: Planned, recipe: Recipe, ask: Ask, *, shown: bool) -> str:
        config = planned.config.to_dict() | {"device": ask.device}
        # These change no picture: how much is traced, by which path, and how often a state is kept.
        offered = config.pop("trace_offered")
        del config["eager"], config["checkpoint_every"]
        data = {
            "config": config, "subject": planned.script.subject, "late_subject": planned.script.late_subject,
            "embedder": ask.embedder, "detector": ask.detector, "judge_flow": ask.judge_flow,
        }  # fmt: skip
        name = f"{planned.row.name} of {recipe.name}, {planned.script.name}, seed {planned.seed}"
        size = sum(shot.seconds for shot in planned.config.shots)
        job = Job(name, data, frozenset([*recipe.measures, *([LOOK] if shown else [])]), {}, size)
        known = self.jobs.get(job.key, job)
        options = {"trace_offered": offered or known.options.get("trace_offered", False)}
        self.jobs[job.key] = replace(known, wants=known.wants | job.wants, options=options)
        return job.key

    def missing(self, store: Store) -> list[Job]:
        """The jobs to do, for those entries alone that are not there; a page can do without a look."""
        lacks = {key: store.lacks(job) for key, job in self.jobs.items()}
        return [replace(job, wants=lacks[key]) for key, job in self.jobs.items() if lacks[key] - {LOOK}]

    def is_complete(self, recipe: Recipe, store: Store) -> bool:
        measures = set(recipe.measures)
        return all(measures <= store.results.get(line.key, {}).keys() for line in self.lines[recipe.name])


def _same_run(one: Planned, other: Planned) -> bool:
    return (one.script.name, one.seed) == (other.script.name, other.seed)


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
    how = how or How()
    recipes = [find_recipe(name) for name in dict.fromkeys(tables)]
    for recipe in recipes:
        # What cannot be asked is refused before anything is fetched.
        next(plan_runs(recipe, ask), None)
    if out.exists() and not out.is_dir():
        raise refuse("--out", str(out), "is a file", "name a folder")
    begun = {recipe.name: begun_with(out / recipe.name) for recipe in recipes}
    ask = settle(ask, recipes, next((found for found in begun.values() if found), {}), notice)
    _check_how(how, ask, recipes)
    left_out = {
        r.name: {row.name: "this version has no such memory or admission rule" for row in r.rows if not row.available}
        for r in recipes
    }  # fmt: skip
    store = Store(out)
    plan = _Plan(recipes, ask, left_out)
    missing = plan.missing(store)
    if missing:
        lacking = _find_lacking(recipes, ask, how, plan, missing, begun, notice)
        left_out = {name: {**rows, **lacking[name]} for name, rows in left_out.items()}
    for name, rows in left_out.items():
        for row, why in rows.items():
            notice(f"{name}: the row {row!r} is left out: {why}")
        if len(rows) == len(find_recipe(name).rows):
            raise refuse("table", name, "none of its rows can be generated here", next(iter(rows.values())))
    plan = _Plan(recipes, ask, left_out)
    here = made_here(ask.device, how.commit)
    _check_versions(plan, store, here)
    wanted = {r.name: _record(r, ask, left_out[r.name]) for r in recipes}
    for recipe in recipes:
        kept = {line.planned.row.name for line in plan.lines[recipe.name]}
        check_folder(out / recipe.name, wanted[recipe.name], kept)
    out.mkdir(parents=True, exist_ok=True)
    with alone_in(out, "--out", "another process is writing to it", "wait for it, or choose another --out"):
        for recipe in recipes:
            begin_folder(out / recipe.name, wanted[recipe.name])
        store = Store(out, here)
        progress = _run(plan.missing(store), store, how, ask, recipes, report, notice)
        finished = [recipe for recipe in recipes if plan.is_complete(recipe, store)]
        for recipe in finished:
            _write(out, recipe, ask, plan, store, tuple(left_out[recipe.name]), notice)
    left = len(plan.missing(store))
    folders = {recipe.name: out / recipe.name for recipe in finished}
    rows_left_out = {name: tuple(rows) for name, rows in left_out.items()}
    return Reproduction(folders, len(plan.jobs), left, progress.errors, rows_left_out)


def _record(recipe: Recipe, ask: Ask, left_out: Mapping[str, str]) -> dict[str, Any]:
    """What a table's folder is begun with."""
    seeds = ask.seeds or recipe.seeds
    asked = {**asdict(ask), "backbone": ask.backbone_name, "seeds": seeds}
    return {"table": recipe.name, **asked, LEFT_OUT: list(left_out)}


def _check_how(how: How, ask: Ask, recipes: Sequence[Recipe]) -> None:
    """Refuse what does not go together."""
    if any(recipe.alone for recipe in recipes):
        limit = "times of runs next to each other, or on other machines, mean nothing"
        for name in ("workers", "rows", "ray"):
            if (value := getattr(how, name)) not in (None, 1, ""):
                raise refuse(f"--{name}", value, limit, "leave it out: one run at a time, here")
    if how.workers is not None and not how.ray and (ask.device != "cpu" or (how.rows or 1) > 1):
        limit = "one process generates in batches, on a GPU or with --rows"
        raise refuse("--workers", how.workers, limit, "leave it out, or choose --rows and --scorers")
    if how.ray and how.rows not in (None, 1):
        raise refuse("--rows", how.rows, "on Ray every task generates one run", "leave it out")


def _find_lacking(
    recipes: Sequence[Recipe],
    ask: Ask,
    how: How,
    plan: _Plan,
    missing: Sequence[Job],
    begun: Mapping[str, Mapping[str, Any]],
    notice: Notice,
) -> dict[str, dict[str, str]]:
    """By table, the rows that cannot be generated here and why; refuses what no missing run can do without.

    Weights on the machines of a cluster are not known here.
    """
    keys = {job.key for job in missing}
    lines = {name: [line for line in own if line.key in keys] for name, own in plan.lines.items()}
    lacking: dict[str, dict[str, str]] = {recipe.name: {} for recipe in recipes}
    # Rows that were left out where the others were made stay left out where none can be made.
    former = {
        name: dict.fromkeys(begun[name].get(LEFT_OUT, ()), "it was left out before") for name in lacking
    }
    if all(line.planned.row.name in former[name] for name, own in lines.items() for line in own):
        try:
            check_place(ask.device, ask.dtype)
        except ValueError:
            return former
    if how.ray:
        return lacking
    try:
        check_place(ask.device, ask.dtype)
    except ValueError as error:
        limit = (
            f"{len(missing)} of {len(plan.jobs)} runs are missing, the first is {missing[0].name}; {error}"
        )
        remedy = "generate them where it can be used, or ask for fewer --prompts or --seeds"
        raise refuse("--device", ask.device, limit, remedy) from error
    check_judges(ask, recipes, notice)
    for recipe in recipes:
        configs = {line.planned.row.name: line.planned.config for line in lines[recipe.name]}
        if configs:
            lacking[recipe.name] = find_missing_weights(configs, notice)
    of_subject = any(each.of_subject for recipe in recipes for each in find_measures(recipe.measures))
    if not ask.detector and ask.backbone_name != EMBEDDED and of_subject:
        notice("subjects are not judged by themselves, as there is no --detector: whole frames are")
    if ask.detector and ask.backbone_name == EMBEDDED:
        notice("--detector is not used: the embedded world has its own probe")
    return lacking


def _check_versions(plan: _Plan, store: Store, here: Mapping[str, str]) -> None:
    """Refuse a table of runs by two versions of the code."""
    for table, lines in plan.lines.items():
        keys = [line.key for line in lines]
        makers = makers_of(store, keys)
        made_here = [here] if any(store.lacks(plan.jobs[key]) - {LOOK} for key in keys) else []
        found = {tuple(str(maker.get(name)) for name in VERSIONS) for maker in [*makers, *made_here]}
        if len(found) > 1:
            versions = " and ".join(
                ", ".join(map(" ".join, zip(VERSIONS, each, strict=True))) for each in sorted(found)
            )
            limit = f"the runs of {table} would be made by {versions}"
            raise refuse("--out", str(store.folder), limit, "choose another --out, or use one version")


def _run(
    jobs: Sequence[Job],
    store: Store,
    how: How,
    ask: Ask,
    recipes: Sequence[Recipe],
    report: Report,
    notice: Notice,
) -> Progress:
    if not jobs:
        return Progress(0)
    alone = any(recipe.alone for recipe in recipes)
    shown = store.folder / SHOWN
    executor: Executor
    if how.ray:
        executor = OnRay(WORK, shown, address=how.ray, gpus=float(ask.device != "cpu"))
    elif ask.device != "cpu" or (how.rows or 1) > 1:
        scorers = how.scorers or max(1, cores() * 3 // 4)
        executor = Batches(shown, 1 if alone else how.rows or ROWS, scorers, alone=alone, notice=notice)
    else:
        executor = Processes(WORK, shown, 1 if alone else how.workers or cores())

    def tell(progress: Progress) -> None:
        errors = "".join(f"{name}: {error}\n" for name, error in progress.errors.items())
        write_whole(store.folder / "progress.txt", f"{progress.line()}\n{errors}".encode())
        report(progress)

    return run_jobs(jobs, store, executor, minutes=how.minutes, report=tell)


def _write(
    out: Path, recipe: Recipe, ask: Ask, plan: _Plan, store: Store, left_out: Sequence[str], notice: Notice
) -> None:
    """The files of one finished table."""
    own = plan.lines[recipe.name]
    lines = []
    for planned, key in own:
        result = store.results[key]
        scores = {name: score for measure in recipe.measures for name, score in result[measure].items()}
        lines.append(Line(planned.row.name, planned.script.name, planned.seed, scores))
    first = own[0].planned
    shown = {line.planned.row.name: line.key for line in own if _same_run(line.planned, first)}
    looks = {
        row: unpack_look(store.results[key][LOOK]) for row, key in shown.items() if LOOK in store.results[key]
    }
    # Pages compare runs of one length.
    alike = {row: look for row, look in looks.items() if look.moments == next(iter(looks.values())).moments}
    clips = {row: out / SHOWN / shown[row] / CLIP for row in alike}
    keys = [line.key for line in own]
    about = about_table(recipe, ask, len(own), makers_of(store, keys))
    video = _video(out / recipe.name, clips, notice)
    write_table(out / recipe.name, Finished(recipe, lines, keys, about, first, alike, left_out, video))


def _video(folder: Path, clips: Mapping[str, Path], notice: Notice) -> Video:
    """The first runs in motion; where they were generated without PyAV, or are lost, the page does without."""
    if not clips or not all(clip.is_file() for clip in clips.values()):
        return Video()
    try:
        return side_by_side(folder, clips)
    except ValueError as error:
        notice(f"the page shows no video: {error}")
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
    given = vars(read_arguments(words))
    tables, out = given.pop("tables"), given.pop("out")
    how = How(**{name: given.pop(name) for name in asdict(How())})
    said = [""]

    def report(progress: Progress) -> None:
        if (line := progress.line()) != said[0]:
            said[0] = line
            print(line, flush=True)

    done = reproduce(
        tables, Ask(**given), out, how, report=report, notice=lambda line: print(line, flush=True)
    )
    for line in summary_of(done):
        print(line, flush=True)
    return SOME_LEFT if done.left else 0


def summary_of(done: Reproduction) -> list[str]:
    """Lines for whoever gave the command: what failed and what is left."""
    lines = [f"given up: {name}: {error}" for name, error in done.errors.items()]
    if done.left:
        lines.append(f"{done.left} of {done.num_runs} runs are left; the same command resumes")
    return [*lines, *map(str, done.pages)]


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ValueError as mistake:
        sys.exit(f"error: {mistake}")
