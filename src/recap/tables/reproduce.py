"""From a recipe to `results/<table>/`: the runs through a sweep, then the table, the drawing and the page.

Beside the files of a table (see `folder`), the folder holds `work/` with the sweep and all runs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from recap.errors import refuse
from recap.eval.embedders import build_embedder
from recap.run import versions
from recap.tables.about import about_this, choose_workers
from recap.tables.folder import Finished, begun_with, claim_folder, write_table
from recap.tables.job import job_of
from recap.tables.looks import Look
from recap.tables.on_ray import run_on_ray
from recap.tables.page import Video, first_looks
from recap.tables.pool import Tell, in_silence, run_sweep
from recap.tables.preflight import check_detector, check_judge, find_undrawable, settle_flows
from recap.tables.recipes import Ask, Planned, Recipe, find_recipe, plan_runs
from recap.tables.scripts import EMBEDDED
from recap.tables.table import Line

ABOUT_SUBJECTS = {"identity", "retention", "reappearance"}
WORK = "recap.tables.job:draw_and_score"


@dataclass(frozen=True, slots=True)
class Reproduction:
    folder: Path
    num_runs: int
    left_out: tuple[str, ...]  # rows that cannot be drawn here

    @property
    def page(self) -> Path:
        return self.folder / "index.html"


def reproduce(
    table: str,
    ask: Ask,
    out: Path,
    *,
    workers: int | None = None,
    embedder: str = "auto",
    detector: str = "",
    ray: str = "",
    tell: Tell = in_silence,
    notice: Callable[[str], None] = print,
) -> Reproduction:
    """Draw, score and write down one table; the same call again goes on with what was stopped.

    Without a number of workers, each processor of this machine has one, a GPU one alone.
    """
    recipe = find_recipe(table)
    ask = dataclasses.replace(ask, seeds=ask.seeds or recipe.seeds)
    next(plan_runs(recipe, ask), None)  # what cannot be asked is refused before anything is fetched
    embedder = resolve_embedder(embedder, ask.device, notice)
    ask = settle_flows(ask, [recipe], begun_with(out), notice)
    planned, left_out = _plan(recipe, ask, detector, bool(ray), notice)
    alone = ask.device != "cpu" or recipe.name == "time"
    workers = choose_workers(workers, alone=alone)
    if recipe.name == "time" and (workers != 1 or ray):
        field, value = ("--ray", ray) if ray else ("--workers", workers)
        limit = "times of runs beside each other, or on other machines, mean nothing"
        raise refuse(field, value, limit, "leave it out: one worker here")
    claim_folder(out, _wanted(table, ask, embedder, detector), {each.row.name for each in planned})
    jobs = [job_of(each, recipe, embedder, detector, ask.judge_flow) for each in planned]
    folder = out / "work"
    if ray:
        results = run_on_ray(jobs, WORK, folder, address=ray, tell=tell, gpus=float(ask.device != "cpu"))
    else:
        results = run_sweep(jobs, WORK, folder, workers=workers, tell=tell)
    lines = [
        Line(job.row, job.prompt, job.seed, result["scores"])
        for job, result in zip(jobs, results, strict=True)
    ]
    looks, video = _look(planned, [folder / "jobs" / job.key for job in jobs], notice)
    about = about_this(recipe, ask, embedder, "pictures read back from H.264 files") | {"runs": len(jobs)}
    keys = [job.key for job in jobs]
    write_table(out, Finished(recipe, lines, keys, about, planned[0], looks, left_out, video))
    return Reproduction(out, len(jobs), left_out)


def _plan(
    recipe: Recipe, ask: Ask, detector: str, elsewhere: bool, notice: Callable[[str], None]
) -> tuple[list[Planned], tuple[str, ...]]:
    """What is to be drawn, and the rows that cannot be; weights on the machines of a cluster are not known here."""
    why = {
        row.name: "this version has no such memory or admission rule"
        for row in recipe.rows
        if not row.available
    }
    planned = list(plan_runs(recipe, ask))
    if not elsewhere:
        check_detector(detector)
        check_judge(ask, recipe, notice)
        why |= find_undrawable(planned, notice)
    for name, reason in why.items():
        notice(f"{recipe.name}: the row {name!r} is left out: {reason}")
    planned = [each for each in planned if each.row.name not in why]
    if not planned:
        raise refuse("table", recipe.name, "none of its rows can be drawn here", next(iter(why.values())))
    if not detector and ask.backbone_name != EMBEDDED and ABOUT_SUBJECTS & set(recipe.measures):
        notice("subjects are not judged by themselves, as there is no --detector: whole frames are")
    if detector and ask.backbone_name == EMBEDDED:
        notice("--detector is not asked: the embedded world has its own probe")
    return planned, tuple(row.name for row in recipe.rows if row.name in why)


def _look(
    planned: Sequence[Planned], folders: Sequence[Path], notice: Callable[[str], None]
) -> tuple[dict[str, Look], Video]:
    """At the first runs, for the page. The scores are there, so a lost or damaged video costs its pictures alone."""
    try:
        return first_looks(planned, folders)
    except ValueError as error:
        notice(f"the page shows no pictures: {error}")
        return {}, Video()


def resolve_embedder(embedder: str, device: str, notice: Callable[[str], None]) -> str:
    """What `auto` means here, said aloud: it decides the numbers."""
    if embedder != "auto":
        build_embedder(embedder, device=device)
        return embedder
    for name in ("dinov2", "mobilenetv2"):
        try:
            build_embedder(name, device=device)
            return name
        except ValueError:
            continue
    notice("whole frames are judged by their colours alone, as neither DINOv2 nor MobileNetV2 is installed; "
           "`python -m recap.eval.embedders` fetches the latter, 9 MB")  # fmt: skip
    return "hsv"


def _wanted(table: str, ask: Ask, embedder: str, detector: str) -> dict[str, object]:
    """What a folder is begun with; numbers of two versions of the code do not belong into one table."""
    made_by = {name: versions()[name] for name in ("recap", "torch")}
    asked = {**dataclasses.asdict(ask), "backbone": ask.backbone_name}
    return {"table": table, "embedder": embedder, "detector": detector, **made_by, **asked}
