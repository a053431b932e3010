"""What a reader must know of a number: suite, models, sizes, judges, machine and code."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

from recap.errors import refuse
from recap.fast.threads import QUOTA, fair_threads
from recap.run import versions
from recap.tables.recipes import Ask, Recipe
from recap.tables.scoring import OF_MOTION
from recap.tables.scripts import EMBEDDED


def about_this(recipe: Recipe, ask: Ask, embedder: str, pictures: str, commit: str = "") -> dict[str, Any]:
    """Of the numbers of one table, made here; `pictures` says what was judged, files or what never was one."""
    seeds = ask.seeds or recipe.seeds
    runs = ask.prompts * seeds * sum(row.available for row in recipe.rows)
    device = torch.cuda.get_device_name(ask.device) if ask.device.startswith("cuda") else _processor()
    length = " and ".join(f"{seconds:g} s" for seconds in _lengths(recipe, ask))
    made_by = versions()
    words = "the embedded world's words" if ask.backbone_name == EMBEDDED else "sentences"
    judge = {"flow of the judge": ask.judge_flow} if OF_MOTION & set(recipe.measures) else {}
    return {
        "suite": f"{recipe.script} prompts of our own, in {words}", "backbone": ask.backbone_name,
        "prompts": ask.prompts, "seeds": seeds, "runs": runs, "length": length, "flow of the bank": ask.flow,
        **judge, "frame embedder": embedder, "judged": pictures, "hardware": device, "dtype": ask.dtype,
        "recap": made_by["recap"], "torch": made_by["torch"], "commit": commit or _commit(),
    }  # fmt: skip


def _lengths(recipe: Recipe, ask: Ask) -> list[float]:
    scale = 1.0 if ask.seconds is None else ask.seconds / recipe.seconds
    return sorted({scale * (row.seconds or recipe.seconds) for row in recipe.rows})


def cores() -> int:
    """Processors that this process may use: fewer than there are, in many containers."""
    return fair_threads(os.cpu_count() or 1, {}, QUOTA)


def choose_workers(asked: int | None, *, alone: bool) -> int:
    """As many as asked for, else one per processor, or one where a GPU or a clock is not to be shared."""
    if asked is not None and asked < 1:
        raise refuse("--workers", asked, "must be 1 or more", "1 does the jobs one by one")
    return asked or (1 if alone else cores())


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
