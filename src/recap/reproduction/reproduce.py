"""From a recipe to `results/<table>/`: the runs through a sweep, then the table, the drawing and the page.

The folder holds record.json (what was asked), results.jsonl (a line per run), table.csv, table.md, table.json,
figure.svg, index.html, and `work/` with the sweep and all runs. All but the first and the last are written only when
every run is there, so a partial result never takes the place of a complete one.
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from recap.config import read_json
from recap.errors import refuse, unknown_name
from recap.eval.embedders import build_embedder
from recap.files import write_whole
from recap.recipes.tables import Ask, Planned, Recipe, find_recipe, plan_runs
from recap.reproduction.job import job_of
from recap.reproduction.page import figures_of, section_of
from recap.reproduction.table import Line, as_csv, as_markdown, build_cells, cell_dict
from recap.run import versions
from recap.show.results_page import Results, build_results_page
from recap.sweep.jobs import Job, Result, canonical
from recap.sweep.on_ray import run_on_ray
from recap.sweep.pool import Tell, in_silence, run_sweep

WORK = "recap.reproduction.job:draw_and_score"
RECORD = "record.json"
GROWING = ("prompts", "seeds")
"""A larger number goes on with the folder of a smaller one."""


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
    embedder = _resolve(embedder, ask, notice)
    if detector not in ("", "qwen2.5-vl"):
        raise unknown_name("--detector", detector, ["qwen2.5-vl"])
    planned = list(plan_runs(recipe, ask))
    left_out = tuple(row.name for row in recipe.rows if not row.available)
    for name in left_out:
        notice(f"{table}: the row {name!r} is left out, as this version has no such memory or admission rule")
    alone = ask.device != "cpu" or recipe.name == "time"
    if workers is None:
        workers = 1 if alone else _cores()
    if recipe.name == "time" and workers != 1:
        raise refuse("--workers", workers, "times of runs beside each other mean nothing", "take 1")
    _claim(out, table, ask, embedder, detector)
    jobs = [job_of(each, recipe, embedder, detector) for each in planned]
    folder = out / "work"
    if ray:
        results = run_on_ray(jobs, WORK, folder, address=ray, tell=tell, gpus=float(ask.device != "cpu"))
    else:
        results = run_sweep(jobs, WORK, folder, workers=workers, tell=tell)
    _write(out, recipe, ask, planned, jobs, results, left_out)
    return Reproduction(out, len(jobs), left_out)


def _resolve(embedder: str, ask: Ask, notice: Callable[[str], None]) -> str:
    """What `auto` means here, said aloud: it decides the numbers."""
    if embedder != "auto":
        build_embedder(embedder, device=ask.device)
        return embedder
    for name in ("dinov2", "mobilenetv2"):
        try:
            build_embedder(name, device=ask.device)
            return name
        except ValueError:
            continue
    notice("whole frames are judged by their colours alone, as neither DINOv2 nor MobileNetV2 is installed; "
           "`python -m recap.eval.embedders` fetches the latter, 9 MB")  # fmt: skip
    return "hsv"


def _claim(out: Path, table: str, ask: Ask, embedder: str, detector: str) -> None:
    """Make the folder, or see that it is one of this reproduction and not of a larger one."""
    # Numbers of two versions of the code do not belong into one table.
    made_by = {name: versions()[name] for name in ("recap", "torch")}
    judges = {"embedder": embedder, "detector": detector}
    asked = {**dataclasses.asdict(ask), "backbone": ask.backbone_name}
    wanted = {"table": table, **judges, **made_by, **asked}
    record = out / RECORD
    if out.exists() and (not out.is_dir() or (any(out.iterdir()) and not record.is_file())):
        raise refuse("--out", str(out), "holds something that is no reproduction", "choose another folder")
    if record.is_file():
        found = read_json(record)
        for name, value in wanted.items():
            if name not in GROWING and found.get(name) != value:
                limit = f"it was begun with {name} {found.get(name)!r}, not {value!r}"
                raise refuse("--out", str(out), limit, "choose another folder, or ask as it was begun")
        for name in GROWING:
            if (out / "table.json").is_file() and found[name] > wanted[name]:
                limit = f"it holds a larger result, of {found[name]} {name}"
                raise refuse(f"--{name}", wanted[name], limit, "choose another folder, or ask for as many")
    out.mkdir(parents=True, exist_ok=True)
    if not (out / "table.json").is_file() or not record.is_file():
        write_whole(record, json.dumps(wanted, indent=2).encode())


def _write(
    out: Path,
    recipe: Recipe,
    ask: Ask,
    planned: Sequence[Planned],
    jobs: Sequence[Job],
    results: Sequence[Result],
    left_out: Sequence[str],
) -> None:
    lines = [
        Line(job.row, job.prompt, job.seed, result["scores"])
        for job, result in zip(jobs, results, strict=True)
    ]
    cells = build_cells(recipe, lines)
    record = read_json(out / RECORD)
    record |= {"prompts": ask.prompts, "seeds": ask.seeds}
    about = about_this(ask, record["embedder"], len(jobs))
    figures = figures_of(recipe, cells, lines)
    folders = [out / "work" / "jobs" / job.key for job in jobs]
    section = section_of(recipe, cells, figures, planned, folders, left_out)
    page = Results(recipe.title, f"recap reproduce {recipe.name}", [section], about)
    texts = {
        "results.jsonl": "".join(
            canonical({**dataclasses.asdict(line), "key": job.key}) + "\n"
            for line, job in zip(lines, jobs, strict=True)
        ),
        "table.csv": as_csv(cells),
        "table.md": as_markdown(recipe, cells, about),
        "figure.svg": figures[0] if figures else "",
        "index.html": build_results_page(page),
        RECORD: json.dumps(record, indent=2),
        # Last: whoever finds it finds all the others.
        "table.json": json.dumps(
            {"table": recipe.name, "title": recipe.title, "ours": recipe.ours, "note": recipe.note, "about": about,
             "left_out": list(left_out), "cells": [cell_dict(cell) for cell in cells]},
            indent=1,
        ),
    }  # fmt: skip
    for name, text in texts.items():
        write_whole(out / name, text.encode())


def about_this(ask: Ask, embedder: str, runs: int) -> dict[str, Any]:
    """What a reader must know of a number: models, sizes, judges, machine and code."""
    device = torch.cuda.get_device_name(ask.device) if ask.device.startswith("cuda") else _processor()
    length = "as the recipe has it" if ask.seconds is None else f"{ask.seconds:g} s"
    return {
        "backbone": ask.backbone_name, "prompts": ask.prompts, "seeds": ask.seeds, "runs": runs, "length": length,
        "flow of the bank": ask.flow, "frame embedder": embedder, "hardware": device, "dtype": ask.dtype,
        "recap": versions()["recap"], "torch": versions()["torch"], "commit": _commit(),
    }  # fmt: skip


def _cores() -> int:
    """Processors that this process may use: fewer than there are, in many containers."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
        return f"{len(names)} cores of {names[0]}" if names else platform.processor()
    except OSError:
        return platform.processor() or platform.machine()


def _commit() -> str:
    """The commit of the checkout this file lies in, "" for an installed package."""
    here = Path(__file__).parent
    command = ["git", "-C", str(here), "describe", "--always", "--dirty", "--abbrev=10"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
