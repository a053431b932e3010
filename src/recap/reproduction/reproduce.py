"""From a recipe to `results/<table>/`: the runs through a sweep, then the table, the drawing and the page.

Beside the files of a table (see `folder`), the folder holds `work/` with the sweep and all runs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from recap.errors import refuse, unknown_name
from recap.eval.embedders import build_embedder
from recap.recipes.tables import Ask, find_recipe, plan_runs
from recap.reproduction.about import about_this, cores
from recap.reproduction.folder import Finished, claim_folder, write_table
from recap.reproduction.job import job_of
from recap.reproduction.page import first_looks
from recap.reproduction.table import Line
from recap.run import versions
from recap.sweep.on_ray import run_on_ray
from recap.sweep.pool import Tell, in_silence, run_sweep

WORK = "recap.reproduction.job:draw_and_score"


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
    embedder = resolve_embedder(embedder, ask.device, notice)
    if detector not in ("", "qwen2.5-vl"):
        raise unknown_name("--detector", detector, ["qwen2.5-vl"])
    planned = list(plan_runs(recipe, ask))
    left_out = tuple(row.name for row in recipe.rows if not row.available)
    for name in left_out:
        notice(f"{table}: the row {name!r} is left out, as this version has no such memory or admission rule")
    alone = ask.device != "cpu" or recipe.name == "time"
    if workers is None:
        workers = 1 if alone else cores()
    if recipe.name == "time" and workers != 1:
        raise refuse("--workers", workers, "times of runs beside each other mean nothing", "take 1")
    claim_folder(out, _wanted(table, ask, embedder, detector), {each.row.name for each in planned})
    jobs = [job_of(each, recipe, embedder, detector) for each in planned]
    folder = out / "work"
    if ray:
        results = run_on_ray(jobs, WORK, folder, address=ray, tell=tell, gpus=float(ask.device != "cpu"))
    else:
        results = run_sweep(jobs, WORK, folder, workers=workers, tell=tell)
    lines = [
        Line(job.row, job.prompt, job.seed, result["scores"])
        for job, result in zip(jobs, results, strict=True)
    ]
    looks, video = first_looks(planned, [folder / "jobs" / job.key for job in jobs])
    about = about_this(recipe, ask, embedder, "pictures read back from H.264 files")
    keys = [job.key for job in jobs]
    write_table(out, Finished(recipe, lines, keys, about, planned[0], looks, left_out, video))
    return Reproduction(out, len(jobs), left_out)


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
